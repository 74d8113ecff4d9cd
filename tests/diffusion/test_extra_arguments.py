from collections.abc import Sequence
from typing import Any

import pytest
from diffusers import QwenImagePipeline, StableAudioPipeline, StableDiffusionXLPipeline

from vllm_omni.diffusion.extra_arguments import extra_arguments
from vllm_omni.errors import InvalidRequest


class Pipeline:
    """Annotations as those of diffusers."""

    def __call__(
        self,
        prompt: str | list[str] | None = None,
        sizes: tuple[int] = (1,),
        lengths: Sequence[int] | None = None,
        anything=None,
        **kwargs: Any,
    ) -> None: ...


@pytest.mark.parametrize(
    ("pipeline", "values"),
    [
        (QwenImagePipeline, {"sigmas": [1.0, 0.5]}),
        (QwenImagePipeline, {"sigmas": None, "max_sequence_length": 77, "attention_kwargs": {"scale": 0.5}}),
        (StableAudioPipeline, {"audio_end_in_s": 3}),
        (StableDiffusionXLPipeline, {"original_size": (64, 64), "prompt_2": ["a", "b"]}),
        (Pipeline, {"sizes": (1, 2, 3), "lengths": [1, 2.5], "anything": {"a": [1]}}),
    ],
)
def test_a_value_of_the_annotated_type_is_passed_on(pipeline: type, values: dict[str, Any]) -> None:
    assert extra_arguments(pipeline, values, ["prompt"]) == values


def test_a_list_becomes_a_tuple_where_the_pipeline_takes_one() -> None:
    assert extra_arguments(StableDiffusionXLPipeline, {"original_size": [64, 32]}, []) == {"original_size": (64, 32)}


@pytest.mark.parametrize("name", ["latents", "prompt_embeds", "callback_on_step_end", "generator"])
def test_an_object_that_no_request_can_carry_is_rejected_with_those_that_can(name: str) -> None:
    said = rf"'{name}' of QwenImagePipeline is .* which no request can carry; others: sigmas, attention_kwargs, max_seq"
    with pytest.raises(InvalidRequest, match=said):
        extra_arguments(QwenImagePipeline, {name: [1]}, ["prompt"])


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"max_sequence_length": "77"}, "max_sequence_length = '77': must be a whole number"),
        ({"max_sequence_length": True}, "max_sequence_length = True: must be a whole number"),
        ({"sigmas": 0.5}, "sigmas = 0.5: must be a list"),
        ({"sigmas": [0.5, "x"]}, r"sigmas = \[0.5, 'x'\]: must be a number"),
        ({"attention_kwargs": [1]}, r"attention_kwargs = \[1\]: must be a mapping"),
        ({"sigma": [1.0]}, "QwenImagePipeline takes no extra argument 'sigma': did you mean 'sigmas'"),
        ({"prompt": "x"}, "takes no extra argument 'prompt'"),
        ({"kwargs": {}}, "takes no extra argument 'kwargs'"),
    ],
)
def test_another_value_is_rejected(values: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as caught:
        extra_arguments(QwenImagePipeline, values, ["prompt"])
    assert caught.value.param == "extra_args"
