"""Small pictures of a video show its frames."""

import io

import pytest
import torch
from PIL import Image

from vllm_omni.media.stills import SHEET_TILES, encode_spritesheet, encode_thumbnail


def make_frames(num_frames: int, height: int = 32, width: int = 64) -> torch.Tensor:
    """Each frame is one grey, from black to white."""
    greys = torch.linspace(0, 255, num_frames).round().to(torch.uint8)
    return greys[:, None, None, None].expand(num_frames, height, width, 3)


def grey_at(image: Image.Image, x: int, y: int) -> float:
    return sum(image.convert("RGB").getpixel((x, y))) / 3


def test_a_thumbnail_is_the_middle_frame_within_its_size():
    image = Image.open(io.BytesIO(encode_thumbnail(make_frames(5, 400, 640))))
    assert (image.format, image.size) == ("WEBP", (320, 200))
    assert grey_at(image, 100, 100) == pytest.approx(128, abs=3)
    assert Image.open(io.BytesIO(encode_thumbnail(make_frames(1)))).size == (64, 32)


@pytest.mark.parametrize(("num_frames", "columns", "rows"), [(1, 1, 1), (3, 3, 1), (6, 4, 2), (16, 4, 4), (50, 4, 4)])
def test_a_sheet_shows_frames_from_the_first_to_the_last(num_frames, columns, rows):
    image = Image.open(io.BytesIO(encode_spritesheet(make_frames(num_frames))))
    assert (image.format, image.size) == ("JPEG", (64 * columns, 32 * rows))
    assert grey_at(image, 32, 16) == pytest.approx(0, abs=3)
    if num_frames > 1:
        row, column = divmod(min(num_frames, SHEET_TILES) - 1, 4)
        assert grey_at(image, 64 * column + 32, 32 * row + 16) == pytest.approx(255, abs=3)
