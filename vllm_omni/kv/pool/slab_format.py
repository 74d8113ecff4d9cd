"""The file of a slab: a header, a table with an entry for each slot, and the pages.

    header   4,096 bytes: magic, version, sizes and layout, with a checksum; then the epoch, counted up by each owner
    table    64 bytes per slot: generation, number of bytes, checksum, state, and the key
    pages    from a multiple of 4,096 bytes, each at a multiple of 64

The state is one byte, and is written before and after everything else that it speaks of: whenever its owner is killed,
a slot is WRITING or has a whole page. (A host that fails takes its tmpfs with it.)
"""

from __future__ import annotations

import mmap
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vllm_omni.kv.pool.store import MAX_KEY_BYTES, MIN_KEY_BYTES, PageLocation
from vllm_omni.relay.shm.memory import fence

MAGIC, VERSION = b"OMNISLAB", 1
HEADER_BYTES, EPOCH_OFFSET = 4096, 2048
MAX_LAYOUT_BYTES = 64
_HEADER = struct.Struct(f"<8sIQQ{MAX_LAYOUT_BYTES}s")
_CHECKSUM = struct.Struct("<I")
_ENTRY = np.dtype(
    [
        *(("generation", "<u8"), ("num_bytes", "<u4"), ("checksum", "<u4")),
        *(("state", "u1"), ("key_bytes", "u1"), ("unused", "V6"), ("key", f"V{MAX_KEY_BYTES}")),
    ]
)
ENTRY_BYTES = _ENTRY.itemsize
_STATE, _KEY = 16, 24  # offsets in an entry
_BEHIND_STATE = struct.Struct(f"<B6x{MAX_KEY_BYTES}s")
_SIZES = struct.Struct("<II")
FREE, WRITING, VALID = range(3)


