"""Which networks may compute the calls of several requests in one, and how the arguments are put together.

A rule names every argument that differs from row to row; anything else must be equal in all calls of a group, and a
tensor that no rule names makes a call stand alone. Explicit, because it cannot be seen from a tensor: a first dimension
that happens to equal the number of rows says nothing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import weakref
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vllm_omni.diffusion.suspended_call import PendingCall


class Unmergeable(Exception):
    """A call, or what came back, does not fit the rule of its class."""


@dataclass(frozen=True)
class MergeRule:
    """How the arguments of one class's calls relate to rows; the first name of ``rows`` or ``lists`` counts them."""

    rows: tuple[str, ...] = ()  # tensors, one row each in dimension 0; a dimension of 1 and a scalar stand for all rows
    lists: tuple[str, ...] = ()  # Python lists, one element a row, of any shape
    same_lists: tuple[str, ...] = ()  # Python lists, one element a row or one for all; equal in the whole group
    padded: Mapping[str, str] = field(
        default_factory=dict
    )  # sequences [rows, S, ...] -> the name of their mask [rows, S]
    shared: tuple[str, ...] = ()  # tensors (or tuples of them) that must be equal
    unused: tuple[str, ...] = ()  # what the network takes, and does nothing with
    makes_masks: bool = True  # a missing mask means all ones, and may be added
    is_encoder: bool = False  # outputs [rows, S, ...] are cut to the call's own S, and kept by the pipelines
    pad_value: int = 0

    def without_padding(self) -> MergeRule:
        """For sequences of equal lengths alone."""
        rows = (*self.rows, *self.padded, *self.padded.values())
        return dataclasses.replace(self, rows=rows, padded={})


_TEXT_ENCODER = MergeRule(padded={"input_ids": "attention_mask"}, makes_masks=False, is_encoder=True)
_CLIP = MergeRule(rows=("input_ids", "attention_mask"), is_encoder=True)
_DECODER = MergeRule(rows=("z", "latents", "temb"), unused=("generator",))
_FLUX = MergeRule(
    rows=("hidden_states", "encoder_hidden_states", "pooled_projections", "timestep", "guidance"),
    shared=("img_ids", "txt_ids"),
)

