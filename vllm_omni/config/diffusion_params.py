"""``DiffusionParams``: what a request for an image, a video or a sound may set."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from typing import Any, Literal, get_args

import msgspec

from vllm_omni.errors import InvalidRequest
from vllm_omni.names import suggest

OutputType = Literal["media", "float", "latents"]
OUTPUT_TYPES: tuple[str, ...] = get_args(OutputType)

MAX_INT = 2**31 - 1  # of what counts or measures: a tensor's dimension at most

# What the server gives to a pipeline itself, or what the fields of ``DiffusionParams`` are called there.
_TAKEN_ARGS = {
    "prompt": "the request's own",
    "image": "the request's own",
    "generator": "seed",
    "num_images_per_prompt": "num_outputs_per_prompt",
    "num_videos_per_prompt": "num_outputs_per_prompt",
    "num_waveforms_per_prompt": "num_outputs_per_prompt",
    "output_type": "output_type",
    "callback": "progress",
    "callback_on_step_end": "progress",
    "callback_on_step_end_tensor_inputs": "progress",
    "return_dict": "the server's own",
}


class DiffusionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What a deployment allows a request; None: anything."""

    max_pixels: int | None = None  # height x width of one image or frame
    max_steps: int | None = None
    max_outputs: int | None = None
    max_frames: int | None = None


class DiffusionParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a diffusion request may set; None: the pipeline's own default.

    Making one checks nothing: ``validate`` does, and so does everything that takes one.
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
    # "media": uint8 images and frames, float32 sound. "float": images and frames in float32, [0, 1]. "latents": raw.
    output_type: OutputType = "media"
    progress: bool = False  # an output after every denoise step
    preview_every: int = 0  # a small picture every so many steps; 0: none
    cache_threshold: float | None = None  # of the row-wise first-block cache; None: the deployment's; 0: off
    extra_args: dict[str, Any] = {}  # further keyword arguments of the pipeline's call, msgpack types

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> DiffusionParams:
        """From fields by name, types checked.

        Raises:
            InvalidRequest: an unknown field, with the nearest one; a value of a wrong type.
        """
        for name in values:
            if name not in cls.__struct_fields__:
                raise InvalidRequest(
                    f"unknown diffusion parameter {name!r}: {suggest(str(name), cls.__struct_fields__)}"
                )
        params = cls(**values)
        params._check_types()
        # A whole number for one that is not: what two machines compute from it must be the same.
        return msgspec.structs.replace(params, **{name: float(value) for name, value in params._floats().items()})

    def validate(self, limits: DiffusionLimits | None = None) -> None:
        """Check everything that can be known without the pipeline.

        Args:
            limits: of the deployment.

        Raises:
            InvalidRequest: naming the field, its value, and what is valid.
        """
        limits = limits or DiffusionLimits()
        self._check_types()
        for name, value in self._floats().items():
            if not math.isfinite(value) or value < 0:
                _refuse(name, value, "must be a finite number, at least 0")
        self._check_counts(limits)
        self._check_size(limits)
        self._check_seed()
        self._check_extra_args()

    def _floats(self) -> dict[str, float]:
        names = ("guidance_scale", "guidance_scale_2", "true_cfg_scale", "cache_threshold")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def _check_types(self) -> None:
        for field in msgspec.structs.fields(self):
            value = getattr(self, field.name)
            try:
                msgspec.convert(value, field.type)
            except msgspec.ValidationError as exc:
                _refuse(field.name, value, _must_be(field.name, str(exc)))
        if self.negative_prompt is not None and not _is_text(self.negative_prompt):
            _refuse("negative_prompt", self.negative_prompt, "is no text: it has a lone surrogate")

    def _check_counts(self, limits: DiffusionLimits) -> None:
        for name, least, most, limit in (
            ("num_inference_steps", 1, limits.max_steps, "max_steps"),
            ("num_outputs_per_prompt", 1, limits.max_outputs, "max_outputs"),
            ("num_frames", 1, limits.max_frames, "max_frames"),
            ("fps", 1, None, ""),
            ("preview_every", 0, None, ""),
        ):
            value = getattr(self, name)
            if value is None:
                continue
            if value < least:
                _refuse(name, value, f"must be at least {least}")
            if most is not None and value > most:
                _refuse(name, value, f"at most {most} here ({limit} of the deployment)")
            if value > MAX_INT:
                _refuse(name, value, f"must be at most {MAX_INT}")

    def _check_size(self, limits: DiffusionLimits) -> None:
        for name in ("height", "width"):
            value = getattr(self, name)
            if value is None:
                continue
            if value < 1:
                _refuse(name, value, "must be at least 1 pixel")
            if value > MAX_INT:
                _refuse(name, value, f"must be at most {MAX_INT}")
        sides = [side for side in (self.height, self.width) if side is not None]
        if limits.max_pixels is not None and sides and math.prod(sides) > limits.max_pixels:
            if self.height is not None and self.width is not None:
                _refuse(
                    "height",
                    self.height,
                    f"with width = {self.width} these are {math.prod(sides)} pixels; at most {limits.max_pixels} here "
                    "(max_pixels of the deployment)",
                )
            name = "width" if self.height is None else "height"
            _refuse(name, sides[0], f"at most {limits.max_pixels} pixels here (max_pixels of the deployment)")

    def _check_seed(self) -> None:
        if self.seed is None:
            return
        most = 2**64 - self.num_outputs_per_prompt  # that of the last output must fit, too
        if not -(2**63) <= self.seed <= most:
            _refuse("seed", self.seed, f"valid: -2**63 to 2**64 - {self.num_outputs_per_prompt}")

    def _check_extra_args(self) -> None:
        for name in self.extra_args:
            if name in type(self).__struct_fields__:
                raise InvalidRequest(f"extra_args: {name!r} is a field of its own", param=name)
            if name in _TAKEN_ARGS:
                raise InvalidRequest(
                    f"extra_args: {name!r} is not the pipeline's to be given: {_TAKEN_ARGS[name]}", param="extra_args"
                )
        try:
            msgspec.msgpack.encode(self.extra_args, enc_hook=_refuse_type)
        except (TypeError, OverflowError, ValueError, RecursionError) as exc:
            raise InvalidRequest(f"extra_args: {exc}", param="extra_args") from exc


def _must_be(name: str, said: str) -> str:
    """msgspec's words for a wrong type, as the rest of our sentences."""
    if name == "output_type":
        return f"must be one of {', '.join(OUTPUT_TYPES)}"
    if not said.startswith("Expected "):
        return said.lower()
    expected = said.removeprefix("Expected ").partition(", got")[0].replace("`", "").replace(" | null", "")
    return f"must be {expected}"


def _refuse(name: str, value: Any, why: str) -> None:
    said = reprlib.repr(value)
    raise InvalidRequest(f"{name} = {said}: {why}", param=name)


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse_type(value: Any) -> Any:
    raise TypeError(f"a value of type {type(value).__name__} cannot be sent; numbers, strings, lists and dicts can")
