"""Requests to a diffusion stage, as the user gives them and as the scheduler and the runner receive them."""

import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vllm_omni.config.diffusion import DIFFUSION, DiffusionConfig
from vllm_omni.config.diffusion_params import DiffusionParams
from vllm_omni.core.sched.diffusion import shape_of
from vllm_omni.diffusion.request import DiffusionRequest
from vllm_omni.engine.diffusion_request import make_sampling_params, read_request
from vllm_omni.errors import InvalidRequest
from vllm_omni.messages.stage_step import STAGE_ARGS

PIXELS = np.arange(5 * 7 * 3, dtype=np.uint8).reshape(5, 7, 3)


def encoded(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def sent(prompt: Any, **params: Any) -> dict[str, Any]:
    sampling_params = make_sampling_params(prompt, DiffusionParams(**params), DiffusionConfig(max_steps=50))
    assert sampling_params.max_tokens == 1
    assert sampling_params.extra_args is not None
    return sampling_params.extra_args[STAGE_ARGS][DIFFUSION]


@pytest.mark.parametrize(
    "image",
    [Image.fromarray(PIXELS), PIXELS, torch.from_numpy(PIXELS), encoded(PIXELS), [PIXELS]],
    ids=["PIL", "array", "tensor", "file", "list"],
)
def test_an_image_arrives_with_the_same_pixels(image: Any) -> None:
    args = sent({"prompt": "a cat", "multi_modal_data": {"image": image}}, seed=3)
    request = DiffusionRequest.from_args(args)
    assert (request.prompt, request.params) == ("a cat", DiffusionParams(seed=3))
    (arrived,) = request.images
    assert np.array_equal(np.asarray(arrived), PIXELS)


def test_an_image_whose_pixels_are_not_colours_is_converted() -> None:
    for mode in ("CMYK", "P"):
        image = Image.fromarray(PIXELS).convert(mode)
        (arrived,) = DiffusionRequest.from_args(sent({"prompt": "", "multi_modal_data": {"image": image}})).images
        assert (arrived.mode, arrived.size) == ("RGB", (7, 5))


def test_images_of_another_size_give_another_shape() -> None:
    images = {height: np.zeros((height, 4, 3), np.uint8) for height in (4, 8)}
    shapes = {
        shape_of(DiffusionRequest.from_args(sent({"prompt": prompt, "multi_modal_data": {"image": images[height]}})))
        for prompt, height in (("a cat", 4), ("a dog", 4), ("a cat", 8))
    }
    assert len(shapes) == 2


def test_a_prompt_may_contain_a_negative_prompt() -> None:
    prompt = {"prompt": "a cat", "negative_prompt": "grey"}
    assert read_request(prompt, DiffusionParams()).params.negative_prompt == "grey"
    assert read_request(prompt, DiffusionParams(negative_prompt="blue")).params.negative_prompt == "blue"


REJECTED: list[tuple[Any, dict[str, Any], str]] = [
    (None, {}, "prompt = None: must be a text"),
    ({"prompt": None}, {}, "prompt = None: must be a text"),
    ({"prompt_token_ids": [1]}, {}, "give a text, not ids"),
    ({"prompt": "a", "promt": "b"}, {}, "unknown key 'promt': did you mean 'prompt'"),
    ({"prompt": "a", "multi_modal_data": {"audio": 1}}, {}, "'audio': this model reads images"),
    ({"prompt": "a", "multi_modal_data": {"image": b"no image"}}, {}, "image 0: cannot identify image file"),
    ({"prompt": "a", "multi_modal_data": {"image": [PIXELS, 3]}}, {}, "image 1: must be a PIL image"),
    ({"prompt": "a", "multi_modal_data": {"image": torch.zeros(2, 2, 2, 2)}}, {}, "image 0: "),
    ("a", {"num_inference_steps": 51}, "at most 50 steps here"),
    ("a", {"negative_prompt": "\ud800"}, "unpaired surrogate"),
    ("\ud800", {}, "unpaired surrogate"),
    ("a", {"cache_threshold": 0.1}, "this deployment has no cache"),
]


def test_unreadable_prompts_are_rejected() -> None:
    for prompt, params, said in REJECTED:
        with pytest.raises(InvalidRequest, match=said):
            sent(prompt, **params)
            pytest.fail(f"accepted: {prompt!r}, {params}")
