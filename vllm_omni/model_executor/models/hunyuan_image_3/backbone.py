"""``Backbone``: the decoder, a mixture of experts for texts and latents alike, on positions of two axes.

Queries and keys are rotated and then normalized, unlike in most models: half of the frequencies are of a token's row,
half of its column.

From: HunyuanImage 3.0 (arXiv:2509.23951), sections 3.1 and 3.2.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from vllm.config import CacheConfig, VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe import FusedMoEFactory, GateLinear
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.quantization import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from vllm_omni.model_executor.models.hunyuan_image_3.config import of_layer


class Rotations:
    """Cosines and sines of a step's tokens, [num_tokens, 1, head_dim / 2] float32."""

    def __init__(self, positions: Tensor, rates: Tensor) -> None:
        """Args:
        positions: [num_tokens], or [3, num_tokens] with the slot, the row and the column.
        rates: of the frequencies, [head_dim / 2] float32.
        """
        rows, columns = (positions, positions) if positions.dim() == 1 else positions[1:]
        axes = torch.stack((rows, columns), dim=1).float()
        angles = axes.repeat(1, len(rates) // 2) * rates  # even frequencies are of the row
        self.cos, self.sin = angles.cos()[:, None], angles.sin()[:, None]

    def apply(self, heads: Tensor) -> Tensor:
        """[num_tokens, heads, head_dim] -> the same."""
        one, two = heads.float().chunk(2, dim=-1)
        made = torch.cat((one * self.cos - two * self.sin, two * self.cos + one * self.sin), dim=-1)
        return made.to(heads.dtype)


class BackboneAttention(nn.Module):
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
        self.head_dim = config.head_dim
        self.num_heads, self.num_kv_heads = num_heads // num_ranks, max(1, num_kv_heads // num_ranks)
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            self.head_dim,
            num_heads,
            num_kv_heads,
            bias=config.attention_bias,
            quant_config=quant_config,
            prefix=f"{prefix}.qkv_proj",
        )
        self.o_proj = RowParallelLinear(
            num_heads * self.head_dim,
            config.hidden_size,
            bias=config.attention_bias,
            quant_config=quant_config,
            prefix=f"{prefix}.o_proj",
        )
        self.query_layernorm, self.key_layernorm = (RMSNorm(self.head_dim, eps=config.rms_norm_eps) for _ in range(2))
        self.attn = Attention(
            self.num_heads,
            self.head_dim,
            self.head_dim**-0.5,
            num_kv_heads=self.num_kv_heads,
            cache_config=cache_config,
            quant_config=quant_config,
            prefix=f"{prefix}.attn",
        )

    def forward(self, x: Tensor, rotations: Rotations) -> Tensor:
        qkv, _ = self.qkv_proj(x)
        heads = qkv.unflatten(-1, (-1, self.head_dim))
        q, k, v = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        q = self.query_layernorm(rotations.apply(q).contiguous())
        k = self.key_layernorm(rotations.apply(k).contiguous())
        attended = self.attn(q.flatten(1), k.flatten(1), v.flatten(1))
        made: Tensor = self.o_proj(attended)[0]
        return made


class SharedExpert(nn.Module):
    """The expert of all tokens."""

    def __init__(self, hidden_size: int, size: int, quant_config: QuantizationConfig | None, prefix: str) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden_size, [size] * 2, bias=False, quant_config=quant_config, prefix=f"{prefix}.gate_up_proj"
        )
        self.down_proj = RowParallelLinear(
            size,
            hidden_size,
            bias=False,
            quant_config=quant_config,
            reduce_results=False,  # the sum with the other experts is reduced
            prefix=f"{prefix}.down_proj",
        )
        self.act_fn = SiluAndMul()

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.down_proj(self.act_fn(self.gate_up_proj(x)[0]))[0]
        return made


