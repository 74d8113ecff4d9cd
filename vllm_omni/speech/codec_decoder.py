"""``CodecDecoder``: codes of a causal audio codec to samples, a few frames at a time, exactly.

It serves ``code2wav`` of Qwen3-Omni and the 12 Hz decoder of Qwen3-TTS, which differ in what turns codes into rows and
in the start of a transposed convolution. A stream equals its whole decode because each layer keeps what it looks back
at; decoding windows with left context instead is never exact, as attention looks back window after window.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from vllm_omni.speech.causal import CausalConv, CausalUpsample, ConvNeXtBlock, SnakeBeta, UpsampleBlock
from vllm_omni.speech.codec_config import CodecConfig
from vllm_omni.speech.stream import Chain, Step, number_layers
from vllm_omni.speech.window_transformer import WindowTransformer


class CodecDecoder(nn.Module):
    """Decodes the next frames of a batch of streams, whose states the caller keeps (``CodecStreams``).

    Names of parameters are the checkpoints'.
    """

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        self.config = config
        width, dim = config.num_channels, config.decoder_dim
        if config.has_quantizer:
            self.quantizer = SplitQuantizer(config)
            self.pre_conv = CausalConv(config.codebook_dim, width, 3)
        else:
            self.code_embedding = nn.Embedding(config.codebook_size * config.num_quantizers, config.hidden_size)
        self.pre_transformer = WindowTransformer(config)
        self.upsample = nn.ModuleList(
            Chain([CausalUpsample(width, width, ratio, ratio), ConvNeXtBlock(width)])
            for ratio in config.upsampling_ratios
        )
        blocks = (
            UpsampleBlock(dim // 2**index, dim // 2 ** (index + 1), rate, trims_start=not config.has_quantizer)
            for index, rate in enumerate(config.upsample_rates)
        )
        last_dim = dim // 2 ** len(config.upsample_rates)
        self.decoder = Chain([CausalConv(width, dim, 7), *blocks, SnakeBeta(last_dim), CausalConv(last_dim, 1, 7)])
        self.state_shapes = number_layers(self)  # of one stream

    def forward(
        self, codes: Tensor, position: Tensor, states: Sequence[Tensor], *, is_start: bool
    ) -> tuple[Tensor, list[Tensor]]:
        """Decode the frames that follow those of earlier calls.

        Args:
            codes: [B, num_quantizers, n] int64.
            position: [B] int64, frames of each stream before these.
            states: for each of ``state_shapes``, [B, *shape]; zeros at the start of a stream; unchanged.
            is_start: the position of all streams is 0; otherwise that of none is.

        Returns:
            Samples in [-1, 1], [B, n * samples_per_frame], ``num_trimmed`` fewer at the start; and the states after
            them, which may share memory with each other's batch.
        """
        step = Step(states, position, is_start=is_start)
        x = self.pre_transformer.advance(self._rows(codes, step), step)
        for chain in self.upsample:
            assert isinstance(chain, Chain)
            x = chain.advance(x, step)
        return self.decoder.advance(x, step)[:, 0].clamp(-1, 1), step.states

    def _rows(self, codes: Tensor, step: Step) -> Tensor:
        """Codes to the transformer's input, [B, num_channels, n]."""
        config = self.config
        if config.has_quantizer:
            return self.pre_conv.advance(self.quantizer(codes), step)
        # One table for all groups: group g reads the rows from g * codebook_size on.
        offsets = torch.arange(config.num_quantizers, device=codes.device)[:, None] * config.codebook_size
        return self.code_embedding(codes + offsets).mean(1).transpose(1, 2)


class SplitQuantizer(nn.Module):
    """The semantic code and the acoustic ones, each sum of rows with a projection of its own."""

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        self.rvq_first = ResidualQuantizer(config, 1)
        self.rvq_rest = ResidualQuantizer(config, config.num_quantizers - 1)

    def forward(self, codes: Tensor) -> Tensor:
        """[B, num_quantizers, n] int64 -> [B, codebook_dim, n]."""
        return self.rvq_first(codes[:, :1]) + self.rvq_rest(codes[:, 1:])


class ResidualQuantizer(nn.Module):
    def __init__(self, config: CodecConfig, num_codebooks: int) -> None:
        super().__init__()
        dim = config.codebook_dim // 2
        layers = (nn.ModuleDict({"_codebook": Codebook(config.codebook_size, dim)}) for _ in range(num_codebooks))
        self.vq = nn.ModuleDict({"layers": nn.ModuleList(layers)})
        self.output_proj = nn.Conv1d(dim, config.codebook_dim, 1, bias=False)

    def forward(self, codes: Tensor) -> Tensor:
        books = [module for module in self.vq.modules() if isinstance(module, Codebook)]
        rows = torch.stack([book(codes[:, group]) for group, book in enumerate(books)]).sum(0)
        return self.output_proj(rows.transpose(1, 2))


class Codebook(nn.Module):
    """A table stored as the sum of each cluster's vectors, and their number."""

    def __init__(self, size: int, dim: int) -> None:
        super().__init__()
        self.embedding_sum = nn.Parameter(torch.zeros(size, dim))
        self.cluster_usage = nn.Parameter(torch.ones(size))

    def forward(self, codes: Tensor) -> Tensor:
        return functional.embedding(codes, self.embedding_sum / self.cluster_usage.clamp(min=1e-5)[:, None])
