"""Images in prompts: vLLM's multimodal processor for GLM-Image. An image becomes one token for each of its codes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from transformers import BatchFeature, GlmImageConfig, GlmImageImageProcessor, GlmImageProcessor
from vllm.config.multimodal import MultiModalDummyOptions
from vllm.inputs import MultiModalDataDict
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems
from vllm.multimodal.parse import MultiModalDataItems
from vllm.multimodal.processing import (
    BaseDummyInputsBuilder,
    BaseMultiModalProcessor,
    BaseProcessingInfo,
    ProcessorInputs,
    PromptReplacement,
    PromptUpdate,
)

PIXELS, GRID = "pixel_values", "image_grid_thw"  # as transformers' image processor returns them


class GlmImageProcessingInfo(BaseProcessingInfo):
    @cached_property
    def image_processor(self) -> GlmImageImageProcessor:
        """The checkpoint has it beside the tokenizer, in another folder than the model."""
        return GlmImageProcessor.from_pretrained(self.ctx.model_config.tokenizer).image_processor

    @property
    def longest_side(self) -> int:
        return math.isqrt(self.image_processor.size["longest_edge"])  # which is a number of pixels

    @property
    def image_token_id(self) -> int:
        return self.ctx.get_hf_config(GlmImageConfig).image_token_id

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": None}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int] | None = None) -> Mapping[str, int]:
        return {"image": self.image_processor.get_number_of_image_patches(self.longest_side, self.longest_side)}


class GlmImageDummyInputs(BaseDummyInputsBuilder[GlmImageProcessingInfo]):
    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        return ""  # the stage reads ids

    def get_dummy_mm_data(
        self, seq_len: int, mm_counts: Mapping[str, int], mm_options: MultiModalDummyOptions
    ) -> MultiModalDataDict:
        side = self.info.longest_side
        images = self._get_dummy_images(
            width=side, height=side, num_images=mm_counts.get("image", 0), overrides=mm_options.get("image")
        )
        return {"image": images}


class GlmImageMultiModalProcessor(BaseMultiModalProcessor[GlmImageProcessingInfo]):
    requires_tokenizer = False

    def get_dummy_inputs(
        self, seq_len: int, mm_counts: Mapping[str, int], mm_options: MultiModalDummyOptions
    ) -> ProcessorInputs:
        made = super().get_dummy_inputs(seq_len, mm_counts, mm_options)
        made.prompt = [self.info.image_token_id] * mm_counts.get("image", 0)
        return made

    def _call_hf_processor(self, hf_data: Mapping[str, Any], hf_kwargs: Mapping[str, object]) -> BatchFeature:
        images = hf_data.get("images")
        return self.info.image_processor(images, return_tensors="pt") if images else BatchFeature()

    def _get_mm_fields_config(
        self, hf_inputs: BatchFeature, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        num_patches = hf_inputs.get(GRID, torch.empty(0, 3, dtype=torch.int64)).prod(-1)
        return {
            PIXELS: MultiModalFieldConfig.flat_from_sizes("image", num_patches),
            GRID: MultiModalFieldConfig.batched("image", keep_on_cpu=True),
        }

    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        out_mm_kwargs: MultiModalKwargsItems,
    ) -> Sequence[PromptUpdate]:
        token = self.info.image_token_id

        def tokens(item_idx: int) -> list[int]:
            grid = out_mm_kwargs["image"][item_idx][GRID].data
            assert isinstance(grid, torch.Tensor)
            return [token] * int(grid.prod())

        return [PromptReplacement(modality="image", target=[token], replacement=tokens)]
