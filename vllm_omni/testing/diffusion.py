"""Build tiny random checkpoints of diffusers pipelines, offline, in the layout of the real ones.

The result loads wherever the real checkpoint does: ``diffusers.DiffusionPipeline.from_pretrained``. ``diffusion.yaml``
lists the components: classes, scheduler settings and, unless noted, the VAE's compression and latent channels are the
real ones; widths and depths are not. The random weights are scaled so that pictures are neither flat nor saturated, and
depend on prompt, seed, guidance and the number of steps.

    vllm-omni tiny qwen-image DIRECTORY [--seed 1]

Importing this module loads neither torch nor diffusers, so that the command line can list ``PIPELINES``.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from vllm_omni.errors import MissingDependency, how_to_install
from vllm_omni.names import suggest
from vllm_omni.testing import diffusion_text as tiny_text

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline
    from torch import Generator, nn

# Pattern of a parameter's name, prefixed with its model's class -> gain over the usual scale: fan-in scaling, and 0.1
# for a bias.
GAINS = {
    # Sharper attention distinguishes the words of a prompt; even attention would read only their mean.
    r"\.(attention|attn)\d?\.norm_(added_)?[qk]\.": 1.5,
    # Guidance 7 amplifies the effect of the text; without this a waveform would grow from step to step.
    r"^StableAudioDiTModel\.proj_out\.": 0.2,
    # These normalize vectors of 4 to 16 channels: one near zero would amplify rounding by its inverse.
    r"^AutoencoderKL(QwenImage|Wan)\..*(conv\d|conv_in|conv_shortcut|resample\.1|time_conv)\.bias$": 3.0,
    # Fifteen residual units in a row would amplify rounding a thousandfold.
    r"^AutoencoderOobleck\..*res_unit\d\.conv2\.": 0.1,
    # For sound within -1..1, and pictures that are rarely black or white.
    r"^AutoencoderOobleck\.decoder\.conv2\.": 0.5,
    r"^AutoencoderKLHunyuanVideo\.decoder\.conv_out\.": 0.6,
}
TABLES: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
PIPELINES = tuple(sorted(TABLES["pipelines"]))


def build(path: Path, name: str, *, seed: int = 0) -> Path:
    """Write a checkpoint in float32 into the directory ``path``; the same arguments give the same bytes.

    Args:
        name: one of ``PIPELINES``.
        seed: of the weights.

    Returns:
        ``path``.

    Raises:
        ValueError: the name is unknown.
        MissingDependency: diffusers is not installed.
    """
    if name not in PIPELINES:
        raise ValueError(f"unknown tiny pipeline {name!r}: {suggest(name, PIPELINES)}")
    try:
        import diffusers  # noqa: F401 - make_pipeline uses it
        import torch
    except ImportError as exc:
        raise MissingDependency(f"{name} needs diffusers; {how_to_install('cpu', 'cuda')} ({exc})") from exc

    from vllm_omni.diffusion.loading import no_progress_bars

    with torch.random.fork_rng(devices=[]):  # constructing consumes random numbers of the global generator
        pipeline = make_pipeline(name)
    generator = torch.Generator().manual_seed(seed)
    for component in sorted(pipeline.components):
        module = getattr(pipeline, component)
        if isinstance(module, torch.nn.Module):
            with torch.no_grad():
                randomize(module, generator)
    with no_progress_bars():
        pipeline.save_pretrained(path)
    return path


def make_pipeline(name: str) -> DiffusionPipeline:
    """Construct a pipeline of the table, with the weights of construction."""
    import diffusers

    ((class_name, parts),) = TABLES["pipelines"][name].items()
    pipeline_class = getattr(diffusers, class_name)
    components: dict[str, Any] = {}
    for component, part in parts.items():
        if component.startswith("tokenizer"):
            components[component] = tiny_text.make_tokenizer(part, pipeline_class)
        elif component.startswith("text_encoder"):
            ((encoder, sizes),) = part.items()
            tokenizer = components[component.replace("text_encoder", "tokenizer")]
            components[component] = tiny_text.make_text_encoder(
                encoder, tokenizer, TABLES["text_encoders"][encoder] | sizes
            )
        elif part == "qwen_vl":
            components[component] = tiny_text.make_qwen_vl_processor(components["tokenizer"])
        elif isinstance(part, dict):
            ((part_class, config),) = part.items()
            components[component] = getattr(diffusers, part_class)(**config)
        else:
            components[component] = part
    return pipeline_class(**components)


def randomize(module: nn.Module, generator: Generator) -> None:
    """Overwrite every parameter: the libraries' small standard deviations and zeros would hide the inputs."""
    import torch

    for owner_name, owner in module.named_modules():
        for name, parameter in owner.named_parameters(recurse=False):
            noise = torch.randn(parameter.shape, generator=generator)
            gain = get_gain(f"{type(module).__name__}.{owner_name}.{name}")
            if isinstance(owner, torch.nn.Embedding) or not parameter.requires_grad:  # the latter: frequencies
                parameter.copy_(noise)
            elif name.endswith("bias"):
                parameter.copy_(noise * 0.1 * gain)
            elif parameter.ndim <= 1 or parameter[0].numel() == 1:  # of a norm
                parameter.copy_((noise * 0.1 + 1.0) * gain)
            else:
                parameter.copy_(noise * gain / math.sqrt(parameter[0].numel()))


def get_gain(name: str) -> float:
    """Gain over the usual scale of the parameter of this name."""
    return next((gain for pattern, gain in GAINS.items() if re.search(pattern, name)), 1.0)
