"""Latents as tokens: a token of the canvas is a patch of two by two latents, 16 by 16 pixels."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

PATCH = 2  # latents in each direction
WAVE_SIZE = 256
MAX_PERIOD = 10000.0


def tokens_of(latent: Tensor) -> Tensor:
    """[channels, h, w] -> [h/2 * w/2, 4 * channels]."""
    channels, height, width = latent.shape
    patches = latent.reshape(channels, height // PATCH, PATCH, width // PATCH, PATCH).permute(1, 3, 2, 4, 0)
    return patches.reshape(-1, PATCH * PATCH * channels)


def latent_of(tokens: Tensor, grid: tuple[int, int]) -> Tensor:
    """The reverse of ``tokens_of``."""
    rows, columns = grid
    patches = tokens.reshape(rows, columns, PATCH, PATCH, -1).permute(4, 0, 2, 1, 3)
    return patches.reshape(-1, PATCH * rows, PATCH * columns)


def places_of(grid: tuple[int, int], side: int, device: torch.device) -> Tensor:
    """The rows of a table for ``side`` by ``side`` cells that belong to a grid at its corner: [cells] int64."""
    rows, columns = (torch.arange(one, device=device) for one in grid)
    return (rows[:, None] * side + columns).flatten()


class PositionTable(nn.Module):
    """Embeddings of the cells of a square grid, as the checkpoint has them."""

    def __init__(self, side: int, hidden_size: int) -> None:
        super().__init__()
        self.side = side
        self.pos_embed = nn.Parameter(torch.empty(side * side, hidden_size), requires_grad=False)

    def forward(self, grid: tuple[int, int]) -> Tensor:
        """[rows * columns, hidden_size]."""
        return self.pos_embed[places_of(grid, self.side, self.pos_embed.device)]


class TimeEmbedder(nn.Module):
    """A time from 0 to 1 -> [hidden_size]."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(WAVE_SIZE, hidden_size), nn.SiLU(), nn.Linear(hidden_size, hidden_size))

    def forward(self, time: Tensor) -> Tensor:
        half = WAVE_SIZE // 2
        rates = torch.exp(-math.log(MAX_PERIOD) * torch.arange(half, dtype=torch.float32, device=time.device) / half)
        angles = time.float() * rates
        wave = torch.cat((angles.cos(), angles.sin()))
        return self.mlp(wave.to(self.mlp[0].weight.dtype))


class LatentEmbedder(nn.Module):
    """What stands between latents and the language model, in both directions."""

    def __init__(self, num_channels: int, max_latent_size: int, hidden_size: int) -> None:
        super().__init__()
        self.num_channels = PATCH * PATCH * num_channels  # of a token
        self.vae2llm = nn.Linear(self.num_channels, hidden_size)
        self.llm2vae = nn.Linear(hidden_size, self.num_channels)
        self.time_embedder = TimeEmbedder(hidden_size)
        self.latent_pos_embed = PositionTable(max_latent_size, hidden_size)

    def embed(self, latents: Tensor, grid: tuple[int, int], time: Tensor) -> Tensor:
        """Latents at a time as embeddings: [N, channels of a token] -> [N, hidden_size]."""
        embedded = functional.linear(latents.to(self.vae2llm.weight), self.vae2llm.weight, self.vae2llm.bias)
        return embedded + self.time_embedder(time) + self.latent_pos_embed(grid)

    def velocities(self, hidden_states: Tensor) -> Tensor:
        """[N, hidden_size] -> [N, channels of a token], float32."""
        return self.llm2vae(hidden_states).float()
