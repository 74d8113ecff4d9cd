"""What a pipeline returned, as tensors on the CPU; and a picture of latents that are not finished."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm_omni.config.diffusion_params import OutputType

# What pipelines call their output -> what it is.
KINDS = {
    "images": "images",
    "image": "images",
    "frames": "frames",
    "videos": "frames",
    "video": "frames",
    "audios": "audio",
    "audio": "audio",
}


class NoPreview(Exception):
    """Latents of a layout that is not known here."""


def collect(pipeline: Any, result: Any, output_type: OutputType) -> dict[str, Any]:
    """A pipeline's result, by kind.

    Args:
        result: of the pipeline called with an output type of ``pt`` or ``latent``.

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


def sample_rate(pipeline: Any) -> int:
    """Of a pipeline's sound, Hz.

    Raises:
        TypeError: no component says.
    """
    for component in ("vocoder", "audio_vae", "vae"):
        config = getattr(getattr(pipeline, component, None), "config", None)
        for name in ("output_sampling_rate", "sampling_rate", "sample_rate"):
            if getattr(config, name, None):
                return int(getattr(config, name))
    raise TypeError(f"{type(pipeline).__name__} makes sound, and no component of it has a sampling rate")


def _to_pixels(value: Any, kind: str, output_type: OutputType) -> Tensor:
    pixels = _to_tensor(value)
    if pixels.dtype == torch.uint8:
        return pixels.cpu() if output_type == "media" else pixels.cpu().float() / 255
    rank = 5 if kind == "frames" else 4
    if pixels.ndim == rank - 1:
        pixels = pixels[None]
    if isinstance(_first(value), Tensor):  # channels before height and width; numpy's and PIL's come after them
        pixels = pixels.movedim(-3, -1)
    pixels = pixels.float().clamp(0, 1)
    if not pixels.isfinite().all():  # as a picture it would be black, and look like one
        raise FloatingPointError("the pipeline's output has values that are no numbers")
    if output_type == "media":
        pixels = (pixels * 255).round().to(torch.uint8)  # before it leaves the device: a quarter of the bytes
    return pixels.cpu().contiguous()


def _first(value: Any) -> Any:
    while isinstance(value, list | tuple):
        value = value[0]
    return value


def _to_tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, list | tuple):
        return torch.stack([_to_tensor(one) for one in value])
    return torch.from_numpy(np.array(value))


def preview(pipeline: Any, latents: Tensor, height: int | None, width: int | None) -> Tensor:
    """The first output's first frame, by the pipeline's own VAE.

    Args:
        pipeline: whose VAE decodes; that of a request suspends there.
        latents: as the pipeline hands them to ``callback_on_step_end``.
        height, width: of the request, pixels; None: the pipeline's default.

    Returns:
        [H, W, 3], uint8, CPU.

    Raises:
        NoPreview: the latents' layout is not known.
    """
    latents = latents[:1]
    vae = getattr(pipeline, "vae", None)
    if vae is None:
        raise NoPreview("it has no VAE")
    if latents.ndim == 3:
        latents = _unpack(pipeline, latents, height, width)
    if latents.ndim == 5:
        latents = latents[:, :, :1]  # the first latent frame, which is one of the video's, too
    elif latents.ndim != 4:
        raise NoPreview(f"its latents have {latents.ndim} dimensions")
    latents = latents.to(vae.dtype)
    config = vae.config
    if config.get("latents_mean") is not None and config.get("latents_std") is not None:
        shape = (1, -1, *[1] * (latents.ndim - 2))
        mean, std = (latents.new_tensor(config[name]).view(shape) for name in ("latents_mean", "latents_std"))
        latents = latents * std + mean
    elif config.get("scaling_factor"):
        latents = latents / config["scaling_factor"] + (config.get("shift_factor") or 0.0)
    else:
        raise NoPreview("its VAE does not say how its latents are scaled")
    pixels = vae.decode(latents, return_dict=False)[0]
    pixels = pixels[0, :, 0] if pixels.ndim == 5 else pixels[0]
    if pixels.shape[0] != 3:
        raise NoPreview(f"its VAE decodes to {pixels.shape[0]} channels")
    pixels = (pixels.float() / 2 + 0.5).clamp(0, 1).permute(1, 2, 0)
    return (pixels * 255).round().to(torch.uint8).cpu().contiguous()


def _unpack(pipeline: Any, latents: Tensor, height: int | None, width: int | None) -> Tensor:
    """Tokens [1, S, C] to [1, C, (1,) H, W]."""
    unpack = getattr(pipeline, "_unpack_latents", None)
    default, factor = getattr(pipeline, "default_sample_size", None), getattr(pipeline, "vae_scale_factor", None)
    if unpack is None or factor is None:
        raise NoPreview("its latents are tokens, and it has no _unpack_latents")
    height, width = (side or (default or 0) * factor for side in (height, width))
    if (height // (2 * factor)) * (width // (2 * factor)) != latents.shape[1]:
        raise NoPreview(f"its {latents.shape[1]} tokens are not those of {height} x {width} pixels")
    try:
        return unpack(latents, height, width, factor)
    except TypeError as exc:
        raise NoPreview(f"its _unpack_latents takes other arguments ({exc})") from exc
