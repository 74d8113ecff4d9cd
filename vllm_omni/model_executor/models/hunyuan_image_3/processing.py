"""Images in prompts: vLLM's multimodal processor for HunyuanImage-3.

``<img>`` in a prompt becomes an image: its latents behind a token of the time, and what the vision transformer sees of
it, which see each other. The image is cut to the nearest of the shapes that pictures have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import BatchFeature, Siglip2ImageProcessor
from transformers.models.siglip2.image_processing_siglip2 import get_image_size_for_max_num_patches
from vllm.config.multimodal import MultiModalDummyOptions
from vllm.inputs import MultiModalDataDict
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems
from vllm.multimodal.parse import ImageProcessorItems, MultiModalDataItems
from vllm.multimodal.processing import (
    BaseDummyInputsBuilder,
    BaseMultiModalProcessor,
    BaseProcessingInfo,
    PromptReplacement,
    PromptUpdate,
    PromptUpdateDetails,
)

from vllm_omni.model_executor.models.hunyuan_image_3.config import IMAGE, PIXELS_PER_TOKEN, Sizes, TokenIds

VIEW, VIEW_GRID, PIXELS = "view", "view_grid", "pixels"
VIEW_SETTINGS = ("patch_size", "max_num_patches", "image_mean", "image_std", "resample")
"""Of the configuration's section ``vit_processor``."""


def view_grid(grid: tuple[int, int], settings: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns of what the vision transformer sees of an image, from those of its latents.

    Args:
        settings: the configuration's section ``vit_processor``.
    """
    height, width = (side * PIXELS_PER_TOKEN for side in grid)
    size = settings["patch_size"]
    tall, wide = get_image_size_for_max_num_patches(height, width, size, settings["max_num_patches"])
    return tall // size, wide // size


class HunyuanImage3ProcessingInfo(BaseProcessingInfo):
    @cached_property
    def sizes(self) -> Sizes:
        return Sizes(self.get_hf_config().image_base_size)

    @cached_property
    def token_ids(self) -> TokenIds:
        return TokenIds(self.get_tokenizer().get_vocab(), self.sizes.base)

    @cached_property
    def view_processor(self) -> Siglip2ImageProcessor:
        settings = self.get_hf_config().vit_processor
        return Siglip2ImageProcessor(**{name: settings[name] for name in VIEW_SETTINGS if name in settings})

    @property
    def num_view_tokens(self) -> int:
        num: int = self.get_hf_config().vit_processor["max_num_patches"]
        return num

    def fit(self, image: Image.Image) -> Image.Image:
        """An image of the nearest shape, that covers it and is cut at its middle; sides are multiples of a token's."""
        rows, columns = self.sizes.grids[self.sizes.nearest(image.height, image.width)]
        height, width = rows * PIXELS_PER_TOKEN, columns * PIXELS_PER_TOKEN
        scale = max(height / image.height, width / image.width)
        image = image.convert("RGB")
        if image.size != (width, height):
            sides = round(image.width * scale), round(image.height * scale)
            image = image.resize(sides, Image.Resampling.LANCZOS)
        left, top = (image.width - width) // 2, (image.height - height) // 2
        return image.crop((left, top, left + width, top + height))

    def tokens(self, shape: int) -> tuple[list[int], torch.Tensor]:
        """The tokens of an image of a shape, and which of them have embeddings."""
        ids, (rows, columns), num_view = self.token_ids, self.sizes.grids[shape], self.num_view_tokens
        num_latents = rows * columns
        start = [ids.image_start, ids.size, ids.first_ratio + shape, ids.timestep]
        made = [*start, *[ids.image] * num_latents, ids.separator, *[ids.image] * num_view, ids.image_end]
        embedded = [False] * 3 + [True] * (1 + num_latents) + [False] + [True] * num_view + [False]
        return made, torch.tensor(embedded)

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": None}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int] | None = None) -> Mapping[str, int]:
        return {"image": max(len(self.tokens(shape)[0]) for shape in range(len(self.sizes.grids)))}


class HunyuanImage3DummyInputs(BaseDummyInputsBuilder[HunyuanImage3ProcessingInfo]):
    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        return IMAGE * mm_counts.get("image", 0)

    def get_dummy_mm_data(
        self, seq_len: int, mm_counts: Mapping[str, int], mm_options: MultiModalDummyOptions
    ) -> MultiModalDataDict:
        side, num = self.info.sizes.base, mm_counts.get("image", 0)
        images = self._get_dummy_images(width=side, height=side, num_images=num, overrides=mm_options.get("image"))
        return {"image": images}


class HunyuanImage3Processor(BaseMultiModalProcessor[HunyuanImage3ProcessingInfo]):
    def _call_hf_processor(self, hf_data: Mapping[str, Any], hf_kwargs: Mapping[str, object]) -> BatchFeature:
        images = [self.info.fit(image) for image in hf_data.get("images", ())]
        if not images:
            return BatchFeature({})
        seen = self.info.view_processor(images=images, return_tensors="pt")
        view = {VIEW: seen["pixel_values"], VIEW_GRID: seen["spatial_shapes"]}
        return BatchFeature({**view, PIXELS: [_pixels_of(image) for image in images]})

    def _get_mm_fields_config(
        self, hf_inputs: BatchFeature, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        return {name: MultiModalFieldConfig.batched("image") for name in (VIEW, VIEW_GRID, PIXELS) if name in hf_inputs}

    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        out_mm_kwargs: MultiModalKwargsItems,
    ) -> Sequence[PromptUpdate]:
        def tokens(item_idx: int) -> PromptUpdateDetails:
            images = mm_items.get_items("image", ImageProcessorItems)
            width, height = images.get_image_size(item_idx)
            made, embedded = self.info.tokens(self.info.sizes.nearest(height, width))
            return PromptUpdateDetails(made, lambda full: embedded)

        return [PromptReplacement(modality="image", target=[self.info.token_ids.image], replacement=tokens)]


def _pixels_of(image: Any) -> torch.Tensor:
    """[3, H, W] float32 from -1 to 1."""
    values = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
    return (values - 0.5) / 0.5
