"""``CodecConfig``: sizes of a causal codec decoder, as the checkpoints' configurations name them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from vllm_omni.errors import ConfigError


@dataclass(frozen=True)
class CodecConfig:
    """Fields have the checkpoints' names; those with a default may be missing there.

    With ``codebook_dim`` and ``latent_dim`` the codes pass a split quantizer and a convolution (Qwen3-TTS, 12 Hz);
    without them, the mean of one table's rows feeds the transformer (Qwen3-Omni).
    """

    num_quantizers: int
    codebook_size: int
    hidden_size: int  # of the transformer
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    sliding_window: int  # frames that a frame attends to, itself included
    decoder_dim: int
    upsample_rates: tuple[int, ...]
    upsampling_ratios: tuple[int, ...]
    head_dim: int = 0  # 0: hidden_size / num_attention_heads
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    attention_bias: bool = False
    codebook_dim: int = 0  # width of the quantizer's output
    latent_dim: int = 0  # width around the transformer

    @classmethod
    def of(cls, section: Mapping[str, Any]) -> CodecConfig:
        """Read a section of a checkpoint's config.json; fields of other parts are ignored.

        Raises:
            ConfigError: a field is missing, or sizes do not fit.
        """
        known = {field.name for field in fields(cls)}
        values = {name: value for name, value in section.items() if name in known and value is not None}
        values |= {"rope_theta": theta} if (theta := section.get("rope_parameters", {}).get("rope_theta")) else {}
        values |= {name: tuple(values[name]) for name in ("upsample_rates", "upsampling_ratios") if name in values}
        try:
            config = cls(**values)
        except TypeError as exc:
            raise ConfigError(f"the codec decoder's configuration is incomplete: {exc}") from exc
        if bool(config.codebook_dim) != bool(config.latent_dim):
            raise ConfigError("the codec decoder needs both codebook_dim and latent_dim, or neither")
        return config

    @property
    def has_quantizer(self) -> bool:
        return bool(self.codebook_dim)

    @property
    def attention_dim(self) -> int:
        """Width of one attention head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def num_channels(self) -> int:
        """Width of the upsampling part's input."""
        return self.latent_dim or self.hidden_size

    @property
    def samples_per_frame(self) -> int:
        return math.prod((*self.upsample_rates, *self.upsampling_ratios))

    @property
    def num_trimmed(self) -> int:
        """Samples that the first frame lacks: Qwen3-Omni drops the start of each wide transposed convolution."""
        if self.has_quantizer:
            return 0
        length = math.prod(self.upsampling_ratios)
        for rate in self.upsample_rates:
            length = length * rate - rate
        return self.samples_per_frame - length
