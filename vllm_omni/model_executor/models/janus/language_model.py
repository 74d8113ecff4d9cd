"""``JanusLanguageModel``: Llama that reads text and images, and writes text, or pictures as tokens.

A picture's tokens have embeddings and a head of their own. Their ids stand behind those of texts, so that a sequence
says by itself what each of its tokens is, also where its prefix is cached.

From: Janus (arXiv:2410.13848) and Janus-Pro (arXiv:2501.17811); names as in transformers' ``models/janus``.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import JanusConfig, JanusVisionConfig, SiglipVisionConfig
from transformers.models.janus.modeling_janus import JanusVisionAlignerMLP, JanusVQVAEAlignerMLP, JanusVQVAEHead
from vllm.config import VllmConfig
from vllm.model_executor.models.interfaces import MultiModalEmbeddings, SupportsMultiModal
from vllm.model_executor.models.siglip import SiglipVisionModel
from vllm.model_executor.models.utils import (
    AutoWeightsLoader,
    WeightsMapper,
    init_vllm_registered_model,
    maybe_prefix,
)
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.sequence import IntermediateTensors

from vllm_omni.model_executor.models.janus.config import IMAGE
from vllm_omni.model_executor.models.janus.processing import (
    PIXELS,
    JanusDummyInputs,
    JanusMultiModalProcessor,
    JanusProcessingInfo,
)
from vllm_omni.model_executor.stage_model import check_all_loaded


def siglip_config(config: JanusVisionConfig) -> SiglipVisionConfig:
    """Janus' vision transformer is SigLIP's."""
    return SiglipVisionConfig(
        hidden_size=config.hidden_size,
        intermediate_size=int(config.hidden_size * config.mlp_ratio),
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_channels=config.num_channels,
        image_size=config.image_size,
        patch_size=config.patch_size,
        hidden_act=config.hidden_act,
        layer_norm_eps=config.layer_norm_eps,
    )


@MULTIMODAL_REGISTRY.register_processor(
    JanusMultiModalProcessor, info=JanusProcessingInfo, dummy_inputs=JanusDummyInputs
)
class JanusLanguageModel(nn.Module, SupportsMultiModal):
    """See the module's docstring.

    Attributes:
        first_picture_id: the first id of a picture's tokens.
    """

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={
            "model.language_model.": "language_model.model.",
            "lm_head.": "language_model.lm_head.",
            "model.vision_model.": "vision_model.vision_model.",
            "model.vqmodel.": None,  # another stage has it
            "model.": "",
        },
        orig_to_new_substr={".self_attn.projection_layer.": ".self_attn.out_proj."},
    )

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        if modality == "image":
            return IMAGE
        raise ValueError(f"{modality} is no input of this model: valid: image")

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config: JanusConfig = vllm_config.model_config.hf_config
        self.config = config
        self.first_picture_id: int = config.first_picture_id
        self.num_picture_ids: int = config.vq_config.num_embeddings
        text_config = copy.deepcopy(config.text_config)
        text_config.vocab_size = self.first_picture_id
        with self._mark_tower_model(vllm_config, "image"):
            self.vision_model = SiglipVisionModel(
                siglip_config(config.vision_config),
                vllm_config.quant_config,
                prefix=maybe_prefix(prefix, "vision_model"),
            )
            self.aligner = JanusVisionAlignerMLP(config.vision_config)
        with self._mark_language_model(vllm_config):
            self.language_model = init_vllm_registered_model(
                vllm_config,
                hf_config=text_config,
                architectures=["LlamaForCausalLM"],
                prefix=maybe_prefix(prefix, "language_model"),
            )
        self.generation_embeddings = nn.Embedding(self.num_picture_ids, config.vq_config.embed_dim)
        self.generation_aligner = JanusVQVAEAlignerMLP(config.vq_config)
        self.generation_head = JanusVQVAEHead(config.vq_config)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        loaded = AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)
        check_all_loaded(self, loaded)
        return loaded

    # -- vLLM's model interface ---------------------------------------------------------------------------------------

    def embed_multimodal(self, **kwargs: object) -> MultiModalEmbeddings:
        """The rows of the prompts' images, each [num_image_tokens, hidden_size]."""
        pixels: Any = kwargs.get(PIXELS)
        if pixels is None:
            return []
        return list(self.aligner(self.vision_model(pixels)))

    def embed_input_ids(
        self,
        input_ids: Tensor,
        multimodal_embeddings: MultiModalEmbeddings | None = None,
        *,
        is_multimodal: Tensor | None = None,
    ) -> Tensor:
        is_picture = (input_ids >= self.first_picture_id)[:, None]
        codes = (input_ids - self.first_picture_id).clamp(min=0)
        pictures = self.generation_aligner(self.generation_embeddings(codes))
        text_ids = input_ids.masked_fill(is_picture[:, 0], 0)
        others = super().embed_input_ids(text_ids, multimodal_embeddings, is_multimodal=is_multimodal)
        return torch.where(is_picture, pictures, others)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: object,
    ) -> Tensor | IntermediateTensors:
        return self.language_model.model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        logits = self.language_model.compute_logits(hidden_states)
        return None if logits is None else functional.pad(logits, (0, self.num_picture_ids), value=float("-inf"))

    # -- hook of a model that writes pictures (``stage_model.WritesPictures``) ----------------------------------------

    def picture_logits(self, hidden_states: Tensor) -> Tensor:
        return self.generation_head(hidden_states)
