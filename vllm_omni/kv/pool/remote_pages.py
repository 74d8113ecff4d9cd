"""``RemotePages``: pages that engines of other hosts have in memory: found by a directory, copied by a relay.

A page is copied, and used only if the directory still stands by the replica afterwards, and if its checksum is right.
All else is a miss: the page is recomputed.

From: Omni-Flow section 4.1.4, Cross-Node Demand Pulling: Search, Transfer, Release.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple, Protocol

import numpy as np
import torch

from vllm_omni.complaints import Complaints
from vllm_omni.errors import RelayError
from vllm_omni.kv.pool.directory import Directory, Match, Member, Replica
from vllm_omni.kv.pool.directory.base import MAX_MATCH_PAGES
from vllm_omni.kv.pool.store import page_checksum
from vllm_omni.relay.remote.pages import address_of

CALL_S = 0.05  # of a call of the directory that no request waits for
LOOKUP_S = 0.02  # a request waits for the directory no longer than this, and computes what it has not found
CLAIM_S = 5.0  # holders do not evict a page that was found, for this time at most
PULL_S = 2.0  # for the pages of one pull; then the other host is left alone for
BACK_OFF_S = 5.0
PULL_BYTES = 32 << 20  # of one pull, and at least one page: so much memory is used, by each thread that loads pages

logger = logging.getLogger(__name__)


class Puller(Protocol):
    """``PageRelay``."""

    def pull(self, source: str, slots: Sequence[int], timeout_s: float) -> list[torch.Tensor]: ...


class Place(NamedTuple):
    """Where a page stands in its request; pages of one chain are found up to the first that is missing."""

    chain: int
    position: int


class FoundPage(NamedTuple):
    key: bytes
    replica: Replica
    claim: int

    @property
    def node(self) -> str:
        return self.replica.node


class Limits(NamedTuple):
    """Of one engine, in seconds and bytes."""

    call_s: float = CALL_S
    lookup_s: float = LOOKUP_S
    pull_s: float = PULL_S
    back_off_s: float = BACK_OFF_S
    pull_bytes: int = PULL_BYTES


LIMITS = Limits()


@dataclass(slots=True)
class _Question:
    """What one request asks the directory."""

    asked_at: float = 0.0
    keys: dict[bytes, Place] = field(default_factory=dict)  # to be asked at the end of this iteration
    sent: Sequence[bytes] = ()  # asked, and not answered yet
    answer: Future[list[Match]] | None = None
    found: dict[bytes, FoundPage] = field(default_factory=dict)
    absent: set[bytes] = field(default_factory=set)


class RemotePages:
    """Finds and copies pages of one layout, all of ``page_bytes`` bytes.

    ``find``, ``ask``, ``take`` and ``forget`` are for the scheduler's thread, and never wait; ``load`` is for threads
    that do. What was found for a request is claimed, until it is loaded or the request is forgotten. A page is loaded
    once, so that one that cannot be copied is a miss afterwards.

    Args:
        directory: to be read only. Its calls should not take longer than ``limits.lookup_s``.
        node: of this engine.
        member: returns what this engine is in the directory; None: it was not reached yet.
        clock: in seconds; never goes back.
    """

    def __init__(
        self,
        directory: Directory,
        relay: Puller,
        page_bytes: int,
        *,
        node: str,
        member: Callable[[], Member | None],
        limits: Limits = LIMITS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = directory
        self._relay = relay
        self._page_bytes = page_bytes
        self._node = node
        self._member = member
        self._limits = limits
        self._clock = clock
        self._questions: dict[str, _Question] = {}  # by request
        self._asking: dict[str, _Question] = {}  # those with keys to be asked
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv_pool_lookup")
        self._back_off: dict[str, float] = {}  # node -> until when it is left alone
        self._lock = threading.Lock()  # of the counts and the line above
        self._complaints = Complaints(logger)
        self.num_hits = self.num_damaged = self.num_failures = 0
        self.num_lookups = self.num_late = 0

    # -- what the scheduler asks --------------------------------------------------------------------------------------

    def find(self, request_id: str, key: bytes, place: Place) -> bool | None:
        """Return whether another host has a page; None: ask again in the next iteration, after ``ask``."""
        question = self._questions.get(request_id)
        if question is None:
            if self._member() is None or not self._directory.is_available or not self._is_key(key):
                return False
            question = self._questions[request_id] = _Question()
        self._take_answer(question)
        if (page := question.found.get(key)) is not None:
            return not self._is_left_alone(page.node)
        if key in question.absent or not self._directory.is_available or not self._is_key(key):
            return False
        if key not in question.sent:
            question.keys[key] = place
            self._asking[request_id] = question
        return None

    def ask(self) -> None:
        """Send what was looked for in this iteration: one call of the directory for each request and chain."""
        waiting = {}
        for request_id, question in self._asking.items():
            if question.answer is not None:
                waiting[request_id] = question
                continue
            keys, question.keys = sorted(question.keys.items(), key=lambda one: one[1]), {}
            chains = [[key for key, _ in chain] for _, chain in groupby(keys, lambda one: one[1].chain)]
            question.sent = [key for key, _ in keys]
            question.asked_at = self._clock()
            question.answer = self._thread.submit(self._match, chains)
            self.num_lookups += 1
        self._asking = waiting

    def take(self, request_id: str, keys: Sequence[bytes]) -> list[FoundPage]:
        """The pages among these that ``find`` has found, to be loaded; from now on they are misses for the request."""
        question = self._questions.get(request_id)
        if question is None:
            return []
        taken = [page for key in keys if (page := question.found.pop(key, None)) is not None]
        question.absent.update(page.key for page in taken)
        return taken

    def forget(self, request_id: str) -> None:
        """Release what was found for a request; an unknown one is ignored."""
        self._asking.pop(request_id, None)
        question = self._questions.pop(request_id, None)
        if question is not None:
            self._abandon(question)
            if question.found:
                self._thread.submit(self._release, list(question.found.values()))

    def _take_answer(self, question: _Question) -> None:
        """Note what the directory has answered, or that it has not in time."""
        answer = question.answer
        if answer is None or not (answer.done() or self._clock() - question.asked_at >= self._limits.lookup_s):
            return
        if answer.done():
            for page in _pages_of(answer.result()):
                question.found[page.key] = page
            question.answer = None
        else:
            self.num_late += 1
            self._abandon(question)
        question.absent.update(key for key in question.sent if key not in question.found)
        question.sent = ()

    def _abandon(self, question: _Question) -> None:
        """Release what a late answer will claim."""
        if question.answer is not None:
            if not question.answer.cancel():
                question.answer.add_done_callback(lambda answer: self._release(_pages_of(answer.result())))
            question.answer = None

    def _is_key(self, key: bytes) -> bool:
        return len(key) == self._directory.layout.key_bytes

    # -- the directory, on a thread of its own ------------------------------------------------------------------------

    def _match(self, chains: Sequence[Sequence[bytes]]) -> list[Match]:
        matches: list[Match] = []
        if (member := self._member()) is None:
            return matches
        try:
            for keys in chains:
                for first in range(0, len(keys), MAX_MATCH_PAGES):
                    part = keys[first : first + MAX_MATCH_PAGES]
                    match = self._directory.match_and_claim(member, part, CLAIM_S)
                    matches.append(self._without_own(match))
                    if len(match.pages) < len(part):
                        break
        except Exception:
            logger.exception("The page directory could not be asked")
        return matches

    def _without_own(self, match: Match) -> Match:
        """Pages that this engine has are read in place: one that it is asked for was damaged, or evicted just now."""
        own = Match(match.claim, tuple(page for page in match.pages if any(one.node == self._node for one in page[1])))
        if own.pages and (member := self._member()) is not None:
            self._directory.release(member, own)
        return Match(match.claim, tuple(page for page in match.pages if page not in own.pages))

    def _release(self, pages: Sequence[FoundPage]) -> None:
        member = self._member()
        for claim, claimed in groupby(pages, attrgetter("claim")):
            if member is not None:
                self._directory.release(member, Match(claim, tuple((page.key, (page.replica,)) for page in claimed)))

    # -- copies, on threads of the tier -------------------------------------------------------------------------------

    def load(self, wanted: Sequence[tuple[FoundPage, memoryview]]) -> list[bytes]:
        """Copy pages; blocks. Returns the keys of those that are right, from the start: others need not be tried.

        Args:
            wanted: pages of ``take``, each with the ``page_bytes`` bytes that it is copied into.
        """
        loaded: list[bytes] = []
        try:
            for part in self._parts(wanted):
                copied = self._pull([page for page, _ in part])
                for (page, into), copy in zip(part, copied, strict=False):
                    np.copyto(np.frombuffer(into, np.uint8), copy.numpy())
                    loaded.append(page.key)
                if len(copied) < len(part):
                    break
        finally:
            self._release([page for page, _ in wanted])
            with self._lock:
                self.num_hits += len(loaded)
        return loaded

    def _parts(
        self, wanted: Sequence[tuple[FoundPage, memoryview]]
    ) -> Iterator[Sequence[tuple[FoundPage, memoryview]]]:
        """Pages of one node that follow each other, as many as may be in flight."""
        at_once = max(1, self._limits.pull_bytes // self._page_bytes)
        for _, of_node in groupby(wanted, lambda one: one[0].node):
            pages = list(of_node)
            yield from (pages[first : first + at_once] for first in range(0, len(pages), at_once))

    def _pull(self, pages: Sequence[FoundPage]) -> list[torch.Tensor]:
        """The pages of a node, up to the first that is not right any longer."""
        node = pages[0].node
        if self._is_left_alone(node):
            return []
        try:
            copies = self._relay.pull(node, [page.replica.slot for page in pages], self._limits.pull_s)
        except RelayError as exc:
            with self._lock:
                self.num_failures += 1
                now = self._clock()
                self._back_off = {name: until for name, until in self._back_off.items() if until > now}
                self._back_off[node] = now + self._limits.back_off_s
            self._complaints.warn("No pages are read from %s for a while: %s", address_of(node), exc)
            return []
        stand = self._directory.verify(Match(0, tuple((page.key, (page.replica,)) for page in pages)))
        if not self._directory.is_available:  # nothing is known of the copies
            with self._lock:
                self.num_failures += 1
            return []
        right: list[torch.Tensor] = []
        for page, copy, stands in zip(pages, copies, stand, strict=True):
            if not stands or page_checksum(page.key, memoryview(copy.numpy())) != page.replica.checksum:
                with self._lock:
                    self.num_damaged += 1
                break
            right.append(copy)
        return right

    def _is_left_alone(self, node: str) -> bool:
        return self._back_off.get(node, 0.0) > self._clock()

    def close(self) -> None:
        """End lookups; no thread loads pages any longer."""
        for request_id in list(self._questions):
            self.forget(request_id)
        self._thread.shutdown()


def _pages_of(matches: Sequence[Match]) -> list[FoundPage]:
    return [
        FoundPage(key, replica, match.claim) for match in matches for key, (replica,) in match.pages
    ]  # pages of one part have one replica each
