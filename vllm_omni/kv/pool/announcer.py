"""``Announcer``: publishes in a directory which pages a slab holds, and asks it before one of them is evicted.

From: Omni-Flow section 4.1.3, Replica Publishing; 4.1.4, Inference Write -> Publication.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterable, Sequence
from itertools import islice

from vllm_omni.kv.pool.directory import Directory, Member, Membership, Page, Reason
from vllm_omni.kv.pool.store import PageStore

BATCH_PAGES = 256  # published by one call
RETRY_S = 1.0  # after which the directory is asked again for what it did not do

logger = logging.getLogger(__name__)

_HAS_NONE = (Reason.NOT_HELD, Reason.LOST)  # no reader can verify a copy


class Announcer:
    """A slab's part in a directory: a lease, publications in batches by a thread, and evictions.

    One lock orders publications and evictions, so that no place is announced that is free, or has another page. The
    directory may take 50 ms to fail, once, under that lock: the threads of a slab's writers wait for it, the scheduler
    does not.

    A page that is stored while its lease is lost, or while the directory does not answer, is published later; all pages
    are when the node joins again. A directory without memory is asked again each ``RETRY_S``.

    Args:
        directory: of the slab's layout, for this node alone to write to.
    """

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._store: PageStore | None = None
        self._membership: Membership | None = None
        self._pending: dict[bytes, None] = {}  # to be published, in order
        self._damaged: set[bytes] = set()  # gone, and not withdrawn yet
        self._leaving: set[bytes] = set()  # may be evicted: the store is about to do so
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="kv-pool-announcer", daemon=True)

    def start(self, store: PageStore, node: str) -> None:
        """Join the directory, and publish what the store holds, from now on.

        Args:
            store: made with this object's ``may_evict``, ``on_evicted`` and ``on_kept``.
            node: unique; readers pull by it.
        """
        self._store = store
        self._membership = Membership(self._directory, node, on_join=self._on_join)
        self._membership.start()
        self._thread.start()

    @property
    def member(self) -> Member | None:
        """What this node is in the directory, if that was reached; it may be lost."""
        return None if self._membership is None else self._membership.member

    # -- for the threads that store pages -----------------------------------------------------------------------------

    def announce(self, keys: Iterable[bytes]) -> None:
        """Publish pages that were stored; those that are gone meanwhile are skipped."""
        with self._lock:
            self._pending.update((key, None) for key in keys if len(key) == self._directory.layout.key_bytes)
        self._wake.set()

    def may_evict(self, keys: Sequence[bytes]) -> Collection[bytes]:
        """Withdraw pages unless they are protected; returns those that may be overwritten."""
        with self._lock:
            allowed = set(keys)
            if (member := self.member) is not None:
                kept = self._directory.evict(member, keys).kept
                allowed -= {key for key, reason in kept.items() if reason not in _HAS_NONE}
            self._leaving |= allowed
            return allowed

    def on_evicted(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            self._damaged.update(key for key in keys if key not in self._leaving)
            self._leaving.difference_update(keys)
            has_damaged = bool(self._damaged)
        if has_damaged:
            self._wake.set()

    def on_kept(self, keys: Sequence[bytes]) -> None:
        """Publish pages again that were withdrawn to be evicted, and were not."""
        with self._lock:
            self._leaving.difference_update(keys)
        self.announce(keys)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _on_join(self, member: Member) -> None:
        assert self._store is not None
        with self._lock:  # what an earlier member has published is void
            self._pending = dict.fromkeys(self._store.pages())
        self._wake.set()

    def _run(self) -> None:
        while not self._is_closing:
            self._wake.wait(RETRY_S if self._pending or self._damaged else None)
            self._wake.clear()
            try:
                while not self._is_closing and self.step():
                    pass  # each step is short, so that evictions come between
            except Exception:  # pages that are not published are of no use to others, and still to this engine
                logger.exception("Cached pages could not be published")

    def step(self) -> bool:
        """Withdraw and publish one batch; returns whether there is more that the directory may do now."""
        assert self._store is not None
        with self._lock:
            member = self.member
            if member is None or not self._directory.is_available:
                return False
            if self._damaged:
                kept = self._directory.evict(member, list(self._damaged), discard=True).kept
                self._damaged = {key for key, reason in kept.items() if reason not in _HAS_NONE}
            batch = list(islice(self._pending, BATCH_PAGES))
            pages = [page for key in batch if (page := self._page(key)) is not None]
            kept = self._directory.publish(member, pages).kept if pages else {}
            for key in batch:
                if kept.get(key) is not Reason.UNAVAILABLE and key not in self._damaged:
                    self._pending.pop(key)
            return bool(self._pending) and not kept and not self._damaged

    def _page(self, key: bytes) -> Page | None:
        """A page as it is published; None if it cannot be."""
        assert self._store is not None
        location = self._store.locate(key)
        if location is None or key in self._leaving or key in self._damaged:
            return None
        return Page(key, location.slot, location.checksum)

    def close(self) -> None:
        """Leave the directory: readers find nothing here any longer."""
        self._is_closing = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._membership is not None:
            self._membership.close()
