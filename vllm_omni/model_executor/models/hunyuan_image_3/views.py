"""``ImageViews``: images as the language model understands them, by SigLIP2 on a fixed number of places.

Places without a patch stay in the sequence, where no patch sees them. vLLM's attention of encoders has no such mask, so
the encoder is transformers' own, whole on each rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Siglip2VisionConfig, Siglip2VisionModel

FIELDS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_channels", "num_patches",
    "patch_size", "hidden_act", "layer_norm_eps", "attention_dropout", "vision_use_head",
)  # fmt: skip
"""Of the configuration's section ``vit``; it has more, which are not of the model."""


class Aligner(nn.Module):
    """Names as in the checkpoint."""

    def __init__(self, size: int, hidden_size: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(size, hidden_size), nn.GELU(), nn.Linear(hidden_size, hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class ImageViews(nn.Module):
    def __init__(self, settings: Mapping[str, Any], hidden_size: int) -> None:
        super().__init__()
        config = Siglip2VisionConfig(**{name: settings[name] for name in FIELDS if name in settings})
        config._attn_implementation = "sdpa"
        self.vision_model = Siglip2VisionModel(config)
        self.vision_aligner = Aligner(config.hidden_size, hidden_size)

    def forward(self, patches: Tensor, grid: Tensor) -> Tensor:
        """One image.

        Args:
            patches: [places, 3 * patch_size**2], from -1 to 1; first those of the image.
            grid: their rows and columns, [2].

        Returns:
            [places, hidden_size of the language model].
        """
        weight = self.vision_aligner.layers[0].weight
        is_patch = torch.arange(len(patches), device=weight.device) < int(grid.prod())
        seen = self.vision_model(patches[None].to(weight), is_patch[None].int(), grid[None].cpu()).last_hidden_state[0]
        return self.vision_aligner(seen)
