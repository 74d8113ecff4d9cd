"""Images of prompts: their sizes as in the reference, and what the vision transformer sees of each shape."""

import numpy as np
import torch
from PIL import Image
from transformers import Siglip2ImageProcessor

from tests.cases import case
from tests.reference.hunyuan_image_3 import fitted
from tests.reference.media import make_image
from vllm_omni.model_executor.models.hunyuan_image_3.config import PIXELS_PER_TOKEN, Sizes, TokenIds
from vllm_omni.model_executor.models.hunyuan_image_3.processing import HunyuanImage3ProcessingInfo, view_grid
from vllm_omni.testing.hunyuan_image_3 import VARIANTS, HunyuanImage3Shape, make_config


class Info(HunyuanImage3ProcessingInfo):
    """That of a tiny checkpoint, without an engine."""

    def __init__(self, shape: HunyuanImage3Shape) -> None:
        self.shape = shape
        self.sizes = Sizes(shape.image_base_size)
        vocabulary = {token: shape.token_id(token) for token in shape.special_tokens}
        self.token_ids = TokenIds(vocabulary, shape.image_base_size)

    @property
    def num_view_tokens(self) -> int:
        return self.shape.vit_places


def test_the_grid_of_a_view_is_what_its_processor_makes() -> None:
    for name, shape in VARIANTS.items():
        settings = make_config(shape)["vit_processor"]
        processor = Siglip2ImageProcessor(**settings)
        for grid in set(Sizes(shape.image_base_size).grids):
            height, width = (side * PIXELS_PER_TOKEN for side in grid)
            made = processor(images=Image.new("RGB", (width, height)), return_tensors="pt")
            with case(name, grid):
                assert made["spatial_shapes"][0].tolist() == list(view_grid(grid, settings))


def test_an_image_is_cut_to_the_nearest_shape_as_in_the_reference() -> None:
    info = Info(VARIANTS["deep"])
    for height, width in ((61, 50), (50, 61), (1, 1), (200, 20), (20, 200), (80, 80)):
        image = make_image(height, width)
        grid = info.sizes.grids[info.sizes.nearest(image.height, image.width)]
        expected = fitted(image.convert("RGB"), (grid[0] * PIXELS_PER_TOKEN, grid[1] * PIXELS_PER_TOKEN))
        with case(height, width):
            assert np.array_equal(np.array(info.fit(image)), np.array(expected))


def test_an_image_has_a_time_latents_a_separator_and_a_view() -> None:
    info = Info(VARIANTS["base"])
    for shape, (rows, columns) in enumerate(info.sizes.grids):
        tokens, embedded = info.tokens(shape)
        assert len(tokens) == len(embedded) == 3 + 1 + rows * columns + 1 + 16 + 1
        assert tokens[2] == info.token_ids.first_ratio + shape
        others = [token for token, one in zip(tokens, embedded, strict=True) if not one]
        ids = info.token_ids
        assert others == [ids.image_start, ids.size, ids.first_ratio + shape, ids.separator, ids.image_end]
        assert int(torch.as_tensor(embedded).sum()) == 1 + rows * columns + 16
