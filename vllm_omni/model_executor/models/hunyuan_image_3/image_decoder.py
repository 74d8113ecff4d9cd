"""``HunyuanImage3ImageDecoder``: a picture's last latents -> pixels, always in float32."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedConfig
from vllm.config import VllmConfig

from vllm_omni.messages.canvas_step import GRID, LATENTS, NUM_STEPS, STEP
from vllm_omni.model_executor.generation_model import GenerationConfig, GenerationModel
from vllm_omni.model_executor.models.hunyuan_image_3.autoencoder import Decoder, decoded_bytes
from vllm_omni.model_executor.models.hunyuan_image_3.latents import latent_of
from vllm_omni.model_executor.stage_model import check_all_loaded

ARCHITECTURE = "HunyuanImage3ImageDecoder"
PREFIX = "vae.decoder."
PREVIEW_SIDE = 16  # latents along the longer side of a preview, which is decoded from averages


class Picture(NamedTuple):
    latent: Tensor | None  # [channels, h, w], float32, host; None: there is progress alone
    is_decoded: bool  # or wanted as it is
    progress: dict[str, Any]  # of a picture that is not complete: ``step`` and ``num_steps``


def decoder_hf_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """``hf_overrides`` of the decoder's stage."""
    if not hasattr(config, "image_base_size"):  # vLLM also passes a dummy, to ask whether the model type changes
        return config
    return GenerationConfig(architectures=[ARCHITECTURE], model_config=config.vae, dtype="float32")


class HunyuanImage3ImageDecoder(GenerationModel):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        settings: dict[str, Any] = vllm_config.model_config.hf_config.model_config
        self._scale: float = settings["scaling_factor"]
        self.decoder = Decoder(settings).float()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        own = dict(self.decoder.named_parameters())
        loaded = set()
        for name, tensor in weights:
            if name.startswith(PREFIX) and (parameter := own.get(name.removeprefix(PREFIX))) is not None:
                parameter.data.copy_(tensor)
                loaded.add(f"decoder.{name.removeprefix(PREFIX)}")
        check_all_loaded(self, loaded)
        return loaded

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
            return Picture(None, False, progress)
        rows, columns = payload[GRID]
        tokens: Tensor = payload[LATENTS]
        if len(tokens) != rows * columns:
            raise ValueError(f"{len(tokens)} latents are no grid of {rows} by {columns}")
        latent = latent_of(tokens.float(), (rows, columns)).contiguous().clone()
        return Picture(latent, args["output_type"] == "media", progress)

    def generate(self, batch: Sequence[Picture]) -> list[dict[str, Any]]:
        """Decode pictures one by one: their sizes differ, and each fills the device.

        Returns:
            For each, ``images``: uint8 [1, H, W, 3]; or ``latents``: float32 [1, channels, H / 16, W / 16]; or the
            report of a step, maybe with a ``preview``: uint8 [h, w, 3].
        """
        return [self._answer(one) for one in batch]

    def _answer(self, picture: Picture) -> dict[str, Any]:
        if picture.latent is None:
            return picture.progress
        latent = picture.latent[None]
        if picture.progress:
            size = math.ceil(max(latent.shape[2:]) / PREVIEW_SIDE)
            small = functional.avg_pool2d(latent, size, ceil_mode=True)
            return {"preview": self._decode(small)[0], **picture.progress}
        return {"images": self._decode(latent)} if picture.is_decoded else {"latents": latent}

    def _decode(self, latent: Tensor) -> Tensor:
        return decoded_bytes(self.decoder(latent.to(self.decoder.conv_in.weight.device) / self._scale))
