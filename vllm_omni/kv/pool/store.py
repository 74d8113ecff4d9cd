"""``PageStore``: pages by key in slots of a fixed size, with eviction: what the slab and the disk have in common."""

from __future__ import annotations

import itertools
import threading
import zlib
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum
from typing import NamedTuple, Self

from vllm_omni.kv.pool.policy import EvictionDuel, PolicyStatistics

MAX_KEY_BYTES = 40  # a SHA-256 digest and the index of a KV cache group: 36
MIN_KEY_BYTES = 16  # of a digest, see ``FrequencySketch``
CANDIDATES = 8  # victims for which ``may_evict`` is asked at a time
COUNTED = (
    *("adopted", "hits", "misses", "stored", "bytes_stored", "bytes_loaded", "duplicates", "dropped", "evicted"),
    *("corrupt", "failures"),
)
MAX_ASKED = 4  # times for one page, before it is dropped

Data = bytes | bytearray | memoryview
Task = tuple["Use", str]


class Use(Enum):
    """Why a slot may not be reused."""

    REQUEST = "request"
    WRITE = "write"
    READ = "read"
    EVICTION = "eviction"  # whether the page may be evicted is being asked


class PageLocation(NamedTuple):
    """Where a page lies; with its key, enough for another process to read it (``PageReader``)."""

    slot: int
    num_bytes: int
    checksum: int  # ``page_checksum``
    generation: int  # of the slot's contents: another page, or the same one written again, has another


class StoreStatistics(NamedTuple):
    """What a store holds, and what it has done since it was opened."""

    num_slots: int
    page_bytes: int
    num_pages: int
    num_bytes: int  # of these pages
    num_adopted: int  # pages found when it was opened
    num_hits: int
    num_misses: int
    num_stored: int
    num_bytes_stored: int
    num_bytes_loaded: int
    num_duplicates: int  # not stored, as the page was there, or was just being written
    num_dropped: int  # not stored: all pages in use, or the medium failed
    num_evicted: int
    num_corrupt: int  # pages that were removed, as their bytes were not those that were stored
    num_failures: int  # of the medium: a full disk, an error of a device
    num_in_use: dict[str, int]  # slots by ``Use``
    policy: PolicyStatistics


def page_checksum(key: bytes, data: Data) -> int:
    """CRC-32 of a page under its key: a page that lies in the place of another one does not match either.

    It finds bit errors, torn writes and slots that were reused while they were read. Against deliberate changes the
    files are private. zlib's CRC is in every Python, releases the GIL and reads 4 GB/s; blake3 would read 6.5 and be
    one more dependency.
    """
    return zlib.crc32(data, zlib.crc32(key))


class PageReader(ABC):
    """Reads pages that another process stores, from the locations that it publishes. Thread-safe."""

    @abstractmethod
    def read(self, key: bytes, location: PageLocation, into: memoryview) -> bool:
        """Copy a page, then check that it was the right one all the time; False if it was not.

        Args:
            into: at least ``location.num_bytes`` bytes; its contents are undefined if the answer is False.
        """

    @abstractmethod
    def close(self) -> None: ...


