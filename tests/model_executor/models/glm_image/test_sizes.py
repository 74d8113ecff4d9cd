"""Sizes of GLM-Image's pictures and images, with the published limits."""

import itertools

import pytest
from PIL import Image
from transformers import GlmImageImageProcessor

from vllm_omni.errors import InvalidRequest
from vllm_omni.model_executor.models.glm_image.sizes import CODE_SIDE, LATENT_SIDE, fit, num_codes, picture_size

PROCESSOR = GlmImageImageProcessor(
    patch_size=16, merge_size=1, temporal_patch_size=1, size={"shortest_edge": 512**2, "longest_edge": 2048**2}
)
SIDES = (16, 100, 496, 512, 700, 999, 1000, 1024, 1500, 2040, 2048, 3000, 4100)


def test_codes_of_an_image_cover_its_latents() -> None:
    for width, height in itertools.product(SIDES, SIDES):
        if max(width, height) > 4 * min(width, height):
            continue
        fitted = fit(Image.new("RGB", (width, height)), PROCESSOR)
        rows, columns = fitted.height // LATENT_SIDE, fitted.width // LATENT_SIDE
        assert rows * columns == 4 * PROCESSOR.get_number_of_image_patches(fitted.height, fitted.width), (width, height)
        assert fit(fitted, PROCESSOR).size == fitted.size, (width, height)
        assert picture_size(None, None, [fitted]) == (rows // 2 * CODE_SIDE, columns // 2 * CODE_SIDE)


@pytest.mark.parametrize("size", [(8, 64), (1000, 200)])
def test_an_image_that_the_processor_does_not_read_is_rejected(size: tuple[int, int]) -> None:
    with pytest.raises(InvalidRequest, match=f"image of {size[0]} x {size[1]} pixels"):
        fit(Image.new("RGB", size), PROCESSOR)


@pytest.mark.parametrize("size", [(512, 512), (1024, 768), (1000, 1000), (2048, 1536)])
def test_an_image_that_fits_stays_as_it_is(size: tuple[int, int]) -> None:
    assert fit(Image.new("RGB", size), PROCESSOR).size == size


def test_an_image_becomes_rgb() -> None:
    assert fit(Image.new("LA", (512, 512)), PROCESSOR).mode == "RGB"


def test_a_side_that_is_not_given_is_that_of_the_first_image() -> None:
    images = [Image.new("RGB", (1000, 640)), Image.new("RGB", (512, 512))]
    assert picture_size(None, None, images) == (640, 992)
    assert picture_size(64, None, images) == (64, 992)
    assert picture_size(None, None, []) == (1024, 1024)


def test_codes_are_counted_over_all_grids() -> None:
    assert num_codes([(32, 32), (16, 16)]) == 1280
