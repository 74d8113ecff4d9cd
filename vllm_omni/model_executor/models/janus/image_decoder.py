"""``JanusImageDecoder``: the tokens of a picture -> pixels, by the decoder of the VQ-VAE, always in float32."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import JanusVQVAEConfig, PreTrainedConfig
from transformers.models.janus.modeling_janus import JanusVQVAE
from vllm.config import VllmConfig

from vllm_omni.model_executor.generation_model import GenerationConfig, GenerationModel
from vllm_omni.model_executor.stage_model import check_all_loaded

ARCHITECTURE = "JanusImageDecoder"
PREFIX = "model.vqmodel."


class Picture(NamedTuple):
    codes: Tensor  # [number of tokens], int64
    is_decoded: bool  # or wanted as the codes' vectors


def decoder_hf_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """``hf_overrides`` of the decoder's stage."""
    if not hasattr(config, "vq_config"):  # vLLM also passes a dummy, to ask whether the model type changes
        return config
    return GenerationConfig(architectures=[ARCHITECTURE], model_config=config.vq_config.to_dict(), dtype="float32")


class JanusImageDecoder(GenerationModel):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = JanusVQVAEConfig.from_dict(vllm_config.model_config.hf_config.model_config)
        self.num_codes, self.num_tokens = config.num_embeddings, config.num_patches**2
        self.vq = JanusVQVAE(config)
        del self.vq.encoder, self.vq.quant_conv

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        own = dict(self.vq.named_parameters())
        loaded = set()
        for name, tensor in weights:
            if name.startswith(PREFIX) and (parameter := own.get(name.removeprefix(PREFIX))) is not None:
                parameter.data.copy_(tensor)
                loaded.add(f"vq.{name.removeprefix(PREFIX)}")
        check_all_loaded(self, loaded)
        return loaded

    def read(self, args: Mapping[str, Any]) -> Picture:
        """The tokens of a request.

        Args:
            args: ``codes``: list[int]; ``output_type``: "media" or "latents".

        Raises:
            ValueError: they are no picture.
        """
        codes = torch.tensor(args["codes"], dtype=torch.int64)
        if len(codes) != self.num_tokens:
            raise ValueError(f"{len(codes)} tokens are no picture, which has {self.num_tokens}")
        if codes.min() < 0 or codes.max() >= self.num_codes:
            raise ValueError(f"a picture's tokens are from 0 to {self.num_codes - 1}")
        return Picture(codes, args["output_type"] == "media")

    def generate(self, batch: Sequence[Picture]) -> list[dict[str, Tensor]]:
        """Decode pictures of one size.

        Returns:
            For each, ``images``: uint8 [1, H, W, 3]; or ``latents``: float32 [1, embed_dim, rows, columns].
        """
        codes = torch.stack([one.codes for one in batch]).to(self.vq.post_quant_conv.weight.device)
        latents = self.vq.quantize.get_codebook_entry(codes)
        made: list[dict[str, Tensor]] = [{"latents": one[None]} for one in latents]
        decoded = [index for index, one in enumerate(batch) if one.is_decoded]
        if decoded:
            pixels = self.vq.decoder(self.vq.post_quant_conv(latents[decoded]))
            for index, one in zip(decoded, images_of(pixels), strict=True):
                made[index] = {"images": one[None]}
        return made


def images_of(pixels: Tensor) -> Tensor:
    """[N, 3, H, W] from -1 to 1 -> [N, H, W, 3] uint8, truncated as by transformers' processor."""
    return ((pixels.clamp(-1, 1) + 1) / 2 * 255).permute(0, 2, 3, 1).to(torch.uint8)
