"""Images in prompts: vLLM's multimodal processor for BAGEL.

``PLACEHOLDER`` in a prompt becomes an image as the vision transformer sees it, between its markers. Where the answer is
a picture (``IS_DRAWN``), the image's latents stand before it, between markers of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import BatchFeature
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

from vllm_omni.model_executor.models.bagel.config import IMAGE_END, IMAGE_START, PADS, ImageSizes

IS_DRAWN = "is_drawn"
"""Of ``mm_processor_kwargs``: the answer is a picture, or reads pictures as one that is generated does."""

VIEW, PIXELS = "view", "pixels"
PLACEHOLDER = f"{IMAGE_START}{IMAGE_END}"


class TokenIds(NamedTuple):
    start: int
    end: int
    pad: int

    @classmethod
    def of(cls, vocabulary: Mapping[str, int]) -> TokenIds:
        pad = next(vocabulary[token] for token in PADS if token in vocabulary)
        return cls(vocabulary[IMAGE_START], vocabulary[IMAGE_END], pad)

    def span(self, grid: tuple[int, int]) -> list[int]:
        """An image's tokens between its markers. The last of each row differs, so that the ids say what the grid is."""
        rows, columns = grid
        return [self.start, *([self.pad] * (columns - 1) + [self.end]) * rows, self.end]

    def grid_of(self, span: Sequence[int]) -> tuple[int, int]:
        """The reverse of ``span``."""
        columns = span.index(self.end)
        return (len(span) - 2) // columns, columns


def _is_embed(grids: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Which tokens of an image's spans have embeddings: those between markers."""
    spans = [[False, *[True] * (rows * columns), False] for rows, columns in grids]
    return torch.tensor([one for span in spans for one in span])


class BagelProcessingInfo(BaseProcessingInfo):
    @cached_property
    def sizes(self) -> ImageSizes:
        return ImageSizes.of(self.get_hf_config())

    @cached_property
    def token_ids(self) -> TokenIds:
        return TokenIds.of(self.get_tokenizer().get_vocab())

    def grids(self, size: tuple[int, int], *, is_drawn: bool) -> list[tuple[int, int]]:
        """Rows and columns of an image's spans, from its width and height."""
        return [self.sizes.latent_grid(size)] * is_drawn + [self.sizes.view_grid(size)]

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": None}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int] | None = None) -> Mapping[str, int]:
        longest = self.sizes.latents.longest
        return {"image": sum(rows * columns + 2 for rows, columns in self.grids((longest, longest), is_drawn=True))}


class BagelDummyInputs(BaseDummyInputsBuilder[BagelProcessingInfo]):
    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        return PLACEHOLDER * mm_counts.get("image", 0)

    def get_dummy_mm_data(
        self, seq_len: int, mm_counts: Mapping[str, int], mm_options: MultiModalDummyOptions
    ) -> MultiModalDataDict:
        side = self.info.sizes.latents.longest
        images = self._get_dummy_images(
            width=side, height=side, num_images=mm_counts.get("image", 0), overrides=mm_options.get("image")
        )
        return {"image": images}


class BagelProcessor(BaseMultiModalProcessor[BagelProcessingInfo]):
    def _call_hf_processor(self, hf_data: Mapping[str, Any], hf_kwargs: Mapping[str, object]) -> BatchFeature:
        resized = [self.info.sizes.latents.resize(image) for image in hf_data.get("images", ())]
        made = {VIEW: [_pixels_of(self.info.sizes.view.resize(image)) for image in resized]}
        if hf_kwargs.get(IS_DRAWN):
            made[PIXELS] = [_pixels_of(image) for image in resized]
        return BatchFeature(made)

    def _get_mm_fields_config(
        self, hf_inputs: BatchFeature, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        return {name: MultiModalFieldConfig.batched("image") for name in (VIEW, PIXELS) if name in hf_inputs}

    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        out_mm_kwargs: MultiModalKwargsItems,
    ) -> Sequence[PromptUpdate]:
        ids, is_drawn = self.info.token_ids, bool(hf_processor_mm_kwargs.get(IS_DRAWN))

        def spans(item_idx: int) -> PromptUpdateDetails:
            images = mm_items.get_items("image", ImageProcessorItems)
            width, height = images.get_image_size(item_idx)
            grids = self.info.grids((width, height), is_drawn=is_drawn)
            tokens = [token for grid in grids for token in ids.span(grid)]
            return PromptUpdateDetails(tokens, lambda full: _is_embed(grids))

        return [PromptReplacement(modality="image", target=[ids.start, ids.end], replacement=spans)]


def _pixels_of(image: Any) -> torch.Tensor:
    """[3, H, W] float32 from -1 to 1."""
    values = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
    return (values - 0.5) / 0.5
