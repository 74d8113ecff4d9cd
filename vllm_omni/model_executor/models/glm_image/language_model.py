"""``GlmImageLanguageModel``: GLM-4 that reads texts and images, and writes the codes of a picture, row by row.

An image of a prompt is read as codes, too: those of transformers' encoder. Codes have positions in rows and columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import GlmImageConfig, PreTrainedConfig
from transformers.models.glm_image.modeling_glm_image import GlmImageModel, GlmImageVisionModel, GlmImageVQVAE
from vllm.config import VllmConfig
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.glm4 import Glm4Model
from vllm.model_executor.models.interfaces import MultiModalEmbeddings, SupportsMRoPE, SupportsMultiModal
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.sequence import IntermediateTensors

from vllm_omni.model_executor.models.glm_image.processing import (
    GRID,
    PIXELS,
    GlmImageDummyInputs,
    GlmImageMultiModalProcessor,
    GlmImageProcessingInfo,
)
from vllm_omni.model_executor.stage_model import RequestInfo, check_all_loaded

ARCHITECTURE = "GlmImageLanguageModel"
GRIDS = "grids"
"""Stage argument: rows and columns of what the request writes, first the picture, then, if there is one, its preview,
which is written before it. The order is that of transformers' processor."""


def language_hf_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """``hf_overrides`` of the language model's stage."""
    if isinstance(config, GlmImageConfig):  # vLLM also passes a dummy, to ask whether the model type changes
        config.architectures = [ARCHITECTURE]
        # Defaults of transformers' model; vLLM's has others.
        rope = config.text_config.rope_parameters
        config.text_config.rope_parameters = {"partial_rotary_factor": 1.0, "mrope_section": [8, 12, 12], **rope}
    return config


@MULTIMODAL_REGISTRY.register_processor(
    GlmImageMultiModalProcessor, info=GlmImageProcessingInfo, dummy_inputs=GlmImageDummyInputs
)
class GlmImageLanguageModel(nn.Module, SupportsMultiModal, SupportsMRoPE):
    """See the module's docstring. Its rows are the ids of its tokens, with the codes of the prompt's images."""

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={
            "model.language_model.": "model.",
            "model.visual.": "visual.",
            "model.vqmodel.": "vqmodel.",
        }
    )

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        raise ValueError("prompts of this model are made by its pipeline")

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config: GlmImageConfig = vllm_config.model_config.hf_config
        self.config = config
        text = config.text_config
        with self._mark_tower_model(vllm_config, "image"):
            self.visual = GlmImageVisionModel._from_config(config.vision_config)
            self.vqmodel = GlmImageVQVAE._from_config(config.vq_config)
        with self._mark_language_model(vllm_config):
            language_config = vllm_config.with_hf_config(text, architectures=["Glm4ForCausalLM"])
            self.model = Glm4Model(vllm_config=language_config, prefix=maybe_prefix(prefix, "model"))
            self.lm_head = ParallelLMHead(
                text.vision_vocab_size, text.hidden_size, prefix=maybe_prefix(prefix, "lm_head")
            )
        for layer in self.model.layers:  # GLM-4 itself rotates neighbouring channels, this model halves
            layer.self_attn.rotary_emb = get_rope(
                layer.self_attn.head_dim, text.max_position_embeddings, True, text.rope_parameters
            )
        self.logits_processor = LogitsProcessor(text.vision_vocab_size)
        self.num_codes: int = config.vq_config.num_embeddings

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        loaded = AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)
        check_all_loaded(self, loaded)
        return loaded

    # -- vLLM's model interface ---------------------------------------------------------------------------------------

    def get_language_model(self) -> nn.Module:
        return self.model

    def embed_multimodal(self, **kwargs: object) -> MultiModalEmbeddings:
        """The codes of images, each [rows * columns, 1] int64; ``embed_input_ids`` embeds them."""
        pixels: Any = kwargs.get(PIXELS)
        if pixels is None:
            return []
        grids: Any = kwargs[GRID]
        patches = self.visual(pixels.to(self.visual.dtype), grid_thw=grids.to(pixels.device)).last_hidden_state
        codes = []
        for (_, rows, columns), image in zip(grids.tolist(), patches.split(grids.prod(-1).tolist()), strict=True):
            encoded = self.vqmodel.encode(image.T.reshape(1, -1, rows, columns))
            codes.append(encoded.image_tokens[:, None])
        return codes

    def embed_input_ids(
        self,
        input_ids: Tensor,
        multimodal_embeddings: MultiModalEmbeddings | None = None,
        *,
        is_multimodal: Tensor | None = None,
    ) -> Tensor:
        """Embeddings of ids. The codes of images are written over their placeholders, as other stages read them."""
        if multimodal_embeddings is not None and len(multimodal_embeddings):
            assert is_multimodal is not None
            codes = torch.cat(list(multimodal_embeddings)).flatten()
            input_ids[is_multimodal.to(input_ids.device)] = codes.to(input_ids)
        return self.model.embed_input_ids(input_ids)

    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: list[MultiModalFeatureSpec]
    ) -> tuple[Tensor, int]:
        positions = self._positions(input_tokens, mm_features, ())[:, : len(input_tokens)]
        return positions, int(positions[0, -1]) + 1 - len(input_tokens)

    def _positions(
        self, input_tokens: Sequence[int], mm_features: Sequence[MultiModalFeatureSpec], grids: Sequence[Sequence[int]]
    ) -> Tensor:
        """Positions of a prompt and of what follows it by transformers' rules, [3, n] int64.

        Args:
            grids: see ``GRIDS``.
        """
        read = [feature.data[GRID].data.tolist() for feature in mm_features if feature.data is not None]
        model = SimpleNamespace(config=self.config, get_vision_position_ids=_vision_positions)
        every = torch.tensor([*read, *([1, *grid] for grid in grids)]).view(-1, 3)
        prompt, _ = GlmImageModel.get_rope_index(model, torch.tensor([list(input_tokens)]), every)
        written = model._cached_decode_position_ids
        return prompt[:, 0] if written is None else torch.cat([prompt[:, 0], written[0]], dim=1)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: object,
    ) -> Tensor:
        hidden_states: Tensor = self.model(input_ids, positions, intermediate_tensors, inputs_embeds)
        return hidden_states

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """Logits of the vocabulary, [n, vocab_size], where only codes can be sampled: others are none of a picture."""
        logits = self.logits_processor(self.lm_head, hidden_states)
        if logits is None:
            return None
        num_others = self.config.text_config.vocab_size - self.num_codes
        return functional.pad(logits[:, : self.num_codes], (0, num_others), value=-torch.inf)

    # -- hooks of a stage's model (``stage_model``) -------------------------------------------------------------------

    def init_mrope_positions(self, info: RequestInfo) -> tuple[Tensor, int]:
        positions = self._positions(info.prompt_token_ids, info.mm_features, info.args[GRIDS])
        return positions, int(positions[0, -1]) + 1 - positions.shape[1]

    def finished_rows(self, input_ids: Tensor, hidden_states: Tensor) -> Tensor:
        return input_ids[:, None].clone()


def _vision_positions(**kwargs: Any) -> Tensor:
    positions: Tensor = GlmImageModel.get_vision_position_ids(None, **kwargs)
    return positions
