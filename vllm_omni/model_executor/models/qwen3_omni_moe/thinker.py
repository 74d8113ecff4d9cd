"""``Qwen3OmniThinker``: vLLM's thinker, which publishes rows for the talker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen3_omni_moe_thinker import (
    Qwen3OmniMoeThinkerDummyInputsBuilder,
    Qwen3OmniMoeThinkerForConditionalGeneration,
    Qwen3OmniMoeThinkerMultiModalProcessor,
    Qwen3OmniMoeThinkerProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY

from vllm_omni.model_executor.models.qwen2_5_omni.thinker import ThinkerProcessor
from vllm_omni.model_executor.omni_thinker import OmniThinker, ResamplesWithSoxr


class Qwen3ProcessingInfo(ResamplesWithSoxr, Qwen3OmniMoeThinkerProcessingInfo):
    """Upstream's, with another resampler for audio."""


class Qwen3Processor(ThinkerProcessor, Qwen3OmniMoeThinkerMultiModalProcessor):
    """Upstream's, where a video and its own audio are one item to every cache."""


@MULTIMODAL_REGISTRY.register_processor(
    Qwen3Processor,
    info=Qwen3ProcessingInfo,
    dummy_inputs=Qwen3OmniMoeThinkerDummyInputsBuilder,
)
class Qwen3OmniThinker(OmniThinker, Qwen3OmniMoeThinkerForConditionalGeneration):
    """vLLM's thinker, which also publishes rows for the talker.

    Attributes:
        row_layers: the layer that the talker reads; none if the checkpoint has no talker.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = vllm_config.model_config.hf_config
        is_read = config.enable_audio_output
        self.row_layers: tuple[int, ...] = (config.talker_config.accept_hidden_layer,) if is_read else ()

    @property
    def media_ids(self) -> dict[int, str]:
        config = self.config
        return {config.audio_token_id: "audio", config.image_token_id: "image", config.video_token_id: "video"}

    def _process_audio_input(self, audio_input: Any) -> tuple[torch.Tensor, ...]:
        # Upstream pads audio of less than a chunk, a second, to the longest one of its batch, and its convolutions see
        # the padding: the embeddings would depend on other requests. Longer audio is padded to whole chunks anyway.
        features, lengths = audio_input["input_features"], audio_input["audio_feature_lengths"]
        short = torch.nonzero(lengths < 2 * self.audio_tower.n_window).flatten().tolist()
        batches = [[index for index in range(len(lengths)) if index not in short], *([index] for index in short)]
        parts = features.split(lengths.tolist(), dim=1)
        encoded: dict[int, torch.Tensor] = {}
        for batch in batches:
            if batch:
                one = {
                    "input_features": torch.cat([parts[index] for index in batch], dim=1),
                    "audio_feature_lengths": lengths[batch],
                }
                encoded |= zip(batch, super()._process_audio_input(one), strict=True)
        return tuple(encoded[index] for index in range(len(lengths)))

    def finished_layer_rows(self, input_ids: torch.Tensor, layers: Sequence[torch.Tensor]) -> torch.Tensor:
        """The embedding of each text token; at media what the layer returned.

        From: transformers' ``Qwen3OmniMoeForConditionalGeneration.generate``, step 2, where the talker reads the one or
        the other.
        """
        return torch.where(self.is_media(input_ids), layers[0], self.language_model.embed_input_ids(input_ids))
