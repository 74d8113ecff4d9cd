"""``collect``: convert what a pipeline returned into tensors on the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm_omni.config.diffusion_params import OutputType

# Field of a pipeline's output -> its kind.
KINDS = {
    "images": "images",
    "image": "images",
    "frames": "frames",
    "videos": "frames",
    "video": "frames",
    "audios": "audio",
    "audio": "audio",
}


def collect(pipeline: Any, result: Any, output_type: OutputType) -> dict[str, Any]:
    """Convert the result of a pipeline.

    Args:
        result: returned by the pipeline for an output type of ``pt`` or ``latent``.

    Returns:
        ``images`` [N, H, W, C] or ``frames`` [N, T, H, W, C], uint8 or (``float``) float32 in [0, 1]; ``audio``
        [N, channels, samples], float32, with ``sample_rate`` in Hz; or ``latents`` alone, as the pipeline has them.
    """
    fields = dict(result.items()) if hasattr(result, "items") else {"images": result[0]}
    known = {name: KINDS[name] for name in fields if name in KINDS and fields[name] is not None}
    if not known:
        raise TypeError(
            f"{type(pipeline).__name__} returned {', '.join(fields) or 'nothing'}; known: {', '.join(KINDS)}"
        )
    output: dict[str, Any] = {}
    for name, kind in known.items():
        if output_type == "latents":
            output["latents" if not output else f"{kind}_latents"] = _to_tensor(fields[name]).cpu()
        elif kind == "audio":
            sound = _to_tensor(fields[name]).float().cpu()
            output["audio"] = sound[:, None] if sound.ndim == 2 else sound
            output["sample_rate"] = sample_rate(pipeline)
        else:
            output[kind] = _to_pixels(fields[name], kind, output_type)
    return output


def join(outputs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the results of several calls along N."""
    first, *others = outputs
    if not others:
        return dict(first)
    return {
        name: torch.cat([one[name] for one in outputs]) if isinstance(value, Tensor) else value
        for name, value in first.items()
    }


def sample_rate(pipeline: Any) -> int:
    """Sampling rate of a pipeline's sound, Hz.

    Raises:
        TypeError: no component has one.
    """
    for component in ("vocoder", "audio_vae", "vae"):
        config = getattr(getattr(pipeline, component, None), "config", None)
        for name in ("output_sampling_rate", "sampling_rate", "sample_rate"):
            if getattr(config, name, None):
                return int(getattr(config, name))
    raise TypeError(f"{type(pipeline).__name__} makes sound, but none of its components has a sampling rate")


def _to_pixels(value: Any, kind: str, output_type: OutputType) -> Tensor:
    pixels = _to_tensor(value)
    if pixels.dtype == torch.uint8:
        return pixels.cpu() if output_type == "media" else pixels.cpu().float() / 255
    rank = 5 if kind == "frames" else 4
    if pixels.ndim == rank - 1:
        pixels = pixels[None]
    if _has_tensors(value):  # channels precede height and width, unlike numpy's and PIL's
        pixels = pixels.movedim(-3, -1)
    pixels = pixels.float().clamp(0, 1)
    if not pixels.isfinite().all():  # else the picture would be black, which looks like a result
        raise FloatingPointError("the pipeline's output is not finite (NaN or infinite)")
    if output_type == "media":
        pixels = (pixels * 255).round().to(torch.uint8)  # on the device: a quarter of the bytes to copy
    return pixels.cpu().contiguous()


def _has_tensors(value: Any) -> bool:
    return _has_tensors(value[0]) if isinstance(value, list | tuple) else isinstance(value, Tensor)


def _to_tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, list | tuple):
        return torch.stack([_to_tensor(one) for one in value])
    return torch.from_numpy(np.array(value))
