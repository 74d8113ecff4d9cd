"""``FirstBlockCache``: first-block caching of a denoiser, decided for each row of a batch.

With x the hidden states before the first block, h after it, and t after the last:

    r = h - x,  d = mean|r - r'| / mean|r'|        r' is of the row's latest computed step
    d >  threshold: the other blocks run           t,  and r' = r, (t - h)' = t - h are kept
    d <= threshold: the other blocks are skipped   h + (t - h)'

From: First Block Cache (ParaAttention; diffusers' ``FirstBlockCacheConfig``), which decides once for each call.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from vllm_omni.diffusion.denoiser_blocks import FoundBlocks, find_blocks


class RowKey(NamedTuple):
    """Identifies a row of a denoiser call: the same key in each step."""

    request_id: str
    component: str  # name of the denoiser in its pipeline: "transformer", "transformer_2"
    branch: str  # distinguishes the calls of one step: "cond", "uncond"
    row: int  # among the rows of all outputs of this request in this step


class RowStep(NamedTuple):
    """Progress of the request of a row."""

    step_index: int  # denoise steps done before this call
    num_steps: int  # of the whole run; 0: not known yet


@dataclass(slots=True)
class CacheEntry:
    """Residuals of the latest step in which all blocks of a row were computed."""

    head_residual: Tensor  # r', [T, D] on the device, without padding
    tail_residual: Tensor  # (t - h)', same shape
    num_reuses: int = 0  # since it was computed

    @property
    def num_bytes(self) -> int:
        return self.head_residual.nbytes + self.tail_residual.nbytes

    def matches(self, residual: Tensor) -> bool:
        known = self.head_residual
        return (known.shape, known.dtype, known.device) == (residual.shape, residual.dtype, residual.device)

    def distance(self, residual: Tensor) -> Tensor:
        """d of a row: a float32 scalar on the device."""
        change = (residual - self.head_residual).abs().mean(dtype=torch.float32)
        return change / self.head_residual.abs().mean(dtype=torch.float32)


class FirstBlockCacheStatistics(NamedTuple):
    num_requests: int  # granted, or seen in a call, and not dropped since
    num_entries: int
    num_bytes: int  # of all entries
    num_rows_computed: int  # rows with a key whose blocks all ran, so far
    num_rows_reused: int  # rows whose blocks after the first were skipped, so far


@dataclass(slots=True)
class _Request:
    num_bytes_granted: int = 0
    threshold: float = 0.0
    row_bytes: dict[tuple[str, int], int] = field(default_factory=dict)  # (branch, row) -> bytes of its entry
    entries: dict[RowKey, CacheEntry] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.entries.values())

    def has_room(self, key: RowKey, num_bytes: int) -> bool:
        """Whether an entry of this size fits, in the place of an earlier one of ``key``."""
        others = sum(entry.num_bytes for other, entry in self.entries.items() if other != key)
        return others + num_bytes <= self.num_bytes_granted

    def drop_entries(self, component: str, *, keep: bool = False) -> None:
        """Free the entries of one component; with ``keep``, those of all others."""
        self.entries = {key: entry for key, entry in self.entries.items() if (key.component == component) is keep}


class FirstBlockCache:
    """Cache entries of requests within their grants, and the forward of a denoiser that uses them.

    Not thread-safe. An entry may be freed at any time: its row then runs through all blocks in its next step, and its
    result is as exact as without a cache.

    Args:
        threshold: the greatest d at which a row's blocks are skipped, for requests granted without their own.
        num_warmup_steps: first steps of a request that are always computed.
        num_last_steps: last steps that are always computed; they give the picture its details.
        max_reuses: consecutive steps that may reuse one entry; None: any number.

    Raises:
        ValueError: one of them is negative or, for the threshold, not finite.
    """

    def __init__(
        self, threshold: float, *, num_warmup_steps: int = 1, num_last_steps: int = 1, max_reuses: int | None = 3
    ):
        if min(num_warmup_steps, num_last_steps, max_reuses or 0) < 0:
            raise ValueError(f"{num_warmup_steps=}, {num_last_steps=}, {max_reuses=}: none can be negative")
        self.threshold = _check_threshold(threshold)
        self.num_warmup_steps = num_warmup_steps
        self.num_last_steps = num_last_steps
        self.max_reuses = max_reuses
        self._requests: dict[str, _Request] = {}
        self._found: WeakKeyDictionary[nn.Module, FoundBlocks | None] = WeakKeyDictionary()
        self._num_rows_computed = 0
        self._num_rows_reused = 0

    def supports(self, module: nn.Module) -> bool:
        """Whether calls of ``module`` can be cached, by its state when first asked; see ``find_blocks``."""
        return self._find_blocks(module) is not None

    def grant(self, request_id: str, num_bytes: int, threshold: float | None = None) -> None:
        """Allow a request entries of at most ``num_bytes`` in total; replaces an earlier grant.

        Rows whose entries have no room run uncached. ``threshold``: None is the cache's own; 0 keeps nothing.
        """
        request = self._requests.setdefault(request_id, _Request())
        request.num_bytes_granted = num_bytes
        request.threshold = self.threshold if threshold is None else _check_threshold(threshold)
        if request.num_bytes > num_bytes or not request.threshold:
            request.entries.clear()

    def num_bytes(self, request_id: str) -> int:
        """Bytes of the entries of all rows of a request, granted or not; 0 until its first call has run."""
        request = self._requests.get(request_id)
        return 0 if request is None else sum(request.row_bytes.values())

    def drop(self, request_id: str, component: str | None = None) -> None:
        """Forget a request and its grant, or only its entries of one component. Does nothing for an unknown one."""
        if component is None:
            self._requests.pop(request_id, None)
        elif (request := self._requests.get(request_id)) is not None:
            request.drop_entries(component)

    def statistics(self) -> FirstBlockCacheStatistics:
        requests = self._requests.values()
        return FirstBlockCacheStatistics(
            num_requests=len(requests),
            num_entries=sum(len(request.entries) for request in requests),
            num_bytes=sum(request.num_bytes for request in requests),
            num_rows_computed=self._num_rows_computed,
            num_rows_reused=self._num_rows_reused,
        )

    @torch.no_grad()
    def forward(
        self, module: nn.Module, kwargs: Mapping[str, Any], keys: Sequence[RowKey | None], steps: Sequence[RowStep]
    ) -> Any:
        """Compute ``module(**kwargs)``, where rows that have hardly changed skip all blocks but the first.

        The module's own forward runs, with its lists of blocks shadowed by wrappers. Waits for the device once, and not
        at all if no row may be reused. Bitwise equal to a plain call if no row has an entry.

        Args:
            keys: of each row of the batch; None: this row is not cached.
            steps: of each row of the batch.
        """
        blocks = self._find_blocks(module)
        if blocks is None or not any(keys) or not blocks.denoiser.accepts(kwargs):
            return module(**kwargs)
        for request_id, component in {key[:2] for key in keys if key is not None}:
            if (request := self._requests.get(request_id)) is not None:
                request.drop_entries(component, keep=True)  # a request that has reached its next expert does not return
        cached = CachedForward(self, blocks, keys, steps, blocks.denoiser.num_tokens(kwargs))
        shadows = cached.wrap_blocks(module)
        # Python searches __dict__ before nn.Module's table of children, which stays unchanged.
        vars(module).update(shadows)
        try:
            return module(**kwargs)
        finally:
            for name in shadows:
                del vars(module)[name]

    def _find_blocks(self, module: nn.Module) -> FoundBlocks | None:
        if module not in self._found:
            self._found[module] = find_blocks(module)
        return self._found[module]

    def may_keep(self, key: RowKey, num_bytes: int) -> bool:
        """Note the size of a row's entry; return whether there is room for it."""
        request = self._requests.setdefault(key.request_id, _Request())
        request.row_bytes[key.branch, key.row] = num_bytes
        return request.threshold > 0 and request.has_room(key, num_bytes)

    def choose_hits(
        self, keys: Mapping[int, RowKey], steps: Sequence[RowStep], residuals: Mapping[int, Tensor]
    ) -> dict[int, CacheEntry]:
        """Choose the entries to reuse, by row; free the entries of all other rows in ``keys``.

        Args:
            keys: row -> key, for the rows that have one.
            residuals: row -> r, [T, D], for the rows that may have an entry.
        """
        candidates: dict[int, CacheEntry] = {}
        for row, residual in residuals.items():
            entry = self._requests[keys[row].request_id].entries.get(keys[row])
            if entry is not None and entry.matches(residual) and self._may_reuse(entry, steps[row]):
                candidates[row] = entry
        hits: dict[int, CacheEntry] = {}
        distances = [entry.distance(residuals[row]) for row, entry in candidates.items()]
        values = torch.stack(distances).tolist() if distances else []  # the only wait for the device
        for (row, entry), distance in zip(candidates.items(), values, strict=True):
            # NaN, where the kept residual is zero or infinite, is a miss.
            if distance <= self._requests[keys[row].request_id].threshold:
                hits[row] = entry
                entry.num_reuses += 1
        for row, key in keys.items():
            if row not in hits:
                self._requests[key.request_id].entries.pop(key, None)
        self._num_rows_reused += len(hits)
        self._num_rows_computed += len(keys) - len(hits)
        return hits

    def keep(self, key: RowKey, entry: CacheEntry) -> None:
        """Store the entry of a row, if there is room."""
        request = self._requests[key.request_id]
        if request.has_room(key, entry.num_bytes):
            request.entries[key] = entry

    def _may_reuse(self, entry: CacheEntry, step: RowStep) -> bool:
        is_first = step.step_index < self.num_warmup_steps
        is_last = step.num_steps > 0 and step.step_index >= step.num_steps - self.num_last_steps
        return not is_first and not is_last and (self.max_reuses is None or entry.num_reuses < self.max_reuses)


