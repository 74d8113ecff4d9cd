"""``DiskPages``: pages on disk behind the slab, checked when they are read, within a quota.

vLLM's file-system tier keeps a file for each block, never removes one, and serves changed bytes as they are. Here all
pages lie in the slots of one file: a page is one ``pwrite`` and 64 bytes of an index, and is evicted by writing another
one over it, so that the quota holds at any time and no directory grows. That is why vLLM's ``fs_io_C``, which writes
and renames files, is not used; ``pwrite`` and ``preadv`` release the GIL as well.

Several processes may share a directory: each owns a *segment* of it, with a lock, and reads those of others
(``DiskReader``). With one common file every store and every eviction would wait for a lock that other processes hold,
and each policy would see the others' pages without their uses. A new process adopts a segment that has no owner.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from vllm_omni.errors import ConfigError
from vllm_omni.kv.pool import ownership
from vllm_omni.kv.pool.disk_index import (
    REWRITTEN,
    IndexFile,
    encode_put,
    encode_remove,
    max_index_bytes,
    read_at,
    read_layout,
    replay,
    write_at,
)
from vllm_omni.kv.pool.slab import check_layout
from vllm_omni.kv.pool.store import PageLocation, PageReader, PageStore, page_checksum

OWNER, INDEX, PAGES = "owner", "index", "pages"  # the files of a segment
SEGMENT_FILES = {OWNER, INDEX, PAGES, f"{INDEX}{REWRITTEN}"}
BLOCK_BYTES = 4096  # pages start at multiples of it


def _stride(page_bytes: int) -> int:
    return -(-page_bytes // BLOCK_BYTES) * BLOCK_BYTES


def count_slots(page_bytes: int, quota_bytes: int) -> int:
    """How many pages fit a quota, with their index."""
    per_slot = _stride(page_bytes) + max_index_bytes(1) - max_index_bytes(0)
    return max(0, (quota_bytes - max_index_bytes(0)) // per_slot)


class DiskPages(PageStore):
    """A segment that this process owns: one without an owner, with its pages, or a new one.

    A full disk, or one that fails, drops what cannot be written; the rest stays readable.

    Args:
        root: directory of segments of all layouts, made with mode 0700. Not on a network's file system, whose locks
            may not be released with their owner.
        layout: id of the format of pages. A segment whose index names another one is left alone.
        quota_bytes: of this segment, index included; with several processes each has as much.
        may_evict, on_evicted, on_kept: see ``PageStore``.

    Raises:
        ConfigError: the quota is smaller than one page, or the directory cannot be used.
    """

    def __init__(
        self,
        root: Path,
        layout: str,
        page_bytes: int,
        quota_bytes: int,
        *,
        may_evict: Callable[[Sequence[bytes]], Collection[bytes]] | None = None,
        on_evicted: Callable[[Sequence[bytes]], None] | None = None,
        on_kept: Callable[[Sequence[bytes]], None] | None = None,
    ) -> None:
        num_slots = count_slots(page_bytes, quota_bytes)
        if num_slots < 1:
            raise ConfigError(
                f"a quota of {quota_bytes:,} bytes on disk has no room for one page of {page_bytes:,} and its index: "
                f"at least {_stride(page_bytes) + max_index_bytes(1):,} are needed"
            )
        super().__init__(num_slots, page_bytes, may_evict=may_evict, on_evicted=on_evicted, on_kept=on_kept)
        self._stride = _stride(page_bytes)
        parent = ownership.private_directory(ownership.private_directory(root) / check_layout(layout))
        self.path, self._owner = _adopt_or_create(parent, layout)
        with contextlib.ExitStack() as unless_open:
            unless_open.callback(ownership.unlock, self._owner)
            try:
                self._open_files(layout)
            except OSError as exc:
                raise ConfigError(f"no pages can be kept in {self.path}: {exc.strerror}") from exc
            unless_open.pop_all()
        self._index_lock = threading.Lock()  # taken before ``lock``
        self._records: list[bytes] = []  # that are to be appended to the index
        self._adopt((key, place) for key, place in self._index.pages.items() if self._can_be(place))
        self._counts["corrupt"] += self._index.num_damaged
        self._index.pages = {}

    def _open_files(self, layout: str) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._pages_fd = os.open(self.path / PAGES, flags, 0o600)
        with contextlib.ExitStack() as unless_open:
            unless_open.callback(os.close, self._pages_fd)
            if os.fstat(self._pages_fd).st_size > self.num_slots * self._stride:  # the quota was larger
                os.ftruncate(self._pages_fd, self.num_slots * self._stride)
            self._index = IndexFile(self.path / INDEX, layout, self.page_bytes)
            unless_open.pop_all()

    def _can_be(self, location: PageLocation) -> bool:
        return location.slot < self.num_slots and 0 < location.num_bytes <= self.page_bytes

    def close(self) -> None:
        """Leave the segment to the next process. A second call does nothing."""
        if self.is_closed:
            return
        super().close()
        self._flush()
        self._index.close()
        os.close(self._pages_fd)
        ownership.unlock(self._owner)

    # -- for PageStore ------------------------------------------------------------------------------------------------

    def _write(self, slot: int, page: memoryview) -> None:
        write_at(self._pages_fd, page, slot * self._stride)

    def _read(self, slot: int, into: memoryview) -> bool:
        return read_at(self._pages_fd, into, slot * self._stride)

    def _begin(self, slot: int, key: bytes, num_bytes: int) -> int:
        return 0  # whether a slot has the right page is shown by its checksum alone

    def _commit(self, key: bytes, location: PageLocation) -> None:
        self._records.append(encode_put(key, location))

    def _erase(self, slot: int, key: bytes) -> None:
        self._records.append(encode_remove(key, slot))

    def _flush(self) -> None:
        """Write the records outside ``lock``: the scheduler, which asks what is there, does not wait for a disk."""
        with self._index_lock:
            with self.lock:
                records, self._records = self._records, []
                is_due = self._index.is_due(len(self._pages), len(records))
                pages = list(self._pages.items()) if is_due else []
            try:
                if is_due:
                    self._index.rewrite(pages)
                elif records:
                    self._index.append(b"".join(records))
            except OSError:  # a page whose REMOVE is lost does not match its checksum, once its slot is reused
                with self.lock:
                    self._counts["failures"] += 1


def _segments(parent: Path) -> Iterator[Path]:
    return (path.parent for path in sorted(parent.glob(f"*/{OWNER}")))


def _adopt_or_create(parent: Path, layout: str) -> tuple[Path, int]:
    """The largest segment without an owner: what lies in one that nobody owns is read by no engine."""
    for path in sorted(_segments(parent), key=_bytes_or_none, reverse=True):
        owner = ownership.claim(path / OWNER)
        if owner is None:
            continue
        if read_layout(path / INDEX) in (None, layout):  # None: not finished, or damaged
            return path, owner
        ownership.unlock(owner)
    while True:
        path = parent / secrets.token_hex(4)
        try:
            path.mkdir(mode=0o700)
            owner = ownership.create(path / OWNER)
        except FileExistsError:
            continue
        except OSError as exc:
            if exc.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
                raise
            raise ConfigError(f"no pages can be kept in {parent}: {exc.strerror}") from exc
        if owner is not None:
            return path, owner


def remove_abandoned(root: Path, *, keep_bytes: int = 0) -> list[Path]:
    """Remove segments without an owner, of all layouts, the oldest first, until so many bytes or less are left.

    Segments that have an owner count, and are never removed. Returns the paths of those that were.
    """
    segments = [path for layout in sorted(root.glob("*")) if not layout.is_symlink() for path in _segments(layout)]
    segments.sort(key=_last_change)
    num_bytes = sum(map(count_bytes, segments))
    removed = []
    for path in segments:
        owner = ownership.claim(path / OWNER) if num_bytes > keep_bytes else None
        if owner is not None:
            num_bytes -= count_bytes(path)
            remove_locked(path)
            ownership.unlock(owner)
            removed.append(path)
    return removed


def remove_locked(path: Path) -> None:
    """Remove a segment that is locked: its owner's file last, by which what is left can be found."""
    for file in sorted(path.iterdir(), key=lambda file: file.name == OWNER):
        file.unlink(missing_ok=True)
    path.rmdir()
    with contextlib.suppress(OSError):  # other segments of the layout are left
        path.parent.rmdir()


