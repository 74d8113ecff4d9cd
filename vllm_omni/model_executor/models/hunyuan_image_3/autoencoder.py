"""The auto-encoder of pictures: convolutions over frames, of which a picture is the last of four equal ones.

It halves or doubles sides by moving pixels into channels and back, beside a shortcut without weights. diffusers has
such blocks (``AutoencoderKLHunyuanImageRefiner``) with other norms and with causal frames.

From: DC-AE (arXiv:2410.10733), section 3.2 (residual autoencoding).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

NUM_GROUPS = 32
EPS = 1e-6


def packed(x: Tensor, frames: int) -> Tensor:
    """[B, c, f * frames, 2 h, 2 w] -> [B, frames * 4 * c, f, h, w]."""
    num, c, f, h, w = x.shape
    made = x.reshape(num, c, f // frames, frames, h // 2, 2, w // 2, 2).permute(0, 3, 5, 7, 1, 2, 4, 6)
    return made.reshape(num, -1, f // frames, h // 2, w // 2)


def unpacked(x: Tensor, frames: int) -> Tensor:
    """The reverse of ``packed``."""
    num, _, f, h, w = x.shape
    made = x.reshape(num, frames, 2, 2, -1, f, h, w).permute(0, 4, 5, 1, 6, 2, 7, 3)
    return made.reshape(num, -1, f * frames, 2 * h, 2 * w)


def mean_of_groups(x: Tensor, num_channels: int) -> Tensor:
    """Channels that stand together, averaged: [B, c, ...] -> [B, num_channels, ...]."""
    return x.unflatten(1, (num_channels, -1)).mean(2)


def _norm(num_channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(NUM_GROUPS, num_channels, eps=EPS)


class Block(nn.Module):
    """A residual block; names as in the checkpoint."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = _norm(num_inputs), _norm(num_outputs)
        self.conv1 = nn.Conv3d(num_inputs, num_outputs, 3, padding=1)
        self.conv2 = nn.Conv3d(num_outputs, num_outputs, 3, padding=1)
        self.nin_shortcut = nn.Identity() if num_inputs == num_outputs else nn.Conv3d(num_inputs, num_outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.conv1(functional.silu(self.norm1(x)))
        return self.nin_shortcut(x) + self.conv2(functional.silu(self.norm2(inner)))


class AttentionBlock(nn.Module):
    """All places of all frames see each other."""

    def __init__(self, num_channels: int) -> None:
        super().__init__()
        self.norm = _norm(num_channels)
        self.q, self.k, self.v, self.proj_out = (nn.Conv3d(num_channels, num_channels, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        q, k, v = (one(normed).flatten(2).mT[:, None].contiguous() for one in (self.q, self.k, self.v))
        attended = functional.scaled_dot_product_attention(q, k, v)[:, 0].mT.reshape(x.shape)
        return x + self.proj_out(attended)


class Middle(nn.Module):
    def __init__(self, num_channels: int) -> None:
        super().__init__()
        self.block_1, self.attn_1 = Block(num_channels, num_channels), AttentionBlock(num_channels)
        self.block_2 = Block(num_channels, num_channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.block_2(self.attn_1(self.block_1(x)))


class Downsample(nn.Module):
    def __init__(self, num_inputs: int, num_outputs: int, frames: int) -> None:
        super().__init__()
        self.frames, self.num_outputs = frames, num_outputs
        self.conv = nn.Conv3d(num_inputs, num_outputs // (4 * frames), 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return packed(self.conv(x), self.frames) + mean_of_groups(packed(x, self.frames), self.num_outputs)


class Upsample(nn.Module):
    def __init__(self, num_inputs: int, num_outputs: int, frames: int) -> None:
        super().__init__()
        self.frames, self.num_copies = frames, 4 * frames * num_outputs // num_inputs
        self.conv = nn.Conv3d(num_inputs, 4 * frames * num_outputs, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        copies = x.repeat_interleave(self.num_copies, dim=1)
        return unpacked(self.conv(x), self.frames) + unpacked(copies, self.frames)


class Level(nn.Module):
    """Blocks of one size, and what leads to the next one."""

    def __init__(self, num_inputs: int, num_outputs: int, num_blocks: int) -> None:
        super().__init__()
        self.block = nn.ModuleList(Block(num_outputs if one else num_inputs, num_outputs) for one in range(num_blocks))
        self.downsample: nn.Module = nn.Identity()
        self.upsample: nn.Module = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.block:
            x = block(x)
        return self.upsample(self.downsample(x))


def _num_levels(settings: Mapping[str, Any]) -> tuple[int, int]:
    """How many levels change sides; how many of those frames."""
    return int(math.log2(settings["ffactor_spatial"])), int(math.log2(settings["ffactor_temporal"]))


class Encoder(nn.Module):
    """[B, 3, H, W] from -1 to 1 -> mean of the latents, [B, z, H / 16, W / 16].

    Args:
        settings: section ``vae`` of the configuration.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__()
        sizes, self.num_latents = settings["block_out_channels"], settings["latent_channels"]
        num_sides, num_frames = _num_levels(settings)
        self.num_copies = settings["ffactor_temporal"]
        self.conv_in = nn.Conv3d(settings["in_channels"], sizes[0], 3, padding=1)
        self.down, before = nn.ModuleList(), sizes[0]
        for index, size in enumerate(sizes):
            level = Level(before, size, settings["layers_per_block"])
            before = size
            if index < num_sides:
                before = sizes[min(index + 1, len(sizes) - 1)] if settings["downsample_match_channel"] else size
                level.downsample = Downsample(size, before, 1 + (index >= num_sides - num_frames))
            self.down.append(level)
        self.mid, self.norm_out = Middle(before), _norm(before)
        self.conv_out = nn.Conv3d(before, 2 * self.num_latents, 3, padding=1)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.conv_in(pixels[:, :, None].expand(-1, -1, self.num_copies, -1, -1))
        for level in self.down:
            x = level(x)
        x = self.mid(x)
        made = self.conv_out(functional.silu(self.norm_out(x))) + mean_of_groups(x, 2 * self.num_latents)
        return made[:, : self.num_latents, 0]


class Decoder(nn.Module):
    """Latents, [B, z, h, w] -> [B, 3, 16 h, 16 w] from -1 to 1."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__()
        sizes, num_latents = settings["block_out_channels"][::-1], settings["latent_channels"]
        num_sides, num_frames = _num_levels(settings)
        self.num_copies = sizes[0] // num_latents
        self.conv_in, self.mid = nn.Conv3d(num_latents, sizes[0], 3, padding=1), Middle(sizes[0])
        self.up, before = nn.ModuleList(), sizes[0]
        for index, size in enumerate(sizes):
            level = Level(before, size, settings["layers_per_block"] + 1)
            before = size
            if index < num_sides:
                before = sizes[min(index + 1, len(sizes) - 1)] if settings["upsample_match_channel"] else size
                level.upsample = Upsample(size, before, 1 + (index < num_frames))
            self.up.append(level)
        self.norm_out = _norm(before)
        self.conv_out = nn.Conv3d(before, settings["out_channels"], 3, padding=1)

    def forward(self, latents: Tensor) -> Tensor:
        z = latents[:, :, None]
        x = self.mid(self.conv_in(z) + z.repeat_interleave(self.num_copies, dim=1))
        for level in self.up:
            x = level(x)
        made: Tensor = self.conv_out(functional.silu(self.norm_out(x)))
        return made[:, :, -1]


class AutoEncoder(nn.Module):
    """Both, with the names of the checkpoint."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__()
        self.encoder, self.decoder = Encoder(settings), Decoder(settings)


def decoded_bytes(pixels: Tensor) -> Tensor:
    """[B, 3, H, W] from -1 to 1 -> [B, H, W, 3] uint8, rounded."""
    return ((pixels / 2 + 0.5).clamp(0, 1) * 255).round().permute(0, 2, 3, 1).to(torch.uint8)
