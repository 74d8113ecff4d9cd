"""Builds tiny random checkpoints of diffusers pipelines, offline, in the layout of the real ones.

The result loads wherever the real checkpoint does: ``diffusers.DiffusionPipeline.from_pretrained``. The classes and the
scheduler's settings are the real ones, and so are the VAE's compression and its latent channels where nothing else is
said; widths and depths are not.
Its weights are random but not arbitrary: pictures are neither flat nor saturated, and prompt, seed, guidance and the
number of steps each show in them.

    vllm-omni tiny qwen-image DIRECTORY [--seed 1]

Importing this module loads neither torch nor diffusers, so that the command line can list ``PIPELINES``.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_omni.errors import MissingDependency
from vllm_omni.names import suggest
from vllm_omni.testing import diffusion_images, diffusion_videos

if TYPE_CHECKING:
    from torch import Generator, nn

# Pattern of a parameter's name, which begins with the class of its model -> how much wider it is than usual: fan-in
# scaling, and 0.1 for a bias.
GAINS = {
    # Sharper attention tells the words of a prompt apart, where even attention would see their mean alone.
    r"\.(attention|attn)\d?\.norm_(added_)?[qk]\.": 1.5,
    # Guidance 7 multiplies what the text changes; without this a waveform would grow from step to step.
    r"^StableAudioDiTModel\.proj_out\.": 0.2,
    # These normalize vectors of 4 to 16 channels: one that is almost zero would multiply rounding by its inverse.
    r"^AutoencoderKL(QwenImage|Wan)\..*(conv\d|conv_in|conv_shortcut|resample\.1|time_conv)\.bias$": 3.0,
    # Fifteen residual units in a row would multiply rounding by a thousand.
    r"^AutoencoderOobleck\..*res_unit\d\.conv2\.": 0.1,
    # Sound within -1..1, and pictures that are seldom black or white.
    r"^AutoencoderOobleck\.decoder\.conv2\.": 0.5,
    r"^AutoencoderKLHunyuanVideo\.decoder\.conv_out\.": 0.6,
}
MAKERS = diffusion_images.MAKERS | diffusion_videos.MAKERS
PIPELINES = tuple(sorted(MAKERS))


def build(path: Path, name: str, *, seed: int = 0) -> Path:
    """Write a checkpoint in float32 into ``path``, which is made if need be; the same arguments give the same bytes.

    Args:
        name: of ``PIPELINES``.
        seed: of the weights.

    Returns:
        ``path``.

    Raises:
        ValueError: no pipeline has that name.
        MissingDependency: diffusers is not installed.
    """
    if name not in PIPELINES:
        raise ValueError(f"no tiny pipeline {name!r}: {suggest(name, PIPELINES)}")
    try:
        import diffusers  # noqa: F401 - the makers use it
        import torch
    except ImportError as exc:
        raise MissingDependency(
            f"{name} needs the package diffusers: install vllm-omni with the extra 'cpu' or 'cuda' ({exc})"
        ) from exc

    from vllm_omni.diffusion.loading import no_progress_bars

    with torch.random.fork_rng(devices=[]):  # the libraries draw from the global generator while they construct
        pipeline = MAKERS[name]()
    generator = torch.Generator().manual_seed(seed)
    for component in sorted(pipeline.components):
        module = getattr(pipeline, component)
        if isinstance(module, torch.nn.Module):
            with torch.no_grad():
                randomize(module, generator)
    with no_progress_bars():
        pipeline.save_pretrained(path)
    return path


def randomize(module: nn.Module, generator: Generator) -> None:
    """Overwrite every parameter. The libraries' own small standard deviations and zeros would hide what went in."""
    import torch

    for owner_name, owner in module.named_modules():
        for name, parameter in owner.named_parameters(recurse=False):
            noise = torch.randn(parameter.shape, generator=generator)
            gain = get_gain(f"{type(module).__name__}.{owner_name}.{name}")
            if isinstance(owner, torch.nn.Embedding) or not parameter.requires_grad:  # the latter: random frequencies
                parameter.copy_(noise)
            elif name.endswith("bias"):
                parameter.copy_(noise * 0.1 * gain)
            elif parameter.ndim <= 1 or parameter[0].numel() == 1:  # of a norm
                parameter.copy_((noise * 0.1 + 1.0) * gain)
            else:
                parameter.copy_(noise * gain / math.sqrt(parameter[0].numel()))


def get_gain(name: str) -> float:
    """How much wider than usual the parameter of this name is."""
    return next((gain for pattern, gain in GAINS.items() if re.search(pattern, name)), 1.0)