def _last_change(segment: Path) -> float:
    return max((file.lstat().st_mtime for file in segment.iterdir()), default=0.0)


def _bytes_or_none(segment: Path) -> int:
    """What its files occupy on the disk; 0 if it is being removed."""
    try:
        return count_bytes(segment)
    except OSError:
        return 0


def count_bytes(segment: Path) -> int:
    """What its files occupy on the disk."""
    return sum(file.lstat().st_blocks * 512 for file in segment.iterdir())


class DiskReader(PageReader):
    """Reads a segment that another process owns.

    Raises:
        OSError: the segment is gone.
        ConfigError: it has another layout.
    """

    def __init__(self, path: Path, layout: str, page_bytes: int) -> None:
        found = read_layout(path / INDEX)
        if found != layout:
            raise ConfigError(f"{path} has pages of the layout {found!r}, not {layout!r}")
        self._index = path / INDEX
        self._stride = _stride(page_bytes)
        self._fd = os.open(path / PAGES, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)

    def entries(self) -> Iterator[tuple[bytes, PageLocation]]:
        """Key and location of all pages that it has now, the oldest first."""
        yield from replay(self._index.read_bytes()).pages.items()

    def read(self, key: bytes, location: PageLocation, into: memoryview) -> bool:
        data = into.cast("B")[: location.num_bytes]
        try:
            is_whole = 0 < location.num_bytes <= self._stride and read_at(self._fd, data, location.slot * self._stride)
        except OSError:
            return False
        return is_whole and page_checksum(key, data) == location.checksum

    def close(self) -> None:
        os.close(self._fd)
