"""The contract of a directory, and the values it takes and returns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from vllm_omni.kv.pool.directory.layout import Layout

if TYPE_CHECKING:
    from vllm_omni.kv.pool.directory.subscription import Subscription

MAX_NAME_BYTES = 128  # of a node or session
MAX_MATCH_PAGES = 1024  # a longer prefix is matched in several calls, so that no call keeps Redis busy for long
MAX_CHAIN_PAGES = 1 << 15
SWEEP_PAGES = 256
MAX_SECONDS = 7 * 24 * 3600.0  # of a lease, a claim, a write or an idle session
MAX_SLOT = 1 << 53  # what a number in Redis' scripts holds exactly


class Tier(IntEnum):
    """Where a node keeps a page (levels 1 to 3 of the paper)."""

    GPU = 1
    CPU = 2
    DISK = 3


class Reason(IntEnum):
    """Why nothing was done with a page."""

    IN_USE = 1  # a live member has a claim on this replica that has not expired
    BEING_WRITTEN = 2  # a live member has started to write the page
    LAST_COPY = 3  # it cannot be recomputed, and no other live replica has these parts
    NOT_HELD = 4  # the member has no replica of the page
    LOST = 5  # the membership has ended: none of its replicas is matched or verified any longer; join again
    UNAVAILABLE = 6  # the directory did not answer: it may have been done or not, and the lease may still run


class Member(NamedTuple):
    """A node from ``join`` until its lease ends; a node that joins again is another member."""

    node: str
    epoch: int  # higher than that of every earlier member
    lease_s: float


class Page(NamedTuple):
    """A page as its holder publishes it."""

    key: bytes
    slot: int  # the holder's name for the place, 0 to 2^53
    checksum: int  # of the bytes, 64 bits
    mask: int = 1  # bit i: the replica has part i of the page
    tier: Tier = Tier.CPU
    is_recomputable: bool = True


class Replica(NamedTuple):
    """A page as one node holds it."""

    node: str
    epoch: int
    version: int  # unique to the publication: equal versions are the same bytes in the same place
    mask: int
    tier: Tier
    slot: int
    checksum: int
    is_recomputable: bool


# A page, and replicas which together have all of its parts, in the order in which they should be read.
MatchedPage = tuple[bytes, tuple[Replica, ...]]


class Match(NamedTuple):
    """The longest prefix that can be read; each of its replicas is claimed under ``claim``."""

    claim: int
    pages: tuple[MatchedPage, ...]


NO_MATCH = Match(0, ())


class Outcome(NamedTuple):
    """What was done for each key of a call, in its order."""

    done: tuple[bytes, ...]
    kept: Mapping[bytes, Reason]  # nothing was changed for these


class Event(NamedTuple):
    """Pages that a node has published, or that were appended to a session's chain."""

    node: str | None
    session: str | None
    keys: tuple[bytes, ...]


class Statistics(NamedTuple):
    """What a directory holds at this moment. All but ``num_stale`` are zero once all is released and evicted."""

    num_members: int  # with a running lease
    num_pages: int  # with a replica of a live member
    num_replicas: int  # of live members
    num_stale: int  # replicas of former members, which no call finds: ``sweep`` removes them
    num_claims: int  # of live members on replicas of live members
    num_writes: int
    num_chains: int


