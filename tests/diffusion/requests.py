"""Requests to tiny pipelines, and their results in diffusers alone."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from PIL import Image

from vllm_omni.config.diffusion_params import DiffusionParams
from vllm_omni.diffusion import outputs
from vllm_omni.diffusion.merge_check import SHORT_CUTS
from vllm_omni.diffusion.pipeline_arguments import needs_image, parameters_of, pipeline_arguments
from vllm_omni.diffusion.request import DiffusionRequest
from vllm_omni.diffusion.stepper import PipelineStepper, StepOutcome
from vllm_omni.testing import diffusion as tiny

# One tiny pipeline for each mechanism: guidance in two calls and padded texts; a video by two experts; images as lists;
# guidance in one call; a multistep scheduler; sound, and a shared tensor; input images.
REPRESENTATIVE = ("qwen-image", "wan2.2-t2v", "z-image", "sd3", "sana", "stable-audio", "qwen-image-edit-plus")
OTHERS = tuple(name for name in tiny.PIPELINES if name not in REPRESENTATIVE)

PROMPTS = ("a red fox", "a lighthouse on a cliff, seen from the sea", "rain", "two people at a table by the window")
NEGATIVE_PROMPTS = ("blurred", "grey and out of focus", "dark", "a frame")
NUM_STEPS = (4, 6, 3, 5)
GUIDANCE = (1.5, 3.0, 2.0, 2.5)
SIDES = (32, 32, 64, 32)  # pixels, where 8 or 16 are one latent


def make_request(pipeline: Any, index: int = 0, **values: Any) -> DiffusionRequest:
    """Make request ``index`` of four, which differ in all parameters of the pipeline; ``values`` replace its own."""
    accepted = parameters_of(pipeline)
    side = SIDES[index] * (2 if getattr(pipeline, "vae_scale_factor", 8) >= 32 else 1)
    own: dict[str, Any] = {
        "height": side,
        "width": side,
        "num_frames": 9 if "LTX" in type(pipeline).__name__ else 5,
        "num_inference_steps": NUM_STEPS[index],
        "negative_prompt": NEGATIVE_PROMPTS[index],
        "true_cfg_scale": GUIDANCE[index],
        "guidance_scale": GUIDANCE[index],
    }
    own = {name: value for name, value in own.items() if name in accepted}
    own["extra_args"] = {name: value for name, value in SHORT_CUTS.items() if name in accepted}
    params = DiffusionParams(**{"seed": 100 + index, "output_type": "float", **own, **values})
    images = [make_image(index)] if needs_image(pipeline) else []
    return DiffusionRequest(prompt=PROMPTS[index], images=images, params=params)


def make_image(index: int) -> Image.Image:
    return Image.radial_gradient("L").resize((64, 64)).convert("RGB").rotate(30 * index)


def run_diffusers(pipeline: Any, request: DiffusionRequest) -> dict[str, Any]:
    """Call the pipeline as diffusers' users do."""
    result = pipeline(**pipeline_arguments(pipeline, request))
    return outputs.collect(pipeline, result, request.params.output_type)


def run(
    stepper: PipelineStepper, requests: Mapping[str, DiffusionRequest], *, together: int = 4
) -> dict[str, list[StepOutcome]]:
    """Run requests to their end: ``together`` at first, then one more with every step; all outcomes of each."""
    waiting = list(requests)
    outcomes: dict[str, list[StepOutcome]] = {name: [] for name in requests}
    running: list[str] = []
    for _ in range(200):
        count = together if not any(outcomes.values()) else 1
        for name in waiting[:count]:
            stepper.add(name, requests[name])
            running.append(name)
        del waiting[:count]
        for name, outcome in stepper.step(running).items():
            outcomes[name].append(outcome)
            if outcome.has_ended:
                running.remove(name)
        if not running and not waiting:
            return outcomes
    raise AssertionError(f"requests that do not end: {running}")


def results(outcomes: Mapping[str, Sequence[StepOutcome]]) -> dict[str, dict[str, Any]]:
    """The outputs of requests that must all have succeeded."""
    ended = {}
    for name, steps in outcomes.items():
        last = steps[-1]
        if last.error is not None:
            raise last.error
        assert last.output is not None
        ended[name] = last.output
    return ended


def difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> float:
    """Largest difference between two outputs, whose kinds and shapes must be equal."""
    assert ours.keys() == theirs.keys()
    largest = 0.0
    for name, value in theirs.items():
        if isinstance(value, torch.Tensor):
            assert ours[name].shape == value.shape and ours[name].dtype == value.dtype
            assert value.isfinite().all() and value.float().std() > 1e-3, "the output is not finite, or constant"
            largest = max(largest, (ours[name].double() - value.double()).abs().max().item())
        else:
            assert ours[name] == value
    return largest
