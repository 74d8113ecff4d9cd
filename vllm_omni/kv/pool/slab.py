"""``Slab``: pages in shared memory that outlive the process that wrote them.

The slabs of the relay (``vllm_omni.relay.slab``) carry what one process hands to another, and end with their owner;
these are files in tmpfs, and belong to the host. One process at a time owns a slab; others read it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import numpy as np

from vllm_omni.errors import ConfigError
from vllm_omni.kv.pool import ownership
from vllm_omni.kv.pool.ownership import SLAB_SUFFIX
from vllm_omni.kv.pool.slab_format import (
    EPOCH_OFFSET,
    MAX_LAYOUT_BYTES,
    SlabFile,
    SlabShape,
    read_shape,
)
from vllm_omni.kv.pool.store import PageLocation, PageReader, PageStore, page_checksum

LAYOUT = re.compile(rf"[A-Za-z0-9_.]{{1,{MAX_LAYOUT_BYTES}}}")  # no "-", which ends it in a file's name


def check_layout(layout: str) -> str:
    """Raises ``ValueError`` for a layout id that cannot be part of a file's name."""
    if not LAYOUT.fullmatch(layout) or layout.startswith("."):
        raise ValueError(
            f"the layout id {layout!r}: it has 1 to {MAX_LAYOUT_BYTES} letters, digits, '_' and '.', and starts with "
            "no '.'"
        )
    return layout


class Slab(PageStore):
    """A slab that this process owns: one that a process which has ended left, with its pages, or a new one.

    Pages are checked when they are read, not when they are adopted. All memory is allocated when a slab is made, so
    that a full tmpfs is an error then, instead of a signal later.

    Args:
        layout: id of the format of pages. Only a slab of the same layout and sizes is adopted; others of this layout,
            made with sizes that were configured before, are removed if they have no owner.
        directory: None: ``ownership.slab_directory()``.
        may_evict, on_evicted, on_kept: see ``PageStore``.

    Raises:
        ConfigError: no memory, or no private directory.
    """

    def __init__(
        self,
        layout: str,
        page_bytes: int,
        num_slots: int,
        *,
        directory: Path | None = None,
        may_evict: Callable[[Sequence[bytes]], Collection[bytes]] | None = None,
        on_evicted: Callable[[Sequence[bytes]], None] | None = None,
        on_kept: Callable[[Sequence[bytes]], None] | None = None,
    ) -> None:
        self._shape = SlabShape(check_layout(layout), page_bytes, num_slots)
        if page_bytes < 1 or num_slots < 1:
            raise ValueError(f"a slab of {num_slots} pages of {page_bytes} bytes")
        super().__init__(num_slots, page_bytes, may_evict=may_evict, on_evicted=on_evicted, on_kept=on_kept)
        parent = ownership.private_directory(ownership.slab_directory() if directory is None else directory)
        self.path, self._fd = _adopt_or_create(parent, self._shape)
        try:
            self._file = SlabFile(self._fd, self._shape, is_writable=True)
        except OSError as exc:
            ownership.unlock(self._fd)
            raise ConfigError(f"{self.path} cannot be mapped: {exc.strerror}") from exc
        self._file.start_epoch()
        self.epoch = self._file.epoch
        pages = dict(self._file.entries())
        self._generation = max((location.generation for location in pages.values()), default=0)
        self._adopt(pages.items())
        for slot in self._free:
            self._file.free(slot)

    @property
    def slots(self) -> memoryview:
        """The memory of all slots, read-only, [num_slots x stride] bytes; valid until ``close``."""
        start = self._shape.pages_offset
        return self._file.bytes[start : start + self.num_slots * self.stride].toreadonly()

    @property
    def stride(self) -> int:
        return self._shape.stride

    def view(self, key: bytes) -> memoryview | None:
        """A page in place, read-only and checked; None if it is not there or was damaged.

        The caller holds it (``hold``) for as long as it uses the view.
        """
        location = self._pages.get(key)
        if location is None:
            return None
        page = self._file.page(location.slot, location.num_bytes).toreadonly()
        if page_checksum(key, page) == location.checksum:
            return page
        self._remove_damaged(key, location)
        return None

    def close(self) -> None:
        """Leave the slab to the next process. A second call does nothing."""
        if not self.is_closed:
            super().close()
            self._file.close()
            ownership.unlock(self._fd)

    def destroy(self) -> None:
        """Close the slab and free its memory; readers that have mapped it keep what they see."""
        if not self.is_closed:
            self.path.unlink(missing_ok=True)  # before the lock is released: nothing can adopt it
            self.close()

    # -- for PageStore ------------------------------------------------------------------------------------------------

    def _write(self, slot: int, page: memoryview) -> None:
        self._file.write(slot, page)

    def _read(self, slot: int, into: memoryview) -> bool:
        self._file.read(slot, into)
        return True

    def _begin(self, slot: int, key: bytes, num_bytes: int) -> int:
        self._generation += 1
        self._file.begin(slot, self._generation)
        return self._generation

    def _commit(self, key: bytes, location: PageLocation) -> None:
        self._file.commit(key, location)

    def _erase(self, slot: int, key: bytes) -> None:
        self._file.free(slot)


