"""Small pictures of a video, from its frames: one of them, and a sheet of several."""

from __future__ import annotations

from PIL import Image
from torch import Tensor

from vllm_omni.media.image import IMAGE_FORMATS, encode_image, to_image

THUMBNAIL_SIDE = 320  # pixels of the longer side, at most
SHEET_TILE_SIDE = 160
SHEET_COLUMNS = 4
SHEET_TILES = SHEET_COLUMNS**2  # at most


def encode_thumbnail(frames: Tensor) -> bytes:
    """Encode the middle frame as a webp: the first one is often the picture that the request gave.

    Args:
        frames: [T, H, W, 3], uint8 or float in [0, 1].
    """
    return encode_image(_shrink(frames[len(frames) // 2], THUMBNAIL_SIDE), IMAGE_FORMATS["webp"])


def encode_spritesheet(frames: Tensor) -> bytes:
    """Encode frames at equal distances as one jpeg, in rows, from the first to the last."""
    num_tiles = min(len(frames), SHEET_TILES)
    last = max(num_tiles - 1, 1)
    tiles = [_shrink(frames[index * (len(frames) - 1) // last], SHEET_TILE_SIDE) for index in range(num_tiles)]
    width, height = tiles[0].size
    num_rows = -(-num_tiles // SHEET_COLUMNS)
    sheet = Image.new("RGB", (width * min(num_tiles, SHEET_COLUMNS), height * num_rows))
    for index, tile in enumerate(tiles):
        row, column = divmod(index, SHEET_COLUMNS)
        sheet.paste(tile, (column * width, row * height))
    return encode_image(sheet, IMAGE_FORMATS["jpeg"])


def _shrink(pixels: Tensor, side: int) -> Image.Image:
    image = to_image(pixels)
    image.thumbnail((side, side))
    return image
