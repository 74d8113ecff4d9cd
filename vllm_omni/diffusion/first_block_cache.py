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
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from vllm_omni.diffusion.cached_forward import CachedForward, CacheEntry, RowKey, RowStep
from vllm_omni.diffusion.denoiser_blocks import FoundBlocks, find_blocks


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
        _check_threshold(threshold)
        for name, value in (
            ("num_warmup_steps", num_warmup_steps),
            ("num_last_steps", num_last_steps),
            ("max_reuses", max_reuses or 0),
        ):
            if value < 0:
                raise ValueError(f"{name} is {value}; it cannot be negative")
        self.threshold = threshold
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
        if threshold is not None:
            _check_threshold(threshold)
        request = self._requests.setdefault(request_id, _Request())
        request.num_bytes_granted = num_bytes
        request.threshold = self.threshold if threshold is None else threshold
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
        self._drop_other_components(keys)
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

    def _drop_other_components(self, keys: Sequence[RowKey | None]) -> None:
        """Free entries of earlier denoisers: a request that has reached its next expert does not return."""
        for request_id, component in {(key.request_id, key.component) for key in keys if key is not None}:
            if (request := self._requests.get(request_id)) is not None:
                request.drop_entries(component, keep=True)

    # -- called by CachedForward: see EntryStore ----------------------------------------------------------------------

    def may_keep(self, key: RowKey, num_bytes: int) -> bool:
        request = self._requests.setdefault(key.request_id, _Request())
        request.row_bytes[key.branch, key.row] = num_bytes
        return request.threshold > 0 and request.has_room(key, num_bytes)

    def choose_hits(
        self, keys: Mapping[int, RowKey], steps: Sequence[RowStep], residuals: Mapping[int, Tensor]
    ) -> dict[int, CacheEntry]:
        candidates: dict[int, CacheEntry] = {}
        for row, residual in residuals.items():
            entry = self._requests[keys[row].request_id].entries.get(keys[row])
            if entry is not None and entry.matches(residual) and self._may_reuse(entry, steps[row]):
                candidates[row] = entry
        hits: dict[int, CacheEntry] = {}
        if candidates:
            distances = torch.stack([entry.distance(residuals[row]) for row, entry in candidates.items()])
            values = distances.tolist()  # the only wait for the device
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
        request = self._requests[key.request_id]
        if request.has_room(key, entry.num_bytes):
            request.entries[key] = entry

    def _may_reuse(self, entry: CacheEntry, step: RowStep) -> bool:
        is_first = step.step_index < self.num_warmup_steps
        is_last = step.num_steps > 0 and step.step_index >= step.num_steps - self.num_last_steps
        return not is_first and not is_last and (self.max_reuses is None or entry.num_reuses < self.max_reuses)


def _check_threshold(threshold: float) -> None:
    if not 0 <= threshold < math.inf:
        raise ValueError(f"a cache threshold of {threshold}; it is 0 (off) or more, and finite")
