"""Latents as tokens: a token of the canvas is a latent, 16 by 16 pixels, between convolutions that know the time."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

WAVE_SIZE = 256
MAX_PERIOD = 10000.0
TIME_SCALE = 1000.0  # of the model's times, whose flow here is from 1 to 0
NUM_GROUPS = 32


def tokens_of(latent: Tensor) -> Tensor:
    """[channels, h, w] -> [h * w, channels]."""
    return latent.flatten(1).T


def latent_of(tokens: Tensor, grid: tuple[int, int]) -> Tensor:
    """The reverse of ``tokens_of``."""
    return tokens.T.unflatten(1, grid)


class TimeEmbedder(nn.Module):
    """A time from 0 to 1 -> [hidden_size]."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(WAVE_SIZE, hidden_size), nn.GELU(), nn.Linear(hidden_size, hidden_size))

    def forward(self, time: Tensor) -> Tensor:
        half = WAVE_SIZE // 2
        rates = torch.exp(-math.log(MAX_PERIOD) * torch.arange(half, dtype=torch.float32, device=time.device) / half)
        angles = time.float() * TIME_SCALE * rates
        wave = torch.cat((angles.cos(), angles.sin()))
        return self.mlp(wave.to(self.mlp[0].weight.dtype))


class TimedBlock(nn.Module):
    """A residual block whose scale and shift are of the time; names as in the checkpoint."""

    def __init__(self, num_inputs: int, num_outputs: int, time_size: int) -> None:
        super().__init__()
        self.in_layers = nn.Sequential(
            nn.GroupNorm(NUM_GROUPS, num_inputs), nn.SiLU(), nn.Conv2d(num_inputs, num_outputs, 3, padding=1)
        )
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(time_size, 2 * num_outputs))
        self.out_layers = nn.Sequential(
            nn.GroupNorm(NUM_GROUPS, num_outputs),
            nn.SiLU(),
            nn.Identity(),  # dropout of the training
            nn.Conv2d(num_outputs, num_outputs, 3, padding=1),
        )
        self.skip_connection = nn.Conv2d(num_inputs, num_outputs, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """[1, num_inputs, h, w] -> [1, num_outputs, h, w]."""
        scale, shift = self.emb_layers(time)[None, :, None, None].chunk(2, dim=1)
        inner = self.out_layers[0](self.in_layers(x)) * (1 + scale) + shift
        return self.skip_connection(x) + self.out_layers[1:](inner)


class PatchEmbedder(nn.Module):
    """Latents -> rows of the language model."""

    def __init__(self, num_channels: int, inner_size: int, hidden_size: int) -> None:
        super().__init__()
        self.model = nn.ModuleList(
            (nn.Conv2d(num_channels, inner_size, 3, padding=1), TimedBlock(inner_size, hidden_size, hidden_size))
        )

    def forward(self, latent: Tensor, time: Tensor) -> Tensor:
        return self.model[1](self.model[0](latent), time)


class FinalLayer(nn.Module):
    """Hidden states of latents -> their velocities."""

    def __init__(self, num_channels: int, inner_size: int, hidden_size: int) -> None:
        super().__init__()
        last = nn.Sequential(
            nn.GroupNorm(NUM_GROUPS, inner_size), nn.SiLU(), nn.Conv2d(inner_size, num_channels, 3, padding=1)
        )
        self.model = nn.ModuleList((TimedBlock(hidden_size, inner_size, hidden_size), last))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return self.model[1](self.model[0](x, time))


class LatentEmbedder(nn.Module):
    """What stands between latents and the language model, in both directions."""

    def __init__(self, num_channels: int, inner_size: int, hidden_size: int) -> None:
        super().__init__()
        self.num_channels = num_channels  # of a token
        self.patch_embed = PatchEmbedder(num_channels, inner_size, hidden_size)
        self.final_layer = FinalLayer(num_channels, inner_size, hidden_size)
        self.time_embed, self.timestep_emb, self.time_embed_2 = (TimeEmbedder(hidden_size) for _ in range(3))

    def embed(self, latents: Tensor, grid: tuple[int, int], time: Tensor) -> Tensor:
        """Latents at a time as embeddings, behind one of the time: [N, channels] -> [1 + N, hidden_size]."""
        latent = latent_of(latents, grid).to(self.patch_embed.model[0].weight.dtype)
        rows = self.patch_embed(latent[None], self.time_embed(time))[0]
        return torch.cat((self.timestep_emb(time)[None], tokens_of(rows)))

    def velocities(self, hidden_states: Tensor, grid: tuple[int, int], time: Tensor) -> Tensor:
        """[N, hidden_size] -> [N, channels], float32."""
        made = self.final_layer(latent_of(hidden_states, grid)[None], self.time_embed_2(time))
        return tokens_of(made[0]).float()
