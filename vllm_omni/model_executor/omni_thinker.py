"""What the thinkers of Qwen2.5-Omni and Qwen3-Omni change of vLLM's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from transformers import PreTrainedConfig
from vllm.multimodal.audio import AudioResampler

from vllm_omni.model_executor.media_order import in_token_order
from vllm_omni.model_executor.stage_model import check_all_loaded


def max_video_positions(text_config: PreTrainedConfig) -> int:
    """Most positions in time that the videos of a prompt may take.

    vLLM's rotary table has four times ``max_position_embeddings`` rows; a quarter is for the rest of the sequence.
    """
    return 3 * int(text_config.max_position_embeddings)


class ResamplesWithSoxr:
    """A mixin in front of vLLM's processing info of a thinker."""

    def get_data_parser(self) -> Any:
        parser = super().get_data_parser()  # type: ignore[misc]
        # Upstream resamples with torchaudio, which has no build for torch's CPU wheel.
        parser.audio_resampler = AudioResampler(parser.audio_resampler.target_sr, method="soxr")
        return parser


class OmniThinker:
    """A mixin in front of vLLM's model of a thinker."""

    @property
    def media_ids(self) -> dict[int, str]:
        """Id of the token of audio, of an image and of a video -> the medium's name."""
        raise NotImplementedError

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded: set[str] = super().load_weights(weights)  # type: ignore[misc]
        check_all_loaded(self, loaded)
        return loaded

    def embed_input_ids(
        self,
        input_ids: torch.Tensor,
        multimodal_embeddings: Any = None,
        *,
        is_multimodal: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Upstream's, for any chunk of a video with its audio; [num_tokens, hidden_size]."""
        ordered = in_token_order(multimodal_embeddings, input_ids, is_multimodal, self.media_ids)
        return super().embed_input_ids(input_ids, ordered, is_multimodal=is_multimodal)  # type: ignore[misc]

    def is_media(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Which tokens stand for audio, an image or a video, [num_tokens, 1]."""
        audio, image, video = self.media_ids
        return ((input_ids == audio) | (input_ids == image) | (input_ids == video)).unsqueeze(-1)

    def iter_mm_features(self, mm_features: list[Any]) -> Iterator[tuple[int, str, dict[str, Any]]]:
        # Upstream's, with a bound: positions beyond the rotary table would crash the engine. The pipeline rejects such
        # videos with a reason (``check_prompt``); the bound is for requests that did not pass it.
        most = max_video_positions(self.config.text_config)  # type: ignore[attr-defined]
        for offset, modality, data in super().iter_mm_features(mm_features):  # type: ignore[misc]
            if modality == "video" and not 0 < data["t_factor"] * data["grid_t"] <= most:
                data["t_factor"] = 1.0
            yield offset, modality, data
