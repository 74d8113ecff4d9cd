"""``OmniLLM`` of a diffusion pipeline: prompts, parameters, and the bar over the steps."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxFillPipeline, FluxPipeline
from PIL import Image
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams

from tests.diffusion.other_pipelines import make_from
from tests.shared_engines import QWEN_IMAGE, SharedEngines
from vllm_omni import DiffusionParams, OmniLLM
from vllm_omni.errors import ConfigError, InvalidRequest, OmniError, StageFailed

SMALL = DiffusionParams(height=48, width=64, num_inference_steps=3, seed=5)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"quantization": "fp8"}, "quantization = 'fp8': this kind of stage has no quantization"),
        ({"cpu_offload_gb": 1.0}, "cpu_offload_gb = 1.0: this kind of stage has no offloading of weights"),
        ({"enforce_eager": False}, "enforce_eager = False: this kind of stage has no compilation"),
        ({"enable_lora": True}, "enable_lora = True: this kind of stage has no adapters"),
        ({"load_format": "dummy"}, "load_format = 'dummy': .* no loader of vLLM"),
        ({"attention_backend": "FLASH_ATTN"}, "attention_backend = 'FLASH_ATTN': .* no selectable attention of vLLM"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_engine_arguments_without_an_effect_are_rejected_before_an_engine_starts(
    tiny_pipeline: Callable[[str], Path], given: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=f"stage 'diffusion': {said}"):
        OmniLLM(tiny_pipeline("qwen-image"), **given)


@pytest.mark.long
def test_a_pipeline_that_needs_more_than_a_request_can_bring_does_not_start(
    tiny_pipeline: Callable[[str], Path], tmp_path: Path
) -> None:
    make_from(FluxPipeline.from_pretrained(tiny_pipeline("flux")), FluxFillPipeline).save_pretrained(tmp_path)
    said = "'diffusion': did not start: .*FluxFillPipeline answers no request: .*it also takes mask_image"
    with pytest.raises(StageFailed, match=said):
        OmniLLM(tmp_path)


@pytest.fixture
def omni(engines: SharedEngines) -> OmniLLM:
    return engines.get(QWEN_IMAGE)


def draw(omni: OmniLLM, prompts: Any = "a cat", params: Any = SMALL, **kwargs: Any) -> list[torch.Tensor]:
    """The pixels [H, W, 3] of each output's first image."""
    outputs = omni.generate(prompts, params, **{"use_tqdm": False, **kwargs})
    return [output.multimodal_output["images"][0] for output in outputs]


def test_a_prompt_becomes_an_image(omni: OmniLLM) -> None:
    (output,) = omni.generate("a cat", SMALL, use_tqdm=False)
    assert output.finished
    assert [image.size for image in output.images] == [(64, 48)]
    assert output.stage_durations.keys() == {"diffusion", "total"}


def test_fields_by_name_are_the_same_as_params(omni: OmniLLM) -> None:
    values = {"height": 48, "width": 64, "num_inference_steps": 3, "seed": 5}
    (expected,) = draw(omni)
    assert torch.equal(draw(omni, params=values)[0], expected)
    assert torch.equal(draw(omni, params={"diffusion": values})[0], expected)


def test_an_adapter_is_rejected_with_the_reason(omni: OmniLLM) -> None:
    with pytest.raises(InvalidRequest, match=r"'diffusion' has no adapters .*only autoregressive stages"):
        draw(omni, lora_request=LoRARequest("any", 1, "/nowhere"))


def test_prompts_share_params_and_outputs_keep_their_order(omni: OmniLLM) -> None:
    prompts = ["a cat", "a dog", "a tram"]
    for image, prompt in zip(draw(omni, prompts), prompts, strict=True):
        assert (image.int() - draw(omni, prompt)[0].int()).abs().max() <= 1  # a batch has other shapes


def test_each_prompt_may_have_its_own_params(omni: OmniLLM) -> None:
    params = [SMALL, DiffusionParams(height=64, width=48, num_inference_steps=3, seed=1)]
    assert [tuple(image.shape) for image in draw(omni, ["a cat", "a dog"], params)] == [(48, 64, 3), (64, 48, 3)]


def test_a_negative_prompt_may_stand_in_either_place(omni: OmniLLM) -> None:
    guided = DiffusionParams(height=48, width=64, num_inference_steps=3, seed=5, true_cfg_scale=3.0)
    (one,) = draw(omni, {"prompt": "a cat", "negative_prompt": "grey"}, guided)
    values = {"height": 48, "width": 64, "num_inference_steps": 3, "seed": 5, "true_cfg_scale": 3.0}
    (other,) = draw(omni, "a cat", {**values, "negative_prompt": "grey"})
    assert torch.equal(one, other)
    assert not torch.equal(one, draw(omni, "a cat", guided)[0])


def test_the_deployments_defaults_hold_for_fields_that_are_not_given(
    omni: OmniLLM, capsys: pytest.CaptureFixture[str]
) -> None:
    omni.generate("a cat", DiffusionParams(height=48, width=64))
    assert "2/2" in capsys.readouterr().err


def test_the_bar_counts_the_steps_of_all_requests(omni: OmniLLM, capsys: pytest.CaptureFixture[str]) -> None:
    omni.generate(["a cat", "a dog"], [SMALL, DiffusionParams(height=48, width=64, num_inference_steps=4)])
    bar = capsys.readouterr().err.split("\r")[-1]
    assert "steps: 100%" in bar
    assert re.search(r" 7/7 .*requests=2/2", bar)


def test_a_bar_changes_nothing_in_the_answer(omni: OmniLLM) -> None:
    assert torch.equal(draw(omni, use_tqdm=True)[0], draw(omni)[0])


@pytest.mark.parametrize(
    ("prompt", "params", "said"),
    [
        ("a cat", {"heigth": 3}, "unknown diffusion parameter 'heigth': did you mean 'height'"),
        ("a cat", {"height": 0}, "height = 0: must be at least 1 pixel"),
        ("a cat", SamplingParams(), "give DiffusionParams"),
        ("a cat", [SMALL, SMALL], "2 values of parameters for 1 prompts"),
        ([1, 2, 3], SMALL, "must be a text"),
        ({"prompt": 3}, SMALL, "must be a text"),
        ({"prompt": "a cat", "negativ_prompt": "x"}, SMALL, "did you mean 'negative_prompt'"),
        ({"prompt": "a cat", "multi_modal_data": {"audio": 1}}, SMALL, "this model reads images"),
        ({"prompt": "a cat", "multi_modal_data": {"image": "x.png"}}, SMALL, "must be a PIL image"),
        (
            {"prompt": "a cat", "multi_modal_data": {"image": Image.new("RGB", (8, 8))}},
            SMALL,
            "takes no input image, got 1",
        ),
    ],
)
def test_a_wrong_request_is_rejected_by_its_field(omni: OmniLLM, prompt: Any, params: Any, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        omni.generate(prompt, params, use_tqdm=False)


def test_chat_and_text_to_speech_are_rejected(omni: OmniLLM) -> None:
    with pytest.raises(InvalidRequest, match="has no chat: give `generate` a prompt"):
        omni.chat([{"role": "user", "content": "a cat"}])
    with pytest.raises(OmniError, match="does not support text to speech"):
        omni.speak("a cat")
