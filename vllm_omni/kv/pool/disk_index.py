"""``IndexFile``: which page lies in which slot of a file on disk, as a log that is only appended to.

    header   128 bytes: magic, version, size of a page and layout, with a checksum
    records  64 bytes each: PUT or REMOVE, the slot, the page's number of bytes and checksum, the key; with a checksum

Nothing is synchronized to the disk, because nothing depends on the order in which bytes reach it: a record that is
torn, lost or damaged is skipped, the last PUT of a slot or of a key holds, and whether the page's bytes are there is
shown by their checksum. A killed process loses nothing that was written, a host that fails perhaps the last seconds.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from vllm_omni.kv.pool.store import MAX_KEY_BYTES, MIN_KEY_BYTES, PageLocation

MAGIC, VERSION = b"OMNIDISK", 1
HEADER_BYTES, RECORD_BYTES = 128, 64
PUT, REMOVE = 1, 2
REWRITTEN = ".new"  # suffix of the file that will replace an index
MIN_RECORDS = 1024  # up to here a log is not rewritten
_HEADER = struct.Struct("<8sIQ64s40xI")
_RECORD = struct.Struct(f"<BBHIII4x{MAX_KEY_BYTES}sI")
assert _HEADER.size == HEADER_BYTES and _RECORD.size == RECORD_BYTES


def encode_put(key: bytes, location: PageLocation) -> bytes:
    return _encode(PUT, key, location.slot, location.num_bytes, location.checksum)


def encode_remove(key: bytes, slot: int) -> bytes:
    return _encode(REMOVE, key, slot, 0, 0)


def _encode(kind: int, key: bytes, *numbers: int) -> bytes:
    record = _RECORD.pack(kind, len(key), 0, *numbers, key, 0)[:-4]
    return record + zlib.crc32(record).to_bytes(4, "little")


def encode_header(layout: str, page_bytes: int) -> bytes:
    header = _HEADER.pack(MAGIC, VERSION, page_bytes, layout.encode(), 0)[:-4]
    return header + zlib.crc32(header).to_bytes(4, "little")


def max_index_bytes(num_slots: int) -> int:
    """The largest size of an index of so many slots, together with the file that replaces it."""
    return 2 * HEADER_BYTES + (3 * num_slots + MIN_RECORDS + 1) * RECORD_BYTES


class IndexHeader(NamedTuple):
    """What an index was made for."""

    layout: str
    page_bytes: int


def read_header(path: Path) -> IndexHeader | None:
    """The header of an index; None if there is none, or a damaged one."""
    try:
        with path.open("rb") as file:
            header = file.read(HEADER_BYTES)
    except FileNotFoundError:
        return None
    if len(header) < HEADER_BYTES or zlib.crc32(header[:-4]).to_bytes(4, "little") != header[-4:]:
        return None
    magic, version, page_bytes, layout, _ = _HEADER.unpack(header)
    if (magic, version) != (MAGIC, VERSION):
        return None
    return IndexHeader(layout.rstrip(b"\0").decode(errors="replace"), page_bytes)


def read_layout(path: Path) -> str | None:
    """The layout that an index was made for; None if there is no header, or a damaged one."""
    header = read_header(path)
    return None if header is None else header.layout


class Replay(NamedTuple):
    """What a log says."""

    pages: dict[bytes, PageLocation]  # the oldest first
    num_records: int  # up to the last whole one, also of pages that are gone
    num_damaged: int  # records that were skipped, without those of an end that was not finished


def replay(log: bytes) -> Replay:
    """Read a log behind its header; changes nothing, so that it may be another process's."""
    pages: dict[bytes, PageLocation] = {}
    owners: dict[int, bytes] = {}
    end, num_damaged = HEADER_BYTES, 0
    for start in range(HEADER_BYTES, len(log) - RECORD_BYTES + 1, RECORD_BYTES):
        record = log[start : start + RECORD_BYTES]
        kind, key_bytes, _, slot, num_bytes, checksum, key, own_checksum = _RECORD.unpack(record)
        is_sane = kind in (PUT, REMOVE) and MIN_KEY_BYTES <= key_bytes <= MAX_KEY_BYTES
        if not is_sane or zlib.crc32(record[:-4]) != own_checksum:
            continue
        num_damaged += (start - end) // RECORD_BYTES
        end = start + RECORD_BYTES
        key = key[:key_bytes]
        before = pages.pop(key, None)
        if before is not None:
            del owners[before.slot]
        if kind == PUT:
            if slot in owners:
                del pages[owners[slot]]
            owners[slot] = key
            pages[key] = PageLocation(slot, num_bytes, checksum, 0)
    return Replay(pages, (end - HEADER_BYTES) // RECORD_BYTES, num_damaged)


class IndexFile:
    """The log of one segment, open for its owner. Not thread-safe.

    Args:
        path: of the file, in a directory that this process owns. A file with another header is replaced.
    """

    def __init__(self, path: Path, layout: str, page_bytes: int) -> None:
        self._path = path
        self._header = encode_header(layout, page_bytes)
        self.num_damaged = self.num_records = 0  # see ``Replay``
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            self.pages: dict[bytes, PageLocation] = self._replay(path.read_bytes())
        except OSError:
            os.close(self._fd)
            raise

    def _replay(self, log: bytes) -> dict[bytes, PageLocation]:
        """Read a log, and cut off what was not finished at its end."""
        if log[:HEADER_BYTES] != self._header:
            os.ftruncate(self._fd, 0)
            write_at(self._fd, self._header, 0)
            return {}
        pages, self.num_records, self.num_damaged = replay(log)
        os.ftruncate(self._fd, HEADER_BYTES + self.num_records * RECORD_BYTES)
        return pages

    def append(self, records: bytes) -> None:
        """Write whole records. After an ``OSError`` the next ones are written in their place."""
        write_at(self._fd, records, HEADER_BYTES + self.num_records * RECORD_BYTES)
        self.num_records += len(records) // RECORD_BYTES

    def is_due(self, num_pages: int, num_new: int) -> bool:
        """Whether the log should be rewritten, rather than be appended to: more than half of it is of no use."""
        return self.num_records + num_new > MIN_RECORDS + 2 * num_pages

    def rewrite(self, pages: Iterable[tuple[bytes, PageLocation]]) -> None:
        """Replace the log by one that has only these pages; at any time there is a whole one under its name."""
        log = b"".join([self._header, *(encode_put(key, location) for key, location in pages)])
        temporary = self._path.with_suffix(REWRITTEN)
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            write_at(fd, log, 0)
            temporary.rename(self._path)
        except BaseException:
            os.close(fd)
            raise
        os.close(self._fd)
        self._fd = fd
        self.num_records = (len(log) - HEADER_BYTES) // RECORD_BYTES

    def close(self) -> None:
        os.close(self._fd)


def write_at(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all bytes at an offset. ``OSError``: some of them may have been written."""
    view = memoryview(data)
    while view:
        num = os.pwrite(fd, view, offset)
        view, offset = view[num:], offset + num


def read_at(fd: int, into: memoryview, offset: int) -> bool:
    """Fill a buffer from an offset; False if the file ends before."""
    while into:
        num = os.preadv(fd, [into], offset)
        if not num:
            return False
        into, offset = into[num:], offset + num
    return True
