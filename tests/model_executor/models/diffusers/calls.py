"""The smallest call of each tiny pipeline that shows what it does: under a second, for 4 steps or fewer.

The editing pipelines take about a second: they bring any input to 1024 x 1024 pixels, and have no argument against it.
"""

from typing import Any

import torch
from diffusers import DiffusionPipeline
from PIL import Image
from torch import Tensor

PICTURE = Image.radial_gradient("L").resize((64, 64)).convert("RGB")
SQUARE = {"height": 64, "width": 64}
CLIP = {"height": 32, "width": 32, "num_frames": 9}
GUIDED = {"true_cfg_scale": 4.0, "negative_prompt": " "}

# Pipeline -> keyword arguments besides the prompt, the steps and the seed.
CALLS: dict[str, dict[str, Any]] = {
    "flux": SQUARE,
    "hunyuan-video": CLIP,
    "qwen-image": SQUARE | GUIDED,
    "qwen-image-edit": SQUARE | GUIDED | {"image": PICTURE},
    "qwen-image-edit-plus": SQUARE | GUIDED | {"image": [PICTURE, PICTURE.rotate(90)]},
    "sd3": SQUARE,
    "stable-audio": {"audio_end_in_s": 0.3},
    "wan2.2-i2v": CLIP | {"image": PICTURE.resize((32, 32))},
    "wan2.2-t2v": CLIP,
    "z-image": SQUARE | {"guidance_scale": 5.0},
}
# Of the first output of such a call, as a tensor: pictures [N, C, H, W], frames [N, T, C, H, W], sound [N, C, samples].
SHAPES = {name: (1, 9, 3, 32, 32) if "num_frames" in call else (1, 3, 64, 64) for name, call in CALLS.items()} | {
    "stable-audio": (1, 2, 13230)
}


def call(pipeline: DiffusionPipeline, name: str, prompt: str = "a red fox", *, seed: int = 0, steps: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    arguments: dict[str, Any] = CALLS[name] | {"output_type": "pt", "return_dict": False}
    return pipeline(prompt=prompt, num_inference_steps=steps, generator=generator, **arguments)[0]
