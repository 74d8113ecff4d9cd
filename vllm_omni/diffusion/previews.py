"""``Previewer``: decode a small picture of a request whose denoising has not ended."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from vllm_omni.diffusion.pipeline_arguments import parameters_of
from vllm_omni.diffusion.suspended_call import SuspendedCall

logger = logging.getLogger(__name__)


class NoPreview(Exception):
    """The layout of the latents is not known here."""


class Previewer:
    """Adds previews to the requests that ask for them; after the first failure, to none."""

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline
        self._is_enabled = True

    def add_to(self, call: SuspendedCall, every: int) -> None:
        """Make the pipeline set ``call.preview`` every so many steps (0: never); ``call`` has not started."""
        arguments = call.arguments
        if not every or not self._is_enabled:
            return
        if "callback_on_step_end" not in parameters_of(self._pipeline):
            self._disable("it has no callback_on_step_end")
            return
        height, width = arguments.get("height"), arguments.get("width")

        def show(pipeline: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
            is_last = step + 1 == call.progress.num_steps  # the picture itself follows
            if (step + 1) % every == 0 and not is_last and self._is_enabled:
                try:
                    call.preview = decode_preview(pipeline, values["latents"], height, width)
                except Exception as exc:
                    self._disable(f"{exc}")
            return {}

        arguments["callback_on_step_end"] = show

    def _disable(self, reason: str) -> None:
        self._is_enabled = False
        logger.warning("no previews of %s: %s", type(self._pipeline).__name__, reason)


def decode_preview(pipeline: Any, latents: Tensor, height: int | None, width: int | None) -> Tensor:
    """Decode the first frame of the first output with the pipeline's own VAE.

    Args:
        pipeline: a request's copy suspends in its VAE.
        latents: as the pipeline passes them to ``callback_on_step_end``.
        height, width: pixels, as requested; None: the pipeline's default.

    Returns:
        [H, W, 3], uint8, CPU.

    Raises:
        NoPreview: the layout of the latents is not known.
    """
    latents = latents[:1]
    vae = getattr(pipeline, "vae", None)
    if vae is None:
        raise NoPreview("it has no VAE")
    if latents.ndim == 3:
        latents = _unpack(pipeline, latents, height, width)
    if latents.ndim == 5:
        latents = latents[:, :, :1]  # the first latent frame decodes to the first frame of the video
    elif latents.ndim != 4:
        raise NoPreview(f"its latents have {latents.ndim} dimensions")
    pixels = vae.decode(_unscale(latents.to(vae.dtype), vae.config), return_dict=False)[0]
    pixels = pixels[0, :, 0] if pixels.ndim == 5 else pixels[0]
    if pixels.shape[0] != 3:
        raise NoPreview(f"its VAE decodes to {pixels.shape[0]} channels")
    pixels = (pixels.float() / 2 + 0.5).clamp(0, 1).permute(1, 2, 0)
    return (pixels * 255).round().to(torch.uint8).cpu().contiguous()


def _unscale(latents: Tensor, config: Any) -> Tensor:
    """Undo the normalization of latents [1, C, (T,) H, W], by the settings of the VAE."""
    if config.get("latents_mean") is not None and config.get("latents_std") is not None:
        shape = (1, -1, *[1] * (latents.ndim - 2))
        mean, std = (latents.new_tensor(config[name]).view(shape) for name in ("latents_mean", "latents_std"))
        return latents * std + mean
    if config.get("scaling_factor"):
        return latents / config["scaling_factor"] + (config.get("shift_factor") or 0.0)
    raise NoPreview("its VAE does not say how its latents are scaled")


def _unpack(pipeline: Any, latents: Tensor, height: int | None, width: int | None) -> Tensor:
    """Convert tokens [1, S, C] to [1, C, (1,) H, W]."""
    unpack = getattr(pipeline, "_unpack_latents", None)
    default, factor = getattr(pipeline, "default_sample_size", None), getattr(pipeline, "vae_scale_factor", None)
    if unpack is None or factor is None:
        raise NoPreview("its latents are tokens, and it has no _unpack_latents")
    height, width = (side or (default or 0) * factor for side in (height, width))
    if (height // (2 * factor)) * (width // (2 * factor)) != latents.shape[1]:
        raise NoPreview(f"its {latents.shape[1]} tokens do not match {height} x {width} pixels")
    try:
        return unpack(latents, height, width, factor)
    except TypeError as exc:
        raise NoPreview(f"its _unpack_latents has other arguments ({exc})") from exc
