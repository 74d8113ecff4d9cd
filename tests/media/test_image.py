import io

import pytest
import torch
from PIL import Image

from tests.cases import case
from vllm_omni.errors import InvalidRequest
from vllm_omni.media import find_format
from vllm_omni.media.image import IMAGE_FORMATS, IMAGE_SUFFIXES, encode_image, to_image, to_pixels


def make_pixels(height: int = 24, width: int = 40) -> torch.Tensor:
    """uint8 [H, W, 3]: red grows to the right, green downwards."""
    red = torch.linspace(0, 255, width).expand(height, width)
    green = torch.linspace(0, 255, height)[:, None].expand(height, width)
    return torch.stack([red, green, torch.full_like(red, 30)], dim=-1).to(torch.uint8)


def decode(data: bytes) -> torch.Tensor:
    with Image.open(io.BytesIO(data)) as image:
        return torch.tensor(list(image.convert("RGB").tobytes()), dtype=torch.uint8).view(image.height, image.width, 3)


def test_a_png_has_the_very_pixels() -> None:
    pixels = make_pixels()
    assert torch.equal(decode(encode_image(to_image(pixels), IMAGE_FORMATS["png"])), pixels)


def test_lossy_formats_are_close() -> None:
    for name in ["jpeg", "webp"]:
        with case(name):
            pixels = make_pixels()
            decoded = decode(encode_image(to_image(pixels), IMAGE_FORMATS[name]))
            assert decoded.shape == pixels.shape
            assert (decoded.int() - pixels.int()).abs().float().mean() < 2.5  # of 255


def test_the_same_pixels_give_the_same_bytes() -> None:
    for name in IMAGE_FORMATS:
        with case(name):
            files = {encode_image(to_image(make_pixels()), IMAGE_FORMATS[name]) for _ in range(3)}
            assert len(files) == 1


def test_less_quality_is_less_bytes() -> None:
    for name in ["jpeg", "webp"]:
        with case(name):
            image = to_image(
                torch.randint(0, 255, (64, 64, 3), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
            )
            sizes = [len(encode_image(image, IMAGE_FORMATS[name], quality)) for quality in (10, 50, 100)]
            assert sizes == sorted(set(sizes))


def test_png_ignores_quality() -> None:
    image = to_image(make_pixels())
    assert encode_image(image, IMAGE_FORMATS["png"], 3) == encode_image(image, IMAGE_FORMATS["png"])


def test_floats_are_rounded_to_the_nearest_pixel_and_clipped() -> None:
    values = torch.tensor([-1.0, 0.0, 0.4 / 255, 0.6 / 255, 1.0, 7.0])
    assert to_pixels(values).tolist() == [0, 0, 0, 1, 255, 255]


def test_every_suffix_has_a_format() -> None:
    assert set(IMAGE_SUFFIXES.values()) == set(IMAGE_FORMATS)


def test_an_unknown_format_is_rejected_with_the_nearest() -> None:
    with pytest.raises(InvalidRequest, match=r"unknown image format 'jpg': did you mean 'jpeg'\?") as rejected:
        find_format("image", IMAGE_FORMATS, "jpg", "output_format")
    assert rejected.value.param == "output_format"
