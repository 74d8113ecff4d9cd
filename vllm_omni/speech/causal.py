"""Causal convolutions, and the blocks that codec decoders are built of.

Names of submodules are those of the checkpoints (``code2wav`` of Qwen3-Omni, ``speech_tokenizer`` of Qwen3-TTS), which
share these layers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from vllm_omni.speech.stream import Chain, Step, StreamLayer, StreamModule

DILATIONS = (1, 3, 9)  # of the residual units behind each upsampling


class CausalConv(StreamLayer):
    """A convolution that sees the current and earlier inputs; its state is the earlier ones that it still needs."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: int, *, dilation: int = 1, groups: int = 1
    ) -> None:
        super().__init__()
        self.conv = nn.Conv1d(in_channels, out_channels, kernel_size, dilation=dilation, groups=groups)
        self.num_past = (kernel_size - 1) * dilation

    def state_shape(self) -> tuple[int, ...]:
        return self.conv.in_channels, self.num_past

    def advance(self, x: Tensor, step: Step) -> Tensor:
        x = torch.cat((step.states[self.slot], x), dim=-1)
        step.states[self.slot] = x[..., x.shape[-1] - self.num_past :]
        return self.conv(x)


class CausalUpsample(StreamLayer):
    """A transposed convolution; its state is the part of the output that the next input still adds to.

    The last ``kernel_size - stride`` samples of a stream are incomplete and never returned, so that n inputs give
    ``n * stride`` outputs without look-ahead.

    Args:
        trims_start: the first ``kernel_size - stride`` samples of a stream are dropped, too.
    """

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: int, stride: int, *, trims_start: bool = False
    ) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose1d(in_channels, out_channels, kernel_size, stride=stride)
        self.stride = stride
        self.num_spilled = kernel_size - stride
        self.trims_start = trims_start

    def state_shape(self) -> tuple[int, ...]:
        return self.conv.out_channels, self.num_spilled

    def advance(self, x: Tensor, step: Step) -> Tensor:
        y = functional.conv_transpose1d(x, self.conv.weight, stride=self.stride)  # the bias is added once, below
        y[..., : self.num_spilled] += step.states[self.slot]
        num_complete = x.shape[-1] * self.stride
        step.states[self.slot] = y[..., num_complete:]
        assert self.conv.bias is not None
        start = self.num_spilled if self.trims_start and step.is_start else 0
        return y[..., start:num_complete] + self.conv.bias[:, None]


class SnakeBeta(StreamModule):
    """``x + sin^2(x * exp(alpha)) / exp(beta)``, with a pair for each channel.

    From: arXiv:2006.08195, with separate parameters for frequency and magnitude.
    """

    def __init__(self, num_channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(num_channels))
        self.beta = nn.Parameter(torch.zeros(num_channels))

    def advance(self, x: Tensor, step: Step) -> Tensor:
        alpha, beta = self.alpha.exp()[:, None], self.beta.exp()[:, None]
        return x + torch.sin(x * alpha).square() / (beta + 1e-9)


class ConvNeXtBlock(StreamModule):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dwconv = CausalConv(dim, dim, 7, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.pwconv1 = nn.Linear(dim, 4 * dim)
        self.pwconv2 = nn.Linear(4 * dim, dim)
        self.gamma = nn.Parameter(torch.ones(dim))

    def advance(self, x: Tensor, step: Step) -> Tensor:
        y = self.norm(self.dwconv.advance(x, step).transpose(1, 2))
        y = self.pwconv2(functional.gelu(self.pwconv1(y)))
        return x + (self.gamma * y).transpose(1, 2)


class ResidualUnit(StreamModule):
    def __init__(self, dim: int, dilation: int) -> None:
        super().__init__()
        self.act1 = SnakeBeta(dim)
        self.conv1 = CausalConv(dim, dim, 7, dilation=dilation)
        self.act2 = SnakeBeta(dim)
        self.conv2 = CausalConv(dim, dim, 1)

    def advance(self, x: Tensor, step: Step) -> Tensor:
        y = self.conv1.advance(self.act1.advance(x, step), step)
        return x + self.conv2.advance(self.act2.advance(y, step), step)


class UpsampleBlock(StreamModule):
    """Activation, transposed convolution, residual units."""

    def __init__(self, in_dim: int, out_dim: int, rate: int, *, trims_start: bool) -> None:
        super().__init__()
        upsample = CausalUpsample(in_dim, out_dim, 2 * rate, rate, trims_start=trims_start)
        units = (ResidualUnit(out_dim, dilation) for dilation in DILATIONS)
        self.block = Chain([SnakeBeta(in_dim), upsample, *units])

    def advance(self, x: Tensor, step: Step) -> Tensor:
        return self.block.advance(x, step)
