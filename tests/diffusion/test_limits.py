from collections.abc import Callable
from typing import Any

import pytest
from PIL import Image

from tests.diffusion.other_pipelines import make_stable_diffusion
from tests.diffusion.requests import make_request, run
from vllm_omni.config.diffusion_params import DiffusionLimits
from vllm_omni.diffusion.limits import CallLimits
from vllm_omni.diffusion.request import DiffusionRequest
from vllm_omni.diffusion.stepper import PipelineStepper
from vllm_omni.errors import InvalidRequest


@pytest.fixture(scope="module")
def make_limits(load_tiny: Callable[[str], Any]) -> Callable[..., CallLimits]:
    return lambda name, **limits: CallLimits(load_tiny(name), DiffusionLimits(**limits))


def test_a_limit_is_four_times_the_pipelines_own_default(make_limits: Callable[..., CallLimits]) -> None:
    image, video, sound = (make_limits(name).limits for name in ("qwen-image", "wan2.2-t2v", "stable-audio"))
    assert (image.max_pixels, image.max_prompt_tokens) == (4 * 1024 * 1024, 4 * 512)
    assert (video.max_pixels, video.max_frames) == (4 * 480 * 832, 4 * 81)
    assert (sound.max_seconds, sound.max_prompt_tokens) == (240, 4 * 128)


def test_a_limit_of_the_deployment_replaces_the_pipelines(make_limits: Callable[..., CallLimits]) -> None:
    limits = make_limits("qwen-image", max_pixels=64 * 64)
    limits.check_arguments({"height": 64, "width": 64})
    with pytest.raises(InvalidRequest, match=r"64 with width 80: at most 4096 pixels here .* raise max_pixels of"):
        limits.check_arguments({"height": 64, "width": 80})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"height": 16384, "width": 16384}, "height = 16384 with width 16384: at most 4194304 pixels"),
        ({"width": 16384}, "width = 16384 with height 1024"),
        ({"resolution": 16384}, "resolution = 16384: at most 4194304 pixels"),
        ({"max_area": 2**30}, "max_area = 1073741824: at most 4194304 pixels"),
        ({"video_length": 10**6}, "video_length = 1000000: at most 324 frames"),
        ({"base_num_frames": 10**6}, "base_num_frames = 1000000: at most 324 frames"),
        ({"audio_end_in_s": 1e9}, r"audio_end_in_s = 1000000000.0: at most 240 seconds"),
        ({"audio_end_in_s": float("inf")}, r"audio_end_in_s = inf: at most 240 seconds"),
        ({"prior_num_inference_steps": 51}, "prior_num_inference_steps = 51: at most 50 steps"),
        ({"sigmas": [1.0] * 100_000}, "sigmas = 100000 values: at most 50 steps"),
        ({"timesteps": [1] * 51}, "timesteps = 51 values: at most 50 steps"),
        ({"batch_size": 9}, "batch_size = 9: at most 4 outputs"),
        ({"max_sequence_length": 10**6}, "max_sequence_length = 1000000: at most 2048 prompt tokens"),
        ({"prompt": "fox " * 500_000}, "prompt = a text of 2000000 characters or more: at most 2048 prompt tokens"),
        ({"prompt_2": ["fox "] * 500_000}, "prompt_2 = a text of"),
        ({"negative_prompt": "fox " * 500_000}, "negative_prompt = a text of"),
    ],
)
def test_an_argument_under_any_name_is_limited(
    make_limits: Callable[..., CallLimits], arguments: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidRequest, match=said):
        make_limits("qwen-image", max_steps=50, max_outputs=4).check_arguments(arguments)


@pytest.mark.parametrize("name", ["qwen-image", "wan2.2-t2v", "z-image", "sd3", "stable-audio", "qwen-image-edit-plus"])
def test_a_request_at_the_limit_is_computed(name: str, load_tiny: Callable[[str], Any]) -> None:
    pipeline = load_tiny(name)
    request = make_request(pipeline, 0)
    params = request.params
    limits = {"max_pixels": (params.height or 1) * (params.width or 1), "max_frames": params.num_frames}
    stepper = PipelineStepper(pipeline, rules={}, limits=CallLimits(pipeline, DiffusionLimits(**limits, max_steps=4)))
    assert run(stepper, {"a": request})["a"][-1].error is None


# -- what only the pipeline's calls show ------------------------------------------------------------------------------


def end_of(
    pipeline: Any, request: DiffusionRequest, monkeypatch: pytest.MonkeyPatch, **limits: Any
) -> Exception | None:
    """The error of a request whose arguments have names that are not known to be sizes."""
    checked = CallLimits(pipeline, DiffusionLimits(**limits))
    monkeypatch.setattr(checked, "check_arguments", lambda arguments: None)
    stepper = PipelineStepper(pipeline, rules={}, limits=checked)
    return run(stepper, {"a": request})["a"][-1].error


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("qwen-image", {"height": 96}),
        ("wan2.2-t2v", {"num_frames": 41}),
        ("z-image", {"width": 96}),
        ("sd3", {"height": 96}),
    ],
)
def test_a_large_call_of_the_denoiser_is_rejected(
    name: str, values: dict[str, Any], load_tiny: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = load_tiny(name)
    request = make_request(pipeline, 0, **values)
    error = end_of(pipeline, request, monkeypatch, max_pixels=32 * 32, max_frames=9)
    assert isinstance(error, InvalidRequest)
    assert "raise max_pixels, max_frames or max_seconds of the deployment" in str(error)


def test_only_the_first_call_of_a_denoiser_is_compared(
    load_tiny: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = load_tiny("sd3")
    request = make_request(pipeline, 0)
    limits = CallLimits(pipeline, DiffusionLimits())
    checked: list[str] = []
    monkeypatch.setattr(limits, "check_call", lambda call, arguments: checked.append(call.component))
    assert run(PipelineStepper(pipeline, rules={}, limits=limits), {"a": request})["a"][-1].error is None
    assert checked.count("transformer") == 1


def test_the_number_of_steps_that_a_pipeline_is_about_to_make_is_limited(
    load_tiny: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = load_tiny("qwen-image")
    request = make_request(pipeline, 0, num_inference_steps=4, extra_args={"sigmas": [1.0, 0.8, 0.6, 0.4, 0.2]})
    error = end_of(pipeline, request, monkeypatch, max_steps=4)
    assert isinstance(error, InvalidRequest)
    assert "num_inference_steps = 5: at most 4 steps here" in str(error)


def test_an_input_image_is_limited_when_the_pipeline_encodes_it(
    load_tiny: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from diffusers import StableDiffusionImg2ImgPipeline

    flux = load_tiny("flux")
    parts = make_stable_diffusion(flux.text_encoder, flux.tokenizer).components
    pipeline = StableDiffusionImg2ImgPipeline(**parts, requires_safety_checker=False)
    pipeline.set_progress_bar_config(disable=True)
    request = DiffusionRequest("a fox", [Image.new("RGB", (256, 128))], make_request(pipeline, 0).params)
    error = end_of(pipeline, request, monkeypatch, max_pixels=128 * 128)
    assert isinstance(error, InvalidRequest)
    assert "image = 256 x 128 pixels: at most 16384 pixels here" in str(error)