def _check_threshold(threshold: float) -> float:
    if not 0 <= threshold < math.inf:
        raise ValueError(f"a cache threshold of {threshold}; it is 0 (off) or more, and finite")
    return threshold


class CachedForward:
    """Wrappers of a denoiser's blocks for one forward: the blocks run in order, and after the first one only on the
    rows that missed the cache.

    Args:
        keys: of each row of the batch; None: this row is not cached.
        steps: of each row of the batch.
        num_tokens: of each row, without padding; None: rows are not padded.
    """

    def __init__(
        self,
        cache: FirstBlockCache,
        blocks: FoundBlocks,
        keys: Sequence[RowKey | None],
        steps: Sequence[RowStep],
        num_tokens: Sequence[int] | None,
    ):
        assert len(keys) == len(steps), "one key and one step for each row"
        self._cache = cache
        self._blocks = blocks
        self._denoiser = blocks.denoiser
        self._num_rows = len(keys)
        self._keys = {row: key for row, key in enumerate(keys) if key is not None}
        self._steps = steps
        self._num_tokens = num_tokens
        self._hits: dict[int, CacheEntry] = {}  # row -> its entry
        self._residuals: dict[int, Tensor] = {}  # row -> r, of rows that missed and may keep an entry
        self._misses: list[int] = []
        self._miss_index: Tensor | None = None  # the same on the device; None: all rows missed, or none
        self._narrowed: dict[int, tuple[Tensor, Tensor]] = {}  # id of an argument -> the argument, its missed rows
        self._head_result: Any = None  # of the first block, all rows

    def wrap_blocks(self, module: nn.Module) -> dict[str, list[partial[Any]]]:
        """For each list of blocks of ``module``, the callables that replace them."""
        lists = {name: list(getattr(module, name)) for name in self._denoiser.lists}
        first, *_, last = [block for blocks in lists.values() for block in blocks]
        roles = {first: self._run_first, last: self._run_last}
        return {
            name: [partial(roles.get(block, self._run_between), block) for block in blocks]
            for name, blocks in lists.items()
        }

    def _run_first(self, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        names = self._blocks.parameters[type(block)]
        before = {**dict(zip(names, args, strict=False)), **kwargs}[self._denoiser.hidden]
        assert before.shape[0] == self._num_rows, "one key for each row of the batch"
        result = self._head_result = block(*args, **kwargs)
        after = self._blocks.get_hidden(result)
        for row, key in self._keys.items():
            part = self._part(after, row)
            if self._cache.may_keep(key, 2 * part.numel() * part.element_size()):
                self._residuals[row] = part - self._part(before, row)  # a new tensor, not a view of the batch
        self._hits = self._cache.choose_hits(self._keys, self._steps, self._residuals)
        self._misses = [row for row in range(self._num_rows) if row not in self._hits]
        self._residuals = {row: self._residuals[row] for row in self._residuals if row not in self._hits}
        if not self._hits or not self._misses:
            return result
        self._miss_index = torch.tensor(self._misses, device=after.device)
        if isinstance(result, Tensor):
            return self._narrow(result)
        return tuple(self._narrow(part) for part in result)

    def _run_between(self, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not self._hits:
            return block(*args, **kwargs)
        if not self._misses:
            return self._head_result  # only passed on to the next wrapper, which ignores it
        names = self._blocks.parameters[type(block)]
        is_row = self._denoiser.row_arguments.__contains__
        # A block ignores arguments beyond its named ones (`*args` of HunyuanVideo's blocks).
        named = [self._narrow(value) if is_row(name) else value for name, value in zip(names, args, strict=False)]
        others = {name: self._narrow(value) if is_row(name) else value for name, value in kwargs.items()}
        return block(*named, *args[len(named) :], **others)

    def _run_last(self, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = self._run_between(block, *args, **kwargs)
        head = self._blocks.get_hidden(self._head_result)
        tail = self._blocks.get_hidden(result)  # of the rows that missed
        for position, row in enumerate(self._misses):
            if (residual := self._residuals.pop(row, None)) is not None:
                entry = CacheEntry(residual, self._part(tail, row, at=position) - self._part(head, row))
                self._cache.keep(self._keys[row], entry)
        if not self._hits:
            return result
        hidden = head.clone()
        if self._miss_index is not None:
            hidden.index_copy_(0, self._miss_index, tail)
        for row, entry in self._hits.items():
            self._part(hidden, row).add_(entry.tail_residual)
        # No model reads the text's states after its last block, so those of the first block are returned: they need
        # not be kept, and a text may have other padding in the next step.
        return self._blocks.replace_hidden(self._head_result, hidden)

    def _part(self, hidden: Tensor, row: int, at: int | None = None) -> Tensor:
        """A view of a row's own tokens, [T, D]; ``at``: position of the row, if not its number."""
        part = hidden[row if at is None else at]
        return part if self._num_tokens is None else part[: self._num_tokens[row]]

    def _narrow(self, value: Any) -> Any:
        """Select the rows that missed from an argument whose first dimension is rows.

        Unchanged are an earlier block's result, which has only these rows, and what is broadcast over rows. An argument
        of the whole batch is never mistaken for either, since it has more rows than missed.
        """
        if not isinstance(value, Tensor) or value.shape[0] in (1, len(self._misses)):
            return value
        if id(value) not in self._narrowed:  # the table keeps the argument, so that its id stays unique
            groups = value.unflatten(0, (-1, self._num_rows))  # [k * B, ...]: k groups of all rows
            self._narrowed[id(value)] = value, groups.index_select(1, self._miss_index).flatten(0, 1)
        return self._narrowed[id(value)][1]
