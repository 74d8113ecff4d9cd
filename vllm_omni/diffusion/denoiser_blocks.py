"""``find_blocks``: find the blocks of a denoiser, and which of their arguments have one part per row."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

# Hooks of diffusers that work when a block is skipped.
HARMLESS_HOOKS = frozenset({"layerwise_casting", "peft_autocast_disable"})


@dataclass(frozen=True, slots=True)
class DenoiserBlocks:
    """The blocks of one class of diffusers' denoisers.

    ``row_arguments`` names the arguments of a block whose leading dimension is the rows of the batch, or a multiple of
    them, all rows first (Qwen-Image with ``zero_cond_t`` has two timesteps per row). They are listed because a shape is
    ambiguous: rotary embeddings have as many rows as tokens, which may equal the size of the batch.
    """

    lists: tuple[str, ...]  # attributes of the denoiser, in the order in which its forward runs through them
    # Arguments of the denoiser with which its forward does nothing between two blocks. Others (of a ControlNet, say)
    # may be added there to all rows, or be read by the blocks.
    arguments: frozenset[str]
    row_arguments: frozenset[str] = frozenset({"hidden_states", "encoder_hidden_states", "temb"})
    hidden: str = "hidden_states"  # the argument of a block that the cache compares and replaces, [B, T, D]
    # Tokens of each row, without the padding of this batch; None: rows are never padded.
    num_tokens: Callable[[Mapping[str, Any]], list[int] | None] = field(default=lambda kwargs: None)

    def accepts(self, kwargs: Mapping[str, Any]) -> bool:
        """Whether only the blocks change the hidden states between the first block and the last."""
        # Pipelines pass an empty dictionary as attention_kwargs when the user gave none.
        others = (value for name, value in kwargs.items() if name not in self.arguments)
        return all(value is None or (isinstance(value, dict) and not value) for value in others)


def _z_image_num_tokens(kwargs: Mapping[str, Any]) -> list[int]:
    """Tokens of a row computed alone: image and caption, each padded by the model to a multiple of 32."""
    from diffusers.models.transformers.transformer_z_image import SEQ_MULTI_OF

    patch_size, frame_patch_size = kwargs.get("patch_size", 2), kwargs.get("f_patch_size", 1)
    totals = []
    for image, caption in zip(kwargs["x"], kwargs["cap_feats"], strict=True):
        _, frames, height, width = image.shape
        num_patches = (frames // frame_patch_size) * (height // patch_size) * (width // patch_size)
        totals.append(sum(-(-count // SEQ_MULTI_OF) * SEQ_MULTI_OF for count in (num_patches, len(caption))))
    return totals


_COMMON = frozenset({"hidden_states", "encoder_hidden_states", "timestep", "guidance", "return_dict"})

TABLE: Mapping[str, DenoiserBlocks] = {
    "QwenImageTransformer2DModel": DenoiserBlocks(
        lists=("transformer_blocks",),
        arguments=_COMMON | {"encoder_hidden_states_mask", "img_shapes", "additional_t_cond"},
        row_arguments=frozenset(
            {"hidden_states", "encoder_hidden_states", "encoder_hidden_states_mask", "temb", "modulate_index"}
        ),
    ),
    "FluxTransformer2DModel": DenoiserBlocks(
        lists=("transformer_blocks", "single_transformer_blocks"),
        arguments=_COMMON | {"pooled_projections", "img_ids", "txt_ids", "controlnet_blocks_repeat"},
    ),
    "WanTransformer3DModel": DenoiserBlocks(lists=("blocks",), arguments=_COMMON | {"encoder_hidden_states_image"}),
    "HunyuanVideoTransformer3DModel": DenoiserBlocks(
        lists=("transformer_blocks", "single_transformer_blocks"),
        arguments=_COMMON | {"encoder_attention_mask", "pooled_projections"},
        row_arguments=frozenset(
            {"hidden_states", "encoder_hidden_states", "temb", "attention_mask", "token_replace_emb"}
        ),
    ),
    "SD3Transformer2DModel": DenoiserBlocks(lists=("transformer_blocks",), arguments=_COMMON | {"pooled_projections"}),
    # Not cached with siglip_feats and image_noise_mask: images as conditions (Z-Image-Omni).
    "ZImageTransformer2DModel": DenoiserBlocks(
        lists=("layers",),
        arguments=frozenset({"x", "t", "cap_feats", "return_dict", "patch_size", "f_patch_size"}),
        row_arguments=frozenset({"x", "attn_mask", "freqs_cis", "adaln_input"}),
        hidden="x",
        num_tokens=_z_image_num_tokens,
    ),
}


@dataclass(frozen=True, slots=True)
class FoundBlocks:
    """The blocks of one denoiser."""

    denoiser: DenoiserBlocks
    hidden_index: int  # where the hidden states are in the tuple that a block returns
    parameters: Mapping[type, tuple[str, ...]]  # class of a block -> names of its arguments, in order, without self

    def get_hidden(self, result: Tensor | Sequence[Tensor]) -> Tensor:
        """Hidden states in the result of a block."""
        return result if isinstance(result, Tensor) else result[self.hidden_index]

    def replace_hidden(self, result: Tensor | Sequence[Tensor], hidden: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Result of a block with other hidden states."""
        if isinstance(result, Tensor):
            return hidden
        return (*result[: self.hidden_index], hidden, *result[self.hidden_index + 1 :])


def find_blocks(module: nn.Module) -> FoundBlocks | None:
    """Find the blocks to cache; None: the class is unknown, or its blocks are already modified.

    Modified by: diffusers' own caches, group offloading (which expects every block to run), tokens split between
    devices (each of which would decide for itself), or compilation of the whole forward (which inlines the blocks).
    Blocks that are compiled one by one are supported.
    """
    denoiser = TABLE.get(type(module).__name__)
    if denoiser is None or not type(module).__module__.startswith("diffusers.") or _is_modified(module):
        return None
    from diffusers.hooks._helpers import TransformerBlockRegistry

    blocks = [block for name in denoiser.lists for block in getattr(module, name)]
    kinds = {type(block) for block in blocks}
    indices = {TransformerBlockRegistry.get(kind).return_hidden_states_index for kind in kinds}
    if len(blocks) < 2 or len(indices) > 1:
        return None
    parameters = {kind: tuple(inspect.signature(kind.forward).parameters)[1:] for kind in kinds}
    return FoundBlocks(denoiser, indices.pop(), parameters)


def _is_modified(module: Any) -> bool:
    registries = [getattr(part, "_diffusers_hook", None) for part in module.modules()]
    return (
        getattr(module, "is_cache_enabled", False)  # the classes without CacheMixin have no such attribute
        or module._parallel_config is not None
        or module._compiled_call_impl is not None
        or any(registry is not None and registry.hooks.keys() - HARMLESS_HOOKS for registry in registries)
    )
