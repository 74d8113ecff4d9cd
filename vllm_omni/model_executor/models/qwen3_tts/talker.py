"""``Qwen3TTSTalker``: text to frames of codes, on vLLM's layers with paged attention.

Each row of the talker is the sum of a text part and a codec part:

    prompt row i   T(text_ids[i]) + C(codec_ids[i]); an id of -1 adds nothing. A cloned voice adds its
                   x-vector at one position, and the frames of its recording, as below, at others
    decode row k   C(c0) + sum over groups of E_g(c_g) of frame k, + T(tail_ids[k]), or T(tts_pad) when the tail is over

T projects the text embedding, C is the codec embedding (``FrameTalker``).

From: the published checkpoints' code (package ``qwen-tts`` 0.1.1).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.qwen3 import Qwen3Model
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix

from vllm_omni.model_executor.frame_talker import FrameTalker, TextProjection
from vllm_omni.model_executor.models.qwen3_tts.prompt import NOTHING
from vllm_omni.model_executor.stage_model import RequestInfo, check_all_loaded
from vllm_omni.speech.code_predictor import CodePredictor, PredictorConfig


class Qwen3TTSTalker(FrameTalker):
    """The codec language model of Qwen3-TTS; see the module's docstring for what each position reads."""

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={
            "talker.model.text_embedding.": "text_embedding.",
            "talker.model.codec_embedding.": "model.embed_tokens.",
            "talker.": "",
            "speaker_encoder.": None,
        }
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.config = config
        self.end_code = config.codec_eos_token_id
        self.model = Qwen3Model(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        self.text_embedding = nn.Embedding(config.text_vocab_size, config.text_hidden_size)
        self.text_projection = TextProjection(config.text_hidden_size, config.text_hidden_size, config.hidden_size)
        self.codec_head = ParallelLMHead(
            config.vocab_size, config.hidden_size, prefix=maybe_prefix(prefix, "codec_head")
        )
        self.logits_processor = LogitsProcessor(config.vocab_size)
        self.code_predictor = CodePredictor(PredictorConfig.of(config.code_predictor_config), config.hidden_size)

    # -- vLLM's model interface ---------------------------------------------------------------------------------------

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded = AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)
        check_all_loaded(self, loaded)
        return loaded

    # -- hooks of a stage model ---------------------------------------------------------------------------------------

    def load_request(self, info: RequestInfo, payloads: Sequence[dict[str, Any]]) -> None:
        """Compute the rows of the prompt and of the tail from the ids in the arguments.

        Args:
            info: ``args`` has the fields of ``TalkerPrompt``; of a cloned voice ``x_vector`` (bytes, float32) and, for
                its recording's frames, ``voice_codes`` (bytes, int16, frame by frame); and what ``open_frames`` reads.
        """
        args = info.args
        prompt = self._text_rows(args["text_ids"]) + self._codec_rows(args["codec_ids"])
        if len(prompt) != info.num_prompt_tokens:
            raise ValueError(f"{len(prompt)} pairs of ids for a prompt of {info.num_prompt_tokens} tokens")
        self._add_voice(prompt, args)
        info.state["prompt"] = prompt
        info.state["tail"] = self._text_rows(args["tail_ids"])
        info.state["pad"] = self._text_rows([self.config.tts_pad_token_id])[0]
        self.open_frames(info)

    def extend_request(self, info: RequestInfo, rows: torch.Tensor | None, last: bool) -> None:
        """Nothing follows: the whole text comes with the request."""

    def _add_voice(self, prompt: torch.Tensor, args: Mapping[str, Any]) -> None:
        """Add a cloned voice to the prompt's rows, [P, hidden_size], in place."""
        if args.get("x_vector") is not None:
            vector = torch.frombuffer(bytearray(args["x_vector"]), dtype=torch.float32)
            prompt[args["x_vector_at"]] += vector.to(prompt)
        if args.get("voice_codes"):
            codes = torch.frombuffer(bytearray(args["voice_codes"]), dtype=torch.int16).long().to(prompt.device)
            codes = codes.reshape(-1, self.config.num_code_groups)
            rows = self.embed_input_ids(codes[:, 0]) + self.code_predictor.embed(codes[:, 1:])
            prompt[args["frames_at"] : args["frames_at"] + len(rows)] += rows

    def _text_rows(self, ids: Sequence[int]) -> torch.Tensor:
        """Projected text embeddings, [n, hidden_size]; zero rows for ``NOTHING``."""
        tensor = torch.tensor(ids, dtype=torch.int64, device=self.text_embedding.weight.device)
        rows = self.text_projection(self.text_embedding(tensor.clamp(min=0)))
        return rows.masked_fill_((tensor == NOTHING)[:, None], 0)

    def _codec_rows(self, ids: Sequence[int]) -> torch.Tensor:
        tensor = torch.tensor(ids, dtype=torch.int64, device=self.text_embedding.weight.device)
        return self.embed_input_ids(tensor.clamp(min=0)).masked_fill((tensor == NOTHING)[:, None], 0)
