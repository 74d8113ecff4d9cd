"""Images in prompts: vLLM's multimodal processor for Janus-Pro."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import BatchFeature, JanusConfig, JanusProcessor
from vllm.config.multimodal import MultiModalDummyOptions
from vllm.inputs import MultiModalDataDict
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems
from vllm.multimodal.parse import MultiModalDataItems
from vllm.multimodal.processing import (
    BaseDummyInputsBuilder,
    BaseMultiModalProcessor,
    BaseProcessingInfo,
    PromptReplacement,
    PromptUpdate,
    PromptUpdateDetails,
)

PIXELS = "pixel_values"


class JanusProcessingInfo(BaseProcessingInfo):
    def get_hf_config(self) -> JanusConfig:
        return self.ctx.get_hf_config(JanusConfig)

    def get_hf_processor(self, **kwargs: object) -> JanusProcessor:
        return self.ctx.get_hf_processor(JanusProcessor, **kwargs)

    def image_span(self) -> list[int]:
        """The ids of an image, with its markers."""
        processor = self.get_hf_processor()
        marks = (processor.image_start_token, processor.image_token, processor.image_end_token)
        start, image, end = (self.get_tokenizer().convert_tokens_to_ids(mark) for mark in marks)
        return [start, *[image] * processor.num_image_tokens, end]

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": None}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int] | None = None) -> Mapping[str, int]:
        return {"image": len(self.image_span())}


class JanusDummyInputs(BaseDummyInputsBuilder[JanusProcessingInfo]):
    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        image_token: str = self.info.get_hf_processor().image_token
        return image_token * mm_counts.get("image", 0)

    def get_dummy_mm_data(
        self, seq_len: int, mm_counts: Mapping[str, int], mm_options: MultiModalDummyOptions
    ) -> MultiModalDataDict:
        side = self.info.get_hf_config().vision_config.image_size
        images = self._get_dummy_images(
            width=side, height=side, num_images=mm_counts.get("image", 0), overrides=mm_options.get("image")
        )
        return {"image": images}


class JanusMultiModalProcessor(BaseMultiModalProcessor[JanusProcessingInfo]):
    def _call_hf_processor(self, hf_data: Mapping[str, Any], hf_kwargs: Mapping[str, object]) -> BatchFeature:
        # Upstream's processor needs a text beside the images.
        return self.info.get_hf_processor().image_processor(**hf_data, **hf_kwargs, return_tensors="pt")

    def _get_mm_fields_config(
        self, hf_inputs: BatchFeature, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        return {PIXELS: MultiModalFieldConfig.batched("image")}

    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        out_mm_kwargs: MultiModalKwargsItems,
    ) -> Sequence[PromptUpdate]:
        span = self.info.image_span()
        made = PromptUpdateDetails.select_token_id(span, embed_token_id=span[1])
        return [PromptReplacement(modality="image", target=[span[1]], replacement=made)]
