"""``Qwen2_5OmniTalker``: generate codec tokens from the thinker's rows, on vLLM's layers with paged attention.

Dataflow (P prompt tokens, N reply tokens; row = hidden + E(token), see ``Qwen2_5OmniThinker.finished_rows``):

    prompt ids     [mask] * P,    pad,              bos
    embeddings     rows[0:P],     E(speaker bos),   rows[P]
                                  + codec(pad)      + codec(bos)
    decode step t  codec(code_t) + tail[min(t, len(tail) - 1)],   tail = [rows[P+1:], E(text end), E(text pad)]

The prompt has real ids, so that penalties count them as the reference does; the model reads only the embeddings.

From: transformers' ``Qwen2_5OmniForConditionalGeneration.generate`` with the talker's intended prefill (codec
embeddings added and M-RoPE positions used at any batch size; docs/parity.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from vllm.config import CacheConfig, VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.quantization import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.interfaces import SupportsMRoPE
from vllm.model_executor.models.llama import LlamaDecoderLayer
from vllm.model_executor.models.qwen2 import Qwen2Model
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix
from vllm.sequence import IntermediateTensors

from vllm_omni.model_executor.stage_model import RequestInfo, StepRequest, check_all_loaded

THINKER_EMBEDDING = "thinker.model.embed_tokens.weight"


def talker_hf_config(config: PreTrainedConfig, speaker_bos_ids: Sequence[int]) -> PreTrainedConfig:
    """``hf_overrides`` of the talker stage: the checkpoint's talker section, with the fields that vLLM's layers read.

    Args:
        speaker_bos_ids: start token of each voice; requests name a voice by its index (``speaker_index``).
    """
    if config.model_type != "qwen2_5_omni":  # vLLM also passes a dummy, to ask whether the model type changes
        return config
    talker = config.talker_config
    talker.architectures = ["Qwen2_5OmniTalker"]
    talker.qkv_bias = True  # LlamaDecoderLayer: bias on q, k, v and none on o, as in Qwen2
    talker.speaker_bos_ids = list(speaker_bos_ids)
    talker.projection_size = talker.embedding_size  # width of the runner's inputs_embeds buffer (ModelConfig)
    return talker


class TalkerDecoderLayer(LlamaDecoderLayer):
    """vLLM's layer that reads ``head_dim`` from the config: hidden_size is not heads * head_dim (896, 12 * 128)."""

    def __init__(
        self,
        config: PreTrainedConfig,
        cache_config: CacheConfig | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__(get_current_vllm_config(), prefix=prefix, config=config)


class TalkerModel(Qwen2Model):
    """Qwen2's decoder whose token embedding is as wide as the thinker's.

    It projects its input itself: what vLLM captures as a CUDA graph reads the buffer of the first call again, and has
    to begin with the runner's.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, decoder_layer_type=TalkerDecoderLayer)
        config = vllm_config.model_config.hf_config
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.embedding_size, prefix=maybe_prefix(prefix, "embed_tokens")
        )
        self.thinker_to_talker_proj = ReplicatedLinear(
            config.embedding_size, config.hidden_size, prefix=maybe_prefix(prefix, "thinker_to_talker_proj")
        )

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        assert inputs_embeds is not None
        projected, _ = self.thinker_to_talker_proj(inputs_embeds)
        return super().forward(input_ids, positions, intermediate_tensors, projected)


class Qwen2_5OmniTalker(nn.Module, SupportsMRoPE):
    """Codec language model fed by the thinker; see the module's docstring for what each position reads."""

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={"talker.": "", "thinker.": None, "token2wav.": None},
        orig_to_new_substr={"thinker_to_talker_proj.": "model.thinker_to_talker_proj."},
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.config = config
        self.model = TalkerModel(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        self.codec_head = ParallelLMHead(
            config.vocab_size, config.hidden_size, prefix=maybe_prefix(prefix, "codec_head")
        )
        self.logits_processor = LogitsProcessor(config.vocab_size)
        # Rows of the thinker's embedding that the talker reads: text end, text pad, then the speakers' start tokens.
        self.text_ids = [config.tts_text_end_token_id, config.tts_text_pad_token_id, *config.speaker_bos_ids]
        self.register_buffer("text_rows", torch.zeros(len(self.text_ids), config.embedding_size), persistent=False)
        self.has_text_rows = False

    # -- vLLM's model interface ---------------------------------------------------------------------------------------

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Codec embeddings, [num_tokens, embedding_size] (the thinker's width, not this model's hidden_size)."""
        return self.model.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        if inputs_embeds is None:
            assert input_ids is not None
            inputs_embeds = self.embed_input_ids(input_ids)
        return self.model(None, positions, intermediate_tensors, inputs_embeds=inputs_embeds)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        logits = self.logits_processor(self.codec_head, hidden_states)
        if logits is not None:
            # The start token belongs to the prompt and is never sampled (transformers: suppress_tokens).
            logits[:, self.config.tts_codec_start_token_id] = float("-inf")
        return logits

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded = AutoWeightsLoader(self).load_weights(self._take_text_rows(weights), mapper=self.hf_to_vllm_mapper)
        if not self.has_text_rows:
            raise ValueError(f"the checkpoint has no {THINKER_EMBEDDING}, some rows of which the talker reads")
        check_all_loaded(self, loaded)
        return loaded

    def _take_text_rows(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterable[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            if name == THINKER_EMBEDDING:
                self.text_rows.copy_(tensor[self.text_ids])
                self.has_text_rows = True
            else:
                yield name, tensor

    def get_mrope_input_positions(self, input_tokens: list[int], mm_features: object) -> tuple[torch.Tensor, int]:
        # Called only by vLLM's warm-up; positions of requests come from the thinker (init_mrope_positions).
        return torch.arange(len(input_tokens)).expand(3, -1), 0

    # -- hooks of a stage model ---------------------------------------------------------------------------------------

    def load_request(self, info: RequestInfo, payloads: Sequence[dict[str, Any]]) -> None:
        """Store positions, and the rows that are ready: all of the thinker's prompt, maybe some of the reply."""
        device, dtype = self.text_rows.device, self.text_rows.dtype
        if payloads[0]["first_row"] != 0:
            raise ValueError(f"rows start at {payloads[0]['first_row']}: the thinker did not compute its prompt")
        num_thinker_tokens = info.num_prompt_tokens - 2
        rows = torch.cat([payload["rows"] for payload in payloads if "rows" in payload]).to(device, dtype)
        if len(rows) < num_thinker_tokens:
            raise ValueError(f"{len(rows)} rows came with the request, its prompt has {num_thinker_tokens}")
        speaker_row = self.text_rows[2 + info.args["speaker_index"]].unsqueeze(0)
        # The last row, of the reply's first token, is set when it arrives.
        info.state["prompt"] = torch.cat([rows[:num_thinker_tokens], speaker_row, torch.zeros_like(speaker_row)])
        info.state["tail"], info.state["has_reply"] = [], False
        # Positions of the thinker's whole prompt, which ends with the reply in text to speech.
        positions = payloads[0]["positions"].to(torch.int64)
        info.state["positions"] = positions[:, :num_thinker_tokens].clone()
        self.extend_request(info, rows[num_thinker_tokens:], last=False)

    def extend_request(self, info: RequestInfo, rows: torch.Tensor | None, last: bool) -> None:
        """Append rows of the reply: the first completes the prompt, the others form the tail, then text end and pad."""
        if rows is not None and len(rows):
            rows = rows.to(self.text_rows.device, self.text_rows.dtype)
            if not info.state["has_reply"]:
                info.state["has_reply"] = True
                info.state["prompt"][-1] = rows[0]
                rows = rows[1:]
            info.state["tail"] += rows.unbind()
        if last:
            info.state["tail"] += self.text_rows[:2].unbind()

    def init_mrope_positions(self, info: RequestInfo) -> tuple[torch.Tensor, int]:
        """Positions of the thinker's prompt, and of two text tokens after it."""
        positions = info.state.pop("positions")
        following = positions[:, -1].max() + 1 + torch.arange(2)
        positions = torch.cat([positions, following.expand(3, -1)], dim=1)
        return positions, int(positions.max()) + 1 - info.num_prompt_tokens

    def preprocess(self, step: Sequence[StepRequest], input_ids: torch.Tensor, inputs_embeds: torch.Tensor) -> None:
        """Put the thinker's rows at prompt positions (the last two add a codec embedding); add the tail to decodes."""
        rows, indices = [], []
        for info, start, num_tokens, offset in step:
            prompt, tail = info.state["prompt"][start : start + num_tokens], info.state["tail"]
            if len(prompt):
                num_thinker = min(max(info.num_prompt_tokens - 2 - start, 0), len(prompt))
                # Rows of the thinker's prompt replace the embedding of the mask token; the others are added to theirs.
                inputs_embeds[offset : offset + num_thinker] = 0
                inputs_embeds[offset : offset + len(prompt)] += prompt
            for k in range(len(prompt), num_tokens):  # several, if a preempted request computes its codes again
                rows.append(tail[min(start + k - info.num_prompt_tokens, len(tail) - 1)])
                indices.append(offset + k)
        if rows:
            inputs_embeds[indices] += torch.stack(rows)
