"""Merge the calls of several requests into one call of a network, and split its output, by ``merge_rules``."""

from __future__ import annotations

import dataclasses
import hashlib
import weakref
from collections.abc import Hashable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from vllm_omni.diffusion.merge_rules import MergeRule, Unmergeable
from vllm_omni.diffusion.suspended_call import PendingCall


class Fingerprints:
    """Digests of shared tensors. Each is read once; comparing two tensors would wait for a GPU in every step."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], int, Hashable]] = {}  # id -> the tensor, its version, its digest

    def __len__(self) -> int:
        """Number of live tensors whose digest is kept."""
        return len(self._known)

    def of(self, value: Any) -> Hashable:
        """Compute a key that is equal for equal values.

        Raises:
            Unmergeable: the value cannot be compared.
        """
        if isinstance(value, Tensor):
            return self._of_tensor(value)
        if isinstance(value, tuple | list):
            return (type(value).__name__, *map(self.of, value))
        if isinstance(value, Mapping):
            return tuple((key, self.of(value[key])) for key in sorted(value))
        if isinstance(value, Hashable):
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
    """Number of rows of a call, from the first argument that has rows."""
    for name in (*rule.lists, *rule.rows, *rule.padded):
        value = call.kwargs.get(name)
        if isinstance(value, list) or (isinstance(value, Tensor) and value.ndim):
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
    masks = set(rule.padded.values()).difference(rule.rows)
    key: list[Hashable] = [id(call.module), call.method]
    for name in sorted(call.kwargs):
        value = call.kwargs[name]
        if value is None or name in rule.unused:
            continue
        if name in rule.unused_if:
            if not rule.unused_if[name](value):
                raise Unmergeable(f"{name} is in use")
        elif name not in masks:
            key.append((name, _argument_key(call, rule, name, rows, fingerprints)))
        elif value.ndim != 2:
            raise Unmergeable(f"{name} is not a mask [rows, S]")
        elif not rule.makes_masks:  # else calls with and without a mask can be merged
            key.append((name, value.dtype))
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
        if value.shape[0] != rows:
            raise Unmergeable(f"{name} has {value.shape[0]} rows, not {rows}")
        # Without a mask, only sequences of equal length can be merged.
        has_mask = rule.makes_masks or call.kwargs.get(rule.padded[name]) is not None
        return (value.shape[2:], value.dtype, value.device, None if has_mask else value.shape[1])
    if name not in rule.shared and isinstance(value, Tensor):
        raise Unmergeable(f"the rule does not name the tensor {name}")
    return fingerprints.of(value)


def _list_key(name: str, value: Any, rows: int) -> Hashable:
    if not isinstance(value, list) or len(value) != rows or not all(isinstance(one, Tensor) for one in value):
        raise Unmergeable(f"{name} is not a list with a tensor for each of {rows} rows")
    return (value[0].dtype, value[0].device)


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
            merged |= _pad(calls, name, mask)
    return merged, counts


def _concatenate(values: Sequence[Any], counts: Sequence[int]) -> Any:
    if isinstance(values[0], Mapping):
        return {key: _concatenate([value[key] for value in values], counts) for key in values[0]}
    return torch.cat([value.expand(count, *value.shape[1:]) for value, count in zip(values, counts, strict=True)])


def _pad(calls: Sequence[PendingCall], name: str, mask_name: str) -> dict[str, Any]:
    """Pad sequences to one length and make their masks; no mask where none was given and all lengths are equal."""
    sequences = [call.kwargs[name] for call in calls]
    masks = [call.kwargs.get(mask_name) for call in calls]
    rows = [row for sequence in sequences for row in sequence]
    merged = {name: pad_sequence(rows, batch_first=True)}
    given = next((mask for mask in masks if mask is not None), None)
    if given is None and len({len(row) for row in rows}) == 1:
        return merged
    dtype = torch.bool if given is None else given.dtype
    row_masks = [
        row
        for sequence, mask in zip(sequences, masks, strict=True)
        for row in (sequence.new_ones(sequence.shape[:2], dtype=dtype) if mask is None else mask.to(dtype))
    ]
    return merged | {mask_name: pad_sequence(row_masks, batch_first=True)}


def split(output: Any, calls: Sequence[PendingCall], counts: Sequence[int], rule: MergeRule) -> list[Any]:
    """Split the output of a merged call into the outputs of ``calls``.

    Raises:
        Unmergeable: the output has a part that cannot be split.
    """
    lengths: list[int] = []  # of an encoder's sequences
    if rule.is_encoder:
        name = next(iter((*rule.padded, *rule.rows)))
        lengths = [call.kwargs[name].shape[1] for call in calls]
    return _split(output, counts, lengths)


def _split(output: Any, counts: Sequence[int], lengths: Sequence[int]) -> list[Any]:
    if output is None:
        return [None] * len(counts)
    if isinstance(output, Tensor):
        return _split_rows(output, counts, lengths)
    if isinstance(output, tuple):
        return list(zip(*(_split(one, counts, lengths) for one in output), strict=True))
    if isinstance(output, list):
        if len(output) != sum(counts):
            raise Unmergeable(f"a list of {len(output)} for {sum(counts)} rows")
        return [output[end - count : end] for count, end in zip(counts, accumulate(counts), strict=True)]
    if isinstance(output, Mapping) and dataclasses.is_dataclass(output):  # BaseOutput, ModelOutput
        # Without past_key_values, which pipelines do not use.
        parts = {name: _split(value, counts, lengths) for name, value in output.items() if name != "past_key_values"}
        return [type(output)(**dict(zip(parts, values, strict=True))) for values in zip(*parts.values(), strict=True)]
    raise Unmergeable(f"a {type(output).__name__} as output")


def _split_rows(output: Tensor, counts: Sequence[int], lengths: Sequence[int]) -> list[Tensor]:
    if not output.ndim or output.shape[0] != sum(counts):
        raise Unmergeable(f"an output of shape {tuple(output.shape)} for {sum(counts)} rows")
    parts = list(output.split(list(counts)))
    if not lengths:
        return parts
    if output.ndim >= 3 and output.shape[1] == max(lengths):
        parts = [part[:, :length] for part, length in zip(parts, lengths, strict=True)]
    return [part.clone() for part in parts]  # pipelines keep it, and a view would keep the other requests' rows