class SlabShape(NamedTuple):
    """What a slab is made for; one that was made for anything else is not adopted."""

    layout: str
    page_bytes: int
    num_slots: int

    @property
    def stride(self) -> int:
        return -(-self.page_bytes // 64) * 64

    @property
    def pages_offset(self) -> int:
        return -(-(HEADER_BYTES + self.num_slots * ENTRY_BYTES) // 4096) * 4096

    @property
    def num_bytes(self) -> int:
        """Of the whole file."""
        return self.pages_offset + self.num_slots * self.stride

    def encode(self) -> bytes:
        header = _HEADER.pack(MAGIC, VERSION, self.page_bytes, self.num_slots, self.layout.encode())
        return header + _CHECKSUM.pack(zlib.crc32(header))


def read_shape(path: Path) -> SlabShape | None:
    """What a slab was made for; None if it is none, or its header was not finished."""
    with path.open("rb") as file:
        header = file.read(_HEADER.size + _CHECKSUM.size)
    if len(header) < _HEADER.size + _CHECKSUM.size:
        return None
    magic, version, page_bytes, num_slots, layout = _HEADER.unpack_from(header)
    if (magic, version) != (MAGIC, VERSION) or zlib.crc32(header[:-4]) != _CHECKSUM.unpack(header[-4:])[0]:
        return None
    shape = SlabShape(layout.rstrip(b"\0").decode(errors="replace"), page_bytes, num_slots)
    return shape if path.stat().st_size == shape.num_bytes else None


class SlabFile:
    """A slab in memory, as its owner or a reader sees it.

    Args:
        fd: of the file, which has its full size.
    """

    def __init__(self, fd: int, shape: SlabShape, *, is_writable: bool) -> None:
        access = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
        self._map = mmap.mmap(fd, shape.num_bytes, flags=mmap.MAP_SHARED, prot=access)
        self._shape = shape
        self.bytes = memoryview(self._map)
        self._array = np.frombuffer(self._map, np.uint8)
        self._words = self.bytes[: shape.pages_offset].cast("Q")

    @property
    def epoch(self) -> int:
        """How many processes have owned it so far."""
        return self._words[EPOCH_OFFSET // 8]

    def start_epoch(self) -> None:
        self._words[EPOCH_OFFSET // 8] += 1

    def page(self, slot: int, num_bytes: int) -> memoryview:
        start = self._shape.pages_offset + slot * self._shape.stride
        return self.bytes[start : start + num_bytes]

    def write(self, slot: int, data: memoryview) -> None:
        np.copyto(self._page_array(slot, len(data)), np.frombuffer(data, np.uint8))

    def read(self, slot: int, into: memoryview) -> None:
        # numpy releases the GIL while it copies; the assignment of a memoryview does not.
        np.copyto(np.frombuffer(into, np.uint8), self._page_array(slot, len(into)))

    def _page_array(self, slot: int, num_bytes: int) -> np.ndarray:
        start = self._shape.pages_offset + slot * self._shape.stride
        return self._array[start : start + num_bytes]

    # -- entries ------------------------------------------------------------------------------------------------------

    def begin(self, slot: int, generation: int) -> None:
        start = self._entry(slot)
        self.bytes[start + _STATE] = WRITING
        fence()
        self._words[start // 8] = generation
        fence()

    def commit(self, key: bytes, location: PageLocation) -> None:
        start = self._entry(location.slot)
        _SIZES.pack_into(self.bytes, start + 8, location.num_bytes, location.checksum)
        _BEHIND_STATE.pack_into(self.bytes, start + _STATE + 1, len(key), key)
        fence()
        self.bytes[start + _STATE] = VALID

    def free(self, slot: int) -> None:
        self.bytes[self._entry(slot) + _STATE] = FREE
        fence()

    def holds(self, key: bytes, location: PageLocation) -> bool:
        """Whether a slot still has the page that it had when its location was published."""
        fence()
        start = self._entry(location.slot)
        is_same = self.bytes[start + _STATE] == VALID and self._words[start // 8] == location.generation
        return is_same and self.bytes[start + _KEY : start + _KEY + len(key)] == key

    def entries(self) -> Iterator[tuple[bytes, PageLocation]]:
        """Key and location of all whole pages, the oldest first."""
        table = np.frombuffer(self._map, _ENTRY, self._shape.num_slots, HEADER_BYTES)
        is_sane = (table["num_bytes"] > 0) & (table["num_bytes"] <= self._shape.page_bytes)
        is_sane &= (table["key_bytes"] >= MIN_KEY_BYTES) & (table["key_bytes"] <= MAX_KEY_BYTES)
        slots = np.flatnonzero((table["state"] == VALID) & is_sane)
        for slot in slots[np.argsort(table["generation"][slots], kind="stable")].tolist():
            if (page := self._page_of(slot)) is not None:
                yield page

    def changes(self, before: np.ndarray | None) -> tuple[np.ndarray, dict[int, tuple[bytes, PageLocation] | None]]:
        """Compare the table with an earlier state of it.

        Args:
            before: what the last call returned first; None: an empty table.

        Returns:
            A mark of each slot, for the next call; and by slot that has changed its page, None where it has none now.
        """
        table = np.frombuffer(self._map, _ENTRY, self._shape.num_slots, HEADER_BYTES)
        marks = table["generation"] * 4 + table["state"]
        changed = np.flatnonzero(marks != (0 if before is None else before))
        return marks, {slot: self._page_of(slot) for slot in changed.tolist()}

    def _page_of(self, slot: int) -> tuple[bytes, PageLocation] | None:
        """The page that the table names for a slot; a reader compares its checksum after the copy."""
        start = self._entry(slot)
        num_bytes, checksum = _SIZES.unpack_from(self.bytes, start + 8)
        key_bytes, key = _BEHIND_STATE.unpack_from(self.bytes, start + _STATE + 1)
        is_page = self.bytes[start + _STATE] == VALID and 0 < num_bytes <= self._shape.page_bytes
        if not is_page or not MIN_KEY_BYTES <= key_bytes <= MAX_KEY_BYTES:
            return None
        return key[:key_bytes], PageLocation(slot, num_bytes, checksum, self._words[start // 8])

    def _entry(self, slot: int) -> int:
        return HEADER_BYTES + slot * ENTRY_BYTES

    def close(self) -> None:
        """Unmap it, as soon as no view of a page is left."""
        self._words.release()
        self.bytes = memoryview(b"")
        del self._array, self._map