class PageStore(ABC):
    """Pages of at most ``page_bytes`` bytes by key, in ``num_slots`` slots of one medium. One process writes it.

    All decisions are made under ``lock`` and change memory or a few bytes of an index; pages are copied outside it, so
    several threads can read and write at the same time. A slot is in use while the set of its uses is not empty, and
    then neither evicted nor reused; to add a use twice, or to remove one that is gone, changes nothing. A page that is
    removed while it is in use can no longer be found, and its slot becomes free with its last use.

    A page that is damaged is a miss: it is removed and counted.

    Args:
        may_evict: asked, without the lock, which of some victims may be evicted: those of which other hosts have
            the only copy that is needed may not. None: all.
        on_evicted: called, without the lock, with keys that were evicted or found damaged.
        on_kept: called, without the lock, with keys that may be evicted and were not, as something uses them meanwhile.

    From: Omni-Flow section 4.1.2, multi-tier slot engine: trackers in sets, no counters.
    """

    def __init__(
        self,
        num_slots: int,
        page_bytes: int,
        *,
        may_evict: Callable[[Sequence[bytes]], Collection[bytes]] | None = None,
        on_evicted: Callable[[Sequence[bytes]], None] | None = None,
        on_kept: Callable[[Sequence[bytes]], None] | None = None,
    ) -> None:
        self.num_slots = num_slots
        self.page_bytes = page_bytes
        self.lock = threading.Lock()
        self.is_closed = False
        self._may_evict = may_evict
        self._on_evicted = on_evicted
        self._on_kept = on_kept
        self._policy = EvictionDuel(num_slots)
        self._pages: dict[bytes, PageLocation] = {}  # that can be read
        self._keys: dict[int, bytes] = {}  # by slot, the same pages
        self._writing: dict[bytes, int] = {}  # key -> slot
        self._free: list[int] = list(range(num_slots - 1, -1, -1))
        self._uses: dict[int, set[Task]] = {}  # by slot; never empty
        self._held: defaultdict[str, set[int]] = defaultdict(set)  # request -> slots
        self._tasks = itertools.count()
        self._counts: defaultdict[str, int] = defaultdict(int)

    # -- pages --------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, key: bytes) -> bool:
        return key in self._pages

    def match(self, keys: Sequence[bytes]) -> int:
        """How many pages from the start are there; changes nothing, and waits for nothing."""
        return next((place for place, key in enumerate(keys) if key not in self._pages), len(keys))

    def locate(self, key: bytes) -> PageLocation | None:
        """Where a page lies, to be published to other processes."""
        return self._pages.get(key)

    def pages(self) -> dict[bytes, PageLocation]:
        """All pages and where they lie, the oldest first: to be published when a store was adopted."""
        with self.lock:
            return dict(self._pages)

    def store(self, key: bytes, data: Data) -> bool:
        """Write a page, unless it is there or is being written; evicts another one if necessary.

        Returns whether it was written. Otherwise, too, the caller has nothing to do: a page that is dropped will be
        recomputed. Blocks while it copies.
        """
        page = memoryview(data).cast("B")
        if not MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES or not 0 < len(page) <= self.page_bytes:
            raise ValueError(
                f"a key of {len(key)} bytes and a page of {len(page)} bytes: a key has {MIN_KEY_BYTES} to "
                f"{MAX_KEY_BYTES}, a page 1 to {self.page_bytes}"
            )
        task = self._new_task(Use.WRITE)
        slot = self._take_slot(key, task)
        if slot is None:
            return False
        is_written = False
        try:
            with self.lock:
                generation = self._begin(slot, key, len(page))
            checksum = page_checksum(key, page)
            self._write(slot, page)
            with self.lock:
                location = PageLocation(slot, len(page), checksum, generation)
                self._commit(key, location)
                self._pages[key], self._keys[slot] = location, key
                self._policy.insert(key, is_pinned=True)
                is_written = True
        except OSError:
            with self.lock:
                self._counts["failures"] += 1
        finally:
            with self.lock:
                del self._writing[key]
                self._counts["stored" if is_written else "dropped"] += 1
                self._counts["bytes_stored"] += len(page) if is_written else 0
                self._end_use(slot, task)
            self._flush()
        return is_written

    def load(self, key: bytes, into: memoryview) -> int | None:
        """Copy a page; returns its number of bytes, or None if it is not there. Blocks while it copies.

        Args:
            into: writable and contiguous; undefined after None. A page that does not fit raises ``ValueError``.
        """
        task, buffer = self._new_task(Use.READ), into.cast("B")
        with self.lock:
            location = self._pages.get(key)
            self._counts["misses" if location is None else "hits"] += 1
            if location is None:
                return None
            if len(buffer) < location.num_bytes:
                raise ValueError(f"a page of {location.num_bytes} bytes cannot be copied into {len(buffer)}")
            self._begin_use(location.slot, task)
        data, is_right, has_failed = buffer[: location.num_bytes], False, False
        try:
            is_right = self._read(location.slot, data) and page_checksum(key, data) == location.checksum
        except OSError:
            has_failed = True
        finally:
            with self.lock:
                self._counts["failures"] += has_failed
                self._counts["bytes_loaded"] += location.num_bytes if is_right else 0
                self._end_use(location.slot, task)
        if not is_right:
            self._remove_damaged(key, location, is_corrupt=not has_failed)
        return location.num_bytes if is_right else None

    def _remove_damaged(self, key: bytes, location: PageLocation, *, is_corrupt: bool = True) -> None:
        with self.lock:
            if self._pages.get(key) != location:  # another thread was faster
                return
            self._counts["corrupt"] += is_corrupt
            self._remove(key)
        self._report_gone([key])

    def remove(self, keys: Iterable[bytes]) -> None:
        """Remove pages; those that are not there are skipped."""
        with self.lock:
            for key in keys:
                if key in self._pages:
                    self._remove(key)
        self._flush()

    def clear(self) -> None:
        """Remove all pages."""
        self.remove(list(self._pages))

    def verify(self) -> int:
        """Read all pages, and remove the damaged ones; returns their number. Takes as long as reading the medium."""
        buffer, before = memoryview(bytearray(self.page_bytes)), self._counts["corrupt"]
        for key in list(self._pages):
            self.load(key, buffer)
        return self._counts["corrupt"] - before

    # -- uses ---------------------------------------------------------------------------------------------------------

    def access(self, keys: Sequence[bytes]) -> None:
        """Count a request's use of its chain of pages; see ``EvictionDuel.access``."""
        with self.lock:
            self._policy.access(keys)

    def hold(self, request_id: str, keys: Sequence[bytes]) -> int:
        """Keep pages until ``release``, from the start up to the first that is not there; returns their number."""
        with self.lock:
            for place, key in enumerate(keys):
                location = self._pages.get(key)
                if location is None:
                    return place
                self._begin_use(location.slot, (Use.REQUEST, request_id))
                self._held[request_id].add(location.slot)
            return len(keys)

    def release(self, request_id: str) -> None:
        """Release all pages that are held for a request; a second call does nothing."""
        with self.lock:
            for slot in self._held.pop(request_id, ()):
                self._end_use(slot, (Use.REQUEST, request_id))

    def _new_task(self, use: Use) -> Task:
        return use, str(next(self._tasks))

    def _begin_use(self, slot: int, use: Task) -> None:
        self._uses.setdefault(slot, set()).add(use)
        self._policy.pin(self._keys[slot])

    def _end_use(self, slot: int, use: Task) -> None:
        uses = self._uses[slot]
        uses.discard(use)
        if uses:
            return
        del self._uses[slot]
        if slot in self._keys:
            self._policy.unpin(self._keys[slot])
        else:  # its page was removed meanwhile, or was not written
            self._free.append(slot)

    # -- room ---------------------------------------------------------------------------------------------------------

    def _take_slot(self, key: bytes, task: Task) -> int | None:
        """A slot for a new page, which then is being written; None if it is there already, or there is no room."""
        vetoed: set[bytes] = set()
        for _ in range(MAX_ASKED + 1):
            with self.lock:
                if key in self._pages or key in self._writing:
                    self._counts["duplicates"] += 1
                    return None
                if self._free and not self.is_closed:
                    slot = self._writing[key] = self._free.pop()
                    self._uses[slot] = {task}
                    return slot
                victims = {} if self.is_closed else self._choose_victims(vetoed, task[1])
            if not victims:
                break
            vetoed |= self._evict(victims, task[1])
        with self.lock:
            self._counts["dropped"] += 1
        return None

    def _choose_victims(self, vetoed: Collection[bytes], task_id: str) -> dict[bytes, int]:
        """Select pages, and their slots, to be evicted; until then they cannot be victims of another thread."""
        num = 1 if self._may_evict is None else CANDIDATES
        victims = {key: self._pages[key].slot for key in self._policy.victims(num, vetoed)}
        for slot in victims.values():
            self._begin_use(slot, (Use.EVICTION, task_id))
        return victims

    def _evict(self, victims: Mapping[bytes, int], task_id: str) -> set[bytes]:
        """Evict those of the victims that may be evicted and that nothing uses meanwhile; returns the others."""
        allowed: Collection[bytes] = ()
        task = (Use.EVICTION, task_id)
        evicted: list[bytes] = []
        try:
            allowed = victims if self._may_evict is None else self._may_evict(list(victims))
        finally:
            with self.lock:
                for key, slot in victims.items():
                    if key in allowed and self._keys.get(slot) == key and self._uses[slot] == {task}:
                        self._remove(key)
                        evicted.append(key)
                    self._end_use(slot, task)
                self._counts["evicted"] += len(evicted)
        self._report_gone(evicted)
        if self._on_kept is not None and (kept := [key for key in allowed if key not in evicted]):
            self._on_kept(kept)
        return victims.keys() - evicted

    def _report_gone(self, keys: Sequence[bytes]) -> None:
        self._flush()
        if keys and self._on_evicted is not None:
            self._on_evicted(keys)

    def _remove(self, key: bytes) -> None:
        slot = self._pages.pop(key).slot
        del self._keys[slot]
        self._policy.remove(key)
        self._erase(slot, key)
        if slot not in self._uses:
            self._free.append(slot)

    def _adopt(self, pages: Iterable[tuple[bytes, PageLocation]]) -> None:
        """Take over the pages that the medium holds, the oldest first; all other slots are free."""
        for key, location in pages:
            self._pages[key], self._keys[location.slot] = location, key
            self._policy.insert(key)
        self._free = [slot for slot in range(self.num_slots - 1, -1, -1) if slot not in self._keys]
        self._counts["adopted"] = len(self._pages)

    # -- inner interface: what a medium implements --------------------------------------------------------------------

    @abstractmethod
    def _write(self, slot: int, page: memoryview) -> None:
        """Copy a page to its slot, without the lock. An ``OSError`` drops it."""

    @abstractmethod
    def _read(self, slot: int, into: memoryview) -> bool:
        """Fill a buffer from a slot, without the lock; False if it has less bytes. An ``OSError`` removes the page."""

    def _flush(self) -> None:
        """Write down what was noted; without the lock, before a slot is reused. Raises nothing."""
        return

    # -- the same, called with ``lock`` held --------------------------------------------------------------------------

    @abstractmethod
    def _begin(self, slot: int, key: bytes, num_bytes: int) -> int:
        """Note that a slot is going to be written; returns the generation of its contents."""

    @abstractmethod
    def _commit(self, key: bytes, location: PageLocation) -> None:
        """Note that a page is written: after the next ``_flush`` it survives this process."""

    @abstractmethod
    def _erase(self, slot: int, key: bytes) -> None:
        """Note that a page is gone; raises nothing."""

    def close(self) -> None:
        """Stop storing and release the medium for another process; its pages stay. The tier's threads have ended."""
        with self.lock:
            self.is_closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- for metrics and tests ----------------------------------------------------------------------------------------

    def counts(self) -> dict[str, int]:
        """What the store has done since it was opened, by the names of ``COUNTED``; takes no lock."""
        return {name: self._counts[name] for name in COUNTED}

    def statistics(self) -> StoreStatistics:
        with self.lock:
            uses = [use for uses in self._uses.values() for use in {use for use, _ in uses}]
            counted = {f"num_{name}": self._counts[name] for name in COUNTED}
            return StoreStatistics(
                num_slots=self.num_slots,
                page_bytes=self.page_bytes,
                num_pages=len(self._pages),
                num_bytes=sum(location.num_bytes for location in self._pages.values()),
                num_in_use={use.value: uses.count(use) for use in Use},
                policy=self._policy.statistics(),
                **counted,
            )

    def check_integrity(self) -> None:
        """For tests, and when idle: every slot is free, holds one page, is being written, or waits for its last use.

        Raises:
            AssertionError: says what is wrong.
        """
        with self.lock:
            self._policy.check_integrity()
            assert {location.slot: key for key, location in self._pages.items()} == self._keys, "the indexes differ"
            assert sorted(self._pages) == sorted(self._policy), "the policy's pages are not those of the store"
            assert len(set(self._free)) == len(self._free), "a slot is free twice"
            taken = self._keys.keys() | self._uses.keys()
            assert not taken & set(self._free), "a slot is free that holds a page, or is in use"
            assert len(taken) + len(self._free) == self.num_slots, "a slot is lost"
            assert set(self._writing.values()) <= self._uses.keys(), "a slot is written that is not in use"
            assert all(self._uses.values()), "an empty set of uses was kept"
            for slot in self._keys:
                assert (slot in self._uses) == self._policy.is_pinned(self._keys[slot]), f"slot {slot}: wrongly pinned"
            held = {(slot, request) for request, slots in self._held.items() for slot in slots}
            uses = {(slot, name) for slot, uses in self._uses.items() for use, name in uses if use is Use.REQUEST}
            assert held == uses, "requests hold other slots than are in use for them"
