"""``BagelLanguageModel``: the language model that reads text and images, writes text, and denoises pictures.

An image in a prompt is one or two spans between markers: its latents, for answers that are pictures, and its view. All
tokens of a span share one position and see each other (``unified/spans.py``), and so do those of a canvas.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from vllm.config import VllmConfig
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.interfaces import MultiModalEmbeddings, SupportsMultiModal
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.sequence import IntermediateTensors
from vllm.tokenizers import cached_tokenizer_from_config

from vllm_omni.messages.canvas_step import DENOISES
from vllm_omni.model_executor.models.bagel.config import load_vae, vae_file, vae_settings
from vllm_omni.model_executor.models.bagel.latents import LatentEmbedder, tokens_of
from vllm_omni.model_executor.models.bagel.mixture import Kinds, MixtureModel
from vllm_omni.model_executor.models.bagel.processing import (
    PIXELS,
    PLACEHOLDER,
    VIEW,
    BagelDummyInputs,
    BagelProcessingInfo,
    BagelProcessor,
    TokenIds,
)
from vllm_omni.model_executor.models.bagel.views import ImageViews
from vllm_omni.model_executor.stage_model import check_all_loaded

ARCHITECTURE = "BagelLanguageModel"
LATENT_ROWS = "latent_rows"
"""Argument of ``forward``: the step's rows that are latents, ascending int64 on the device."""


def language_hf_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """``hf_overrides`` of the language model's stage."""
    if hasattr(config, "vit_config"):  # vLLM also passes a dummy, to ask whether the model type changes
        config.architectures = [ARCHITECTURE]
        # Spans see each other by the runner's own metadata (``worker/canvases.py``), which all backends can.
        config.is_mm_prefix_lm = False
        setattr(config, DENOISES, True)
    return config


@MULTIMODAL_REGISTRY.register_processor(BagelProcessor, info=BagelProcessingInfo, dummy_inputs=BagelDummyInputs)
class BagelLanguageModel(nn.Module, SupportsMultiModal):
    """See the module's docstring.

    Attributes:
        num_canvas_channels: of a token of a canvas.
        end_of_picture: the token that ends a request with its picture.
    """

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_stacked={
            ".q_proj": (".qkv_proj", "q"),
            ".k_proj": (".qkv_proj", "k"),
            ".v_proj": (".qkv_proj", "v"),
            ".gate_proj": (".gate_up_proj", 0),
            ".up_proj": (".gate_up_proj", 1),
        },
        orig_to_new_prefix={
            "language_model.": "",
            "vit_model.": "views.",
            "connector.": "views.connector.",
            "vit_pos_embed.": "views.vit_pos_embed.",
            "vae2llm.": "latents.vae2llm.",
            "llm2vae.": "latents.llm2vae.",
            "time_embedder.": "latents.time_embedder.",
            "latent_pos_embed.": "latents.latent_pos_embed.",
            "encoder.": None,  # of the auto-encoder, which is loaded from its own file
            "decoder.": None,
        },
    )

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        if modality == "image":
            return PLACEHOLDER
        raise ValueError(f"{modality} is no input of this model: valid: image")

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        model_config = vllm_config.model_config
        config = model_config.hf_config
        self.config = config
        text = config.llm_config
        with self._mark_language_model(vllm_config):
            self.model = MixtureModel(vllm_config=vllm_config, config=text, prefix=maybe_prefix(prefix, "model"))
            self.lm_head = ParallelLMHead(text.vocab_size, text.hidden_size, prefix=maybe_prefix(prefix, "lm_head"))
        self.logits_processor = LogitsProcessor(text.vocab_size)
        with self._mark_tower_model(vllm_config, "image"):
            self.views = ImageViews(vllm_config, config, maybe_prefix(prefix, "views"))
        settings = vae_settings(config)
        self.latents = LatentEmbedder(settings["z_channels"], config.max_latent_size, text.hidden_size)
        self.num_canvas_channels = self.latents.num_channels
        ids = TokenIds.of(cached_tokenizer_from_config(model_config).get_vocab())
        self._marks = torch.tensor([ids.start, ids.end])
        self.end_of_picture = ids.end
        self._settings = settings
        self._vae_file = vae_file(model_config.model, model_config.revision)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        loaded = AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)
        check_all_loaded(self, loaded)
        vae = load_vae(self._vae_file, self._settings)
        del vae.decoder  # another stage has it
        self.vae = vae.to(self.latents.vae2llm.weight.device)
        return loaded | {name for name, _ in self.named_parameters() if name.startswith("vae.")}

    # -- vLLM's model interface ---------------------------------------------------------------------------------------

    def get_language_model(self) -> nn.Module:
        return self.model

    def embed_multimodal(self, **kwargs: object) -> MultiModalEmbeddings:
        """The rows of the prompts' images, each [num_tokens, hidden_size]: of its latents, if it has them; its view."""
        views: Any = kwargs.get(VIEW)
        if views is None:
            return []
        pixels: Any = kwargs.get(PIXELS)
        rows = [self.views(one) for one in views]
        if pixels is None:
            return rows
        return [torch.cat([self._embed_latents(one), two]) for one, two in zip(pixels, rows, strict=True)]

    def _embed_latents(self, pixels: Tensor) -> Tensor:
        """The mean of an image's latents as embeddings, [N, hidden_size], at the end of the flow."""
        given = pixels[None].to(self.latents.vae2llm.weight.device, torch.float32)
        mean = self.vae.encode(given).latent_dist.mean[0]
        latent = self._settings["scale_factor"] * (mean - self._settings["shift_factor"])
        grid = latent.shape[1] // 2, latent.shape[2] // 2
        return self.latents.embed(tokens_of(latent), grid, torch.zeros((), device=latent.device))

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
        kinds = None
        if latent_rows is not None:
            is_latent = torch.zeros(len(inputs_embeds), dtype=torch.bool, device=inputs_embeds.device)
            is_latent[latent_rows] = True
            kinds = Kinds((~is_latent).nonzero()[:, 0], latent_rows)
        return self.model(positions, inputs_embeds, kinds)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        return self.logits_processor(self.lm_head, hidden_states)

    # -- hooks of a model that denoises (``stage_model.Denoises``) ----------------------------------------------------

    def embed_canvas(self, latents: Tensor, grid: tuple[int, int], time: Tensor) -> Tensor:
        start, end = self.model.embed_input_ids(self._marks.to(latents.device)).unsqueeze(1)
        return torch.cat([start, self.latents.embed(latents, grid, time), end])

    def velocities(self, hidden_states: Tensor, grid: tuple[int, int], time: Tensor) -> Tensor:
        return self.latents.velocities(hidden_states)