class Directory(ABC):
    """Which nodes hold which pages of one layout.

    Every call is thread-safe and bounded in time, and none waits for another node. A call whose member has lost its
    lease, or for which the directory does not answer, finds no pages, and reports all that it was asked to change as
    kept with ``Reason.LOST`` or ``Reason.UNAVAILABLE``. Only ``statistics`` and ``check_integrity``, which are for
    tools, raise ``Unavailable``.

    A holder reuses the place of a published page only after ``evict``, ``begin_write`` or a ``publish`` to another
    place is done, or has answered ``NOT_HELD`` or ``LOST``.

    Any call raises ``ValueError`` for a key of another length than the layout's, or a number outside its range.

    From: Omni-Flow section 4.1.3, Distributed Metadata Coordination.
    """

    layout: Layout

    @property
    def is_available(self) -> bool:
        """Whether it is asked at all: while it does not answer, every call finds nothing at once."""
        return True

    # --- members

    @abstractmethod
    def join(self, node: str, lease_s: float) -> Member | None:
        """Become a member for the time of a lease, in place of the node's earlier member.

        The earlier one's replicas, claims and writes are ignored from now on: a node publishes again what it holds.

        Args:
            node: unique among the nodes of the layout.

        Returns:
            None: the directory does not answer.
        """

    @abstractmethod
    def renew(self, member: Member) -> bool:
        """Start the lease anew. False: join again; it has ended, or the directory does not answer."""

    @abstractmethod
    def leave(self, member: Member) -> None:
        """End the lease. An unknown member is ignored."""

    @abstractmethod
    def sweep(self, limit: int = SWEEP_PAGES) -> int:
        """Remove replicas of former members, at most ``limit``, and return their number; any node may call it."""

    # --- pages

    @abstractmethod
    def begin_write(self, member: Member, keys: Sequence[bytes], write_s: float) -> Outcome:
        """Announce that the member writes these pages, until it publishes or abandons them, for ``write_s`` at most.

        One member at a time writes a page: others get ``BEING_WRITTEN``, and wait for its event instead of computing
        it, too. The member's own replica of a page ends here, as its bytes change from now on; ``IN_USE``: it has
        readers.
        """

    @abstractmethod
    def abandon(self, member: Member, keys: Sequence[bytes]) -> None:
        """End writes without a result; keys that the member does not write are ignored."""

    @abstractmethod
    def publish(self, member: Member, pages: Sequence[Page]) -> Outcome:
        """Register replicas whose bytes are complete, end the member's writes of them, and notify subscribers.

        A replica that the member has already is replaced, as when a page moves to another tier, unless it has readers:
        with ``IN_USE`` the old place must stay as it is. Publishing the same values again changes nothing. After
        ``UNAVAILABLE`` both places must stay: readers may be sent to either, until the node has joined again.
        """

    @abstractmethod
    def match_and_claim(self, member: Member, keys: Sequence[bytes], claim_s: float) -> Match:
        """Find the longest prefix of ``keys`` whose pages live members hold in all parts, and claim the replicas.

        Partial replicas are combined greedily: nodes are taken in one order for the whole prefix, each if it adds
        parts: the caller's, then those with the most parts of the prefix, then by name. So few nodes serve a prefix,
        and no combinations are enumerated.

        Args:
            keys: at most the first ``MAX_MATCH_PAGES`` are looked at.
            claim_s: the claims end on their own after this time, or with the member's lease.
        """

    @abstractmethod
    def verify(self, match: Match) -> list[bool]:
        """Return for each page whether all its replicas still stand: not evicted, moved or rewritten; holders alive.

        To be called after the copy and before it is used. Claims prevent eviction only until they expire, so a reader
        that was stopped meanwhile may have copied a slot with other bytes.
        """

    @abstractmethod
    def release(self, member: Member, match: Match) -> None:
        """End the claims of a match, or of the pages that are left in it; others are ignored."""

    @abstractmethod
    def evict(self, member: Member, keys: Sequence[bytes], *, discard: bool = False) -> Outcome:
        """Remove the member's replicas unless they are protected; those that are done may be overwritten at once.

        Check and removal are one step. Protected are replicas with readers, pages being written, and the last copy
        of parts that cannot be recomputed.

        Args:
            discard: remove last copies, too.

        From: Omni-Flow section 4.1.3, Atomic Eviction with Three-Layer Protection. The paper's locks of other nodes'
        reads and of running sessions are one thing here: a claim, of the same node or another.
        """

    # --- sessions and events

    @abstractmethod
    def append_chain(self, session: str, keys: Sequence[bytes], *, keep_s: float, at: int | None = None) -> int:
        """Append pages to a session's chain, and notify its subscribers.

        Args:
            keep_s: the chain expires when it was neither appended to nor read for this time.
            at: number of pages of the chain to keep, when a turn replaces its tail; None: all. If it has fewer, as its
                tail was lost, nothing is appended.

        Returns:
            The length of the chain now, at most ``MAX_CHAIN_PAGES``; 0: also when the directory does not answer.
        """

    @abstractmethod
    def chain(self, session: str) -> tuple[bytes, ...]:
        """Return a session's pages, and cut the chain before the first that live members no longer hold."""

    @abstractmethod
    def subscribe(self, session: str | None = None, max_events: int = 1024) -> Subscription:
        """Receive the events of a session's chain, or with None of all pages that are published."""

    # --- tools

    @abstractmethod
    def statistics(self) -> Statistics:
        """Count everything; in Redis, a walk over all keys of the layout."""

    @abstractmethod
    def check_integrity(self) -> None:
        """For tests, and when idle.

        Raises:
            AssertionError: says what is wrong.
        """

    @abstractmethod
    def close(self) -> None:
        """End subscriptions and connections. Members stay until they leave or their lease ends."""

    # --- checks of arguments, for implementations

    def _check_keys(self, keys: Sequence[bytes]) -> None:
        expected = self.layout.key_bytes
        for key in keys:
            if len(key) != expected:
                raise ValueError(f"a key of {len(key)} bytes: the keys of layout {self.layout.id} have {expected}")

    def _check_chain(self, session: str, keys: Sequence[bytes], at: int | None) -> None:
        check_name(session)
        self._check_keys(keys)
        if at is not None and at < 0:
            raise ValueError(f"a chain cannot be cut at {at}: must be 0 or more")

    def _check_pages(self, pages: Sequence[Page]) -> None:
        self._check_keys([page.key for page in pages])
        full_mask = self.layout.full_mask
        for page in pages:
            if not 0 < page.mask <= full_mask:
                raise ValueError(f"mask {page.mask:#x}: must have some of the bits {full_mask:#x}")
            if not (0 <= page.slot <= MAX_SLOT and 0 <= page.checksum < 1 << 64):
                raise ValueError(f"slot {page.slot}, checksum {page.checksum}: must be 0 to 2^53, and 64 bits")


def check_name(name: str) -> None:
    """Raise ``ValueError`` for a name of a node or session that is empty or too long."""
    if not 1 <= len(name.encode()) <= MAX_NAME_BYTES:
        raise ValueError(f"{name!r}: must be 1 to {MAX_NAME_BYTES} bytes")


def check_seconds(seconds: float) -> float:
    """Return the argument; raise ``ValueError`` unless it is positive and at most a week."""
    if not 0 < seconds <= MAX_SECONDS:
        raise ValueError(f"{seconds} s: must be more than 0 and at most {MAX_SECONDS:.0f}")
    return seconds


def keep_all(keys: Sequence[bytes], reason: Reason) -> Outcome:
    return Outcome((), dict.fromkeys(keys, reason))


def make_replica(member: Member, version: int, page: Page) -> Replica:
    _, slot, checksum, mask, tier, is_recomputable = page
    return Replica(member.node, member.epoch, version, mask, tier, slot, checksum, is_recomputable)
