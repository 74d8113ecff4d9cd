"""A slab of memory, given out in blocks: nothing is asked of the operating system for a request.

The pool decides where; the bytes belong to whoever made the slab. Single-threaded, nothing waits.

From: Omni-Flow section 4.2, Tmp Buffer Pool.
"""

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from typing import NamedTuple

from vllm_omni.errors import PoolExhausted


class Block(NamedTuple):
    """A piece of the slab."""

    offset: int  # bytes from the slab's begin
    num_bytes: int  # as asked for; whole chunks are taken


class PoolStatistics(NamedTuple):
    """What a pool holds at this moment. Idle blocks are cached and nobody's: they go when room is needed."""

    num_bytes: int
    num_bytes_used: int
    num_bytes_idle: int
    num_blocks: int
    num_idle: int
    num_evicted: int  # since the pool was made


class _Held:
    __slots__ = ("block", "cache_key", "num_chunks", "num_refs")

    def __init__(self, block: Block, num_chunks: int, cache_key: str | None):
        self.block = block
        self.num_chunks = num_chunks
        self.cache_key = cache_key
        self.num_refs = 1


class BufferPool:
    """Blocks with reference counts, and a cache of those that were written under a key.

    Free runs of chunks are a sorted list, the first that fits is taken, neighbours are joined when they get free: few
    and short-lived blocks, as between stages, leave few runs, and a search through them costs less than an order by
    size. A block whose last reference goes becomes free, or idle if it has a key: then it can be borrowed again until
    it is evicted, the one that was longest unused first.

    Args:
        num_bytes: of the slab; a multiple of ``chunk_bytes``.
        chunk_bytes: what blocks are aligned to.
    """

    def __init__(self, num_bytes: int, chunk_bytes: int = 4096):
        if chunk_bytes < 1 or num_bytes < chunk_bytes or num_bytes % chunk_bytes:
            raise ValueError(f"a pool of {num_bytes} bytes: must be a multiple of its chunks of {chunk_bytes} bytes")
        self.num_bytes = num_bytes
        self.chunk_bytes = chunk_bytes
        self._free: list[tuple[int, int]] = [(0, num_bytes // chunk_bytes)]  # (first chunk, how many), sorted
        self._held: dict[int, _Held] = {}  # offset -> block
        self._offsets: list[int] = []  # of all blocks, sorted
        self._cached: dict[str, int] = {}  # cache key -> offset
        self._idle: OrderedDict[int, None] = OrderedDict()  # offsets of cached blocks without references, oldest first
        self._num_evicted = 0

    def can_allocate(self, num_bytes: int) -> bool:
        """Whether there is room, be it by evicting idle blocks; changes nothing."""
        wanted = self._count_chunks(num_bytes)
        runs = sorted(
            [*self._free, *((offset // self.chunk_bytes, self._held[offset].num_chunks) for offset in self._idle)]
        )
        length, end = 0, -1
        for first, count in runs:
            length = length + count if first == end else count
            end = first + count
            if length >= wanted:
                return True
        return False

    def allocate(self, num_bytes: int, *, cache_key: str | None = None) -> Block:
        """Take a block with one reference.

        Args:
            cache_key: others may ``borrow`` it by this name, once it is written; a name that is taken loses its block.

        Raises:
            PoolExhausted: no room, even without all idle blocks; nothing was changed.
        """
        wanted = self._count_chunks(num_bytes)
        place = self._find(wanted)
        if place is None and not self.can_allocate(num_bytes):
            stats = self.statistics()
            raise PoolExhausted(
                f"no room for {num_bytes} bytes: {stats.num_bytes_used} of {self.num_bytes} bytes are in use and "
                f"{stats.num_bytes_idle} idle, in pieces; free blocks, or make the pool larger",
                is_final=wanted * self.chunk_bytes > self.num_bytes,
            )
        while place is None:
            self._evict(next(iter(self._idle)))
            place = self._find(wanted)
        first, count = self._free[place]
        if count > wanted:
            self._free[place] = (first + wanted, count - wanted)
        else:
            del self._free[place]
        block = Block(first * self.chunk_bytes, num_bytes)
        self._held[block.offset] = _Held(block, wanted, cache_key)
        insort(self._offsets, block.offset)
        if cache_key is not None:
            self._forget_key(cache_key)
            self._cached[cache_key] = block.offset
        return block

    def borrow(self, cache_key: str) -> Block | None:
        """The block of this name with one reference more; it stays, so that several may borrow it at once."""
        offset = self._cached.get(cache_key)
        if offset is None:
            return None
        held = self._held[offset]
        held.num_refs += 1
        self._idle.pop(offset, None)
        return held.block

    def add_ref(self, block: Block) -> None:
        self._get(block).num_refs += 1

    def free(self, block: Block) -> None:
        """Give one reference back.

        Raises:
            ValueError: the block is not held: it was freed too often.
        """
        held = self._get(block)
        held.num_refs -= 1
        if held.num_refs:
            return
        if held.cache_key is not None:
            self._idle[block.offset] = None
        else:
            self._release(held)

    def find_alloc_by_ptr(self, offset: int) -> Block | None:
        """The block that a byte lies in, by binary search; None: it lies in none, or behind what was asked for."""
        place = bisect_right(self._offsets, offset) - 1
        if place < 0:
            return None
        block = self._held[self._offsets[place]].block
        return block if offset < block.offset + block.num_bytes else None

    def statistics(self) -> PoolStatistics:
        idle = sum(self._held[offset].num_chunks for offset in self._idle) * self.chunk_bytes
        used = sum(held.num_chunks for held in self._held.values()) * self.chunk_bytes
        return PoolStatistics(self.num_bytes, used - idle, idle, len(self._held), len(self._idle), self._num_evicted)

    def check_integrity(self) -> None:
        """For tests, and when idle: every chunk is free or in one block, and what refers to a block is right.

        Raises:
            AssertionError: says what is wrong.
        """
        runs = [
            *self._free,
            *((held.block.offset // self.chunk_bytes, held.num_chunks) for held in self._held.values()),
        ]
        end = 0
        for first, count in sorted(runs):
            assert first == end, f"chunk {min(first, end)} is {'lost' if first > end else 'given out twice'}"
            end = first + count
        assert end * self.chunk_bytes == self.num_bytes, f"chunks from {end} on are lost"
        for (first, count), (behind, _) in zip(self._free, self._free[1:], strict=False):
            assert first + count < behind, f"free runs at {first} and {behind} were not joined"
        assert self._offsets == sorted(self._held), "the index of offsets is wrong"
        for offset, held in self._held.items():
            is_idle = offset in self._idle
            assert held.num_refs >= 0 and is_idle == (not held.num_refs), f"block {offset}: {held.num_refs} references"
            assert not is_idle or held.cache_key is not None, f"block {offset} is idle without a key"
        for key, offset in self._cached.items():
            assert self._held[offset].cache_key == key, f"key {key!r} names another block"

    def _count_chunks(self, num_bytes: int) -> int:
        if num_bytes < 1:
            raise ValueError(f"a block has at least 1 byte, not {num_bytes}")
        return -(-num_bytes // self.chunk_bytes)

    def _find(self, num_chunks: int) -> int | None:
        for place, (_, count) in enumerate(self._free):
            if count >= num_chunks:
                return place
        return None

    def _get(self, block: Block) -> _Held:
        held = self._held.get(block.offset)
        if held is None or held.block != block or not held.num_refs:
            raise ValueError(f"block {block} is not held: it was freed as often as it was taken")
        return held

    def _evict(self, offset: int) -> None:
        del self._idle[offset]
        self._num_evicted += 1
        self._release(self._held[offset])

    def _forget_key(self, cache_key: str) -> None:
        """Another block takes the name."""
        offset = self._cached.pop(cache_key, None)
        if offset is not None:
            self._held[offset].cache_key = None
            if offset in self._idle:
                del self._idle[offset]
                self._release(self._held[offset])

    def _release(self, held: _Held) -> None:
        offset = held.block.offset
        del self._held[offset]
        del self._offsets[bisect_left(self._offsets, offset)]
        if held.cache_key is not None and self._cached.get(held.cache_key) == offset:
            del self._cached[held.cache_key]
        first, count = offset // self.chunk_bytes, held.num_chunks
        place = bisect_right(self._free, (first, 0))
        if place < len(self._free) and first + count == self._free[place][0]:
            count += self._free.pop(place)[1]
        if place and sum(self._free[place - 1]) == first:
            before, num_before = self._free[place - 1]
            self._free[place - 1] = (before, num_before + count)
        else:
            self._free.insert(place, (first, count))
