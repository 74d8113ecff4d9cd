"""A slab of memory, allocated in blocks: no request asks the operating system for memory.

The pool assigns offsets; the bytes belong to the owner of the slab. Not thread-safe; nothing waits.

From: Omni-Flow section 4.2, Tmp Buffer Pool.
"""

from bisect import bisect_left, bisect_right, insort
from typing import NamedTuple

from vllm_omni.errors import PoolExhausted


class Block(NamedTuple):
    """A piece of the slab."""

    offset: int  # bytes from the start of the slab
    num_bytes: int  # as requested; whole chunks are taken


class PoolStatistics(NamedTuple):
    """What a pool holds at this moment."""

    num_bytes: int
    num_bytes_used: int
    num_blocks: int


class BufferPool:
    """Allocates blocks of whole chunks, first fit.

    Free runs of chunks are a sorted list: the first one that fits is taken, and neighbours are joined when they become
    free. Blocks between stages are few and short-lived and leave few runs, so that a scan costs less than an index by
    size would.

    Args:
        num_bytes: size of the slab; a multiple of ``chunk_bytes``.
        chunk_bytes: alignment of blocks.
    """

    def __init__(self, num_bytes: int, chunk_bytes: int = 4096):
        if chunk_bytes < 1 or num_bytes < chunk_bytes or num_bytes % chunk_bytes:
            raise ValueError(f"a pool of {num_bytes} bytes: must be a multiple of its chunks of {chunk_bytes} bytes")
        self.num_bytes = num_bytes
        self.chunk_bytes = chunk_bytes
        self._free: list[tuple[int, int]] = [(0, num_bytes // chunk_bytes)]  # (first chunk, number of chunks), sorted
        self._blocks: dict[int, Block] = {}  # by offset
        self._offsets: list[int] = []  # of all blocks, sorted

    def can_allocate(self, num_bytes: int) -> bool:
        """Whether there is room for a block; changes nothing."""
        return self._find(self._count_chunks(num_bytes)) is not None

    def allocate(self, num_bytes: int) -> Block:
        """Take a block.

        Raises:
            PoolExhausted: no room; nothing was changed.
        """
        wanted = self._count_chunks(num_bytes)
        place = self._find(wanted)
        if place is None:
            used = self.statistics().num_bytes_used
            raise PoolExhausted(
                f"no room for {num_bytes} bytes: {used} of {self.num_bytes} bytes are in use, in pieces; free blocks, "
                "or make the pool larger",
                is_final=wanted * self.chunk_bytes > self.num_bytes,
            )
        first, count = self._free[place]
        if count > wanted:
            self._free[place] = (first + wanted, count - wanted)
        else:
            del self._free[place]
        block = Block(first * self.chunk_bytes, num_bytes)
        self._blocks[block.offset] = block
        insort(self._offsets, block.offset)
        return block

    def free(self, block: Block) -> None:
        """Give a block back.

        Raises:
            ValueError: the block is not allocated: it was freed before.
        """
        if self._blocks.get(block.offset) != block:
            raise ValueError(f"block {block} is not allocated: it was freed before")
        del self._blocks[block.offset]
        del self._offsets[bisect_left(self._offsets, block.offset)]
        first, count = block.offset // self.chunk_bytes, self._count_chunks(block.num_bytes)
        place = bisect_right(self._free, (first, 0))
        if place < len(self._free) and first + count == self._free[place][0]:
            count += self._free.pop(place)[1]
        if place and sum(self._free[place - 1]) == first:
            before, num_before = self._free[place - 1]
            self._free[place - 1] = (before, num_before + count)
        else:
            self._free.insert(place, (first, count))

    def find_block(self, offset: int) -> Block | None:
        """The block that contains a byte, by binary search; None: no block, or behind the bytes that were requested."""
        place = bisect_right(self._offsets, offset) - 1
        if place < 0:
            return None
        block = self._blocks[self._offsets[place]]
        return block if offset < block.offset + block.num_bytes else None

    def statistics(self) -> PoolStatistics:
        num_free = sum(count for _, count in self._free) * self.chunk_bytes
        return PoolStatistics(self.num_bytes, self.num_bytes - num_free, len(self._blocks))

    def check_integrity(self) -> None:
        """For tests, and when idle: every chunk is free or in one block.

        Raises:
            AssertionError: says what is wrong.
        """
        blocks = self._blocks.values()
        runs = [*self._free, *((one.offset // self.chunk_bytes, self._count_chunks(one.num_bytes)) for one in blocks)]
        end = 0
        for first, count in sorted(runs):
            assert first == end, f"chunk {min(first, end)} is {'lost' if first > end else 'in two blocks'}"
            end = first + count
        assert end * self.chunk_bytes == self.num_bytes, f"chunks from {end} on are lost"
        for (first, count), (behind, _) in zip(self._free, self._free[1:], strict=False):
            assert first + count < behind, f"free runs at {first} and {behind} were not joined"
        assert self._offsets == sorted(self._blocks), "the index of offsets is wrong"

    def _count_chunks(self, num_bytes: int) -> int:
        if num_bytes < 1:
            raise ValueError(f"a block has at least 1 byte, not {num_bytes}")
        return -(-num_bytes // self.chunk_bytes)

    def _find(self, num_chunks: int) -> int | None:
        """The index of the first free run that is long enough."""
        return next((place for place, (_, count) in enumerate(self._free) if count >= num_chunks), None)