def _adopt_or_create(directory: Path, shape: SlabShape) -> tuple[Path, int]:
    adopted: tuple[Path, int] | None = None
    for path in sorted(directory.glob(f"{shape.layout}-*{SLAB_SUFFIX}")):
        fd = ownership.claim(path)
        if fd is None:
            continue
        found = read_shape(path)
        if found == shape and adopted is None:
            adopted = path, fd
            continue
        if found is None or (found.layout == shape.layout and found != shape):  # never finished, or of other sizes
            path.unlink(missing_ok=True)
        ownership.unlock(fd)
    while adopted is None:
        path = directory / f"{shape.layout}-{secrets.token_hex(4)}{SLAB_SUFFIX}"
        fd = ownership.create(path)
        if fd is not None:
            try:
                os.posix_fallocate(fd, 0, shape.num_bytes)
                os.pwrite(fd, bytes(8), EPOCH_OFFSET)
                os.pwrite(fd, shape.encode(), 0)  # from here on it can be adopted
            except OSError as exc:
                path.unlink(missing_ok=True)
                ownership.unlock(fd)
                if exc.errno not in (errno.ENOSPC, errno.EFBIG, errno.ENOMEM, errno.EDQUOT):
                    raise
                raise ConfigError(
                    f"a slab of {shape.num_slots:,} pages needs {shape.num_bytes:,} bytes in {directory}, which has "
                    f"{_num_free_bytes(directory):,}: make the slab smaller, or the tmpfs larger"
                ) from exc
            adopted = path, fd
    return adopted


def _num_free_bytes(directory: Path) -> int:
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


class SlabReader(PageReader):
    """Reads a slab that another process owns, also after that process has ended.

    Raises:
        OSError: the slab is gone.
        ConfigError: it has another layout, or the file is no slab.
    """

    def __init__(self, path: Path, layout: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        with contextlib.closing(os.fdopen(fd, "rb")):
            shape = read_shape(path)
            if shape is None or shape.layout != layout:
                found = "no slab" if shape is None else f"of the layout {shape.layout!r}"
                raise ConfigError(f"{path} is {found}, and pages of the layout {layout!r} are expected")
            self._shape = shape
            self._file = SlabFile(fd, shape, is_writable=False)

    @property
    def epoch(self) -> int:
        return self._file.epoch

    def entries(self) -> Iterator[tuple[bytes, PageLocation]]:
        """Key and location of all pages that it has now, the oldest first."""
        return self._file.entries()

    def changes(self, before: np.ndarray | None) -> tuple[np.ndarray, dict[int, tuple[bytes, PageLocation] | None]]:
        """See ``SlabFile.changes``."""
        return self._file.changes(before)

    def read(self, key: bytes, location: PageLocation, into: memoryview) -> bool:
        fits = 0 <= location.slot < self._shape.num_slots and location.num_bytes <= self._shape.page_bytes
        if not fits or not self._file.holds(key, location):
            return False
        data = into.cast("B")[: location.num_bytes]
        self._file.read(location.slot, data)
        return self._file.holds(key, location) and page_checksum(key, data) == location.checksum

    def close(self) -> None:
        self._file.close()
