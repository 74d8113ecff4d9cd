"""``TensorStore``: tensors by name in the pages of the pool, whole or not at all.

A tensor [num_rows, width] is cut into pages of as many rows as fit. A page's key says which tensor and which page of it
it is, so that nothing but the pages has to be found again:

    key    16 bytes of a digest of all the rest, by which uses are counted; 20 bytes of a digest of the tensor's name;
           the number of the page, 4 bytes
    page   32 bytes (``_HEADER``), then rows

The pages of a tensor are kept and evicted together. Its first page is written last and vanishes first: a tensor whose
first page is there has been written to its end. Each writing has a number of its own in all of its pages, so that pages
of two writings, which may differ in the last bits, are never put together.

From: Omni-Flow sections 4.1.1 (named parameters in pages), 4.1.2 (one upload in flight) and 4.1.4 (fragmented pages are
kept whole); HydraInfer, section 4.3 (the paged image cache, whose pages are 576 rows of one image).
"""

from __future__ import annotations

import hashlib
import itertools
import math
import secrets
import struct
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vllm_omni.kv.pool.disk import DiskPages
from vllm_omni.kv.pool.host_peers import HostPeers
from vllm_omni.kv.pool.ownership import slab_directory
from vllm_omni.kv.pool.slab import Slab
from vllm_omni.kv.pool.store import PageStore
from vllm_omni.messages.payload import DTYPE_NAMES, DTYPES

ROWS_PER_PAGE = 64
"""Of the width that a store is made for. A page of 576 rows, an image of LLaVA, would be mostly empty for a short sound
and for the end of most images; nine of these hold it."""

MEMORY, PEER, DISK = "memory", "peer", "disk"
"""Where a tensor may be: in this engine's slab, in that of another engine of this host, in this engine's segment."""
_HEADER = struct.Struct("<QII16s")  # number of the writing, rows of the tensor, width, name of the dtype
HEADER_BYTES = _HEADER.size
_TENSOR_BYTES = 20
_INDEX = struct.Struct("<I")

OnGone = Callable[[Sequence[bytes]], None]


def page_bytes(width: int, dtype: torch.dtype) -> int:
    """The size of a page for tensors of this width; others are cut into pages of the same size."""
    return HEADER_BYTES + ROWS_PER_PAGE * width * dtype.itemsize


def tensor_digest(identifier: str, name: str) -> bytes:
    """Which tensor a page belongs to.

    Args:
        identifier: of the contents that it was computed from; never a counter.
        name: which of the tensors that were computed from them.
    """
    return hashlib.sha256(f"{len(name)} {name} {identifier}".encode()).digest()[:_TENSOR_BYTES]


def page_key(tensor: bytes, index: int) -> bytes:
    rest = tensor + _INDEX.pack(index)
    return hashlib.sha256(rest).digest()[:16] + rest


def _split(key: bytes) -> tuple[bytes, int]:
    return key[16 : 16 + _TENSOR_BYTES], _INDEX.unpack(key[-_INDEX.size :])[0]


class Found(NamedTuple):
    """A tensor, and the medium that had it."""

    tensor: Tensor  # on the host
    medium: str


class TensorStatistics(NamedTuple):
    """What a store has done since it was opened, in tensors."""

    num_hits: dict[str, int]  # by medium
    num_misses: int
    num_stored: int
    num_duplicates: int  # not stored: it was there, or was just being stored
    num_dropped: int  # not stored: no room, or the medium failed


class _Medium:
    """The pages of one store, by tensor."""

    def __init__(self, open_store: Callable[[OnGone], PageStore]) -> None:
        self._lock = threading.Lock()  # not held while a page is copied
        self._pages: dict[bytes, set[int]] = {}  # tensor -> numbers of its pages
        self.store = open_store(self._remove_rest)
        for key in self.store.pages():
            tensor, index = _split(key)
            self._pages.setdefault(tensor, set()).add(index)
        for tensor, pages in list(self._pages.items()):
            if pages != set(range(len(pages))):  # its owner was killed while it wrote, or a damaged page was removed
                self.remove(tensor)

    def __contains__(self, tensor: bytes) -> bool:
        return page_key(tensor, 0) in self.store

    def __len__(self) -> int:
        return len(self._pages)

    def write(self, tensor: bytes, pages: Sequence[bytes | bytearray | memoryview]) -> bool:
        """Write all pages, or none."""
        if len(pages) > self.store.num_slots:
            return False
        self.remove(tensor)
        task, is_whole = f"put {tensor.hex()}", True
        try:
            for index in (*range(1, len(pages)), 0):
                key = page_key(tensor, index)
                is_whole = self.store.store(key, pages[index])
                if is_whole:
                    with self._lock:
                        self._pages.setdefault(tensor, set()).add(index)
                    is_whole = self.store.hold(task, [key]) == 1
                if not is_whole:
                    break
        finally:
            self.store.release(task)
        if not is_whole:
            self.remove(tensor)
        return is_whole

    def access(self, tensor: bytes, num_pages: int) -> None:
        self.store.access([page_key(tensor, index) for index in range(num_pages)])

    def remove(self, tensor: bytes) -> None:
        with self._lock:
            pages = self._pages.pop(tensor, set())
        self.store.remove([page_key(tensor, index) for index in sorted(pages)])

    def _remove_rest(self, keys: Sequence[bytes]) -> None:
        """Remove the other pages of tensors that have lost one."""
        for tensor in {_split(key)[0] for key in keys}:
            self.remove(tensor)

    def check_integrity(self) -> None:
        self.store.check_integrity()
        found: dict[bytes, set[int]] = {}
        for tensor, index in map(_split, self.store.pages()):
            found.setdefault(tensor, set()).add(index)
        assert found == self._pages, "pages of tensors are not those of the store"
        assert all(pages == set(range(len(pages))) for pages in found.values()), "a part of a tensor was kept"


