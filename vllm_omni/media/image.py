"""Encode images as files, with Pillow."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor


class ImageFormat(NamedTuple):
    name: str  # Pillow's
    media_type: str
    options: Mapping[str, Any] = {}  # of Pillow's ``save``
    has_quality: bool = False


IMAGE_FORMATS = {
    "png": ImageFormat("PNG", "image/png"),
    # The defaults, 75 with halved resolution of colours, show artifacts at edges between colours.
    "jpeg": ImageFormat("JPEG", "image/jpeg", {"quality": 95, "subsampling": 0}, has_quality=True),
    "webp": ImageFormat("WEBP", "image/webp", {"quality": 95}, has_quality=True),
}
IMAGE_SUFFIXES = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp"}
"""A file's suffix -> the name of its format."""


def to_pixels(values: Tensor) -> Tensor:
    """Convert the output of a pipeline to uint8 on the host; floats are in [0, 1], and clipped."""
    values = values.detach().cpu()
    if values.is_floating_point():
        values = (values.float().clamp(0, 1) * 255).round()
    return values.to(torch.uint8)


def to_image(pixels: Tensor) -> Image.Image:
    """Make an image from a copy of pixels [H, W, 3], uint8 or float in [0, 1]."""
    return Image.fromarray(to_pixels(pixels).contiguous().numpy())


def encode_image(image: Image.Image, image_format: ImageFormat, quality: int | None = None) -> bytes:
    """Encode an image as a file.

    Args:
        quality: 0 to 100, for a lossy format; its default is high.
    """
    options = dict(image_format.options)
    if quality is not None and image_format.has_quality:
        options["quality"] = quality
    file = io.BytesIO()
    image.save(file, image_format.name, **options)
    return file.getvalue()
