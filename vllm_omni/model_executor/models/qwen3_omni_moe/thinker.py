"""``Qwen3OmniThinker``: vLLM's thinker, which publishes rows for the talker."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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
from vllm.multimodal.audio import AudioResampler

from vllm_omni.model_executor.media_order import in_token_order
from vllm_omni.model_executor.models.qwen2_5_omni.thinker import ThinkerProcessor, max_video_positions
from vllm_omni.model_executor.stage_model import check_all_loaded


class Qwen3ProcessingInfo(Qwen3OmniMoeThinkerProcessingInfo):
    """Upstream's, with another resampler for audio."""

    def get_data_parser(self) -> Any:
        parser = super().get_data_parser()
        # Upstream resamples with torchaudio, which has no build for torch's CPU wheel.
        parser.audio_resampler = AudioResampler(parser.audio_resampler.target_sr, method="soxr")
        return parser


class Qwen3Processor(ThinkerProcessor, Qwen3OmniMoeThinkerMultiModalProcessor):
    """Upstream's, where a video and its own audio are one item to every cache."""


@MULTIMODAL_REGISTRY.register_processor(
    Qwen3Processor,
    info=Qwen3ProcessingInfo,
    dummy_inputs=Qwen3OmniMoeThinkerDummyInputsBuilder,
)
class Qwen3OmniThinker(Qwen3OmniMoeThinkerForConditionalGeneration):
    """vLLM's thinker, which also publishes rows for the talker.

    Attributes:
        row_layers: the layer that the talker reads; none if the checkpoint has no talker.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = vllm_config.model_config.hf_config
        is_read = config.enable_audio_output
        self.row_layers: tuple[int, ...] = (config.talker_config.accept_hidden_layer,) if is_read else ()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded: set[str] = super().load_weights(weights)
        check_all_loaded(self, loaded)
        return loaded

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

    def embed_input_ids(
        self,
        input_ids: torch.Tensor,
        multimodal_embeddings: Any = None,
        *,
        is_multimodal: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Upstream's, for any chunk of a video with its audio; [num_tokens, hidden_size]."""
        config = self.config
        ids = {
            config.audio_token_id: "audio",
            config.image_token_id: "image",
            config.video_token_id: "video",
        }
        ordered = in_token_order(multimodal_embeddings, input_ids, is_multimodal, ids)
        return super().embed_input_ids(input_ids, ordered, is_multimodal=is_multimodal)

    def finished_layer_rows(self, input_ids: torch.Tensor, layers: Sequence[torch.Tensor]) -> torch.Tensor:
        """The embedding of each text token; at media what the layer returned.

        From: transformers' ``Qwen3OmniMoeForConditionalGeneration.generate``, step 2, where the talker reads the one or
        the other.
        """
        config = self.config
        is_media = (
            (input_ids == config.audio_token_id)
            | (input_ids == config.image_token_id)
            | (input_ids == config.video_token_id)
        )
        return torch.where(is_media.unsqueeze(-1), layers[0], self.language_model.embed_input_ids(input_ids))

    def iter_mm_features(self, mm_features: list[Any]) -> Iterator[tuple[int, str, dict[str, Any]]]:
        # Upstream's, with a bound: positions beyond the rotary table would crash the engine. The pipeline rejects such
        # videos with a reason (``check_prompt``); the bound is for requests that did not pass it.
        most = max_video_positions(self.config.text_config)
        for offset, modality, data in super().iter_mm_features(mm_features):
            if modality == "video" and not 0 < data["t_factor"] * data["grid_t"] <= most:
                data["t_factor"] = 1.0
            yield offset, modality, data
