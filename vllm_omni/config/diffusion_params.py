"""``DiffusionParams``: the parameters of a request for images, videos or sounds."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from typing import Any, Literal, NoReturn, get_args

import msgspec

from vllm_omni.config.checks import Problem, check_field
from vllm_omni.errors import InvalidRequest
from vllm_omni.names import suggest

OutputType = Literal["media", "float", "latents"]
OUTPUT_TYPES: tuple[str, ...] = get_args(OutputType)

MAX_INT = 2**31 - 1  # of counts and sizes: the largest dimension of a tensor

# Arguments of pipelines that the server sets -> the field of ``DiffusionParams`` to use instead, or the reason.
SERVER_ARGS = {
    "prompt": "it is the request's own",
    "image": "it is the request's own",
    "generator": "seed",
    "num_images_per_prompt": "num_outputs_per_prompt",
    "num_videos_per_prompt": "num_outputs_per_prompt",
    "num_waveforms_per_prompt": "num_outputs_per_prompt",
    "num_designs_per_prompt": "num_outputs_per_prompt",
    "output_type": "output_type",
    "callback": "progress",
    "callback_on_step_end": "progress",
    "callback_on_step_end_tensor_inputs": "progress",
    "return_dict": "it is the server's own",
}


class DiffusionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a deployment for one request; None: the pipeline decides."""

    max_pixels: int | None = None  # height x width of one image or frame
    max_frames: int | None = None
    max_seconds: float | None = None  # of a sound
    max_steps: int | None = None
    max_outputs: int | None = None
    max_prompt_tokens: int | None = None

    def check(self, limit: str, size: float, name: str, value: object = None) -> None:
        """Compare a size of a request with a limit.

        Args:
            limit: a field.
            name: of the parameter at fault.
            value: its value, if that is not the size.

        Raises:
            InvalidRequest: the size is larger; names the parameter, the limit and where to raise it.
        """
        most = getattr(self, limit)
        if most is not None and size > most:
            kind = limit.removeprefix("max_").replace("_", " ")
            said = f"{size if value is None else value}: at most {most} {kind} here"
            raise InvalidRequest(f"{name} = {said} (to allow more, raise {limit} of the deployment)", param=name)


class DiffusionParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Parameters of a diffusion request; None: the pipeline's own default.

    The constructor checks nothing. The server calls ``validate`` once, when it admits the request.
    """

    negative_prompt: str | None = None
    height: int | None = None  # pixels
    width: int | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    guidance_scale_2: float | None = None  # of a second expert (Wan2.2)
    true_cfg_scale: float | None = None  # guidance by a second run of the denoiser, where guidance_scale is an input
    seed: int | None = None  # output i of several uses seed + i
    num_outputs_per_prompt: int = 1
    num_frames: int | None = None
    fps: int | None = None  # frames per second of a video
    # "media": uint8 images and frames, float32 sound. "float": float32 images and frames in [0, 1]. "latents": raw.
    output_type: OutputType = "media"
    progress: bool = False  # send an output after every denoise step
    notify_start: bool = False  # send an output once the request has been checked and runs, before its first step
    preview_every: int = 0  # send a preview every so many steps; 0: none
    cache_threshold: float | None = None  # of the first-block cache; None: the deployment's; 0: off
    extra_args: dict[str, Any] = {}  # further keyword arguments of the pipeline's call, msgpack types

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> DiffusionParams:
        """Make parameters from fields by name.

        Raises:
            InvalidRequest: a field is unknown; with the nearest name.
        """
        for name in values:
            if name not in cls.__struct_fields__:
                raise InvalidRequest(
                    f"unknown diffusion parameter {name!r}: {suggest(str(name), cls.__struct_fields__)}"
                )
        return cls(**values)

    def validate(self, limits: DiffusionLimits | None = None) -> None:
        """Check everything that can be checked without the pipeline.

        Args:
            limits: of the deployment; None: no limits.

        Raises:
            InvalidRequest: naming the field, its value, and what is valid.
        """
        limits = limits or DiffusionLimits()
        self._check_types()
        for name in ("guidance_scale", "guidance_scale_2", "true_cfg_scale", "cache_threshold"):
            value = getattr(self, name)
            if value is not None and (not math.isfinite(value) or value < 0):
                _reject(name, value, "must be a finite number, at least 0")
        self._check_counts(limits)
        self._check_seed()
        self._check_extra_args()

    def _check_types(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            try:
                check_field(DiffusionParams, name, value)
            except Problem as exc:
                _reject(name, value, str(exc))
        if self.negative_prompt is not None:
            check_text("negative_prompt", self.negative_prompt)

    def _check_counts(self, limits: DiffusionLimits) -> None:
        for name, least, limit in (
            ("num_inference_steps", 1, "max_steps"),
            ("num_outputs_per_prompt", 1, "max_outputs"),
            ("num_frames", 1, "max_frames"),
            ("fps", 1, None),
            ("preview_every", 0, None),
            ("height", 1, "max_pixels"),
            ("width", 1, "max_pixels"),
        ):
            value = getattr(self, name)
            if value is None:
                continue
            if value < least:
                _reject(name, value, f"must be at least {least}" + (" pixel" if limit == "max_pixels" else ""))
            if value > MAX_INT:
                _reject(name, value, f"must be at most {MAX_INT}")
            if limit is not None:
                limits.check(limit, value, name)
        if self.height and self.width:
            limits.check("max_pixels", self.height * self.width, "height", f"{self.height} with width {self.width}")

    def _check_seed(self) -> None:
        if self.seed is None:
            return
        most = 2**64 - self.num_outputs_per_prompt  # the seed of the last output must fit, too
        if not -(2**63) <= self.seed <= most:
            _reject("seed", self.seed, f"valid: -2**63 to 2**64 - {self.num_outputs_per_prompt}")

    def _check_extra_args(self) -> None:
        for name in self.extra_args:
            if name in type(self).__struct_fields__:
                raise InvalidRequest(f"extra_args: {name!r} is a field of its own", param=name)
            if name in SERVER_ARGS:
                said = f"extra_args: {name!r} is set by the server: {SERVER_ARGS[name]}"
                raise InvalidRequest(said, param="extra_args")
        try:
            msgspec.msgpack.encode(self.extra_args, enc_hook=_reject_type)
        except (TypeError, OverflowError, ValueError, RecursionError) as exc:
            raise InvalidRequest(f"extra_args: {exc}", param="extra_args") from exc


def _reject(name: str, value: Any, why: str) -> NoReturn:
    raise InvalidRequest(f"{name} = {reprlib.repr(value)}: {why}", param=name)


def check_text(name: str, text: str) -> None:
    """Raise ``InvalidRequest`` for an unpaired surrogate, which would stop the thread that sends requests."""
    try:
        text.encode()
    except UnicodeEncodeError:
        _reject(name, text, "invalid Unicode: unpaired surrogate")


def _reject_type(value: Any) -> Any:
    raise TypeError(f"a value of type {type(value).__name__} cannot be sent; numbers, strings, lists and dicts can")
