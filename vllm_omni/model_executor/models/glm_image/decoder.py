"""``GlmImageDecoder``: diffusers' pipeline without its language model, whose codes come from another stage."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
from diffusers import GlmImagePipeline
from PIL import Image
from torch import Tensor
from transformers import PreTrainedConfig

from vllm_omni.model_executor.generation_model import GenerationConfig
from vllm_omni.model_executor.models.glm_image.sizes import picture_size

TOKENS = "tokens"
"""Argument of the pipeline: the ids of the language model's prompt and of what it has written, [n, 1] int64. Codes of
images stand in the places of their tokens; the picture's codes come last."""


def decoder_hf_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """``hf_overrides`` of the diffusion stage."""
    if isinstance(config, GenerationConfig):  # vLLM also passes a dummy, to ask whether the model type changes
        changes = {"_class_name": f"{__name__}:GlmImageDecoder", "vision_language_encoder": [None, None]}
        config.model_config = {**(config.model_config or {}), **changes}
    return config


class GlmImageDecoder(GlmImagePipeline):
    """See the module's docstring. Without ``tokens``, as in the check at start, all codes are 0."""

    def __call__(self, *, tokens: Tensor | None = None, **arguments: Any) -> Any:
        images = arguments.get("image") or []
        height, width = picture_size(arguments.get("height"), arguments.get("width"), images)
        self._tokens = tokens  # a request calls a copy of its own
        return super().__call__(**{**arguments, "height": height, "width": width})

    # What a request may set is read from the signature.
    __call__.__signature__ = inspect.signature(GlmImagePipeline.__call__).replace(  # type: ignore[attr-defined]
        parameters=[
            *inspect.signature(GlmImagePipeline.__call__).parameters.values(),
            inspect.Parameter(TOKENS, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Tensor | None),
        ]
    )

    def generate_prior_tokens(
        self,
        prompt: str | list[str],
        height: int,
        width: int,
        image: list[list[Image.Image]] | None = None,
        device: torch.device | None = None,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, list[Tensor] | None, list[Tensor] | None]:
        """The codes of the picture and of the images that it is generated from; arguments as upstream.

        Raises:
            ValueError: the language model has written another number of codes.
        """
        rows, columns, *preview = self.processor._get_target_shape(height, width)
        if image is None:
            _, _, written = self._codes(0, math.prod(preview), rows * columns)
            return self._upsample_token_ids(written.to(device), rows, columns), None, None
        grids = self.processor.image_processor(image[0], return_tensors="pt")["image_grid_thw"]
        read, _, written = self._codes(int(grids.prod(-1).sum()), 0, rows * columns)
        of_images = [
            self._upsample_token_ids(codes, *grid[1:].tolist())[0]
            for grid, codes in zip(grids, read.to(device).split(grids.prod(-1).tolist()), strict=True)
        ]
        prior = self._upsample_token_ids(written.to(device), rows, columns)
        return prior, [torch.cat(of_images)], [grids * torch.tensor([1, 2, 2])]

    def _codes(self, *counts: int) -> Sequence[Tensor]:
        """The codes of the images in the prompt, of the preview, and of the picture."""
        if self._tokens is None:
            return [torch.zeros(count, dtype=torch.int64) for count in counts]
        tokens = self._tokens.flatten()
        num_codes: int = self.transformer.config.prior_vq_quantizer_codebook_size
        codes = tokens[tokens < num_codes]  # texts and markers have higher ids
        if len(codes) != sum(counts):
            raise ValueError(f"the language model has read and written {len(codes)} codes instead of {sum(counts)}")
        return codes.split(list(counts))
