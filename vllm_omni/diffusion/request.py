"""``DiffusionRequest``: the inputs and parameters of one request to a diffusion pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from PIL import Image

from vllm_omni.config.diffusion_params import DiffusionParams
from vllm_omni.errors import InvalidRequest

IMAGE_MODES = frozenset(["1", "L", "LA", "RGB", "RGBA"])
"""Modes of PIL whose pixels say everything; an image with a palette needs converting."""


class DiffusionRequest(msgspec.Struct, frozen=True):
    """One request to a diffusion pipeline; the same struct in the front end, the scheduler and the runner."""

    prompt: str
    images: list[Image.Image] = []  # input images, in order, of ``IMAGE_MODES``
    params: DiffusionParams = DiffusionParams()  # valid: checked when the request was admitted
    payloads: list[bytes] = []  # encoded ``Payload`` of earlier stages, in order
    inputs: dict[str, str] = {}  # argument of the pipeline, or "image" -> its key in the payloads
    tensors: dict[str, Any] = {}  # in the runner: argument of the pipeline -> what was pulled

    def to_args(self) -> dict[str, Any]:
        """Convert to msgpack types; an image becomes ``[mode, width, height, pixels]``."""
        args: dict[str, Any] = msgspec.to_builtins(self, builtin_types=(bytes,), enc_hook=_encode_image)
        return args

    @classmethod
    def from_args(cls, args: Mapping[str, Any]) -> DiffusionRequest:
        """Convert back from ``to_args``.

        Raises:
            InvalidRequest: a parameter has a wrong type.
        """
        try:
            return msgspec.convert(args, cls, dec_hook=_decode_image)
        except msgspec.ValidationError as exc:
            raise InvalidRequest(f"diffusion parameters: {exc}") from exc


def _encode_image(image: Any) -> Any:
    if not isinstance(image, Image.Image):
        raise NotImplementedError(f"a value of type {type(image).__name__}")
    assert image.mode in IMAGE_MODES, f"an image of mode {image.mode}"
    return [image.mode, *image.size, image.tobytes()]


def _decode_image(kind: type, value: Any) -> Any:
    if kind is not Image.Image:
        raise NotImplementedError(f"a field of type {kind.__name__}")
    mode, width, height, pixels = value
    return Image.frombytes(mode, (width, height), pixels)
