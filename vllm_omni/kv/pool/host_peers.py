"""``HostPeers``: the pages that other engines of this host have in shared memory.

Each engine owns a slab, and any other one of this user can read it: its table says which pages it has, so that no
service is needed to find them. An engine that was killed leaves its slab, which is read until another one adopts it.

From: Omni-Flow section 4.1.3: any replica can pull from any other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from vllm_omni.errors import ConfigError
from vllm_omni.kv.pool.ownership import SLAB_SUFFIX
from vllm_omni.kv.pool.slab import SlabReader
from vllm_omni.kv.pool.store import PageLocation

LOOK_EVERY_S = 0.5  # for slabs of engines that have started or ended


class _Peer:
    """A slab of another engine, and what its table said last."""

    def __init__(self, reader: SlabReader) -> None:
        self.reader = reader
        self.pages: dict[bytes, PageLocation] = {}
        self._keys: dict[int, bytes] = {}  # by slot
        self._marks: np.ndarray | None = None

    def update(self) -> None:
        self._marks, changed = self.reader.changes(self._marks)
        for slot, page in changed.items():
            key = self._keys.pop(slot, None)
            if key is not None and (location := self.pages.get(key)) is not None and location.slot == slot:
                del self.pages[key]
            if page is not None:
                self._keys[slot], self.pages[page[0]] = page


class HostPeers:
    """Finds and copies pages of other engines' slabs of one layout.

    Args:
        directory: of the slabs.
        own: the slab of this engine; None: it has none.
    """

    def __init__(
        self, directory: Path, layout: str, own: Path | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._directory = directory
        self._layout = layout
        self._own = own
        self._clock = clock
        self._peers: dict[tuple[str, int], _Peer] = {}  # by name and inode
        self._look_at = -1.0
        self._lock = threading.Lock()
        self.num_hits = self.num_damaged = 0

    def update(self) -> None:
        """Read what has changed in the tables; some ten microseconds for each slab."""
        with self._lock:
            if self._clock() >= self._look_at:
                self._look_at = self._clock() + LOOK_EVERY_S
                self._look()
            for peer in self._peers.values():
                peer.update()

    def _look(self) -> None:
        found = {}
        for path in self._directory.glob(f"{self._layout}-*{SLAB_SUFFIX}"):
            try:
                if path != self._own:
                    found[path.name, path.stat().st_ino] = path
            except FileNotFoundError:
                continue
        for name in self._peers.keys() - found.keys():
            del self._peers[name]  # unmapped with its last reader, which may be copying
        for name, path in found.items():
            if name not in self._peers:
                try:
                    self._peers[name] = _Peer(SlabReader(path, self._layout))
                except (OSError, ConfigError):  # gone, or not finished
                    continue

    def __contains__(self, key: bytes) -> bool:
        return any(key in peer.pages for peer in self._peers.values())

    def load(self, key: bytes, into: memoryview) -> bool:
        """Copy a page; False if no peer has it any longer. Blocks while it copies."""
        with self._lock:
            found = [(peer, location) for peer in self._peers.values() if (location := peer.pages.get(key)) is not None]
        for peer, location in found:
            if peer.reader.read(key, location, into):
                self.num_hits += 1
                return True
            with self._lock:  # evicted meanwhile, or damaged; it comes back if it is written again
                self.num_damaged += 1
                if peer.pages.get(key) == location:
                    del peer.pages[key]
        return False

    def close(self) -> None:
        """Unmap all slabs, when no copy is running."""
        with self._lock:
            self._peers.clear()
