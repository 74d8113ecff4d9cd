"""``MiMoAudioLanguageModel``: text and groups of audio codes in one sequence, on vLLM's layers with paged attention.

    position             row
    text                 E(token)
    sound of a prompt    token <|empty|>; the patch encoder's row of four frames of codes
    sound of a reply     the same, of the codes that the local transformer made when <|empty|> was sampled

Sound of prompts is a multimodal input (``processing.py``). The codes of a reply are kept, all of them, so that a
preempted request computes its rows again; they leave with their token (``predict_frames``).

From: the published checkpoints' code (XiaomiMiMo/MiMo-Audio).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.interfaces import MultiModalEmbeddings, SupportsMultiModal
from vllm.model_executor.models.qwen2 import Qwen2Model
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.sequence import IntermediateTensors
from vllm.tokenizers import cached_tokenizer_from_config

from vllm_omni.model_executor.models.mimo_audio.audio_tokenizer import (
    codec_directory,
    load_encoder,
    read_codec_config,
)
from vllm_omni.model_executor.models.mimo_audio.config import EMPTY, SpeechConfig, code_sampling
from vllm_omni.model_executor.models.mimo_audio.processing import (
    MELS,
    PLACEHOLDER,
    MiMoAudioDummyInputs,
    MiMoAudioProcessingInfo,
    MiMoAudioProcessor,
)
from vllm_omni.model_executor.models.mimo_audio.speech_groups import SpeechGroups
from vllm_omni.model_executor.stage_model import RequestInfo, StepRequest, check_all_loaded
from vllm_omni.speech.residual_sampling import SamplingBatch


@MULTIMODAL_REGISTRY.register_processor(
    MiMoAudioProcessor, info=MiMoAudioProcessingInfo, dummy_inputs=MiMoAudioDummyInputs
)
class MiMoAudioLanguageModel(nn.Module, SupportsMultiModal):
    """See the module's docstring for what each position reads."""

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={
            name: f"speech.{name}"
            for name in (
                "speech_embeddings", "speech_group_downcast", "hidden_states_downcast", "input_local_transformer",
                "local_transformer",
            )
        }
    )  # fmt: skip

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        if modality == "audio":
            return PLACEHOLDER
        raise ValueError(f"{modality} is no input of this model: valid: audio")

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        model_config = vllm_config.model_config
        config = model_config.hf_config
        self.config = config
        with self._mark_language_model(vllm_config):
            self.model = Qwen2Model(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
            self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, prefix=maybe_prefix(prefix, "lm_head"))
        self.logits_processor = LogitsProcessor(config.vocab_size)
        self.speech = SpeechGroups(SpeechConfig.of(config), config.hidden_size)
        tokenizer = cached_tokenizer_from_config(model_config)
        self.empty_id = tokenizer.get_added_vocab()[EMPTY]
        self._codec_directory = codec_directory(model_config.model)

    # -- vLLM's model interface ---------------------------------------------------------------------------------------

    def get_language_model(self) -> nn.Module:
        return self.model

    def embed_multimodal(self, **kwargs: object) -> MultiModalEmbeddings:
        """Rows of the prompts' sounds, each [num_groups, hidden_size]."""
        mels: Any = kwargs.get(MELS)
        if mels is None:
            return []
        groups = [self._groups(one) for one in mels]
        rows = self.speech.rows(torch.cat(groups))
        return rows.split([len(one) for one in groups])

    def _groups(self, mels: torch.Tensor) -> torch.Tensor:
        """Codes of a sound, [n, group_size, channels]: the last frame is repeated where the last group is not full."""
        codes = self.audio_encoder.encode(mels)
        missing = -len(codes) % self.speech.config.group_size
        codes = torch.cat((codes, codes[-1:].expand(missing, -1)))
        return codes.unflatten(0, (-1, self.speech.config.group_size))

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: object,
    ) -> torch.Tensor | IntermediateTensors:
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded = AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)
        check_all_loaded(self, loaded)
        # A checkpoint of its own, which is not converted to the language model's dtype: bfloat16 changes its codes.
        directory = self._codec_directory
        encoder = load_encoder(read_codec_config(directory), self.speech.config.num_channels, directory)
        self.audio_encoder = encoder.to(self.lm_head.weight.device)
        return loaded | {f"audio_encoder.{name}" for name, _ in encoder.named_parameters()}

    # -- hooks of a stage model ---------------------------------------------------------------------------------------

    def load_request(self, info: RequestInfo, payloads: Sequence[dict[str, Any]]) -> None:
        """Start without a reply."""
        info.state["sampling"] = code_sampling(info.params)
        # Without a seed, the same on every rank.
        seed = zlib.crc32(info.request_id.encode()) if info.params.seed is None else info.params.seed
        info.state["generator"] = torch.Generator(self.lm_head.weight.device).manual_seed(seed)
        info.state["groups"] = []  # for each token of the reply [group_size, channels] int64; None for text

    def extend_request(self, info: RequestInfo, rows: torch.Tensor | None, last: bool) -> None:
        """Nothing follows: the whole prompt comes with the request."""

    def preprocess(self, step: Sequence[StepRequest], input_ids: torch.Tensor, inputs_embeds: torch.Tensor) -> None:
        """Put the rows of the reply's groups of sound in place."""
        codes, places = [], []
        for info, start, num_tokens, offset in step:
            groups = info.state["groups"]
            for k in range(max(info.num_prompt_tokens - start, 0), num_tokens):
                group = groups[start + k - info.num_prompt_tokens]
                if group is not None:
                    codes.append(group)
                    places.append(offset + k)
        if codes:
            inputs_embeds[places] = self.speech.rows(torch.stack(codes).to(inputs_embeds.device))

    def predict_frames(
        self, infos: Sequence[RequestInfo], hidden_states: torch.Tensor, token_ids: Sequence[int]
    ) -> list[list[int] | None]:
        """The groups of sound, frame by frame: ``group_size * channels`` codes; None for a token of text."""
        frames: list[list[int] | None] = [None] * len(infos)
        for info in infos:
            info.state["groups"].append(None)
        rows = [row for row, token in enumerate(token_ids) if token == self.empty_id]
        if rows:
            states = [infos[row].state for row in rows]
            sampling = SamplingBatch(
                [state["sampling"] for state in states], [state["generator"] for state in states], hidden_states.device
            )
            groups = self.speech.generate(hidden_states[rows], sampling).cpu()
            for row, state, group in zip(rows, states, groups, strict=True):
                state["groups"][-1] = group
                frames[row] = group.flatten().tolist()
        return frames

    def compile_frames(self, max_rows: int) -> None:
        self.speech.compile_frames(max_rows)
