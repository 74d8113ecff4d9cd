"""Sound in prompts: vLLM's multimodal processor for MiMo-Audio.

``PLACEHOLDER`` in a prompt becomes a sound that the model hears, ``<|sosp|>``, a token ``<|empty|>`` for each group of
four frames, ``<|eosp|>``. An earlier reply of the model, ``SPOKEN`` with its text, becomes text and sound in turns, as
the model itself writes it.
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
from vllm.multimodal.parse import MultiModalDataItems, MultiModalDataParser
from vllm.multimodal.processing import (
    BaseDummyInputsBuilder,
    BaseMultiModalProcessor,
    BaseProcessingInfo,
    PromptReplacement,
    PromptUpdate,
)
from vllm.multimodal.processing.processor import PlaceholderFeaturesInfo

from vllm_omni.model_executor.models.mimo_audio.audio_tokenizer import (
    SAMPLE_RATE,
    codec_directory,
    log_mels,
    num_frames,
    read_codec_config,
)
from vllm_omni.model_executor.models.mimo_audio.config import (
    EMPTY,
    HEARD_END,
    HEARD_START,
    SPOKEN_END,
    SPOKEN_START,
    TEXT_END,
)

MELS = "audio_mels"
PLACEHOLDER = f"{HEARD_START}{EMPTY}{HEARD_END}"
SPOKEN = SPOKEN_START + "{text}" + f"{TEXT_END}{EMPTY}{SPOKEN_END}"
INTERLEAVED = 5  # tokens of text, then groups of sound, in an earlier reply
DUMMY_SECONDS = 60


class TokenIds(NamedTuple):
    """Special tokens by their ids, which differ between checkpoints."""

    empty: int
    spoken_start: int
    spoken_end: int
    text_end: int

    @classmethod
    def of(cls, vocabulary: Mapping[str, int]) -> TokenIds:
        return cls(*(vocabulary[token] for token in (EMPTY, SPOKEN_START, SPOKEN_END, TEXT_END)))


class Sound(NamedTuple):
    start: int  # its first position
    is_sound: list[bool]  # of each position from there on, up to its last one


def lay_out(token_ids: Sequence[int], num_groups: Sequence[int], ids: TokenIds) -> tuple[list[int], list[Sound]]:
    """Replace each ``<|empty|>`` of a prompt by the groups of its sound.

    Args:
        num_groups: of each sound, in the order of the prompt.

    Raises:
        ValueError: the prompt has more or fewer places than there are sounds.
    """
    num_places = list(token_ids).count(ids.empty)
    if num_places != len(num_groups):
        raise ValueError(
            f"the prompt has {num_places} places for audio ({PLACEHOLDER}), and there are {len(num_groups)} audios"
        )
    made: list[int] = []
    sounds: list[Sound] = []
    text_start = None  # in ``made``, of a reply's text
    for index, token in enumerate(token_ids):
        if token != ids.empty:
            made.append(token)
            if token == ids.spoken_start:
                text_start = len(made)
            continue
        groups = [ids.empty] * num_groups[len(sounds)]
        is_reply = token_ids[index - 1] == ids.text_end and tuple(token_ids[index + 1 : index + 2]) == (ids.spoken_end,)
        if text_start is None or not is_reply:
            sounds.append(Sound(len(made), [True] * len(groups)))
            made += groups
        else:
            turns = _take_turns(made[text_start:-1], groups, ids)
            del made[text_start:]
            first = turns.index(ids.empty)
            last = len(turns) - turns[::-1].index(ids.empty)
            sounds.append(Sound(text_start + first, [one == ids.empty for one in turns[first:last]]))
            made += turns
    return made, sounds


def _take_turns(text: Sequence[int], groups: Sequence[int], ids: TokenIds) -> list[int]:
    """Five tokens of text, five groups of sound, and so on; the end of the text is part of its last piece."""
    turns: list[int] = []
    for start in range(0, max(len(text), len(groups)), INTERLEAVED):
        turns += text[start : start + INTERLEAVED]
        if start < len(text) <= start + INTERLEAVED:
            turns.append(ids.text_end)
        turns += groups[start : start + INTERLEAVED]
    return turns


class MiMoAudioProcessingInfo(BaseProcessingInfo):
    @cached_property
    def codec_config(self) -> dict[str, Any]:
        return read_codec_config(codec_directory(self.ctx.model_config.model))

    @cached_property
    def token_ids(self) -> TokenIds:
        return TokenIds.of(self.get_tokenizer().get_added_vocab())

    def num_groups(self, num_mels: int) -> int:
        return -(-num_frames(num_mels) // self.get_hf_config().group_size)

    def get_data_parser(self) -> MultiModalDataParser:
        return MultiModalDataParser(target_sr=SAMPLE_RATE, target_channels=1)

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"audio": None}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int] | None = None) -> Mapping[str, int]:
        num_mels = self.codec_config.get("max_audio_seconds", 1800) * 100 + 1
        return {"audio": min(self.num_groups(num_mels), seq_len)}


class MiMoAudioDummyInputs(BaseDummyInputsBuilder[MiMoAudioProcessingInfo]):
    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        return PLACEHOLDER * mm_counts.get("audio", 0)

    def get_dummy_mm_data(
        self, seq_len: int, mm_counts: Mapping[str, int], mm_options: MultiModalDummyOptions
    ) -> MultiModalDataDict:
        num_samples = min(DUMMY_SECONDS * SAMPLE_RATE, max(seq_len // 2, 1) * 4 * 960)
        overrides = mm_options.get("audio")
        audios = self._get_dummy_audios(length=num_samples, num_audios=mm_counts.get("audio", 0), overrides=overrides)
        return {"audio": audios}


class MiMoAudioProcessor(BaseMultiModalProcessor[MiMoAudioProcessingInfo]):
    def _call_hf_processor(self, hf_data: Mapping[str, Any], hf_kwargs: Mapping[str, object]) -> BatchFeature:
        waves = [torch.from_numpy(np.asarray(wave, dtype=np.float32)) for wave in hf_data["audio"]]
        return BatchFeature({MELS: [log_mels(wave, self.info.codec_config) for wave in waves]})

    def _get_mm_fields_config(
        self, hf_inputs: BatchFeature, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        return {MELS: MultiModalFieldConfig.batched("audio")}

    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        out_mm_kwargs: MultiModalKwargsItems,
    ) -> Sequence[PromptUpdate]:
        empty = self.info.token_ids.empty
        items = out_mm_kwargs.get("audio", [])  # none, if all are in the cache

        def groups(item_idx: int) -> list[int]:
            mels: Any = items[item_idx][MELS].data
            return [empty] * self.info.num_groups(len(mels))

        return [PromptReplacement(modality="audio", target=[empty], replacement=groups)]

    def _apply_prompt_updates(
        self, token_ids: list[int], mm_prompt_updates: Any
    ) -> tuple[list[int], Mapping[str, list[PlaceholderFeaturesInfo]]]:
        # Upstream replaces each target where it stands, and cannot put a reply's text between its groups.
        num_groups = [len(updates[0].content.full) for updates in mm_prompt_updates.get("audio", ())]
        made, sounds = lay_out(token_ids, num_groups, self.info.token_ids)
        placeholders = [
            PlaceholderFeaturesInfo("audio", index, start, made[start : start + len(is_sound)], torch.tensor(is_sound))
            for index, (start, is_sound) in enumerate(sounds)
        ]
        return made, {"audio": placeholders} if placeholders else {}
