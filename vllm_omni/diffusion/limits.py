"""``CallLimits``: how much one request may compute, by the deployment or by the pipeline's own defaults.

Fields and ``extra_args`` are checked before the pipeline starts, under the names that diffusers gives to sizes. What
else makes a request large (an argument with another name, an input image) shows in the calls of the pipeline's
networks, which are compared with those of a small request.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from msgspec import structs
from torch import Tensor

from vllm_omni.config.diffusion_params import DiffusionLimits, DiffusionParams
from vllm_omni.diffusion.merge_check import NOT_ABOUT_SIZE, SIDES, make_request
from vllm_omni.diffusion.pipeline_arguments import IMAGES, Accepted, needs_image, parameters_of, pipeline_arguments
from vllm_omni.diffusion.pipeline_copy import PipelineCopies
from vllm_omni.diffusion.suspended_call import PendingCall, SuspendedCall
from vllm_omni.errors import InvalidRequest

logger = logging.getLogger(__name__)

TIMES_DEFAULT = 4
"""Without a limit of the deployment: how many times the pipeline's own default a request may have."""

# Used where a pipeline names no default.
DEFAULT_SIDE, DEFAULT_FRAMES, DEFAULT_SECONDS, DEFAULT_TOKENS = 1024, 81, 10, 512
LEAST_SECONDS = 60  # the defaults of sounds are samples of what the models are made for
ROUNDING = 1.1  # sides are rounded to multiples, also those of an image that is scaled to an area
MAX_TOKENS = 8192  # the tokenizers of language models read more, and the pipelines cut it
CHARS_PER_TOKEN = 8

# Limit -> the names of its arguments.
ARGUMENTS = {
    "max_pixels": re.compile(r"^max_area$"),
    "max_frames": re.compile(r"(num_frames|^frames|^video_length)$"),
    "max_seconds": re.compile(r"(duration(_s)?|_in_s|_seconds)$"),
    "max_steps": re.compile(r"(num_inference_steps|sigmas|timesteps)$"),  # the last two are a list with one per step
    "max_outputs": re.compile(r"^(batch_size|layers)$"),
    "max_prompt_tokens": re.compile(r"^max_\w*length$"),
}


class CallLimits:
    """Limits of the calls of one pipeline.

    Args:
        pipeline: loaded; one small request is started on it, up to its first call of a denoiser.
        given: limits of the deployment; what it does not limit is limited to ``TIMES_DEFAULT`` the pipeline's default.
    """

    def __init__(self, pipeline: Any, given: DiffusionLimits) -> None:
        accepted = parameters_of(pipeline)
        self._name = type(pipeline).__name__
        self._sides = {name: default_side(pipeline, accepted, name) for name in ("height", "width")}
        self._frames = default_of(accepted, "max_frames")
        self._seconds = default_of(accepted, "max_seconds") or DEFAULT_SECONDS
        defaults = {
            "max_pixels": math.prod(self._sides.values()),
            "max_frames": self._frames or DEFAULT_FRAMES,
            "max_seconds": max(self._seconds, LEAST_SECONDS),
            "max_prompt_tokens": default_of(accepted, "max_prompt_tokens") or longest_text(pipeline),
        }
        own = {name: TIMES_DEFAULT * value for name, value in defaults.items() if getattr(given, name) is None}
        self.limits = structs.replace(given, **own)
        self._own_pixels = 0  # of input images after the pipeline's own scaling
        self._max_values: float | None = None  # of a row of the first call of a denoiser; None: not known
        self._measure(pipeline)

    def check_arguments(self, arguments: Mapping[str, Any]) -> None:
        """Check the arguments of a pipeline's call.

        Raises:
            InvalidRequest: names the argument and the limit.
        """
        check = self.limits.check
        sides = {name: arguments.get(name) or default for name, default in self._sides.items()}
        for name, other in (("height", "width"), ("width", "height")):
            if arguments.get(name):
                check("max_pixels", math.prod(sides.values()), name, f"{sides[name]} with {other} {sides[other]}")
        for name, value in arguments.items():
            if name in ("resolution", "output_resolution") and isinstance(value, int):
                check("max_pixels", value**2, name, value)
            for limit, names in ARGUMENTS.items():
                if names.search(name) and (size := size_of(value)) is not None:
                    check(limit, size, name, f"{size} values" if isinstance(value, list | tuple) else value)
            num_tokens = sum(map(len, texts_of(value))) // CHARS_PER_TOKEN
            check("max_prompt_tokens", num_tokens, name, f"a text of {num_tokens * CHARS_PER_TOKEN} characters or more")

    def check_steps(self, num_steps: int) -> None:
        """Check the number of steps that a pipeline is about to make; raises as ``check_arguments``."""
        self.limits.check("max_steps", num_steps, "num_inference_steps")

    def check_call(self, call: PendingCall, arguments: Mapping[str, Any]) -> None:
        """Check a network's call, up to the first one of a denoiser; raises as ``check_arguments``.

        Args:
            arguments: of the pipeline's call.
        """
        first = first_argument(call)
        if call.method == "encode" and isinstance(first, Tensor) and first.ndim >= 4:
            height, width = first.shape[-2:]
            if height * width > self._own_pixels * ROUNDING:
                self.limits.check("max_pixels", height * width, "image", f"{width} x {height} pixels")
        if not call.is_denoiser or self._max_values is None:
            return
        images: Any = next((arguments[name] for name in IMAGES if name in arguments), [])
        most = self._max_values * (1 + (len(images) if isinstance(images, list) else 1))
        if (size := num_values(first)) > most:
            raise InvalidRequest(
                f"these arguments make {self._name} compute {size} values at each step: at most {most:.0f} here (to "
                "allow more, raise max_pixels, max_frames or max_seconds of the deployment)"
            )

    def _measure(self, pipeline: Any) -> None:
        """Measure a small request, of which the largest one is a multiple."""
        copies = PipelineCopies(pipeline)
        reason: Exception | None = None
        for side in SIDES:
            request, measured = make_request(pipeline, 0, side, has_image=needs_image(pipeline)), _Measured()
            try:
                size = first_call_size(SuspendedCall(copies, pipeline_arguments(pipeline, request), limits=measured))
                self._max_values, self._own_pixels = size * self._growth(request.params), measured.num_pixels
                return
            except NOT_ABOUT_SIZE as exc:
                reason = exc
                break
            except Exception as exc:
                reason = exc
        logger.warning("%s: requests are limited by the arguments with known names only: %s", self._name, reason)

    def _growth(self, params: DiffusionParams) -> float:
        """How many times larger than this small request the largest one is."""
        limits, growth = self.limits, 1.0
        assert limits.max_pixels and limits.max_frames and limits.max_seconds, "every limit has a default"
        if params.height and params.width:
            growth *= max(1.0, limits.max_pixels / (params.height * params.width))
        if num_frames := params.num_frames or self._frames:
            growth *= (limits.max_frames + num_frames - 1) / num_frames  # some frames are one latent
        return growth if params.height or num_frames else max(1.0, limits.max_seconds / self._seconds)