class TensorStore:
    """Tensors in this engine's memory and disk, and in the memory of other engines of this host. Thread-safe.

    A tensor of which a page is missing or damaged is a miss, and its other pages are removed. One of which another
    thread is just storing the same is not stored twice, nor is one that another engine has in its memory.

    Args:
        media: ``MEMORY`` and ``DISK`` -> how a store is opened, which calls what it is given with keys that are gone.

    Attributes:
        peers: other engines' memory; None: they are not read.
    """

    def __init__(self, media: Mapping[str, Callable[[OnGone], PageStore]]) -> None:
        self.media = {name: _Medium(open_store) for name, open_store in media.items()}
        self.peers: HostPeers | None = None
        self.page_bytes = min((one.store.page_bytes for one in self.media.values()), default=0)
        self._lock = threading.Lock()
        self._storing: set[bytes] = set()
        self._num_hits = dict.fromkeys([*self.media, PEER], 0)
        self._num_misses = self._num_stored = self._num_duplicates = self._num_dropped = 0

    def put(self, identifier: str, tensor: Tensor, name: str = "") -> bool:
        """Store a tensor, unless it is there or is being stored. Blocks while it copies.

        Returns whether it was stored; otherwise, too, the caller has nothing to do.

        Args:
            tensor: [num_rows, width], on the host, any dtype of ``DTYPES``.
        """
        digest = tensor_digest(identifier, name)
        with self._lock:
            if digest in self._storing:
                self._num_duplicates += 1
                return False
            self._storing.add(digest)
        is_stored, wanted = False, {}
        try:
            wanted = {medium: one for medium, one in self.media.items() if not self._has(medium, digest)}
            pages = list(_cut(tensor, self.page_bytes)) if wanted else []
            for medium in wanted.values():
                if pages and medium.write(digest, pages):
                    medium.access(digest, len(pages))
                    is_stored = True
        finally:
            with self._lock:
                self._storing.discard(digest)
                self._num_duplicates += not wanted
                self._num_stored += is_stored
                self._num_dropped += bool(wanted) and not is_stored
        return is_stored

    def _has(self, medium: str, digest: bytes) -> bool:
        if digest in self.media[medium]:
            return True
        if medium == DISK or self.peers is None:
            return False
        self.peers.update()
        return page_key(digest, 0) in self.peers

    def get(self, identifier: str, name: str = "", media: Collection[str] | None = None) -> Found | None:
        """Copy a tensor; None: it is not there, not whole, or damaged. Blocks while it copies.

        Args:
            media: where to look for it; None: everywhere.
        """
        digest = tensor_digest(identifier, name)
        found = next(self._look(digest, media), None)
        with self._lock:
            if found is None:
                self._num_misses += 1
            else:
                self._num_hits[found.medium] += 1
        return found

    def _look(self, digest: bytes, media: Collection[str] | None) -> Iterator[Found]:
        page = memoryview(bytearray(self.page_bytes))
        for name in (MEMORY, PEER, DISK):
            if media is not None and name not in media:
                continue
            if name == PEER:
                tensor = self._join_peers(digest, page)
            elif name in self.media and digest in self.media[name]:
                tensor = self._join_own(self.media[name], digest, page)
            else:
                tensor = None
            if tensor is not None:
                yield Found(tensor, name)

    def _join_own(self, medium: _Medium, digest: bytes, page: memoryview) -> Tensor | None:
        tensor = _join(
            (medium.store.load(page_key(digest, index), page) is not None for index in itertools.count()), page
        )
        if tensor is None:
            medium.remove(digest)
        else:
            medium.access(digest, _num_pages(tensor, self.page_bytes))
        return tensor

    def _join_peers(self, digest: bytes, page: memoryview) -> Tensor | None:
        if self.peers is None:
            return None
        self.peers.update()
        if page_key(digest, 0) not in self.peers:
            return None
        peers = self.peers
        return _join((peers.load(page_key(digest, index), page) for index in itertools.count()), page)

    def remove(self, identifier: str, name: str = "") -> None:
        """Remove a tensor from this engine's media."""
        for medium in self.media.values():
            medium.remove(tensor_digest(identifier, name))

    def close(self) -> None:
        """Leave the media to the next process; they keep what they have."""
        for medium in self.media.values():
            medium.store.close()
        if self.peers is not None:
            self.peers.close()

    # -- for metrics and tests ----------------------------------------------------------------------------------------

    def statistics(self) -> TensorStatistics:
        with self._lock:
            return TensorStatistics(
                dict(self._num_hits), self._num_misses, self._num_stored, self._num_duplicates, self._num_dropped
            )

    def check_integrity(self) -> None:
        """For tests, when nothing is being stored: there are whole tensors, and nothing else.

        Raises:
            AssertionError: says what is wrong.
        """
        for medium in self.media.values():
            medium.check_integrity()


