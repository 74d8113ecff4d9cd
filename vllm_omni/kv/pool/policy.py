"""``EvictionDuel``: which pages of a tier to evict, by frequency or by recency, whichever would have hit more lately.

Chats reuse what was used last, and each of their pages a few times: there recency keeps the right pages, and frequency
loses hits. Documents, shared prompts and scans are the opposite. Neither is known in advance, so both orders are kept
over the same pages, and two small caches of keys alone run beside them, one by each order.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from enum import Enum
from itertools import chain, islice
from typing import NamedTuple

from vllm_omni.kv.pool.sketch import FrequencySketch

NUM_CLASSES = 4  # cold, warm1, warm2 and hot: used once, 2 or 3 times, 4 to 7 times, more often
_CLASS_OF_COUNT = [min(max(count.bit_length() - 1, 0), NUM_CLASSES - 1) for count in range(16)]


class Order(Enum):
    """By which order pages are evicted."""

    RECENCY = "recency"
    FREQUENCY = "frequency"


class PolicyStatistics(NamedTuple):
    """What a policy holds, and what it has decided."""

    num_pages: int
    num_pinned: int
    num_evicted: int  # by ``evict``
    num_by_class: tuple[int, ...]  # pages that are cold, warm1, warm2 and hot
    order: Order  # by which it evicts now
    num_switches: int  # between the two orders
    num_sampled: int  # accesses of pages that the two ghosts have seen
    num_recency_hits: int  # of them, hits of the ghost that evicts by recency
    num_frequency_hits: int  # likewise by frequency
    sketch_bytes: int


class FrequencyClasses:
    """Pages in four lists by how often they were used; the next victim is the oldest page of the coldest list.

    The thresholds are powers of two: when the sketch halves its counts, each page belongs one list lower, so lists are
    joined and no estimate is looked up. A page keeps its list until it is used again or the counts are halved.

    From: Omni-Flow section 4.1.2, "a four-tier frequency-aware LRU that always reclaims from the coldest bucket".
    """

    def __init__(self) -> None:
        self.lists: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(NUM_CLASSES)]
        self._class: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._class)

    def __contains__(self, key: bytes) -> bool:
        return key in self._class

    def __iter__(self) -> Iterator[bytes]:
        """The next victim first."""
        return chain.from_iterable(self.lists)

    def put(self, key: bytes, count: int) -> None:
        """Add a page, or move it, as the most recently used of those that were used so often."""
        now = _CLASS_OF_COUNT[count]
        before = self._class.get(key)
        if before == now:
            self.lists[now].move_to_end(key)
            return
        if before is not None:
            del self.lists[before][key]
        self._class[key] = now
        self.lists[now][key] = None

    def remove(self, key: bytes) -> None:
        del self.lists[self._class.pop(key)][key]

    def pop(self) -> bytes:
        """Remove the next victim, and return it."""
        key = next(iter(self))
        self.remove(key)
        return key

    def halve(self) -> None:
        """Follow the sketch: pages of a list are behind those of the list below, as they were used more often."""
        lowest, *others = self.lists
        lowest.update(others[0])
        self.lists = [lowest, *others[1:], OrderedDict()]
        self._class = {key: place for place, pages in enumerate(self.lists) for key in pages}


class EvictionDuel:
    """Keeps the order of a tier's pages and selects victims; holds no pages, and decides without I/O.

    Two ghosts see a sample of the keys, one in ``2 ** sample_shift``, and have as small a share of the capacity: one
    evicts by recency, one by frequency. The tier evicts by recency until frequency leads by ``MIN_LEAD`` hits per
    access, in an average over some ``WINDOW`` times the capacity, and until it no longer leads. Sampling by key keeps
    the ratio of hits of the full size (as for miss ratio curves: SHARDS, FAST 2015) at an eighth of the cost.

    The alternatives were measured (``tests/kv/pool/test_traces.py``): on chats the classes alone lose 1 to 7 points
    against LRU, ARC 1 to 4, the duel at most 0.3. Where frequency wins, by 6 to 9 points, the duel gets all but 0.5.

    Not thread-safe; nothing waits. Keys are digests of at least 16 bytes.

    Args:
        capacity: pages that the tier holds.
        sample_shift: None: 3, or less for a tier so small that a ghost would have less than ``MIN_GHOST`` pages.

    From: Omni-Flow section 4.1.2; set dueling of Qureshi et al., "Adaptive insertion policies" (ISCA 2007).
    """

    MIN_GHOST = 256
    MIN_LEAD = 0.015
    FIRST_WINDOW, WINDOW = 2, 16  # accesses that are averaged, in capacities: at first, and later

    def __init__(self, capacity: int, *, sample_shift: int | None = None) -> None:
        if capacity < 1:
            raise ValueError(f"a tier of at least 1 page, not {capacity}")
        if sample_shift is None:
            sample_shift = max(0, min(3, (capacity // self.MIN_GHOST).bit_length() - 1))
        self.capacity = capacity
        self._sample_mask = (1 << sample_shift) - 1
        self._ghost_capacity = max(1, capacity >> sample_shift)
        self._num_evicted = self._num_switches = 0
        self.clear()

    def clear(self) -> None:
        """Forget all pages and what was learned, but not the statistics of evictions."""
        self._sketch = FrequencySketch(self.capacity)
        self._recency: OrderedDict[bytes, None] = OrderedDict()  # the least recently used page first
        self._classes = FrequencyClasses()  # the same pages
        self._pinned: set[bytes] = set()
        self._recency_ghost: OrderedDict[bytes, None] = OrderedDict()
        self._frequency_ghost = FrequencyClasses()
        self._order = Order.RECENCY
        self._lead = 0.0  # of frequency: hits more than by recency, per sampled access, as a moving average
        self._window = self.FIRST_WINDOW * self._ghost_capacity  # accesses that it averages
        self._num_sampled = self._num_recency_hits = self._num_frequency_hits = 0

    def __len__(self) -> int:
        return len(self._recency)

    def __contains__(self, key: bytes) -> bool:
        return key in self._recency

    def __iter__(self) -> Iterator[bytes]:
        """The page that was used last at the end."""
        return iter(self._recency)

    # -- pages --------------------------------------------------------------------------------------------------------

    def insert(self, key: bytes, *, is_pinned: bool = False) -> None:
        """Add a page that the tier holds from now on, as the one that was used last. It does not count as a use."""
        assert key not in self._recency, "this page is there already"
        self._recency[key] = None
        self._classes.put(key, self._sketch.estimate(key))
        if is_pinned:
            self._pinned.add(key)

    def remove(self, key: bytes) -> None:
        """Remove a page that the tier has dropped by itself."""
        del self._recency[key]
        self._classes.remove(key)
        self._pinned.discard(key)

    def pin(self, key: bytes) -> None:
        """Keep a page from being a victim: it is being read or written."""
        assert key in self._recency, "a page that is not there cannot be pinned"
        self._pinned.add(key)

    def unpin(self, key: bytes) -> None:
        self._pinned.discard(key)

    def is_pinned(self, key: bytes) -> bool:
        return key in self._pinned

    # -- uses ---------------------------------------------------------------------------------------------------------

    def access(self, keys: Sequence[bytes]) -> None:
        """Count one use of each page of a request's chain, also of those that the tier does not hold; once per request.

        The end of the chain becomes the first victim: a page is of no use without those before it.

        Args:
            keys: different ones, from the start of the prompt.
        """
        add, recency, classes = self._sketch.add, self._recency, self._classes
        for key in reversed(keys):
            count = add(key)
            if key in recency:
                recency.move_to_end(key)
                classes.put(key, count)
            if not key[8] & self._sample_mask:
                self._sample(key, count)
        if self._sketch.is_due:
            self._sketch.halve()
            classes.halve()
            self._frequency_ghost.halve()

    def refresh(self, keys: Sequence[bytes]) -> None:
        """Make pages the last used ones without counting a use; those that the tier does not hold are skipped."""
        for key in reversed(keys):
            if key in self._recency:
                self._recency.move_to_end(key)
                self._classes.put(key, self._sketch.estimate(key))

    def _sample(self, key: bytes, count: int) -> None:
        """Let both ghosts see a use, and compare them."""
        ghost, by_frequency = self._recency_ghost, self._frequency_ghost
        is_recency_hit, is_frequency_hit = key in ghost, key in by_frequency
        ghost[key] = None
        if is_recency_hit:
            ghost.move_to_end(key)
        elif len(ghost) > self._ghost_capacity:
            ghost.popitem(last=False)
        if not is_frequency_hit and len(by_frequency) >= self._ghost_capacity:
            by_frequency.pop()
        by_frequency.put(key, count)
        self._num_sampled += 1
        self._num_recency_hits += is_recency_hit
        self._num_frequency_hits += is_frequency_hit
        self._lead += (is_frequency_hit - is_recency_hit - self._lead) / self._window
        if len(ghost) == self._ghost_capacity:  # before, both hold everything
            self._window = min(self._window + 1, self.WINDOW * self._ghost_capacity)
        if self._lead > self.MIN_LEAD:
            self._switch(Order.FREQUENCY)
        elif self._lead < 0:
            self._switch(Order.RECENCY)

    def _switch(self, order: Order) -> None:
        self._num_switches += order is not self._order
        self._order = order

    # -- victims ------------------------------------------------------------------------------------------------------

    def victims(self, num: int, protected: Collection[bytes] = ()) -> list[bytes]:
        """Select up to ``num`` pages to evict, the best victim first; changes nothing.

        Args:
            protected: pages that may not be evicted now, besides pinned ones.
        """
        pages: Iterable[bytes] = self._recency if self._order is Order.RECENCY else self._classes
        can_go = (key for key in pages if key not in self._pinned and key not in protected)
        return list(islice(can_go, max(num, 0)))

    def evict(self, num: int, protected: Collection[bytes] = ()) -> list[bytes] | None:
        """Remove ``num`` victims, and return them; None, with nothing changed, if there are not so many."""
        found = self.victims(num, protected)
        if len(found) < num:
            return None
        for key in found:
            self.remove(key)
        self._num_evicted += len(found)
        return found

    # -- for metrics and tests ----------------------------------------------------------------------------------------

    def statistics(self) -> PolicyStatistics:
        return PolicyStatistics(
            num_pages=len(self._recency),
            num_pinned=len(self._pinned),
            num_evicted=self._num_evicted,
            num_by_class=tuple(map(len, self._classes.lists)),
            order=self._order,
            num_switches=self._num_switches,
            num_sampled=self._num_sampled,
            num_recency_hits=self._num_recency_hits,
            num_frequency_hits=self._num_frequency_hits,
            sketch_bytes=self._sketch.num_bytes,
        )

    def check_integrity(self) -> None:
        """For tests, and when idle: both orders hold the same pages, once each.

        Raises:
            AssertionError: says what is wrong.
        """
        assert sorted(self._classes) == sorted(self._recency), "the two orders differ"
        assert len(self._classes) == len(self._recency), "the index of classes is wrong"
        assert self._pinned <= self._recency.keys(), "a page is pinned that is not there"
        assert len(self._recency_ghost) <= self._ghost_capacity, "the ghost of recency is too large"
        assert len(self._frequency_ghost) <= self._ghost_capacity, "the ghost of frequency is too large"