RULES: dict[str, MergeRule] = {
    # denoisers
    "QwenImageTransformer2DModel": MergeRule(
        rows=("hidden_states", "timestep", "guidance", "additional_t_cond"),
        padded={"encoder_hidden_states": "encoder_hidden_states_mask"},
        same_lists=("img_shapes",),  # the positions are computed of the first alone
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


class Fingerprints:
    """Says which shared tensors are equal, reading each but once: comparing two would wait for a GPU in every step."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], int, Hashable]] = {}  # id -> the tensor, its version, its digest

    def of(self, value: Any) -> Hashable:
        """Equal for equal values.

        Raises:
            Unmergeable: for a value that cannot be compared.
        """
        if isinstance(value, Tensor):
            return self._of_tensor(value)
        if isinstance(value, tuple | list):
            return (type(value).__name__, *map(self.of, value))
        if isinstance(value, Mapping):
            return tuple((key, self.of(value[key])) for key in sorted(value))
        if value is None or isinstance(value, Hashable):
            return value
        raise Unmergeable(f"cannot compare a {type(value).__name__}")

    def _of_tensor(self, tensor: Tensor) -> Hashable:
        known = self._known.get(id(tensor))
        if known is not None and known[1] == tensor._version and known[0]() is tensor:
            return known[2]
        content = tensor.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy()
        digest = hashlib.blake2b(content, digest_size=16).digest()
        fingerprint = (tuple(tensor.shape), tensor.dtype, tensor.device, digest)
        key, known_ones = id(tensor), self._known
        reference = weakref.ref(tensor, lambda dead: known_ones.pop(key, None))
        self._known[key] = (reference, tensor._version, fingerprint)
        return fingerprint


def count_rows(call: PendingCall, rule: MergeRule) -> int:
    """Rows of a call: of its first argument."""
    for name in (*rule.lists, *rule.rows, *rule.padded):
        value = call.kwargs.get(name)
        if isinstance(value, Tensor) and value.ndim:
            return int(value.shape[0])
        if isinstance(value, list):
            return len(value)
    raise Unmergeable("no argument has rows")


def num_tokens(call: PendingCall, rule: MergeRule) -> tuple[int, int]:
    """Of a row of a call: those of the sequences that may be padded, and those of its longest other sequence."""
    padded = [call.kwargs.get(name) for name in rule.padded]
    others = [call.kwargs.get(name) for name in rule.rows]
    lengths = [value.shape[1] for value in others if isinstance(value, Tensor) and value.ndim == 3]
    return sum(value.shape[1] for value in padded if isinstance(value, Tensor)), max(lengths, default=0)


def group_key(call: PendingCall, rule: MergeRule, fingerprints: Fingerprints) -> Hashable:
    """Equal for calls that may be computed together.

    Raises:
        Unmergeable: this one stands alone.
    """
    if call.positional:
        raise Unmergeable("arguments without a name")
    rows = count_rows(call, rule)
    masks = set(rule.padded.values())
    key: list[Hashable] = [id(call.module), call.method]
    for name in sorted(call.kwargs):
        value = call.kwargs[name]
        if value is None or name in rule.unused:
            continue
        if name in rule.rows:
            key.append((name, *_row_shapes(name, value, rows)))
        elif name in rule.lists:
            if not isinstance(value, list) or len(value) != rows or not all(isinstance(v, Tensor) for v in value):
                raise Unmergeable(f"{name} is no list of a tensor for each of {rows} rows")
            key.append((name, value[0].dtype, value[0].device))
        elif name in rule.same_lists:
            if len(value) not in (1, rows) or any(one != value[0] for one in value):
                raise Unmergeable(f"{name} differs from row to row")
            key.append((name, repr(value[0])))
        elif name in rule.padded:
            if value.shape[0] != rows:
                raise Unmergeable(f"{name} has {value.shape[0]} rows, not {rows}")
            has_mask = rule.makes_masks or call.kwargs.get(rule.padded[name]) is not None
            # Without a mask, and none to be made, only equal lengths go together.
            key.append((name, value.shape[2:], value.dtype, value.device, None if has_mask else value.shape[1]))
        elif name in masks:
            if value.ndim != 2:
                raise Unmergeable(f"{name} is no mask [rows, S]")
            key.append((name, value.dtype) if not rule.makes_masks else name)
        elif name in rule.shared:
            key.append((name, fingerprints.of(value)))
        elif isinstance(value, Tensor):
            raise Unmergeable(f"the rule says nothing of {name}")
        else:
            key.append((name, fingerprints.of(value)))
    if rule.makes_masks:  # with and without a mask go together
        key = [part for part in key if not (isinstance(part, str) and part in masks)]
    return tuple(key)


def _row_shapes(name: str, value: Any, rows: int) -> tuple[Hashable, ...]:
    if isinstance(value, Mapping):
        return tuple((key, *_row_shapes(f"{name}.{key}", value[key], rows)) for key in sorted(value))
    if not isinstance(value, Tensor):
        raise Unmergeable(f"{name} is no tensor")
    if value.ndim and value.shape[0] not in (1, rows):
        raise Unmergeable(f"{name} has {value.shape[0]} rows, not {rows}")
    return (value.shape[1:], value.dtype, value.device)


def merge(calls: Sequence[PendingCall], rule: MergeRule) -> tuple[dict[str, Any], list[int]]:
    """The arguments of one call for all of ``calls``, which have the same key; and the rows of each."""
    counts = [count_rows(call, rule) for call in calls]
    merged: dict[str, Any] = dict(calls[0].kwargs)
    for name in merged:
        values = [call.kwargs.get(name) for call in calls]
        if values[0] is None:
            continue
        if name in rule.rows:
            merged[name] = _concatenate(values, counts)
        elif name in rule.lists:
            merged[name] = [one for value in values for one in value or ()]
        elif name in rule.same_lists:
            merged[name] = list(values[0][:1]) * sum(counts)
    for name, mask in rule.padded.items():
        if merged.get(name) is not None:
            merged |= _pad(calls, name, mask, rule.pad_value)
    return merged, counts


def _concatenate(values: Sequence[Any], counts: Sequence[int]) -> Any:
    if isinstance(values[0], Mapping):
        return {key: _concatenate([value[key] for value in values], counts) for key in values[0]}
    return torch.cat([_expand(value, count) for value, count in zip(values, counts, strict=True)])


def _expand(value: Tensor, rows: int) -> Tensor:
    if not value.ndim:
        return value.expand(rows)
    return value if value.shape[0] == rows else value.expand(rows, *value.shape[1:])


def _pad(calls: Sequence[PendingCall], name: str, mask_name: str, pad_value: int) -> dict[str, Any]:
    """Sequences of one length, and their masks; without a mask where none is needed."""
    sequences = [call.kwargs[name] for call in calls]
    masks = [call.kwargs.get(mask_name) for call in calls]
    longest = max(sequence.shape[1] for sequence in sequences)
    merged = {name: torch.cat([_pad_to(sequence, longest, pad_value) for sequence in sequences])}
    given = next((mask for mask in masks if mask is not None), None)
    if given is not None or any(sequence.shape[1] != longest for sequence in sequences):
        dtype = torch.bool if given is None else given.dtype
        merged[mask_name] = torch.cat(
            [
                _pad_to(
                    sequence.new_ones(sequence.shape[:2], dtype=dtype) if mask is None else mask.to(dtype), longest, 0
                )
                for sequence, mask in zip(sequences, masks, strict=True)
            ]
        )
    return merged


def _pad_to(sequence: Tensor, length: int, value: int) -> Tensor:
    missing = length - sequence.shape[1]
    if not missing:
        return sequence
    padding = sequence.new_full((sequence.shape[0], missing, *sequence.shape[2:]), value)
    return torch.cat([sequence, padding], dim=1)


def split(output: Any, calls: Sequence[PendingCall], counts: Sequence[int], rule: MergeRule) -> list[Any]:
    """What each call returns, of what one call for all of them returned.

    Raises:
        Unmergeable: it holds what cannot be taken apart.
    """
    outputs = []
    start, total = 0, sum(counts)
    lengths, longest = [0] * len(calls), 0  # of an encoder's sequences
    if rule.is_encoder:
        name = next(iter((*rule.padded, *rule.rows)))
        lengths = [call.kwargs[name].shape[1] for call in calls]
        longest = max(lengths)
    for count, length in zip(counts, lengths, strict=True):
        outputs.append(_take(output, start, count, total, length, longest))
        start += count
    return outputs


def _take(output: Any, start: int, count: int, total: int, length: int, longest: int) -> Any:
    if output is None:
        return None
    if isinstance(output, Tensor):
        if not output.ndim or output.shape[0] != total:
            raise Unmergeable(f"an output of shape {tuple(output.shape)} for {total} rows")
        rows = output[start : start + count]
        if not longest:
            return rows
        if rows.ndim >= 3 and rows.shape[1] == longest:
            rows = rows[:, :length]
        return rows.clone()  # pipelines keep it, and a view would keep the rows of the others
    if isinstance(output, tuple):
        return tuple(_take(part, start, count, total, length, longest) for part in output)
    if isinstance(output, list):
        if len(output) != total:
            raise Unmergeable(f"a list of {len(output)} for {total} rows")
        return output[start : start + count]
    if isinstance(output, Mapping) and dataclasses.is_dataclass(output):  # BaseOutput, ModelOutput
        parts = {
            name: _take(value, start, count, total, length, longest)
            for name, value in output.items()
            if name != "past_key_values"  # no pipeline continues from it
        }
        return type(output)(**parts)
    raise Unmergeable(f"a {type(output).__name__} as output")
