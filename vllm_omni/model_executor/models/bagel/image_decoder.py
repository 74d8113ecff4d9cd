"""``BagelImageDecoder``: a picture's last latents -> pixels, always in float32."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedConfig
from vllm.config import VllmConfig

from vllm_omni.messages.canvas_step import GRID, LATENTS, NUM_STEPS, STEP
from vllm_omni.model_executor.generation_model import GenerationConfig, GenerationModel
from vllm_omni.model_executor.models.bagel.config import load_vae, vae_file, vae_settings
from vllm_omni.model_executor.models.bagel.latents import latent_of

ARCHITECTURE = "BagelImageDecoder"


PREVIEW_SIDE = 32  # latents along the longer side of a preview, which is decoded from averages


class Picture(NamedTuple):
    tokens: Tensor | None  # [rows * columns, channels of a token], float32, host; None: there is progress alone
    grid: tuple[int, int]
    is_decoded: bool  # or wanted as it is
    progress: dict[str, Any]  # of a picture that is not complete: ``step`` and ``num_steps``


def decoder_hf_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """``hf_overrides`` of the decoder's stage."""
    if not hasattr(config, "vae_config"):  # vLLM also passes a dummy, to ask whether the model type changes
        return config
    return GenerationConfig(architectures=[ARCHITECTURE], model_config=vae_settings(config), dtype="float32")


class BagelImageDecoder(GenerationModel):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        model_config = vllm_config.model_config
        self._settings: dict[str, Any] = model_config.hf_config.model_config
        self._file = vae_file(model_config.model, model_config.revision)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load the auto-encoder's own file; the weights given are the language model's, and are not read."""
        self.vae = load_vae(self._file, self._settings)
        del self.vae.encoder  # another stage has it
        return {name for name, _ in self.vae.named_parameters()}

    def read(self, args: Mapping[str, Any]) -> Picture:
        """The latents of a request.

        Args:
            args: ``payloads``: one with ``latents`` and ``grid``, or the report of a step; ``output_type``: "media" or
                "latents".

        Raises:
            ValueError: they do not match.
        """
        (payload,) = args["payloads"]
        progress = {name: payload[name] for name in (STEP, NUM_STEPS) if name in payload}
        if LATENTS not in payload:
            return Picture(None, (0, 0), False, progress)
        rows, columns = payload[GRID]
        tokens: Tensor = payload[LATENTS]
        if len(tokens) != rows * columns:
            raise ValueError(f"{len(tokens)} latents are no grid of {rows} by {columns}")
        return Picture(tokens.float().clone(), (rows, columns), args["output_type"] == "media", progress)

    def generate(self, batch: Sequence[Picture]) -> list[dict[str, Any]]:
        """Decode pictures one by one: their sizes differ, and each fills the device.

        Returns:
            For each, ``images``: uint8 [1, H, W, 3]; or ``latents``: float32 [1, channels, H / 8, W / 8]; or the report
            of a step, maybe with a ``preview``: uint8 [h, w, 3].
        """
        return [self._answer(one) for one in batch]

    def _answer(self, picture: Picture) -> dict[str, Any]:
        if picture.tokens is None:
            return picture.progress
        latent = latent_of(picture.tokens, picture.grid)
        if picture.progress:
            size = math.ceil(max(latent.shape[1:]) / PREVIEW_SIDE)
            small = functional.avg_pool2d(latent[None], size, ceil_mode=True)[0]
            return {"preview": self._decode(small)[0], **picture.progress}
        return {"images": self._decode(latent)} if picture.is_decoded else {"latents": latent[None]}

    def _decode(self, latent: Tensor) -> Tensor:
        latent = latent.to(next(self.vae.parameters()).device)
        scaled = latent / self._settings["scale_factor"] + self._settings["shift_factor"]
        image = self.vae.decode(scaled[None]).sample
        # Truncated, as in the published code.
        return ((image * 0.5 + 0.5).clamp(0, 1) * 255).permute(0, 2, 3, 1).to(torch.uint8)
