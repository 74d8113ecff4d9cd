"""``RULES``: for each class of networks, how the arguments of its calls relate to the rows of a batch.

A rule names every argument that differs from row to row. All other arguments must be equal in every call of a group; a
tensor that no rule names excludes its call from merging. Rules are explicit because a tensor does not show its meaning:
its first dimension may equal the number of rows by chance.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


class Unmergeable(Exception):
    """A call or its output does not fit the merge rule of its class."""


@dataclass(frozen=True)
class MergeRule:
    """How the arguments of one class's calls relate to rows; the first name in ``lists`` or ``rows`` counts them."""

    rows: tuple[str, ...] = ()  # tensors [rows, ...]; a first dimension of 1 and a scalar stand for all rows
    lists: tuple[str, ...] = ()  # Python lists, one element per row, of any shape
    same_lists: tuple[str, ...] = ()  # Python lists of one element, or one per row, equal in the whole group
    padded: Mapping[str, str] = field(default_factory=dict)  # sequences [rows, S, ...] -> name of their mask [rows, S]
    shared: tuple[str, ...] = ()  # tensors (or tuples of them) that must be equal
    unused: tuple[str, ...] = ()  # arguments that the network accepts and ignores
    # Argument -> whether the network ignores this value of it; a call with another is computed alone.
    unused_if: Mapping[str, Callable[[Any], bool]] = field(default_factory=dict)
    makes_masks: bool = True  # a missing mask means all ones, and may be added
    is_encoder: bool = False  # outputs [rows, S, ...] are cut to the call's own S, and kept by the pipelines

    def without_padding(self) -> MergeRule:
        """The same rule, for sequences of equal length only."""
        rows = (*self.rows, *self.padded, *self.padded.values())
        return dataclasses.replace(self, rows=rows, padded={})


_TEXT_ENCODER = MergeRule(padded={"input_ids": "attention_mask"}, makes_masks=False, is_encoder=True)
_CLIP = MergeRule(rows=("input_ids", "attention_mask"), is_encoder=True)
_DECODER = MergeRule(rows=("z", "latents", "temb"), unused=("generator",))
_FLUX = MergeRule(
    rows=("hidden_states", "encoder_hidden_states", "pooled_projections", "timestep", "guidance"),
    shared=("img_ids", "txt_ids"),
)


def _is_idle(kv_caches: Any) -> bool:
    """Whether GLM-Image neither reads nor writes the keys and values of its input images."""
    return all(cache.mode in (None, "skip") for cache in kv_caches.caches)


RULES: dict[str, MergeRule] = {
    # denoisers
    "QwenImageTransformer2DModel": MergeRule(
        rows=("hidden_states", "timestep", "guidance", "additional_t_cond"),
        padded={"encoder_hidden_states": "encoder_hidden_states_mask"},
        same_lists=("img_shapes",),  # the model computes positions from the first one only
    ),
    "WanTransformer3DModel": MergeRule(
        rows=("hidden_states", "timestep", "encoder_hidden_states", "encoder_hidden_states_image")
    ),
    "FluxTransformer2DModel": _FLUX,
    "Flux2Transformer2DModel": _FLUX,
    "LongCatImageTransformer2DModel": _FLUX,
    "ZImageTransformer2DModel": MergeRule(lists=("x", "cap_feats"), rows=("t",)),
    "SD3Transformer2DModel": MergeRule(
        rows=("hidden_states", "encoder_hidden_states", "pooled_projections", "timestep")
    ),
    "HunyuanVideoTransformer3DModel": MergeRule(
        rows=("hidden_states", "timestep", "pooled_projections", "guidance"),
        padded={"encoder_hidden_states": "encoder_attention_mask"},
    ),
    "HunyuanImageTransformer2DModel": MergeRule(
        rows=("hidden_states", "timestep", "timestep_r", "guidance"),
        padded={
            "encoder_hidden_states": "encoder_attention_mask",
            "encoder_hidden_states_2": "encoder_attention_mask_2",
        },
    ),
    "GlmImageTransformer2DModel": MergeRule(
        rows=(
            "hidden_states",
            "encoder_hidden_states",
            "prior_token_id",
            "prior_token_drop",
            "timestep",
            "target_size",
            "crop_coords",
        ),
        unused_if={"kv_caches": _is_idle},
    ),
    "SanaTransformer2DModel": MergeRule(
        rows=("hidden_states", "timestep", "guidance"), padded={"encoder_hidden_states": "encoder_attention_mask"}
    ),
    "LTXVideoTransformer3DModel": MergeRule(
        rows=("hidden_states", "timestep"), padded={"encoder_hidden_states": "encoder_attention_mask"}
    ),
    "UNet2DConditionModel": MergeRule(
        rows=("sample", "timestep", "encoder_hidden_states", "timestep_cond", "added_cond_kwargs")
    ),
    "StableAudioDiTModel": MergeRule(
        rows=(
            "hidden_states",
            "timestep",
            "encoder_hidden_states",
            "global_hidden_states",
            "attention_mask",
            "encoder_attention_mask",
        ),
        shared=("rotary_embedding",),
    ),
    # text encoders
    "Qwen2_5_VLForConditionalGeneration": _TEXT_ENCODER,
    "Qwen3Model": _TEXT_ENCODER,
    "Qwen3ForCausalLM": _TEXT_ENCODER,
    "LlamaModel": _TEXT_ENCODER,
    "Gemma2Model": _TEXT_ENCODER,
    "T5EncoderModel": _TEXT_ENCODER,
    "UMT5EncoderModel": _TEXT_ENCODER,
    "CLIPTextModel": _CLIP,
    "CLIPTextModelWithProjection": _CLIP,
    # decoders
    "AutoencoderKL": _DECODER,
    "AutoencoderKLFlux2": _DECODER,
    "AutoencoderKLHunyuanImage": _DECODER,
    "AutoencoderKLLTXVideo": _DECODER,
    "AutoencoderDC": _DECODER,
    "AutoencoderKLQwenImage": _DECODER,
    "AutoencoderKLWan": _DECODER,
    "AutoencoderKLHunyuanVideo": _DECODER,
    "AutoencoderOobleck": _DECODER,
}