def default_side(pipeline: Any, accepted: Accepted, name: str) -> int:
    """The side in pixels, "height" or "width", that a pipeline gives to a request without one."""
    if name in accepted and isinstance(default := accepted[name].default, int):
        return default
    configs = [getattr(pipeline.components.get(part), "config", {}) for part in ("transformer", "unet")]
    samples = [config[key] for config in configs for key in (f"sample_{name}", "sample_size") if config.get(key)]
    sample = getattr(pipeline, "default_sample_size", None) or next(iter(samples), None)
    if isinstance(sample, list | tuple):
        sample = sample[-1 if name == "width" else -2]
    scale = getattr(pipeline, "vae_scale_factor", None) or getattr(pipeline, "vae_scale_factor_spatial", None) or 1
    return sample * scale if isinstance(sample, int) else DEFAULT_SIDE


def default_of(accepted: Accepted, limit: str) -> int | None:
    """The largest default of the arguments under a limit; None: there is none."""
    defaults = [one.default for name, one in accepted.items() if ARGUMENTS[limit].search(name)]
    return max((math.ceil(one) for one in defaults if isinstance(one, int | float)), default=None)


def longest_text(pipeline: Any) -> int:
    """Tokens that the longest of a pipeline's tokenizers reads; some have no bound of their own."""
    lengths = [getattr(part, "model_max_length", 0) for part in pipeline.components.values()]
    return max((length for length in lengths if 0 < length <= MAX_TOKENS), default=DEFAULT_TOKENS)


def size_of(value: Any) -> float | None:
    """A number, or the length of a list; None: it is neither."""
    if isinstance(value, list | tuple):
        return len(value)
    return value if isinstance(value, int | float) else None


def texts_of(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple | dict):
        for one in value.values() if isinstance(value, dict) else value:
            yield from texts_of(one)


class _Measured:
    """In the place of limits: the pixels of the largest image that a pipeline encodes."""

    num_pixels = 0

    def check_steps(self, num_steps: int) -> None:
        pass

    def check_call(self, call: PendingCall, arguments: Mapping[str, Any]) -> None:
        if call.method == "encode" and isinstance(image := first_argument(call), Tensor):
            self.num_pixels = max(self.num_pixels, math.prod(image.shape[-2:]))


@torch.no_grad()
def first_call_size(call: SuspendedCall) -> int:
    """Values of a row of the first call of a denoiser; raises the error of a pipeline that does not reach it."""
    try:
        pending = call.resume()
        while pending is not None and not pending.is_denoiser:
            pending = call.resume(pending.run())
        if call.error is not None:
            raise call.error
        size = 0 if pending is None else num_values(first_argument(pending))
    finally:
        call.cancel()
    if not size:
        raise TypeError("the first argument of its denoiser is no tensor")
    return size


def first_argument(call: PendingCall) -> Any:
    """The first argument of a network; of a denoiser its latents."""
    return next(iter((*call.positional, *call.kwargs.values())), None)


def num_values(latents: Any) -> int:
    """Values of one row of a denoiser's latents: [rows, ...], or a list with a tensor for each row."""
    if isinstance(latents, Tensor):
        return latents.numel() // max(1, len(latents)) if latents.ndim else 0
    return max((one.numel() for one in latents), default=0) if isinstance(latents, list) else 0
