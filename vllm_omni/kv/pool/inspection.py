"""Slabs and segments as a process sees them that owns none: found, counted, verified, removed.

What an engine owns is only read. A store without an owner is locked while it is changed, so an engine that starts
meanwhile makes a new one, as beside another engine.
"""

from __future__ import annotations

import os
import re
import stat
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import ClassVar, NamedTuple

from vllm_omni.errors import ConfigError
from vllm_omni.kv.pool import ownership
from vllm_omni.kv.pool.disk import INDEX, OWNER, PAGES, SEGMENT_FILES, DiskReader, count_bytes, remove_locked
from vllm_omni.kv.pool.disk_index import IndexFile, read_header
from vllm_omni.kv.pool.slab import LAYOUT, SlabReader
from vllm_omni.kv.pool.slab_format import SlabFile, read_shape
from vllm_omni.kv.pool.store import PageLocation

# A page of a live engine that does not match is read again so much later: it may have been replaced, and the index on
# disk says so only after the page was written.
SETTLE_S = 0.2
_SLAB_NAME = re.compile(rf"({LAYOUT.pattern})-[0-9a-f]{{8}}{re.escape(ownership.SLAB_SUFFIX)}")

Pages = list[tuple[bytes, PageLocation]]


class StoreSummary(NamedTuple):
    """What a store held when it was looked at."""

    medium: str  # "memory" or "disk"
    path: str
    layout: str
    has_owner: bool
    is_readable: bool  # False: the header is damaged or not finished, or the file of pages is missing
    page_bytes: int  # the largest size of a page
    num_pages: int
    num_bytes: int  # of these pages
    size_bytes: int  # of its files


class Verification(NamedTuple):
    """What was found by reading a store."""

    is_readable: bool  # False: see ``StoreSummary``; no page could be read
    num_pages: int  # that were read
    num_damaged: int
    was_repaired: bool  # what was damaged has been removed; False: an engine owns the store

    @property
    def is_damaged(self) -> bool:
        return self.num_damaged > 0 or (not self.is_readable and self.was_repaired)


class FoundStore(ABC):
    """A slab or a segment, which may end, or be adopted, at any time. Nothing of it is kept open.

    Args:
        path: of the slab, or of the segment's directory.
        layout: by its header, or else by its name.
    """

    medium: ClassVar[str]

    def __init__(self, path: Path, layout: str) -> None:
        self.path = path
        self.layout = layout

    @property
    @abstractmethod
    def _locked_file(self) -> Path:
        """The file that an owner locks."""

    @property
    @abstractmethod
    def _size_bytes(self) -> int: ...

    @abstractmethod
    def _read_page_bytes(self) -> int | None:
        """The largest size of a page; None without a usable header."""

    @abstractmethod
    def _open_reader(self, page_bytes: int) -> SlabReader | DiskReader: ...

    @abstractmethod
    def _drop(self, damaged: Pages, owner: int, page_bytes: int) -> int:
        """Remove damaged pages, as the owner; returns how many more were lost with entries that cannot be read."""

    @abstractmethod
    def _remove_as_owner(self, owner: int) -> None: ...

    def has_owner(self) -> bool:
        owner = ownership.claim(self._locked_file)
        if owner is not None:
            ownership.unlock(owner)
        return owner is None

    def summarize(self) -> StoreSummary:
        """Count the pages by the table, without reading them. ``OSError``: it is gone."""
        page_bytes, sizes = self._read_page_bytes(), []
        if page_bytes is not None:
            with closing(self._open_reader(page_bytes)) as reader:
                sizes = [location.num_bytes for _, location in reader.entries()]
        return StoreSummary(
            medium=self.medium,
            path=str(self.path),
            layout=self.layout,
            has_owner=self.has_owner(),
            is_readable=page_bytes is not None,
            page_bytes=page_bytes or 0,
            num_pages=len(sizes),
            num_bytes=sum(sizes),
            size_bytes=self._size_bytes,
        )

    def verify(self, sleep: Callable[[float], None] = time.sleep) -> Verification:
        """Read all pages; remove the damaged ones if no engine owns the store, and a store without a usable header.

        Takes as long as reading the medium. ``OSError``: it is gone, or cannot be read.
        """
        self.path.lstat()  # raises if it is gone
        owner = ownership.claim(self._locked_file)
        try:
            page_bytes = self._read_page_bytes()
            if page_bytes is None:
                if owner is not None:
                    self._remove_as_owner(owner)
                return Verification(False, 0, 0, was_repaired=owner is not None)
            with closing(self._open_reader(page_bytes)) as reader:
                pages = list(reader.entries())
                damaged = _damaged(reader, pages, page_bytes)
                if owner is None and damaged:
                    sleep(SETTLE_S)
                    damaged = _damaged(reader, damaged, page_bytes)
                    now = dict(reader.entries())
                    damaged = [(key, location) for key, location in damaged if now.get(key) == location]
            num_lost = 0 if owner is None else self._drop(damaged, owner, page_bytes)
            return Verification(True, len(pages) + num_lost, len(damaged) + num_lost, was_repaired=owner is not None)
        finally:
            if owner is not None:
                ownership.unlock(owner)

    def remove(self) -> bool:
        """Remove it, unless it has an owner; returns whether it is gone."""
        owner = ownership.claim(self._locked_file)
        if owner is not None:
            self._remove_as_owner(owner)
            ownership.unlock(owner)
        return not self.path.exists()


