"""``MixtureModel``: Qwen2's decoder with two complete sets of weights, one for latents and one for all other tokens.

A token's kind chooses the set; attention is joint. Each layer computes a set for its own tokens alone.

From: BAGEL (arXiv:2505.14683), section 2 (mixture of transformers).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from vllm.config import CacheConfig, VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.quantization import QuantizationConfig
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.qwen2 import Qwen2MLP

LATENT = "_moe_gen"
"""End of the names of the weights for latents."""


class Kinds(NamedTuple):
    """The rows of a step by their kind, int64 on the device; None: no latents."""

    others: Tensor
    latents: Tensor


def of_kind(x: Tensor, kinds: Kinds | None, others: Callable[..., Tensor], latents: Callable[..., Tensor]) -> Tensor:
    """Apply to each row what its kind has, [num_tokens, ...]."""
    if kinds is None:
        return others(x)
    first, second = others(x[kinds.others]), latents(x[kinds.latents])
    made = first.new_empty(len(x), *first.shape[1:])
    made[kinds.others], made[kinds.latents] = first, second
    return made


class MixtureAttention(nn.Module):
    def __init__(
        self,
        config: PreTrainedConfig,
        cache_config: CacheConfig | None,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        super().__init__()
        num_ranks = get_tensor_model_parallel_world_size()
        num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.hidden_size // num_heads
        self.num_heads, self.num_kv_heads = num_heads // num_ranks, max(1, num_kv_heads // num_ranks)
        for end in ("", LATENT):
            name = f"qkv_proj{end}"
            linear = QKVParallelLinear(
                config.hidden_size,
                self.head_dim,
                num_heads,
                num_kv_heads,
                bias=True,
                quant_config=quant_config,
                prefix=f"{prefix}.{name}",
            )
            self.add_module(name, linear)
            name = f"o_proj{end}"
            linear = RowParallelLinear(
                num_heads * self.head_dim,
                config.hidden_size,
                bias=False,
                quant_config=quant_config,
                prefix=f"{prefix}.{name}",
            )
            self.add_module(name, linear)
            for name in (f"q_norm{end}", f"k_norm{end}"):
                self.add_module(name, RMSNorm(self.head_dim, eps=config.rms_norm_eps))
        self.rotary_emb = get_rope(
            self.head_dim, max_position=config.max_position_embeddings, rope_parameters=config.rope_parameters
        )
        self.attn = Attention(
            self.num_heads,
            self.head_dim,
            self.head_dim**-0.5,
            num_kv_heads=self.num_kv_heads,
            cache_config=cache_config,
            quant_config=quant_config,
            prefix=f"{prefix}.attn",
        )

    def forward(self, positions: Tensor, x: Tensor, kinds: Kinds | None) -> Tensor:
        qkv = of_kind(x, kinds, self._qkv, lambda rows: self._qkv(rows, LATENT))
        q, k, v = qkv.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        q, k = self.rotary_emb(positions, q.flatten(1), k.flatten(1))
        attended = self.attn(q, k, v.flatten(1))
        return of_kind(attended, kinds, lambda rows: self.o_proj(rows)[0], lambda rows: self.o_proj_moe_gen(rows)[0])

    def _qkv(self, x: Tensor, end: str = "") -> Tensor:
        """Queries and keys, normalized, and values: [n, heads + 2 KV heads, head_dim]."""
        qkv, _ = self.get_submodule(f"qkv_proj{end}")(x)
        q, k, v = qkv.unflatten(-1, (-1, self.head_dim)).split(
            (self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1
        )
        q, k = (self.get_submodule(f"{name}_norm{end}")(one.contiguous()) for name, one in (("q", q), ("k", k)))
        return torch.cat((q, k, v), dim=1)


class MixtureLayer(nn.Module):
    def __init__(
        self,
        config: PreTrainedConfig,
        cache_config: CacheConfig | None,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        super().__init__()
        self.self_attn = MixtureAttention(config, cache_config, quant_config, f"{prefix}.self_attn")
        for end in ("", LATENT):
            name = f"mlp{end}"
            mlp = Qwen2MLP(
                config.hidden_size, config.intermediate_size, config.hidden_act, quant_config, f"{prefix}.{name}"
            )
            self.add_module(name, mlp)
            for name in (f"input_layernorm{end}", f"post_attention_layernorm{end}"):
                self.add_module(name, RMSNorm(config.hidden_size, eps=config.rms_norm_eps))

    def forward(self, positions: Tensor, x: Tensor, kinds: Kinds | None) -> Tensor:
        x = x + self.self_attn(positions, self._each(x, kinds, "input_layernorm"), kinds)
        return x + self._each(self._each(x, kinds, "post_attention_layernorm"), kinds, "mlp")

    def _each(self, x: Tensor, kinds: Kinds | None, name: str) -> Tensor:
        return of_kind(x, kinds, self.get_submodule(name), self.get_submodule(f"{name}{LATENT}"))


class MixtureModel(nn.Module):
    """The decoder. It is not compiled: which rows are latents differs from step to step."""

    def __init__(self, *, vllm_config: VllmConfig, config: PreTrainedConfig, prefix: str = "") -> None:
        super().__init__()
        cache_config, quant_config = vllm_config.cache_config, vllm_config.quant_config
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, quant_config=quant_config, prefix=f"{prefix}.embed_tokens"
        )
        self.layers = nn.ModuleList(
            MixtureLayer(config, cache_config, quant_config, f"{prefix}.layers.{index}")
            for index in range(config.num_hidden_layers)
        )
        for name in ("norm", f"norm{LATENT}"):
            self.add_module(name, RMSNorm(config.hidden_size, eps=config.rms_norm_eps))

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.embed_tokens(input_ids)

    def forward(self, positions: Tensor, inputs_embeds: Tensor, kinds: Kinds | None) -> Tensor:
        """Hidden states behind the final norm, [num_tokens, hidden_size].

        Args:
            positions: [num_tokens] int64.
            inputs_embeds: [num_tokens, hidden_size].
        """
        x = inputs_embeds
        for layer in self.layers:
            x = layer(positions, x, kinds)
        return of_kind(x, kinds, self.norm, self.norm_moe_gen)
