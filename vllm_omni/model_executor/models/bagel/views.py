"""``ImageViews``: images as the language model understands them, by SigLIP on patches of any grid."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import MMEncoderAttention
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
from vllm.model_executor.models.siglip import SiglipEncoder

from vllm_omni.model_executor.models.bagel.latents import PositionTable, places_of


class PatchEmbedder(nn.Module):
    """Patches and their places: the checkpoint has the convolution as a linear layer."""

    def __init__(self, config: PreTrainedConfig, side: int) -> None:
        super().__init__()
        self.patch_size, self.side = config.patch_size, side
        self.patch_embedding = nn.Linear(config.num_channels * config.patch_size**2, config.hidden_size)
        self.position_embedding = nn.Embedding((config.image_size // config.patch_size) ** 2, config.hidden_size)

    def forward(self, pixels: Tensor, grid: tuple[int, int]) -> Tensor:
        rows, columns, size = *grid, self.patch_size
        patches = pixels.reshape(-1, rows, size, columns, size).permute(1, 3, 2, 4, 0).reshape(rows * columns, -1)
        return self.patch_embedding(patches) + self.position_embedding(places_of(grid, self.side, pixels.device))


class Connector(nn.Module):
    def __init__(self, size: int, hidden_size: int, prefix: str) -> None:
        super().__init__()
        self.fc1 = ColumnParallelLinear(size, hidden_size, prefix=f"{prefix}.fc1")
        self.fc2 = RowParallelLinear(hidden_size, hidden_size, prefix=f"{prefix}.fc2")

    def forward(self, x: Tensor) -> Tensor:
        inner, _ = self.fc1(x)
        made: Tensor = self.fc2(functional.gelu(inner, approximate="tanh"))[0]
        return made


class VisionModel(nn.Module):
    """SigLIP's encoder without its head; names as in the checkpoint."""

    def __init__(self, vllm_config: VllmConfig, config: PreTrainedConfig, side: int, prefix: str) -> None:
        super().__init__()
        self.embeddings = PatchEmbedder(config, side)
        # As in the published files: the configuration counts a layer more than there is.
        self.encoder = SiglipEncoder(
            config,
            vllm_config.quant_config,
            config.num_hidden_layers - 1,
            prefix=f"{prefix}.encoder",
            attn_cls=MMEncoderAttention,
        )
        self.post_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, pixels: Tensor, grid: tuple[int, int]) -> Tensor:
        x = self.encoder(self.embeddings(pixels, grid)[None], return_all_hidden_states=False)
        return self.post_layernorm(x)[0]


class ImageViews(nn.Module):
    def __init__(self, vllm_config: VllmConfig, config: PreTrainedConfig, prefix: str = "") -> None:
        super().__init__()
        vit, side = config.vit_config, config.vit_max_num_patch_per_side
        hidden_size = config.llm_config.hidden_size
        self.patch_size = vit.patch_size
        self.vision_model = VisionModel(vllm_config, vit, side, f"{prefix}.vision_model")
        self.connector = Connector(vit.hidden_size, hidden_size, f"{prefix}.connector")
        self.vit_pos_embed = PositionTable(side, hidden_size)

    def forward(self, pixels: Tensor) -> Tensor:
        """An image, [3, H, W] from -1 to 1 -> [rows * columns, hidden_size of the language model]."""
        grid = pixels.shape[1] // self.patch_size, pixels.shape[2] // self.patch_size
        embedded = self.vision_model(pixels.to(self.vit_pos_embed.pos_embed), grid)
        return self.connector(embedded) + self.vit_pos_embed(grid).to(embedded)