def open_tensors(
    layout: str, page_bytes: int, memory_bytes: int, *, directory: str = "", disk: str = "", disk_bytes: int = 0
) -> TensorStore:
    """Open an engine's tensors: adopt a slab, and a segment on disk, or make new ones.

    Args:
        layout: id of everything that the tensors depend on beside their names.
        page_bytes: see the function of this name.
        memory_bytes: of the slab; 0: none.
        directory: of the slabs; "": this user's, in shared memory.
        disk: directory of the segments; "": none.

    Raises:
        ConfigError: no room for a page, or a directory that cannot be used.
    """
    slabs, media = Path(directory) if directory else slab_directory(), {}
    if memory_bytes:
        num_slots = max(1, memory_bytes // page_bytes)
        media[MEMORY] = partial(_open_slab, layout, page_bytes, num_slots, slabs)
    if disk:
        media[DISK] = partial(_open_disk, Path(disk), layout, page_bytes, disk_bytes)
    tensors = TensorStore(media)
    own = tensors.media[MEMORY].store if MEMORY in tensors.media else None
    tensors.peers = HostPeers(slabs, layout, own.path if isinstance(own, Slab) else None)
    return tensors


def _open_slab(layout: str, page_bytes: int, num_slots: int, directory: Path, on_gone: OnGone) -> PageStore:
    return Slab(layout, page_bytes, num_slots, directory=directory, on_evicted=on_gone)


def _open_disk(root: Path, layout: str, page_bytes: int, quota_bytes: int, on_gone: OnGone) -> PageStore:
    return DiskPages(root, layout, page_bytes, quota_bytes, on_evicted=on_gone)


# -- pages of a tensor ------------------------------------------------------------------------------------------------


def _rows_per_page(width: int, dtype: torch.dtype, num_bytes: int) -> int:
    """0: not even one row fits."""
    return (num_bytes - HEADER_BYTES) // max(1, width * dtype.itemsize)


def _num_pages(tensor: Tensor, num_bytes: int) -> int:
    return math.ceil(len(tensor) / _rows_per_page(tensor.shape[1], tensor.dtype, num_bytes))


def _cut(tensor: Tensor, num_bytes: int) -> Iterable[bytes]:
    """The pages of a tensor; none if it is no matrix, is empty, or has rows larger than a page."""
    if tensor.dim() != 2 or not tensor.numel() or tensor.dtype not in DTYPE_NAMES:
        return
    rows = _rows_per_page(tensor.shape[1], tensor.dtype, num_bytes)
    if not rows:
        return
    header = _HEADER.pack(secrets.randbits(64), *tensor.shape, DTYPE_NAMES[tensor.dtype].encode())
    data = memoryview(tensor.contiguous().view(torch.uint8).numpy()).cast("B")
    step = rows * tensor.shape[1] * tensor.dtype.itemsize
    for start in range(0, len(data), step):
        yield b"".join((header, data[start : start + step]))


def _join(loads: Iterator[bool], page: memoryview) -> Tensor | None:
    """Put a tensor together.

    Args:
        loads: each copies the next page to ``page``; False: it is not there.
    """
    if not next(loads):
        return None
    header = bytes(page[:HEADER_BYTES])
    _, num_rows, width, dtype_name = _HEADER.unpack(header)
    dtype = DTYPES[dtype_name.rstrip(b"\0").decode()]
    tensor = torch.empty((num_rows, width), dtype=dtype)
    data, rows = tensor.view(torch.uint8).flatten().numpy(), np.frombuffer(page, np.uint8)[HEADER_BYTES:]
    step = _rows_per_page(width, dtype, len(page)) * width * dtype.itemsize
    for start in range(0, len(data), step):
        # A page of another writing may be as right, and is not of this tensor.
        if (start and not next(loads)) or page[:HEADER_BYTES] != header:
            return None
        part = data[start : start + step]
        np.copyto(part, rows[: len(part)])
    return tensor
