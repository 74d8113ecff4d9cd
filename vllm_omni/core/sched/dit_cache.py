"""``DiTCacheManager``: distribute a budget of bytes for the denoiser's cache entries among requests.

The scheduler counts bytes; the tensors are in the runner's ``FirstBlockCache``, which applies each ``DiTCacheUpdate``.

From: vLLM-Omni design document, section 7 (DiT Cache Manager).
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple

from vllm_omni.messages.cache_update import DiTCacheUpdate


@dataclass(frozen=True, slots=True)
class DiTCacheConfig:
    num_bytes: int  # of all entries of a stage; 0: nothing is cached
    ttl_s: float = 600.0  # a guard against leaks: a request in no batch for this long loses its room

    def __post_init__(self) -> None:
        if self.num_bytes < 0:
            raise ValueError(f"num_bytes is {self.num_bytes}; a budget is 0 (no cache) or more")
        if not 0 < self.ttl_s < math.inf:
            raise ValueError(f"ttl_s is {self.ttl_s}; it is more than 0 and finite")


class DiTCacheEntry(NamedTuple):
    """Room of one request."""

    num_bytes: int  # all its branches and rows
    last_used_s: float  # when it was last in a batch, by the manager's clock


class DiTCacheStatistics(NamedTuple):
    num_requests: int  # with room
    num_bytes: int  # of their room
    num_bytes_budget: int
    num_evictions: int  # to make room for another, so far
    num_expired: int  # so far
    num_rejections: int  # allocations for which there was no room, so far


class DiTCacheManager:
    """Gives requests room in the order of their allocations, within a budget of bytes.

    A request that does not fit runs uncached; none waits for room. Room is taken from requests outside the current
    batch, least recently used first: evicted requests lose no result, and compute one more full forward each. An
    ``OrderedDict`` keeps the order of use, so that a step costs one move for each request of its batch.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, config: DiTCacheConfig, clock: Callable[[], float] = time.monotonic):
        self.config = config
        self._clock = clock
        self._entries: OrderedDict[str, DiTCacheEntry] = OrderedDict()  # the least recently used first
        self._num_bytes = 0
        self._batch: frozenset[str] = frozenset()
        self._granted: dict[str, int] = {}  # not taken yet
        self._dropped: dict[str, None] = {}  # not taken yet; an ordered set
        self._known_to_runner: set[str] = set()  # granted by an update that was taken, and not dropped by one
        self._num_evictions = 0
        self._num_expired = 0
        self._num_rejections = 0

    def start_batch(self, request_ids: Collection[str]) -> None:
        """Set the requests of the coming step, which keep their room until the next call."""
        self._batch = frozenset(request_ids)
        now = self._clock()
        for request_id in request_ids:
            if (entry := self._entries.get(request_id)) is not None:
                self._entries[request_id] = entry._replace(last_used_s=now)
                self._entries.move_to_end(request_id)

    def allocate_cache(self, request_id: str, num_bytes: int) -> bool:
        """Set the room of a request to ``num_bytes``; return whether there was enough.

        If there was not, the request keeps its earlier room. Repeating an allocation costs nothing.

        Raises:
            ValueError: ``num_bytes`` is not positive.
        """
        if num_bytes <= 0:
            raise ValueError(f"request {request_id!r}: num_bytes = {num_bytes}: must be at least 1")
        entry = self._entries.get(request_id)
        num_held = 0 if entry is None else entry.num_bytes
        if num_bytes == num_held:
            return True
        if not self._make_room(num_bytes - num_held, request_id):
            self._num_rejections += 1
            return False
        self._entries[request_id] = DiTCacheEntry(num_bytes, self._clock() if entry is None else entry.last_used_s)
        self._num_bytes += num_bytes - num_held
        self._granted[request_id] = num_bytes
        return True

    def get_cache(self, request_id: str) -> DiTCacheEntry | None:
        """Room of a request; None: it runs uncached. Does not count as a use."""
        return self._entries.get(request_id)

    def release_cache(self, request_id: str) -> None:
        """Free the room of a request that has ended; does nothing for one without room."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return
        self._num_bytes -= entry.num_bytes
        self._granted.pop(request_id, None)
        if request_id in self._known_to_runner:
            self._dropped[request_id] = None

    def clear_expired_cache(self) -> None:
        """Free the room of requests that were in no batch for ``ttl_s``."""
        horizon = self._clock() - self.config.ttl_s
        expired = [
            request_id
            for request_id, entry in self._entries.items()
            if entry.last_used_s <= horizon and request_id not in self._batch
        ]
        for request_id in expired:
            self.release_cache(request_id)
        self._num_expired += len(expired)

    def take_update(self) -> DiTCacheUpdate:
        """Return the changes since the last update; they must reach the runner with the coming step."""
        update = DiTCacheUpdate(self._granted, list(self._dropped))
        self._known_to_runner.difference_update(self._dropped)
        self._known_to_runner.update(self._granted)
        self._granted, self._dropped = {}, {}
        return update

    def statistics(self) -> DiTCacheStatistics:
        return DiTCacheStatistics(
            num_requests=len(self._entries),
            num_bytes=self._num_bytes,
            num_bytes_budget=self.config.num_bytes,
            num_evictions=self._num_evictions,
            num_expired=self._num_expired,
            num_rejections=self._num_rejections,
        )

    def check_integrity(self) -> None:
        """Assert that all counts are consistent."""
        held = {request_id: entry.num_bytes for request_id, entry in self._entries.items()}
        assert self._num_bytes == sum(held.values()), "the sum is kept up"
        assert self._num_bytes <= self.config.num_bytes, "within the budget"
        assert all(num_bytes > 0 for num_bytes in held.values()), "no empty entry"
        assert self._granted.items() <= held.items(), "grants are held"
        assert self._known_to_runner >= self._dropped.keys(), "only what the runner has is dropped"
        left = (self._known_to_runner - self._dropped.keys()) | self._granted.keys()
        assert left == held.keys(), "after the next update the runner knows the very requests that have room"

    def _make_room(self, num_bytes: int, request_id: str) -> bool:
        """Evict until ``num_bytes`` are free; evict none if that is impossible."""
        num_missing = self._num_bytes + num_bytes - self.config.num_bytes
        victims = []
        for other, entry in self._entries.items():
            if num_missing <= 0:
                break
            if other != request_id and other not in self._batch:
                victims.append(other)
                num_missing -= entry.num_bytes
        if num_missing > 0:
            return False
        for victim in victims:
            self.release_cache(victim)
        self._num_evictions += len(victims)
        return True
