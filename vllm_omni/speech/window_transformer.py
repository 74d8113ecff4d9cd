"""A transformer whose frames attend to a window of earlier ones; keys and values of the window are a stream's state."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from vllm_omni.speech.codec_config import CodecConfig
from vllm_omni.speech.few_rows import FewRowsLinear, JoinedLinears
from vllm_omni.speech.stream import Step, StreamLayer


class Window(NamedTuple):
    """What the layers of one call share."""

    cos: Tensor  # [B, 1, n, head_dim]
    sin: Tensor  # the same
    mask: Tensor  # [B, 1, n, window - 1 + n]: which of the kept and the new keys a frame attends to


def make_window(position: Tensor, num_frames: int, config: CodecConfig) -> Window:
    """Angles and mask of the next frames of streams that stand at ``position``, [B] int64."""
    device, dim, window = position.device, config.attention_dim, config.sliding_window
    frequencies = 1.0 / config.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)
    queries = position[:, None] + torch.arange(num_frames, device=device)
    angles = queries[..., None].float() * frequencies
    angles = torch.cat((angles, angles), dim=-1)[:, None]
    keys = position[:, None] + torch.arange(1 - window, num_frames, device=device)
    distance = queries[..., None] - keys[:, None]
    mask = (distance >= 0) & (distance < window) & (keys[:, None] >= 0)
    return Window(angles.cos(), angles.sin(), mask[:, None])


def rotate(x: Tensor, window: Window) -> Tensor:
    """Apply the angles to queries or keys, [B, heads, n, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return x * window.cos.to(x.dtype) + torch.cat((-second, first), dim=-1) * window.sin.to(x.dtype)


class WindowAttention(StreamLayer):
    """Its state is the keys and values of the ``sliding_window - 1`` frames before the next one."""

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim, self.num_kept = config.attention_dim, config.sliding_window - 1
        size, bias = config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(size, self.num_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(size, self.num_kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(size, self.num_kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, size, bias=bias)

    def state_shape(self) -> tuple[int, ...]:
        return 2, self.num_kv_heads, self.num_kept, self.head_dim

    def attend(self, x: Tensor, step: Step, window: Window) -> Tensor:
        """[B, n, hidden_size] -> the same."""
        num_rows, num_frames, _ = x.shape
        query, key, value = (
            projection(x).view(num_rows, num_frames, -1, self.head_dim).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        kept = step.states[self.slot]
        keys = torch.cat((kept[:, 0], rotate(key, window)), dim=2)
        values = torch.cat((kept[:, 1], value), dim=2)
        step.states[self.slot] = torch.stack((keys[:, :, num_frames:], values[:, :, num_frames:]), dim=1)
        y = functional.scaled_dot_product_attention(
            rotate(query, window), keys, values, window.mask, enable_gqa=self.num_heads != self.num_kv_heads
        )
        return self.o_proj(y.transpose(1, 2).reshape(num_rows, num_frames, -1))

    def advance(self, x: Tensor, step: Step) -> Tensor:
        raise AssertionError("attention shares its window with other layers: call attend")


class LayerScale(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x


class GatedMlp(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = FewRowsLinear(intermediate_size, hidden_size, bias=False)
        self._joined: JoinedLinears | None = None

    def join_weights(self) -> None:
        self._joined = JoinedLinears(self.gate_proj, self.up_proj)
        self.down_proj.prepare()

    def forward(self, x: Tensor) -> Tensor:
        gate, up = (self.gate_proj(x), self.up_proj(x)) if self._joined is None else self._joined(x)
        return self.down_proj(functional.silu(gate) * up)


class WindowLayer(nn.Module):
    """Pre-norm attention and MLP; the output of each is scaled by channel."""

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.input_layernorm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        self.self_attn = WindowAttention(config)
        self.self_attn_layer_scale = LayerScale(size)
        self.post_attention_layernorm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        self.mlp = GatedMlp(size, config.intermediate_size)
        self.mlp_layer_scale = LayerScale(size)

    def advance(self, x: Tensor, step: Step, window: Window) -> Tensor:
        x = x + self.self_attn_layer_scale(self.self_attn.attend(self.input_layernorm(x), step, window))
        return x + self.mlp_layer_scale(self.mlp(self.post_attention_layernorm(x)))


class WindowTransformer(nn.Module):
    """Layers and a norm, between two projections where the decoder is wider than the transformer."""

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(WindowLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        is_wider = config.has_quantizer
        self.input_proj = nn.Linear(config.num_channels, config.hidden_size) if is_wider else nn.Identity()
        self.output_proj = nn.Linear(config.hidden_size, config.num_channels) if is_wider else nn.Identity()

    def advance(self, x: Tensor, step: Step) -> Tensor:
        """[B, num_channels, n] -> the same."""
        x = self.input_proj(x.transpose(1, 2))
        window = make_window(step.position, x.shape[1], self.config)
        for layer in self.layers:
            assert isinstance(layer, WindowLayer)
            x = layer.advance(x, step, window)
        return self.output_proj(self.norm(x)).transpose(1, 2)
