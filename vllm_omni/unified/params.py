"""``ImageParams``: what a request says of its picture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import msgspec

from vllm_omni.config.diffusion_params import DiffusionParams
from vllm_omni.errors import InvalidRequest
from vllm_omni.names import suggest
from vllm_omni.unified.plan import Guidance, Renorm

IMAGE = "image"
"""Key of ``SamplingParams.extra_args`` under which a request gives them, as a dictionary."""

DEFAULTS = Guidance()

OutputType = Literal["media", "latents"]

CHOICES = {"output_type": get_args(OutputType), "guidance_renorm": get_args(Renorm)}

MAX_OUTPUTS = 64  # pictures of one request


class ImageParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of a picture; ``docs/unified.md`` says what each does. None: the model's own."""

    output_type: OutputType = "media"
    num_outputs_per_prompt: int = 1
    width: int | None = None  # pixels
    height: int | None = None
    num_inference_steps: int = 49  # passes of the language model over the canvas
    seed: int | None = None  # picture i of several uses seed + i
    shift: float = 3.0
    negative_prompt: str | None = None
    guidance_scale: float = DEFAULTS.text_scale
    image_guidance_scale: float = DEFAULTS.image_scale
    guidance_interval: tuple[float, float] = DEFAULTS.interval
    guidance_renorm: Renorm = DEFAULTS.renorm
    guidance_renorm_min: float = DEFAULTS.renorm_min
    progress: bool = False  # send an output after every denoise step
    preview_every: int = 0  # send a preview every so many steps; 0: none

    @classmethod
    def of(cls, given: object) -> ImageParams:
        """Check what a request gives.

        Raises:
            InvalidRequest: a name or a value is wrong.
        """
        if not isinstance(given, Mapping):
            raise InvalidRequest(f"{IMAGE} = {given!r}: must be a dictionary of its parameters", param=IMAGE)
        for name, value in given.items():
            if name not in cls.__struct_fields__:
                raise InvalidRequest(f"{IMAGE}.{name}: {suggest(str(name), cls.__struct_fields__)}", param=IMAGE)
            if name in CHOICES and value not in CHOICES[name]:
                raise InvalidRequest(f"{name} = {value!r}: {suggest(str(value), CHOICES[name])}", param=name)
        try:
            made: ImageParams = msgspec.convert(dict(given), cls)
        except msgspec.ValidationError as exc:
            raise InvalidRequest(f"{IMAGE}: {exc}", param=IMAGE) from exc
        if not 1 <= made.num_outputs_per_prompt <= MAX_OUTPUTS:
            said = f"num_outputs_per_prompt = {made.num_outputs_per_prompt}: must be from 1 to {MAX_OUTPUTS}"
            raise InvalidRequest(said, param="num_outputs_per_prompt")
        if made.preview_every < 0:
            raise InvalidRequest(f"preview_every = {made.preview_every}: must be at least 0", param="preview_every")
        last_seed = 2**64 - made.num_outputs_per_prompt
        if made.seed is not None and not -(2**63) <= made.seed <= last_seed:
            raise InvalidRequest(f"seed = {made.seed}: must be from -2**63 to {last_seed}", param="seed")
        return made

    @property
    def guidance(self) -> Guidance:
        """Raises ``InvalidRequest``: a value is out of its range."""
        return Guidance(
            self.guidance_scale,
            self.image_guidance_scale,
            self.guidance_interval,
            self.guidance_renorm,
            self.guidance_renorm_min,
        )


def params_of(extra_args: Mapping[str, Any] | None) -> ImageParams:
    """The parameters of a request's ``extra_args``."""
    given = (extra_args or {}).get(IMAGE)
    return ImageParams() if given is None else ImageParams.of(given)


def image_fields(diffusion: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``DiffusionParams``, as those of ``ImageParams``; those of one family stand in ``extra_args``.

    Raises:
        InvalidRequest: a field has no effect on a picture that a language model denoises.
    """
    default = DiffusionParams()
    given = {name: value for name, value in diffusion.items() if value != getattr(default, name)}
    own = given.pop("extra_args", {})
    for name, value in given.items():
        if name not in ImageParams.__struct_fields__:
            said = "the model's own language model denoises the picture: leave it out"
            raise InvalidRequest(f"{name} = {value!r} has no effect: {said}", param=name)
    return {**given, **own}


def check_sampling(params: Any, *more: str) -> None:
    """Check the ``SamplingParams`` of a request for a picture.

    Args:
        more: further parameters that the family cannot honour.

    Raises:
        InvalidRequest: a parameter of texts has no meaning for a picture.
    """
    if params.n > 1:
        raise InvalidRequest(f"n = {params.n}: the answer is a picture; give num_outputs_per_prompt", param="n")
    for name in ("prompt_logprobs", "structured_outputs", "allowed_token_ids", *more):
        if getattr(params, name) is not None:
            raise InvalidRequest(f"{name}: the answer is a picture, which it has no meaning for", param=name)
