"""``FrameTalker``: what talkers with a code predictor share (Qwen3-TTS, Qwen3-Omni).

The sampled token is the first code of a frame; the code predictor adds the others in the same step. The next row is

    C(c0) + sum over groups of E_g(c_g) of frame k, + tail row k, or the padding's row when the tail is over

where C is the talker's codec embedding and the tail is the text that is still to be spoken. All frames of a request are
kept: a preempted request computes its rows from them again.

From: Qwen3-Omni (arXiv:2509.17765), section 2.5.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.sampling_params import SamplingParams
from vllm.sequence import IntermediateTensors

from vllm_omni.errors import InvalidRequest
from vllm_omni.model_executor.stage_model import RequestInfo, StepRequest
from vllm_omni.speech.code_predictor import CodePredictor
from vllm_omni.speech.residual_sampling import CodeSampling, SamplingBatch

NUM_UNSAMPLED = 1024  # ids at the end of the vocabulary that are never sampled, but for the end's


def residual_sampling(defaults: Mapping[str, Any], params: SamplingParams) -> CodeSampling:
    """How a request samples its residual codes: by default as its checkpoint says, unless the talker's ``extra_args``
    have ``subtalker_temperature``, ``subtalker_top_k`` or ``subtalker_top_p``. A greedy talker has greedy ones.

    Raises:
        InvalidRequest: a value is out of range.
    """
    values = dict(defaults)
    if params.temperature == 0:
        values["temperature"] = 0.0
    for name, (kind, is_right, valid) in _RESIDUAL.items():
        value = (params.extra_args or {}).get(given := f"subtalker_{name}")
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, kind) or not is_right(value):
            raise InvalidRequest(f"extra_args: {given} = {value!r}: must be {valid}", param=given)
        values[name] = value
    return CodeSampling(**values)


_RESIDUAL: Mapping[str, tuple[Any, Callable[[Any], bool], str]] = {
    "temperature": (int | float, lambda value: 0 <= value < math.inf, "0 or more"),
    "top_k": (int, lambda value: value >= 0, "a number of codes, or 0 for all"),
    "top_p": (int | float, lambda value: 0 < value <= 1, "in (0, 1]"),
}


class TextProjection(nn.Module):
    """Two layers between rows of a text model and the talker's width."""

    def __init__(self, text_size: int, inner_size: int, size: int) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(text_size, inner_size)
        self.linear_fc2 = nn.Linear(inner_size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear_fc2(functional.silu(self.linear_fc1(x)))


class FrameTalker(nn.Module):
    """A codec language model. A subclass makes its layers, and puts ``prompt``, ``tail`` and ``pad`` into a request's
    state: rows of its width, [num_prompt_tokens, size], a row for each decode step, and [size].
    """

    model: Any  # a decoder of vLLM, whose token embedding is the codec's
    codec_head: ParallelLMHead
    logits_processor: LogitsProcessor
    code_predictor: CodePredictor
    end_code: int

    # -- vLLM's model interface ---------------------------------------------------------------------------------------

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Codec embeddings, [num_tokens, hidden_size]."""
        return self.model.embed_input_ids(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        logits = self.logits_processor(self.codec_head, hidden_states)
        if logits is not None:
            end_logits = logits[:, self.end_code].clone()
            logits[:, -NUM_UNSAMPLED:] = float("-inf")
            logits[:, self.end_code] = end_logits
        return logits

    # -- hooks of a stage model ---------------------------------------------------------------------------------------

    def open_frames(self, info: RequestInfo) -> None:
        """Start a request that has no frame.

        Args:
            info: ``args`` may have ``sampling``, the defaults of ``residual_sampling``.
        """
        info.state["frames"] = []  # [num_code_groups] int64 each
        info.state["sampling"] = residual_sampling(info.args.get("sampling", {}), info.params)
        seed, device = info.params.seed, self.codec_head.weight.device
        info.state["generator"] = None if seed is None else torch.Generator(device).manual_seed(seed)

    def preprocess(self, step: Sequence[StepRequest], input_ids: torch.Tensor, inputs_embeds: torch.Tensor) -> None:
        """Put the prompt's rows in place; add residual codes and text to decodes, which have their first code."""
        frames, tails, indices = [], [], []
        for info, start, num_tokens, offset in step:
            state = info.state
            prompt = state["prompt"][start : start + num_tokens]
            inputs_embeds[offset : offset + len(prompt)] = prompt
            for k in range(len(prompt), num_tokens):  # several, if a preempted request computes its rows again
                index = start + k - info.num_prompt_tokens
                frames.append(state["frames"][index])
                tails.append(state["tail"][index] if index < len(state["tail"]) else state["pad"])
                indices.append(offset + k)
        if frames:
            codes = torch.stack(frames).to(inputs_embeds.device)
            inputs_embeds[indices] += self.code_predictor.embed(codes[:, 1:]) + torch.stack(tails)

    def predict_frames(
        self, infos: Sequence[RequestInfo], hidden_states: torch.Tensor, token_ids: Sequence[int]
    ) -> list[list[int] | None]:
        """The frames that the sampled tokens begin, all groups; None for an end."""
        rows = [row for row, token in enumerate(token_ids) if token < self.code_predictor.config.vocab_size]
        if not rows:
            return [None] * len(infos)
        first = torch.tensor([token_ids[row] for row in rows], device=hidden_states.device)
        states: list[dict[str, Any]] = [infos[row].state for row in rows]
        sampling = SamplingBatch(
            [state["sampling"] for state in states], [state["generator"] for state in states], hidden_states.device
        )
        residual = self.code_predictor(hidden_states[rows], self.embed_input_ids(first), sampling)
        codes = torch.cat((first[:, None], residual), dim=1).cpu()
        frames: list[list[int] | None] = [None] * len(infos)
        for row, state, frame in zip(rows, states, codes, strict=True):
            state["frames"].append(frame)
            frames[row] = frame.tolist()
        return frames

    def compile_frames(self, max_rows: int) -> None:
        self.code_predictor.compile_frames(max_rows)
