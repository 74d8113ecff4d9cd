"""Pixels as files of an image, by Pillow."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from vllm_omni.errors import InvalidRequest
from vllm_omni.names import suggest


class ImageFormat(NamedTuple):
    name: str  # Pillow's
    media_type: str
    options: Mapping[str, Any] = {}  # of Pillow's ``save``
    has_quality: bool = False


IMAGE_FORMATS = {
    "png": ImageFormat("PNG", "image/png"),
    # At the default of 75, with colours at half the resolution, edges of colour are visibly torn.
    "jpeg": ImageFormat("JPEG", "image/jpeg", {"quality": 95, "subsampling": 0}, has_quality=True),
    "webp": ImageFormat("WEBP", "image/webp", {"quality": 95}, has_quality=True),
}
IMAGE_SUFFIXES = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp"}
"""A file's suffix -> the name of its format."""


def find_image_format(name: str, param: str | None = None) -> ImageFormat:
    """Raises ``InvalidRequest`` for a name that there is not, with those that there are."""
    if name not in IMAGE_FORMATS:
        raise InvalidRequest(f"unknown image format {name!r}: {suggest(name, IMAGE_FORMATS)}", param=param)
    return IMAGE_FORMATS[name]


def to_pixels(values: Tensor) -> Tensor:
    """Whatever a pipeline answers with as uint8 on the host: floats are taken to be in [0, 1], and clipped."""
    values = values.detach().cpu()
    if values.is_floating_point():
        values = (values.float().clamp(0, 1) * 255).round()
    return values.to(torch.uint8)


def to_image(pixels: Tensor) -> Image.Image:
    """Pixels [H, W, 3], uint8 or float in [0, 1], as an image of their own."""
    return Image.fromarray(to_pixels(pixels).contiguous().numpy())


def encode_image(image: Image.Image, image_format: ImageFormat, quality: int | None = None) -> bytes:
    """The bytes of a file.

    Args:
        quality: 0 to 100, of a format that loses something; its default is high.
    """
    options = dict(image_format.options)
    if quality is not None and image_format.has_quality:
        options["quality"] = quality
    file = io.BytesIO()
    image.save(file, image_format.name, **options)
    return file.getvalue()
