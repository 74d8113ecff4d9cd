"""The smallest call of each tiny pipeline that shows what it does: under a second, for 4 steps or fewer.

Those that edit take one or two: they bring any input to 1024 x 1024 pixels, and have no argument against it. Within one
process ``work_on_small_inputs`` spares them that.
"""

from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
from PIL import Image
from torch import Tensor

PICTURE = Image.radial_gradient("L").resize((64, 64)).convert("RGB")
SQUARE = {"height": 64, "width": 64}
CLIP = {"height": 32, "width": 32, "num_frames": 9}
GUIDED = {"true_cfg_scale": 4.0, "negative_prompt": " "}

EDITORS = (pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus)

# Pipeline -> keyword arguments besides the prompt, the steps and the seed.
CALLS: dict[str, dict[str, Any]] = {
    "flux": SQUARE,
    "flux2-klein": SQUARE,
    "hunyuan-image": SQUARE,
    "hunyuan-video": CLIP,
    "longcat-image": SQUARE | {"enable_prompt_rewrite": False},
    "ltx": CLIP,
    "qwen-image": SQUARE | GUIDED,
    "qwen-image-edit": SQUARE | GUIDED | {"image": PICTURE},
    "qwen-image-edit-plus": SQUARE | GUIDED | {"image": [PICTURE, PICTURE.rotate(90)]},
    "sana": SQUARE | {"use_resolution_binning": False},
    "sd3": SQUARE,
    "stable-audio": {"audio_end_in_s": 0.3},
    "wan2.2-i2v": CLIP | {"image": PICTURE.resize((32, 32))},
    "wan2.2-t2v": CLIP,
    "z-image": SQUARE | {"guidance_scale": 5.0},
}
# Shape of the first output of such a call: pictures [N, C, H, W], frames [N, T, C, H, W], sound [N, C, samples].
SHAPES = {name: (1, 9, 3, 32, 32) if "num_frames" in call else (1, 3, 64, 64) for name, call in CALLS.items()} | {
    "stable-audio": (1, 2, 13230)
}


def call(pipeline: DiffusionPipeline, name: str, prompt: str = "a red fox", *, seed: int = 0, steps: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    arguments: dict[str, Any] = CALLS[name] | {"output_type": "pt", "return_dict": False}
    return pipeline(prompt=prompt, num_inference_steps=steps, generator=generator, **arguments)[0]


def work_on_small_inputs(monkeypatch: pytest.MonkeyPatch, area: int = 128 * 128) -> None:
    """Let editing pipelines scale their input images to ``area`` pixels."""
    for module in EDITORS:
        calculate = module.calculate_dimensions
        monkeypatch.setattr(
            module, "calculate_dimensions", lambda _, ratio, calculate=calculate: calculate(area, ratio)
        )