def _damaged(reader: SlabReader | DiskReader, pages: Pages, page_bytes: int) -> Pages:
    buffer = memoryview(bytearray(page_bytes))
    return [(key, location) for key, location in pages if not reader.read(key, location, buffer)]


class FoundSlab(FoundStore):
    """A slab in shared memory."""

    medium = "memory"

    @property
    def _locked_file(self) -> Path:
        return self.path

    @property
    def _size_bytes(self) -> int:
        return self.path.lstat().st_size

    def _read_page_bytes(self) -> int | None:
        shape = read_shape(self.path)
        return None if shape is None else shape.page_bytes

    def _open_reader(self, page_bytes: int) -> SlabReader:
        return SlabReader(self.path, self.layout)

    def _drop(self, damaged: Pages, owner: int, page_bytes: int) -> int:
        shape = read_shape(self.path)
        assert shape is not None, "it is locked, and was readable"
        with closing(SlabFile(owner, shape, is_writable=True)) as slab:
            for _, location in damaged:
                slab.free(location.slot)
        return 0

    def _remove_as_owner(self, owner: int) -> None:
        self.path.unlink(missing_ok=True)


class FoundSegment(FoundStore):
    """A segment on disk."""

    medium = "disk"

    @property
    def _locked_file(self) -> Path:
        return self.path / OWNER

    @property
    def _size_bytes(self) -> int:
        return count_bytes(self.path)

    def _read_page_bytes(self) -> int | None:
        header = read_header(self.path / INDEX)
        return None if header is None or not (self.path / PAGES).exists() else header.page_bytes

    def _open_reader(self, page_bytes: int) -> DiskReader:
        return DiskReader(self.path, self.layout, page_bytes)

    def _drop(self, damaged: Pages, owner: int, page_bytes: int) -> int:
        with closing(IndexFile(self.path / INDEX, self.layout, page_bytes)) as index:
            if damaged or index.num_damaged:
                gone = {key for key, _ in damaged}
                index.rewrite((key, location) for key, location in index.pages.items() if key not in gone)
            return index.num_damaged

    def _remove_as_owner(self, owner: int) -> None:
        remove_locked(self.path)


# -- where they are ---------------------------------------------------------------------------------------------------


def find_slabs(directory: Path) -> list[FoundSlab]:
    """The slabs of a directory; other files are left out.

    Raises:
        ConfigError: it is no directory of this user's, or has something, and no slab.
    """
    files = _list(directory)
    slabs = [slab for file in files if (slab := _as_slab(file)) is not None]
    if files and not slabs:
        raise ConfigError(f"{directory} is no directory of slabs: it has {_names(files)}, and no LAYOUT-XXXXXXXX.slab")
    return slabs


def find_segments(root: Path) -> list[FoundSegment]:
    """The segments of a directory of cached pages on disk, of all layouts; other files are left out.

    Raises:
        ConfigError: it is no directory of this user's, or has something, and no segment.
    """
    files = _list(root)
    inner = {file: _list_folder(file) for file in files if LAYOUT.fullmatch(file.name)}
    segments = [
        segment for paths in inner.values() for path in paths or () if (segment := _as_segment(path)) is not None
    ]
    if not segments and any(inner.get(file) != [] for file in files):  # an empty folder is what `clear` may leave
        raise ConfigError(
            f"{root} is no directory of cached pages: it has {_names(files)}, and no LAYOUT/XXXXXXXX/owner"
        )
    return segments


def _list(directory: Path) -> list[Path]:
    try:
        found = directory.lstat()
        if not stat.S_ISDIR(found.st_mode):
            raise ConfigError(f"{directory} is not a directory")
        if found.st_uid != os.geteuid():
            raise ConfigError(f"{directory} is another user's")
        return sorted(directory.iterdir())
    except OSError as exc:
        raise ConfigError(f"{directory} cannot be read: {exc.strerror}") from exc


def _list_folder(path: Path) -> list[Path] | None:
    """What a folder has; None: it cannot be listed, or is none."""
    try:
        return None if path.is_symlink() else sorted(path.iterdir())
    except OSError:
        return None


def _names(files: Sequence[Path]) -> str:
    return ", ".join(repr(file.name) for file in files[:3]) + (", ..." if len(files) > 3 else "")


def _as_slab(path: Path) -> FoundSlab | None:
    named = _SLAB_NAME.fullmatch(path.name)
    if named is None or not _is_own_file(path):
        return None
    try:
        shape = read_shape(path)
    except FileNotFoundError:
        return None
    return FoundSlab(path, named[1] if shape is None else shape.layout)


def _as_segment(path: Path) -> FoundSegment | None:
    """Only a directory that has nothing but the files of a segment: ``remove`` removes all of them."""
    names = {file.name for file in _list_folder(path) or ()}
    if OWNER not in names or not names <= SEGMENT_FILES or not all(_is_own_file(path / name) for name in names):
        return None
    header = read_header(path / INDEX)
    return FoundSegment(path, path.parent.name if header is None else header.layout)


def _is_own_file(path: Path) -> bool:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
