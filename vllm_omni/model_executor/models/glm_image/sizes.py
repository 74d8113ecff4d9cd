"""Sizes of pictures and of the images that they are generated from, in pixels."""

from __future__ import annotations

import math
from collections.abc import Sequence

from PIL import Image
from transformers import GlmImageImageProcessor
from transformers.models.glm_image.image_processing_glm_image import smart_resize

from vllm_omni.errors import InvalidRequest

CODE_SIDE = 32  # pixels of a picture for which the language model writes one code
LATENT_SIDE = 16  # pixels for which the diffusion transformer has one token: each code stands for 2 x 2 of them
DEFAULT_SIDE = 1024
MAX_RATIO = 64  # of the sides; the preview of a narrower picture would have no columns


def picture_size(height: int | None, width: int | None, images: Sequence[Image.Image]) -> tuple[int, int]:
    """Height and width of a request's picture: by default those of its first image, without what is no whole code.

    Args:
        images: of the request, as ``fit`` returns them.

    Raises:
        InvalidRequest: a side is no multiple of a code's, or the picture is too narrow.
    """
    own = (images[0].height, images[0].width) if images else (DEFAULT_SIDE, DEFAULT_SIDE)
    sides = []
    for name, given, default in (("height", height, own[0]), ("width", width, own[1])):
        side = default // CODE_SIDE * CODE_SIDE if given is None else given
        if side % CODE_SIDE or side < CODE_SIDE:
            below = max(side // CODE_SIDE * CODE_SIDE, CODE_SIDE)
            said = f"must be a multiple of {CODE_SIDE}; the nearest are {below} and {below + CODE_SIDE}"
            raise InvalidRequest(f"{name} = {side}: {said}", param=name)
        sides.append(side)
    if max(sides) > MAX_RATIO * min(sides):
        said = f"one side must be at most {MAX_RATIO} times the other"
        raise InvalidRequest(f"height = {sides[0]} with width {sides[1]}: {said}", param="height")
    return sides[0], sides[1]


def fit(image: Image.Image, processor: GlmImageImageProcessor) -> Image.Image:
    """An image of a request in RGB, resized if its codes would not cover the tokens of its latents.

    The language model reads an image at half its size, within the processor's limits, and the diffusion transformer at
    its own size: the published code fails where the numbers do not match.

    Raises:
        InvalidRequest: the image is too small or too narrow.
    """
    image = image.convert("RGB")
    pixels = {"min_pixels": processor.size["shortest_edge"], "max_pixels": processor.size["longest_edge"]}
    try:
        halves = smart_resize(image.height, image.width, processor.patch_size * processor.merge_size, **pixels)
    except ValueError as exc:
        raise InvalidRequest(f"image of {image.width} x {image.height} pixels: {exc}", param="image") from exc
    rows, columns = (2 * half // processor.patch_size for half in halves)
    if (image.height // LATENT_SIDE, image.width // LATENT_SIDE) == (rows, columns):
        return image
    return image.resize((columns * LATENT_SIDE, rows * LATENT_SIDE), Image.Resampling.LANCZOS)


def num_codes(grids: Sequence[Sequence[int]]) -> int:
    """Codes of pictures with these rows and columns."""
    return sum(math.prod(grid) for grid in grids)
