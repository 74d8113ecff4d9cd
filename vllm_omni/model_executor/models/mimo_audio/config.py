"""``SpeechConfig``: the fields of a MiMo-Audio checkpoint that Qwen2's configuration does not have."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.sampling_params import SamplingParams

from vllm_omni.errors import InvalidRequest
from vllm_omni.speech.code_predictor import PredictorConfig
from vllm_omni.speech.residual_sampling import CodeSampling

EMPTY = "<|empty|>"  # the token of a group of sound
HEARD_START, HEARD_END = "<|sosp|>", "<|eosp|>"  # around a sound in a prompt
SPOKEN_START, SPOKEN_END = "<|sostm|>", "<|eostm|>"  # around a spoken reply
TEXT_END = "<|eot|>"  # of the text of a spoken reply


CODE_SAMPLING: Mapping[str, float] = {"code_temperature": 0.9, "code_top_k": 0, "code_top_p": 0.95}
"""How codes are sampled, unless ``extra_args`` of the request's sampling parameters says otherwise."""


def code_sampling(params: SamplingParams) -> CodeSampling:
    """How a request samples its codes.

    Raises:
        InvalidRequest: a value is out of range.
    """
    given = params.extra_args or {}
    values = {name: given.get(name, value) for name, value in CODE_SAMPLING.items()}
    for name, value in values.items():
        is_number = isinstance(value, int if name == "code_top_k" else int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value < math.inf or (name == "code_top_p" and not 0 < value <= 1):
            ranges = {"code_top_k": "0 (all codes) or a number of codes", "code_top_p": "in (0, 1]"}
            said = f"extra_args: {name} = {value!r}: must be {ranges.get(name, '0 or more')}"
            raise InvalidRequest(said, param=name)
    return CodeSampling(values["code_temperature"], int(values["code_top_k"]), values["code_top_p"])


@dataclass(frozen=True)
class SpeechConfig:
    group_size: int  # frames of a group
    sizes: tuple[int, ...]  # of each channel's vocabulary
    empty_ids: tuple[int, ...]  # of each channel: no code
    delays: tuple[int, ...]  # steps by which the local transformer is later with a channel
    patch: PredictorConfig
    local: PredictorConfig

    @classmethod
    def of(cls, config: Any) -> SpeechConfig:
        """Read transformers' configuration of a checkpoint."""
        num_channels = config.audio_channels

        def per_channel(pattern: str | int) -> tuple[int, ...]:
            """ "0-1-2": a number for each channel; one number is that of all."""
            numbers = tuple(int(one) for one in str(pattern).split("-"))
            return numbers if len(numbers) > 1 else numbers * num_channels

        delays = per_channel(config.delay_pattern)
        patch_dim = getattr(config, "input_local_dim", None) or config.local_dim

        def stack(dim: int, num_layers: int, ffn_dim: int, num_positions: int, *, is_causal: bool) -> PredictorConfig:
            heads = config.local_attn_heads
            return PredictorConfig(
                dim, num_layers, heads, heads, dim // heads, ffn_dim, 0, num_positions, config.rms_norm_eps,
                _rope_theta(config), attention_bias=True, is_qwen2=True, is_causal=is_causal,
            )  # fmt: skip

        is_causal = not getattr(config, "input_full_attention", None)
        return cls(
            group_size=config.group_size,
            sizes=per_channel(config.speech_vocab_size),
            empty_ids=per_channel(config.speech_zeroemb_idx),
            delays=delays,
            patch=stack(
                patch_dim, config.input_local_layers, 4 * patch_dim, config.group_size, is_causal=is_causal
            ),
            local=stack(
                config.local_dim, config.local_layers, config.local_ffn_dim, config.group_size + max(delays),
                is_causal=True,
            ),
        )  # fmt: skip

    @property
    def num_channels(self) -> int:
        return len(self.sizes)


def _rope_theta(config: Any) -> float:
    parameters = getattr(config, "rope_parameters", None) or {}
    return float(parameters.get("rope_theta") or config.rope_theta)
