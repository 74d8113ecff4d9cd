"""The memory that the processes of one host share: a slab, and in front of it the table of its leases.

    table   64 bytes per slot: words of 8 bytes with the lease's number, the tensor's offset in the slab and its length;
            then a byte per reader: 0, READING, RELEASED or RELEASED_FOR_ALL
    slab    blocks of whole pages

A reader marks a slot READING before it compares the lease's number, and the producer clears the number before it looks
for readers: one of the two sees the other, so no block is freed under a reader.
"""

from __future__ import annotations

import functools
import mmap
import threading
from collections.abc import Callable

import msgspec
import torch

from vllm_omni.errors import RelayBroken
from vllm_omni.messages.payload import Layout, TensorRef
from vllm_omni.relay.slab import typed_view

SLOT_BYTES, SLOT_WORDS = 64, 8
EMPTY_SLOT = bytes(SLOT_BYTES)
FLAGS = 24  # offset in a slot
MAX_READERS = SLOT_BYTES - FLAGS  # processes, the producer's own included
NUM_SLOTS = 4096
TABLE_BYTES = NUM_SLOTS * SLOT_BYTES
PRODUCER_WAITS = FLAGS  # byte of slot 0, which is never leased: set while the producer waits for room
READING, RELEASED, RELEASED_FOR_ALL = 1, 2, 3
OWN_READER = 0  # the byte of the producer's process

# A stream's block starts with a header of words; these two count the rows written and read.
NUM_WRITTEN, NUM_READ = 0, 1
MAX_LOCATION_BYTES = 128  # a Unix socket's address has less than 108

_fence_lock = threading.Lock()


def fence() -> None:
    """Order the stores and loads around it: taking a lock is a locked instruction on every machine."""
    with _fence_lock:
        pass


class Location(msgspec.Struct, frozen=True, array_like=True):
    """Where a reference of this backend points."""

    address: str  # the producer's abstract Unix socket, without the leading zero byte
    slot: int


encode = msgspec.msgpack.Encoder().encode
_decode_location = msgspec.msgpack.Decoder(Location).decode


def parse_location(ref: TensorRef) -> Location:
    """Raises ``RelayBroken`` for a malformed location."""
    return _parse_location(ref.location)


@functools.lru_cache(NUM_SLOTS)  # a producer uses the same few slots again and again
def _parse_location(location: bytes) -> Location:
    if len(location) > MAX_LOCATION_BYTES:
        raise RelayBroken(f"a reference has a location of {len(location)} bytes, at most {MAX_LOCATION_BYTES}")
    try:
        return _decode_location(location)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise RelayBroken(f"a reference has a malformed location: {exc}") from exc


def _check_slot(location: Location) -> int:
    if not 0 < location.slot < NUM_SLOTS:
        raise RelayBroken(f"a reference names slot {location.slot} of {NUM_SLOTS}")
    return location.slot


class Mapping:
    """Table and slab, as one process sees them."""

    def __init__(self, fd: int, num_bytes: int, prefault: bool):
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if prefault else 0)
        whole = mmap.mmap(fd, TABLE_BYTES + num_bytes, flags=flags)
        self.num_bytes = num_bytes
        self.bytes = memoryview(whole)
        self.words = self.bytes.cast("Q")
        self.memory = torch.frombuffer(whole, dtype=torch.uint8, offset=TABLE_BYTES)
        self.typed = {torch.uint8: self.memory}

    def flags(self, slot: int) -> bytes:
        """The readers' bytes of a slot."""
        start = slot * SLOT_BYTES + FLAGS
        return bytes(self.bytes[start : start + MAX_READERS])


class Readable:
    """A mapping and this process's byte in its slots: takes and releases the tensors in it."""

    def __init__(self, mapping: Mapping, reader: int):
        self.mapping = mapping
        self.reader = reader
        self.is_broken = False  # the producer is gone
        self.wakes: list[Callable[[], None]] = []  # called when the producer has written or ended a stream
        self._taken: dict[int, int] = {}  # slot -> lease that this process reads; it may have been revoked since
        self._lock = threading.Lock()

    def take(self, location: Location, lease: int, layout: Layout) -> torch.Tensor:
        """Return a view of a leased tensor, valid until ``release``.

        Raises:
            RelayBroken: the lease has ended, or the tensor is not what the reference says.
        """
        mapping, slot = self.mapping, _check_slot(location)
        flag = slot * SLOT_BYTES + FLAGS + self.reader
        with self._lock:
            before = mapping.bytes[flag]
            if self.is_broken or not self._mark(slot, lease):
                raise RelayBroken("the tensor is not there any longer: released, expired, or its request was aborted")
            offset, num_bytes = mapping.words[slot * SLOT_WORDS + 1], mapping.words[slot * SLOT_WORDS + 2]
            fits = num_bytes == layout.num_bytes and offset + num_bytes <= mapping.num_bytes
            if not fits or offset % layout.dtype.itemsize:
                mapping.bytes[flag] = before
                raise RelayBroken(f"a reference needs {layout.num_bytes} bytes, {num_bytes} were put")
            self._taken[slot] = lease
        return typed_view(mapping.typed, offset, layout)

    def release(self, location: Location, lease: int, for_all: bool = False) -> bool:
        """Release a lease; returns whether the producer waits to be notified."""
        if not 0 < location.slot < NUM_SLOTS:
            return False
        with self._lock:
            # A lease that was not read is marked as if it were, so that the slot cannot get another lease meanwhile.
            if self._taken.get(location.slot) == lease:
                del self._taken[location.slot]
            elif not self._mark(location.slot, lease):
                return False
            flag = location.slot * SLOT_BYTES + FLAGS + self.reader
            self.mapping.bytes[flag] = RELEASED_FOR_ALL if for_all else RELEASED
            fence()
        return bool(self.mapping.bytes[PRODUCER_WAITS])

    def _mark(self, slot: int, lease: int) -> bool:
        """Keep a lease from ending, unless it has ended already."""
        flag, word = slot * SLOT_BYTES + FLAGS + self.reader, slot * SLOT_WORDS
        mapping = self.mapping
        # Another number: this process's byte in the slot belongs to another lease. 0: the slot has no lease.
        if lease < 1 or mapping.words[word] != lease:
            return False
        mapping.bytes[flag] = READING
        fence()
        if mapping.words[word] != lease:
            mapping.bytes[flag] = 0
            return False
        return True

    def credits_of(self, location: Location, lease: int, credits: int) -> Callable[[], int]:
        """See ``Streams.credits_of``; takes no lease."""
        words, slot = self.mapping.words, _check_slot(location)
        first = slot * SLOT_WORDS
        offset = words[first + 1]
        if offset + (NUM_READ + 1) * 8 > self.mapping.num_bytes:
            raise RelayBroken("a reference names as a stream what is not one")
        start = (TABLE_BYTES + offset) // 8

        def count() -> int:
            # Without a reader, or behind its last.
            if words[first] != lease or max(self.mapping.flags(slot)) != READING:
                return credits
            # Clamped: the stream may just have ended, and its block have another owner.
            return min(max(credits - (words[start + NUM_WRITTEN] - words[start + NUM_READ]), 0), credits)

        return count

    def nudge(self) -> None:
        """Wake the producer, if it is another process."""
        return

    def wake_readers(self) -> None:
        """Wake the streams' readers in this process."""
        for wake in list(self.wakes):
            wake()
