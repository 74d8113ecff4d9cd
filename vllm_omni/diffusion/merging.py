"""Merge the calls of several requests into one call of a network, and split its output, by ``merge_rules``."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vllm_omni.diffusion.fingerprints import Fingerprints
from vllm_omni.diffusion.merge_rules import MergeRule, Unmergeable
from vllm_omni.diffusion.suspended_call import PendingCall


def count_rows(call: PendingCall, rule: MergeRule) -> int:
    """Number of rows of a call, from the first argument that has rows."""
    for name in (*rule.lists, *rule.rows, *rule.padded):
        value = call.kwargs.get(name)
        if isinstance(value, Tensor) and value.ndim:
            return int(value.shape[0])
        if isinstance(value, list):
            return len(value)
    raise Unmergeable("no argument has rows")


def num_tokens(call: PendingCall, rule: MergeRule) -> tuple[int, int]:
    """Tokens per row: of the sequences that can be padded, and of the longest other sequence."""
    padded = [call.kwargs.get(name) for name in rule.padded]
    others = [call.kwargs.get(name) for name in rule.rows]
    lengths = [value.shape[1] for value in others if isinstance(value, Tensor) and value.ndim == 3]
    return sum(value.shape[1] for value in padded if isinstance(value, Tensor)), max(lengths, default=0)


def group_key(call: PendingCall, rule: MergeRule, fingerprints: Fingerprints) -> Hashable:
    """Compute a key that is equal for calls that can be merged.

    Raises:
        Unmergeable: this call must be computed alone.
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
        if name in masks and name not in rule.rows:
            if value.ndim != 2:
                raise Unmergeable(f"{name} is not a mask [rows, S]")
            if not rule.makes_masks:  # else calls with and without a mask can be merged
                key.append((name, value.dtype))
        else:
            key.append((name, _argument_key(call, rule, name, rows, fingerprints)))
    return tuple(key)


def _argument_key(call: PendingCall, rule: MergeRule, name: str, rows: int, fingerprints: Fingerprints) -> Hashable:
    """The part of a group's key that one argument contributes."""
    value = call.kwargs[name]
    if name in rule.rows:
        return _row_shapes(name, value, rows)
    if name in rule.lists:
        return _list_key(name, value, rows)
    if name in rule.same_lists:
        if len(value) not in (1, rows) or any(one != value[0] for one in value):
            raise Unmergeable(f"{name} differs from row to row")
        return repr(value[0])
    if name in rule.padded:
        # Without a mask, only sequences of equal length can be merged.
        has_mask = rule.makes_masks or call.kwargs.get(rule.padded[name]) is not None
        return _sequence_key(name, value, rows, has_mask=has_mask)
    if name not in rule.shared and isinstance(value, Tensor):
        raise Unmergeable(f"the rule does not name the tensor {name}")
    return fingerprints.of(value)


def _list_key(name: str, value: Any, rows: int) -> Hashable:
    if not isinstance(value, list) or len(value) != rows or not all(isinstance(one, Tensor) for one in value):
        raise Unmergeable(f"{name} is not a list with a tensor for each of {rows} rows")
    return (value[0].dtype, value[0].device)


def _sequence_key(name: str, value: Tensor, rows: int, *, has_mask: bool) -> Hashable:
    if value.shape[0] != rows:
        raise Unmergeable(f"{name} has {value.shape[0]} rows, not {rows}")
    return (value.shape[2:], value.dtype, value.device, None if has_mask else value.shape[1])


def _row_shapes(name: str, value: Any, rows: int) -> tuple[Hashable, ...]:
    if isinstance(value, Mapping):
        return tuple((key, *_row_shapes(f"{name}.{key}", value[key], rows)) for key in sorted(value))
    if not isinstance(value, Tensor):
        raise Unmergeable(f"{name} is not a tensor")
    if value.ndim and value.shape[0] not in (1, rows):
        raise Unmergeable(f"{name} has {value.shape[0]} rows, not {rows}")
    return (value.shape[1:], value.dtype, value.device)


def merge(calls: Sequence[PendingCall], rule: MergeRule) -> tuple[dict[str, Any], list[int]]:
    """Build the arguments of one call for all ``calls``, which have the same key; also returns the rows of each."""
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
    """Pad sequences to one length and make their masks; no mask where none was given and all lengths are equal."""
    sequences = [call.kwargs[name] for call in calls]
    masks = [call.kwargs.get(mask_name) for call in calls]
    longest = max(sequence.shape[1] for sequence in sequences)
    merged = {name: torch.cat([_pad_to(sequence, longest, pad_value) for sequence in sequences])}
    given = next((mask for mask in masks if mask is not None), None)
    if given is None and all(sequence.shape[1] == longest for sequence in sequences):
        return merged
    dtype = torch.bool if given is None else given.dtype
    whole = [
        sequence.new_ones(sequence.shape[:2], dtype=dtype) if mask is None else mask.to(dtype)
        for sequence, mask in zip(sequences, masks, strict=True)
    ]
    merged[mask_name] = torch.cat([_pad_to(mask, longest, 0) for mask in whole])
    return merged


def _pad_to(sequence: Tensor, length: int, value: int) -> Tensor:
    missing = length - sequence.shape[1]
    if not missing:
        return sequence
    padding = sequence.new_full((sequence.shape[0], missing, *sequence.shape[2:]), value)
    return torch.cat([sequence, padding], dim=1)


def split(output: Any, calls: Sequence[PendingCall], counts: Sequence[int], rule: MergeRule) -> list[Any]:
    """Split the output of a merged call into the outputs of ``calls``.

    Raises:
        Unmergeable: the output has a part that cannot be split.
    """
    lengths, longest = [0] * len(calls), 0  # of an encoder's sequences
    if rule.is_encoder:
        name = next(iter((*rule.padded, *rule.rows)))
        lengths = [call.kwargs[name].shape[1] for call in calls]
        longest = max(lengths)
    outputs = []
    start, total = 0, sum(counts)
    for count, length in zip(counts, lengths, strict=True):
        outputs.append(_take(output, _Part(slice(start, start + count), total, length, longest)))
        start += count
    return outputs


class _Part(NamedTuple):
    """The part of a merged output that belongs to one call."""

    rows: slice
    num_rows: int  # of the whole output
    length: int  # of the call's own sequence; 0: outputs are not sequences
    longest: int  # length of the padded sequences; 0: outputs are not sequences


def _take(output: Any, part: _Part) -> Any:
    if output is None:
        return None
    if isinstance(output, Tensor):
        return _take_rows(output, part)
    if isinstance(output, tuple):
        return tuple(_take(one, part) for one in output)
    if isinstance(output, list):
        if len(output) != part.num_rows:
            raise Unmergeable(f"a list of {len(output)} for {part.num_rows} rows")
        return output[part.rows]
    if isinstance(output, Mapping) and dataclasses.is_dataclass(output):  # BaseOutput, ModelOutput
        values = {name: _take(value, part) for name, value in output.items() if name != "past_key_values"}
        return type(output)(**values)  # without past_key_values, which pipelines do not use
    raise Unmergeable(f"a {type(output).__name__} as output")


def _take_rows(output: Tensor, part: _Part) -> Tensor:
    if not output.ndim or output.shape[0] != part.num_rows:
        raise Unmergeable(f"an output of shape {tuple(output.shape)} for {part.num_rows} rows")
    rows = output[part.rows]
    if not part.longest:
        return rows
    if rows.ndim >= 3 and rows.shape[1] == part.longest:
        rows = rows[:, : part.length]
    return rows.clone()  # pipelines keep it, and a view would keep the other requests' rows