class Experts(nn.Module):
    """The best experts of each token, and the shared one. The router computes in float32."""

    def __init__(
        self, config: PreTrainedConfig, index: int, quant_config: QuantizationConfig | None, prefix: str
    ) -> None:
        super().__init__()
        size = of_layer(config.moe_intermediate_size, index)
        self.gate = GateLinear(
            config.hidden_size,
            config.num_experts,
            bias=False,
            out_dtype=torch.float32,
            params_dtype=torch.float32,
            prefix=f"{prefix}.gate",
        )
        self.shared_mlp = SharedExpert(
            config.hidden_size, size * of_layer(config.num_shared_expert, index), quant_config, f"{prefix}.shared_mlp"
        )
        self.experts = FusedMoEFactory(
            num_experts=config.num_experts,
            top_k=of_layer(config.moe_topk, index),
            hidden_size=config.hidden_size,
            intermediate_size=size,
            renormalize=config.norm_topk_prob,
            quant_config=quant_config,
            prefix=f"{prefix}.experts",
            shared_experts=self.shared_mlp,
        )

    def forward(self, x: Tensor) -> Tensor:
        logits, _ = self.gate(x)
        made: Tensor = self.experts(hidden_states=x, router_logits=logits)
        return made


class BackboneLayer(nn.Module):
    def __init__(
        self,
        config: PreTrainedConfig,
        index: int,
        cache_config: CacheConfig | None,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        super().__init__()
        self.self_attn = BackboneAttention(config, cache_config, quant_config, f"{prefix}.self_attn")
        self.mlp = Experts(config, index, quant_config, f"{prefix}.mlp")
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, x: Tensor, rotations: Rotations) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotations)
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
    def __init__(self, *, vllm_config: VllmConfig, config: PreTrainedConfig, prefix: str = "") -> None:
        super().__init__()
        cache_config, quant_config = vllm_config.cache_config, vllm_config.quant_config
        self.wte = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, quant_config=quant_config, prefix=f"{prefix}.wte"
        )
        self.layers = nn.ModuleList(
            BackboneLayer(config, index, cache_config, quant_config, f"{prefix}.layers.{index}")
            for index in range(config.num_hidden_layers)
        )
        self.ln_f = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        half, theta = config.head_dim // 2, config.rope_parameters["rope_theta"]
        self._rates = 1.0 / theta ** (torch.arange(half, dtype=torch.float32, device="cpu") / half)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.wte(input_ids)

    def forward(self, positions: Tensor, inputs_embeds: Tensor) -> Tensor:
        """What the last layer returns, [num_tokens, hidden_size]. Texts alone have the final norm, ``ln_f``, behind it.

        Args:
            positions: see ``Rotations``.
            inputs_embeds: [num_tokens, hidden_size].
        """
        self._rates = self._rates.to(inputs_embeds.device)
        x, rotations = inputs_embeds, Rotations(positions, self._rates)
        for layer in self.layers:
            x = layer(x, rotations)
        return x


def split_weights(config: PreTrainedConfig, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The checkpoint's tensors, with those of its own layout cut into vLLM's.

    ``qkv_proj`` has, for each KV head, its queries, its key and its value. In ``gate_and_up_proj`` the activation is
    that of the second half.
    """
    group = config.num_attention_heads // config.num_key_value_heads
    for name, tensor in weights:
        if ".qkv_proj." in name:
            rows = tensor.unflatten(0, (config.num_key_value_heads, group + 2, config.head_dim))
            for letter, part in (("q", rows[:, :group]), ("k", rows[:, group]), ("v", rows[:, group + 1])):
                yield name.replace("qkv_proj", f"qkv_proj.{letter}"), part.flatten(0, -tensor.dim())
        elif ".gate_and_up_proj." in name:
            up, gate = tensor.chunk(2)
            yield name.replace("gate_and_up_proj", "gate_proj"), gate
            yield name.replace("gate_and_up_proj", "up_proj"), up
        else:
            yield name, tensor
