"""diffusers' own pipeline of GLM-Image, whose language model is transformers': greedy, and repaired for images.

diffusers 0.42 joins what transformers' image encoder returns, a tensor [channels, rows, columns] for each image, into
one, of which the quantizer then reads each channel as an image: any request with images fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from diffusers import GlmImagePipeline
from PIL import Image
from torch import Tensor


class Reference:
    """One request at a time.

    Attributes:
        codes: that the language model has written for the last request, previews and the end of the image included.
    """

    def __init__(self, path: Path) -> None:
        self.pipeline = GlmImagePipeline.from_pretrained(path, dtype=torch.float32)
        self.pipeline.set_progress_bar_config(disable=True)
        self.codes: list[int] = []
        model = self.pipeline.vision_language_encoder
        self._generate, self._features, self._tokens = model.generate, model.get_image_features, model.get_image_tokens
        self._images: list[Tensor] = []
        model.generate, model.get_image_features, model.get_image_tokens = self.generate, self.features, self.tokens

    def generate(self, **kwargs: Any) -> Tensor:
        ids: Tensor = self._generate(**{**kwargs, "do_sample": False})
        self.codes = ids[0, kwargs["input_ids"].shape[1] :].tolist()
        return ids

    def features(self, *args: Any, **kwargs: Any) -> Any:
        made = self._features(*args, **kwargs)
        if not args:  # transformers' own call
            return made
        self._images = made.pooler_output
        return SimpleNamespace(pooler_output=[torch.zeros(1)])

    def tokens(self, features: Tensor, grids: Tensor) -> Tensor:
        codes: Tensor = self._tokens(self._images)
        return codes

    def latents(self, prompt: str, images: Sequence[Image.Image], seed: int, **kwargs: Any) -> Tensor:
        """The picture's last latents, [1, channels, H / 8, W / 8]."""
        latents: Tensor = self.pipeline(
            prompt,
            image=list(images) or None,
            generator=torch.Generator().manual_seed(seed),
            output_type="latent",
            **kwargs,
        ).images
        return latents
