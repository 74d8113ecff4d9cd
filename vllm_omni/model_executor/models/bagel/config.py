"""What a BAGEL checkpoint says of images, and what only its published code says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from diffusers import AutoencoderKL
from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint
from huggingface_hub import hf_hub_download
from PIL import Image
from safetensors.torch import load_file
from transformers import PreTrainedConfig

from vllm_omni.errors import ConfigError

TEXT_START, TEXT_END = "<|im_start|>", "<|im_end|>"
IMAGE_START, IMAGE_END = "<|vision_start|>", "<|vision_end|>"
PADS = ("<|image_pad|>", "<|endoftext|>")
"""Tokens in whose places embeddings stand: the first that the vocabulary has."""

PIXELS_PER_TOKEN = 16  # in each direction: the auto-encoder's 8, in patches of 2
VAE_FILE = "ae.safetensors"
FLUX_VAE = {
    "ch": 128,
    "ch_mult": [1, 2, 4, 4],
    "num_res_blocks": 2,
    "z_channels": 16,
    "scale_factor": 0.3611,
    "shift_factor": 0.1159,
}


class Sizes(NamedTuple):
    """Limits of an image's sides, in pixels."""

    longest: int
    shortest: int
    stride: int  # sides are multiples of it

    def of(self, size: tuple[int, int]) -> tuple[int, int]:
        """The sides nearest to an image's own that keep the limits and, roughly, its shape."""
        made = self._scaled(size, max(min(self.longest / max(size), 1.0), self.shortest / min(size)))
        return self._scaled(made, self.longest / max(made)) if max(made) > self.longest else made

    def _scaled(self, size: tuple[int, int], scale: float) -> tuple[int, int]:
        width, height = (max(self.stride, round(round(side * scale) / self.stride) * self.stride) for side in size)
        return width, height

    def resize(self, image: Image.Image) -> Image.Image:
        return image.convert("RGB").resize(self.of(image.size), Image.Resampling.BICUBIC)


LATENT_SIZES, VIEW_SIZES = Sizes(1024, 512, 16), Sizes(980, 224, 14)
"""As the auto-encoder and as the vision transformer get an image, one behind the other."""


class ImageSizes(NamedTuple):
    latents: Sizes
    view: Sizes

    @classmethod
    def of(cls, config: PreTrainedConfig) -> ImageSizes:
        """Those of the published code, or a small checkpoint's own, ``image_sizes`` of its configuration."""
        given: Mapping[str, Any] = getattr(config, "image_sizes", None) or {}
        return cls(Sizes(*given.get("latents", LATENT_SIZES)), Sizes(*given.get("view", VIEW_SIZES)))

    def latent_grid(self, size: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of the tokens of an image's latents, from its width and height."""
        width, height = self.latents.of(size)
        return height // self.latents.stride, width // self.latents.stride

    def view_grid(self, size: tuple[int, int]) -> tuple[int, int]:
        width, height = self.view.of(self.latents.of(size))
        return height // self.view.stride, width // self.view.stride


def vae_settings(config: PreTrainedConfig) -> dict[str, Any]:
    """The auto-encoder's shape, which published checkpoints do not have whole, and the scale of its latents."""
    return {**FLUX_VAE, **(config.vae_config or {})}


def vae_file(model: str, revision: str | None) -> Path:
    """The file of the auto-encoder.

    Raises:
        ConfigError: the checkpoint has none.
    """
    directory = Path(model).expanduser()
    if directory.is_dir():
        if not (directory / VAE_FILE).is_file():
            raise ConfigError(f"model {model!r}: it has no {VAE_FILE}, the auto-encoder of its pictures")
        return directory / VAE_FILE
    return Path(hf_hub_download(model, VAE_FILE, revision=revision))


def load_vae(file: Path, settings: Mapping[str, Any]) -> AutoencoderKL:
    """The checkpoint's auto-encoder as diffusers' own, float32 on the host."""
    num_levels = len(settings["ch_mult"])
    made = {
        "block_out_channels": [settings["ch"] * factor for factor in settings["ch_mult"]],
        "down_block_types": ["DownEncoderBlock2D"] * num_levels,
        "up_block_types": ["UpDecoderBlock2D"] * num_levels,
        "layers_per_block": settings["num_res_blocks"],
        "latent_channels": settings["z_channels"],
        "use_quant_conv": False,
        "use_post_quant_conv": False,
    }
    vae = AutoencoderKL(**made).float().eval()  # the default dtype is that of the stage
    vae.load_state_dict(convert_ldm_vae_checkpoint(load_file(file), made))
    return vae
