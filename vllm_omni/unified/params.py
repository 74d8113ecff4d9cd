"""``ImageParams``: what a request says of its picture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import msgspec

from vllm_omni.errors import InvalidRequest
from vllm_omni.names import suggest
from vllm_omni.unified.plan import Guidance, Renorm

IMAGE = "image"
"""Key of ``SamplingParams.extra_args`` under which a request gives them, as a dictionary."""

DEFAULTS = Guidance()

OutputType = Literal["media", "latents"]

CHOICES = {"output_type": get_args(OutputType), "renorm": get_args(Renorm)}


class ImageParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of a picture; ``docs/unified.md`` says what each does. None: the model's own."""

    output_type: OutputType = "media"
    width: int | None = None  # pixels
    height: int | None = None
    num_inference_steps: int = 49  # passes of the language model over the canvas
    seed: int | None = None
    shift: float = 3.0
    text_scale: float = DEFAULTS.text_scale
    image_scale: float = DEFAULTS.image_scale
    interval: tuple[float, float] = DEFAULTS.interval
    renorm: Renorm = DEFAULTS.renorm
    renorm_min: float = DEFAULTS.renorm_min

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
                raise InvalidRequest(f"{IMAGE}.{name} = {value!r}: {suggest(str(value), CHOICES[name])}", param=IMAGE)
        try:
            made: ImageParams = msgspec.convert(dict(given), cls)
        except msgspec.ValidationError as exc:
            raise InvalidRequest(f"{IMAGE}: {exc}", param=IMAGE) from exc
        return made

    @property
    def guidance(self) -> Guidance:
        return Guidance(self.text_scale, self.image_scale, self.interval, self.renorm, self.renorm_min)


def params_of(extra_args: Mapping[str, Any] | None) -> ImageParams:
    """The parameters of a request's ``extra_args``."""
    given = (extra_args or {}).get(IMAGE)
    return ImageParams() if given is None else ImageParams.of(given)
