"""``Qwen2_5OmniThinker``: vLLM's thinker, with corrected positions of a video with audio, and rows for the talker."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from vllm.model_executor.models.qwen2_5_omni_thinker import (
    Qwen2_5OmniThinkerDummyInputsBuilder,
    Qwen2_5OmniThinkerForConditionalGeneration,
    Qwen2_5OmniThinkerMultiModalProcessor,
    Qwen2_5OmniThinkerProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.hasher import MultiModalHasher

from vllm_omni.model_executor.omni_thinker import OmniThinker, ResamplesWithSoxr

PAIR = "video+audio:"
"""Start of the names of a video and its own audio."""


class ThinkerProcessingInfo(ResamplesWithSoxr, Qwen2_5OmniThinkerProcessingInfo):
    """Upstream's, with another resampler for audio."""


class ThinkerProcessor(Qwen2_5OmniThinkerMultiModalProcessor):
    """Upstream's, where a video and its own audio (``use_audio_in_video``) are one item to every cache.

    Upstream names each by its own content, for its cache of processed items, the prefix cache and the encoder cache.
    But the placeholder tokens of such a video interleave both, so they depend on both.
    """

    def _get_mm_hashes(self, inputs: Any) -> dict[str, list[str]]:
        hashes: dict[str, list[str]] = super()._get_mm_hashes(inputs)
        if not inputs.hf_processor_mm_kwargs.get("use_audio_in_video"):
            return hashes
        algorithm = self.info.ctx.get_mm_config().mm_hasher_algorithm
        seconds = inputs.hf_processor_mm_kwargs.get("second_per_grid_ts") or ()
        pairs = [
            MultiModalHasher.hash_kwargs(algorithm, video=video, audio=audio, seconds=rate or 1.0)
            for video, audio, rate in zip_longest(hashes.get("video", ()), hashes.get("audio", ()), seconds)
            if video and audio
        ]
        return {
            modality: [*(f"{PAIR}{pair}:{modality}" for pair in pairs), *names[len(pairs) :]]
            if modality in ("video", "audio")
            else names
            for modality, names in hashes.items()
        }

    def _get_cache_missing_items(self, cache: Any, mm_data_items: Any, mm_hashes: dict[str, list[str]]) -> Any:
        # Upstream looks up each item by itself; of a pair, one may have been evicted, and cannot be processed alone.
        return super()._get_cache_missing_items(_PairCache(cache), mm_data_items, mm_hashes)

    def _get_cache_missing_processor_kwargs(self, inputs: Any, mm_is_cached: dict[str, list[bool]]) -> dict[str, Any]:
        # Upstream counts only the missing videos when it looks up this list.
        kwargs = dict(super()._get_cache_missing_processor_kwargs(inputs, mm_is_cached))
        if seconds := kwargs.get("second_per_grid_ts"):
            is_cached = mm_is_cached.get("video", ())
            kwargs["second_per_grid_ts"] = [one for one, known in zip(seconds, is_cached, strict=False) if not known]
        return kwargs


class _PairCache:
    """The part of vLLM's processor cache that looks up items: of a pair, both are found or none."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def is_cached(self, names: Sequence[str]) -> list[bool]:
        return [all(self._cache.is_cached(_pair_of(name))) for name in names]


def _pair_of(name: str) -> list[str]:
    """The names of the pair that the item belongs to, or its own alone."""
    stem, _, modality = name.rpartition(":")
    return [f"{stem}:video", f"{stem}:audio"] if modality and stem.startswith(PAIR) else [name]


@MULTIMODAL_REGISTRY.register_processor(
    ThinkerProcessor,
    info=ThinkerProcessingInfo,
    dummy_inputs=Qwen2_5OmniThinkerDummyInputsBuilder,
)
class Qwen2_5OmniThinker(OmniThinker, Qwen2_5OmniThinkerForConditionalGeneration):
    """vLLM's thinker, which also publishes rows for the talker."""

    @property
    def media_ids(self) -> dict[int, str]:
        config = self.config
        return {
            config.audio_token_index: "audio",
            config.image_token_index: "image",
            config.video_token_index: "video",
        }

    def finished_rows(self, input_ids: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """Hidden state plus token embedding of each token, without the embedding at media positions.

        From: transformers' ``Qwen2_5OmniForConditionalGeneration.generate``, step 2, where the embeddings of audio,
        image and video positions are set to zero before they are added to the last hidden state.
        """
        embeddings = self.language_model.embed_input_ids(input_ids)
        return hidden_states + embeddings.masked_fill(self.is_media(input_ids), 0)

    def get_mrope_input_positions(self, input_tokens: list[int], mm_features: list[Any]) -> tuple[torch.Tensor, int]:
        # Upstream starts a video with audio at the placeholder's first token, which is the audio's start marker. All
        # that follows is one position early, and the pairs of start and end markers do not share positions, as they do
        # in training (transformers' get_rope_index). Other prompts are upstream's.
        if not any(data.get("use_audio_in_video") for _, _, data in self.iter_mm_features(mm_features)):
            return super().get_mrope_input_positions(input_tokens, mm_features)
        return self._positions_with_audio_in_video(input_tokens, mm_features)

    def _positions_with_audio_in_video(
        self, input_tokens: list[int], mm_features: list[Any]
    ) -> tuple[torch.Tensor, int]:
        """Compute transformers' ``get_rope_index`` for prompts with a video and its audio."""
        parts: list[np.ndarray] = []  # each int64 [3, n]

        def next_position() -> int:
            # After the last token, not after the largest position: a video may last longer than the audio with which it
            # is interleaved, and the reference continues from the one that came last.
            return int(parts[-1][:, -1].max()) + 1 if parts else 0

        def text(num_tokens: int) -> None:
            if num_tokens > 0:
                parts.append(np.broadcast_to(np.arange(num_tokens), (3, num_tokens)) + next_position())

        cursor = 0  # tokens placed so far
        for offset, modality, data in self.iter_mm_features(mm_features):
            if data.get("use_audio_in_video"):
                # <|vision_bos|> (before the placeholder) and <|audio_bos|> (its first token) share one position; so do
                # the two end markers.
                text(offset - 1 - cursor)
                parts.append(np.full((3, 2), next_position()))
                positions, num_tokens = self._compute_interleaved_positions(next_position(), data)
                parts.append(positions)
                parts.append(np.full((3, 2), next_position()))
                cursor = offset + 1 + num_tokens + 2
                continue
            text(offset - cursor)
            if modality == "audio":
                num_tokens = self._compute_audio_token_count(data["audio_feature_length"])
                text(num_tokens)
            else:
                grid = np.indices((data["grid_t"], data["grid_h"], data["grid_w"]))
                grid[0] = (grid[0] * data["t_factor"]).astype(np.int64)
                parts.append(grid.reshape(3, -1) + next_position())
                num_tokens = parts[-1].shape[1]
            cursor = offset + num_tokens
        text(len(input_tokens) - cursor)
        positions = np.concatenate(parts, axis=1)
        return torch.from_numpy(positions), int(positions.max()) + 1 - len(input_tokens)
