"""``HunyuanImage3LanguageModel``: the language model that reads text and images, writes text, and denoises pictures.

Positions of images have two axes (``unified/layout.py``: ``GRID``); those of texts are equal in both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from vllm.config import VllmConfig
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.interfaces import MultiModalEmbeddings, SupportsMRoPE, SupportsMultiModal
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.sequence import IntermediateTensors
from vllm.tokenizers import cached_tokenizer_from_config

from vllm_omni.messages.canvas_step import DENOISES
from vllm_omni.model_executor.models.hunyuan_image_3.autoencoder import Encoder
from vllm_omni.model_executor.models.hunyuan_image_3.backbone import Backbone, split_weights
from vllm_omni.model_executor.models.hunyuan_image_3.config import AXES, IMAGE, Sizes, TokenIds
from vllm_omni.model_executor.models.hunyuan_image_3.latents import LatentEmbedder, tokens_of
from vllm_omni.model_executor.models.hunyuan_image_3.processing import (
    PIXELS,
    VIEW,
    VIEW_GRID,
    HunyuanImage3DummyInputs,
    HunyuanImage3ProcessingInfo,
    HunyuanImage3Processor,
    view_grid,
)
from vllm_omni.model_executor.models.hunyuan_image_3.views import ImageViews
from vllm_omni.model_executor.stage_model import check_all_loaded
from vllm_omni.unified.layout import IMAGE_LAYOUT
from vllm_omni.unified.spans import grid_positions

ARCHITECTURE = "HunyuanImage3LanguageModel"
ENCODER = "vae.encoder."


def language_hf_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """``hf_overrides`` of the language model's stage."""
    if hasattr(config, "image_base_size"):  # vLLM also passes a dummy, to ask whether the model type changes
        config.architectures = [ARCHITECTURE]
        config.head_dim = config.attention_head_dim
        config.rope_parameters = {**config.rope_parameters, "mrope_section": AXES}
        # Images see each other by the runner's own metadata (``worker/canvases.py``), which all backends can.
        config.is_mm_prefix_lm = False
        setattr(config, DENOISES, True)
        setattr(config, IMAGE_LAYOUT, "grid")
    return config


@MULTIMODAL_REGISTRY.register_processor(
    HunyuanImage3Processor, info=HunyuanImage3ProcessingInfo, dummy_inputs=HunyuanImage3DummyInputs
)
class HunyuanImage3LanguageModel(nn.Module, SupportsMultiModal, SupportsMRoPE):
    """See the module's docstring.

    Attributes:
        num_canvas_channels: of a token of a canvas.
        end_of_picture: the token that ends a request with its picture.
    """

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_stacked={
            ".qkv_proj.q": (".qkv_proj", "q"),
            ".qkv_proj.k": (".qkv_proj", "k"),
            ".qkv_proj.v": (".qkv_proj", "v"),
            ".shared_mlp.gate_proj": (".shared_mlp.gate_up_proj", 0),
            ".shared_mlp.up_proj": (".shared_mlp.gate_up_proj", 1),
        },
        orig_to_new_substr={".mlp.gate.wg.": ".mlp.gate."},
        orig_to_new_prefix={
            "patch_embed.": "latents.patch_embed.",
            "final_layer.": "latents.final_layer.",
            "time_embed.": "latents.time_embed.",
            "time_embed_2.": "latents.time_embed_2.",
            "timestep_emb.": "latents.timestep_emb.",
            "vision_aligner.": "views.vision_aligner.",
            "vision_model.": "views.vision_model.",
            ENCODER: "encoder.",
            "vae.decoder.": None,  # another stage has it
        },
    )

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        if modality == "image":
            return IMAGE
        raise ValueError(f"{modality} is no input of this model: valid: image")

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        model_config = vllm_config.model_config
        config = model_config.hf_config
        self.config = config
        with self._mark_language_model(vllm_config):
            self.model = Backbone(vllm_config=vllm_config, config=config, prefix=maybe_prefix(prefix, "model"))
            self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, prefix=maybe_prefix(prefix, "lm_head"))
        self.logits_processor = LogitsProcessor(config.vocab_size)
        num_channels = config.vae["latent_channels"]
        self.latents = LatentEmbedder(num_channels, config.patch_embed_hidden_dim, config.hidden_size)
        with self._mark_tower_model(vllm_config, "image"):
            self.views = ImageViews(config.vit, config.hidden_size)
            self.encoder = Encoder(config.vae).float()
        self._sizes = Sizes(config.image_base_size)
        self._ids = TokenIds(cached_tokenizer_from_config(model_config).get_vocab(), self._sizes.base)
        self.num_canvas_channels = num_channels
        self.end_of_picture = self._ids.image_end

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        split = split_weights(self.config, weights)
        loaded = AutoWeightsLoader(self).load_weights(split, mapper=self.hf_to_vllm_mapper)
        check_all_loaded(self, loaded)
        return loaded

    # -- vLLM's model interface ---------------------------------------------------------------------------------------

    def get_language_model(self) -> nn.Module:
        return self.model

    def embed_multimodal(self, **kwargs: object) -> MultiModalEmbeddings:
        """The rows of the prompts' images, each [num_tokens, hidden_size]: a time, its latents, its view."""
        pixels: Any = kwargs.get(PIXELS)
        if pixels is None:
            return []
        views, grids = (kwargs[name] for name in (VIEW, VIEW_GRID))
        return [
            torch.cat((self._embed_latents(image), self.views(view, grid)))
            for image, view, grid in zip(pixels, views, grids, strict=True)  # type: ignore[call-overload]
        ]

    def _embed_latents(self, pixels: Tensor) -> Tensor:
        """The mean of an image's latents as embeddings, [1 + N, hidden_size], at the end of the flow."""
        weight = self.encoder.conv_in.weight
        latent = self.encoder(pixels[None].to(weight))[0] * self.config.vae["scaling_factor"]
        grid = latent.shape[1], latent.shape[2]
        return self.latents.embed(tokens_of(latent), grid, torch.zeros((), device=weight.device))

    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: Sequence[MultiModalFeatureSpec]
    ) -> tuple[Tensor, int]:
        """Slots, rows and columns of a prompt's tokens, [3, num_tokens] int64; later ones have their slots."""
        positions = torch.arange(len(input_tokens)).repeat(3, 1)
        for feature in mm_features:
            (time, last), (view, _) = feature.mm_position.extract_embeds_range()  # inclusive
            # Of the ids alone: an engine that pulls the pages of a prompt does not get its images.
            grid = self._sizes.grids[input_tokens[time - 1] - self._ids.first_ratio]
            rows, columns = view_grid(grid, self.config.vit_processor)
            positions[1:, time + 1 : last + 1] = grid_positions(time + 1, grid)
            positions[1:, view : view + rows * columns] = grid_positions(view, (rows, columns))
        return positions, 0

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
        latent_rows: Tensor | None = None,
        **kwargs: object,
    ) -> Tensor:
        if inputs_embeds is None:
            assert input_ids is not None
            inputs_embeds = self.model.embed_input_ids(input_ids)
        return self.model(positions, inputs_embeds)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        return self.logits_processor(self.lm_head, self.model.ln_f(hidden_states))

    # -- hooks of a model that denoises (``stage_model.Denoises``) ----------------------------------------------------

    def embed_canvas(self, latents: Tensor, grid: tuple[int, int], time: Tensor) -> Tensor:
        return self.latents.embed(latents, grid, time)

    def velocities(self, hidden_states: Tensor, grid: tuple[int, int], time: Tensor) -> Tensor:
        return self.latents.velocities(hidden_states, grid, time)
