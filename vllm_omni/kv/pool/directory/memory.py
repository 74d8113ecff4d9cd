"""The embedded directory: plain dictionaries, for the nodes of one process."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm_omni.kv.pool.directory.base import (
    MAX_CHAIN_PAGES,
    MAX_MATCH_PAGES,
    NO_MATCH,
    SWEEP_PAGES,
    Directory,
    Event,
    Match,
    Member,
    Outcome,
    Page,
    Reason,
    Replica,
    Statistics,
    check_name,
    check_seconds,
    keep_all,
    make_replica,
)
from vllm_omni.kv.pool.directory.layout import Layout
from vllm_omni.kv.pool.directory.subscription import Subscription

Epoch = int


@dataclass
class Lease:
    """A member, until it leaves, joins again or is swept."""

    node: str
    ends_at: float
    held: set[bytes] = field(default_factory=set)


class Claim(NamedTuple):
    """A reader's protection of one replica."""

    epoch: Epoch  # of the reader
    ends_at: float


class Write(NamedTuple):
    """A page that a member has started to write."""

    epoch: Epoch
    ends_at: float


class Chain(NamedTuple):
    """The pages of a session."""

    keys: tuple[bytes, ...]
    keep_s: float
    ends_at: float


class MemoryDirectory(Directory):
    """See ``Directory``. Synchronous: a call ends when its dictionaries have changed.

    What has expired is ignored by every call, and removed by the calls that come across it and by ``sweep``: there is
    neither a timer nor an order by expiry to maintain.

    Args:
        clock: in seconds; never goes back.
    """

    def __init__(self, layout: Layout, clock: Callable[[], float] = time.monotonic):
        layout.check()
        self.layout = layout
        self._clock = clock
        self._lock = threading.Lock()
        self._last_number = 0  # of epochs, versions and claims
        self._leases: dict[Epoch, Lease] = {}
        self._epochs: dict[str, Epoch] = {}  # node -> its member
        self._former: dict[Epoch, set[bytes]] = {}  # ended members -> pages whose replicas are still to be removed
        self._pages: dict[bytes, dict[Epoch, Replica]] = {}
        self._claims: defaultdict[Epoch, dict[bytes, dict[int, Claim]]] = defaultdict(dict)  # holder, page -> by match
        self._writes: dict[bytes, Write] = {}
        self._chains: dict[str, Chain] = {}
        self._subscriptions: list[Subscription] = []

    # --- members

    def join(self, node: str, lease_s: float) -> Member:
        check_name(node)
        check_seconds(lease_s)
        with self._lock:
            if node in self._epochs:
                self._end(self._epochs[node])
            epoch = self._epochs[node] = self._next_number()
            self._leases[epoch] = Lease(node, self._clock() + lease_s)
            return Member(node, epoch, lease_s)

    def renew(self, member: Member) -> bool:
        with self._lock:
            lease = self._find_lease(member)
            if lease is not None:
                lease.ends_at = self._clock() + member.lease_s
            return lease is not None

    def leave(self, member: Member) -> None:
        with self._lock:
            if member.epoch in self._leases:
                self._end(member.epoch)

    def sweep(self, limit: int = SWEEP_PAGES) -> int:
        with self._lock:
            now = self._clock()
            for epoch in [epoch for epoch, lease in self._leases.items() if lease.ends_at <= now]:
                self._end(epoch)
            num_removed = 0
            for epoch, held in list(self._former.items()):
                while held and num_removed < limit:
                    self._remove(epoch, held.pop())
                    num_removed += 1
                if not held:
                    del self._former[epoch]
                    self._claims.pop(epoch, None)
            for holder, pages in self._claims.items():
                for key in list(pages):
                    self._is_in_use(holder, key, now)  # drops what has expired
            self._writes = {key: one for key, one in self._writes.items() if self._is_current(one, now)}
            self._chains = {session: one for session, one in self._chains.items() if one.ends_at > now}
            return num_removed

    # --- pages

    def begin_write(self, member: Member, keys: Sequence[bytes], write_s: float) -> Outcome:
        self._check_keys(keys)
        check_seconds(write_s)
        with self._lock:
            lease = self._find_lease(member)
            if lease is None:
                return keep_all(keys, Reason.LOST)
            now = self._clock()
            done, kept = [], {}
            for key in keys:
                write = self._writes.get(key)
                if write is not None and write.epoch != member.epoch and self._is_current(write, now):
                    kept[key] = Reason.BEING_WRITTEN
                elif self._is_in_use(member.epoch, key, now):
                    kept[key] = Reason.IN_USE
                else:
                    self._writes[key] = Write(member.epoch, now + write_s)
                    if key in lease.held:
                        lease.held.remove(key)
                        self._remove(member.epoch, key)
                    done.append(key)
            return Outcome(tuple(done), kept)

    def abandon(self, member: Member, keys: Sequence[bytes]) -> None:
        self._check_keys(keys)
        with self._lock:
            for key in keys:
                self._end_write(member.epoch, key)

    def publish(self, member: Member, pages: Sequence[Page]) -> Outcome:
        self._check_pages(pages)
        with self._lock:
            lease = self._find_lease(member)
            if lease is None:
                return keep_all([page.key for page in pages], Reason.LOST)
            now, version = self._clock(), self._next_number()
            done, kept, new = [], {}, []
            for page in pages:
                replica = make_replica(member, version, page)
                old = self._pages.get(page.key, {}).get(member.epoch)
                if old is None or old._replace(version=version) != replica:
                    if old is not None and self._is_in_use(member.epoch, page.key, now):
                        kept[page.key] = Reason.IN_USE
                        continue
                    self._pages.setdefault(page.key, {})[member.epoch] = replica
                    lease.held.add(page.key)
                    new.append(page.key)
                self._end_write(member.epoch, page.key)
                done.append(page.key)
            self._notify(Event(lease.node, None, tuple(new)))
            return Outcome(tuple(done), kept)

    def match_and_claim(self, member: Member, keys: Sequence[bytes], claim_s: float) -> Match:
        keys = keys[:MAX_MATCH_PAGES]
        self._check_keys(keys)
        check_seconds(claim_s)
        with self._lock:
            if self._find_lease(member) is None:
                return NO_MATCH
            now, full_mask = self._clock(), self.layout.full_mask
            live = self._live_epochs(now)
            found: list[dict[Epoch, Replica]] = []
            for key in keys:
                replicas = self._pages.get(key, {})
                if not _is_covered(replicas, live, full_mask):
                    break
                found.append(replicas)
            if not found:
                return NO_MATCH
            order = self._order_holders(found, live, member.epoch)
            number, claim = self._next_number(), Claim(member.epoch, now + claim_s)
            pages = []
            for key, replicas in zip(keys, found, strict=False):
                picked = _pick_cover(replicas, order, full_mask)
                for one in picked:
                    claims = self._claims[one.epoch]
                    if key in claims:
                        claims[key][number] = claim
                    else:
                        claims[key] = {number: claim}
                pages.append((key, picked))
            return Match(number, tuple(pages))

    def verify(self, match: Match) -> list[bool]:
        with self._lock:
            now = self._clock()
            return [all(self._stands(key, one, now) for one in replicas) for key, replicas in match.pages]

    def release(self, member: Member, match: Match) -> None:
        with self._lock:
            for key, replicas in match.pages:
                for one in replicas:
                    claims = self._claims[one.epoch].get(key, {})
                    if match.claim in claims and claims[match.claim].epoch == member.epoch:
                        del claims[match.claim]
                        if not claims:
                            del self._claims[one.epoch][key]

    def evict(self, member: Member, keys: Sequence[bytes], *, discard: bool = False) -> Outcome:
        self._check_keys(keys)
        with self._lock:
            lease = self._find_lease(member)
            if lease is None:
                return keep_all(keys, Reason.LOST)
            now = self._clock()
            done, kept = [], {}
            for key in keys:
                reason = self._why_protected(member.epoch, key, now, discard)
                if reason is not None:
                    kept[key] = reason
                else:
                    lease.held.remove(key)
                    self._remove(member.epoch, key)
                    done.append(key)
            return Outcome(tuple(done), kept)

    # --- sessions and events

    def append_chain(self, session: str, keys: Sequence[bytes], *, keep_s: float, at: int | None = None) -> int:
        self._check_chain(session, keys, at)
        check_seconds(keep_s)
        with self._lock:
            old = self._find_chain(session) or ()
            num_kept = len(old) if at is None else at
            if num_kept > len(old):
                return len(old)
            new = tuple(keys[: MAX_CHAIN_PAGES - num_kept])
            self._chains[session] = Chain(old[:num_kept] + new, keep_s, self._clock() + keep_s)
            self._notify(Event(None, session, new))
            return num_kept + len(new)

    def chain(self, session: str) -> tuple[bytes, ...]:
        check_name(session)
        with self._lock:
            keys = self._find_chain(session)
            if keys is None:
                return ()
            now, full_mask = self._clock(), self.layout.full_mask
            live = self._live_epochs(now)
            for index, key in enumerate(keys):
                if not _is_covered(self._pages.get(key, {}), live, full_mask):
                    keys = keys[:index]
                    break
            keep_s = self._chains[session].keep_s
            self._chains[session] = Chain(keys, keep_s, now + keep_s)
            return keys

    def subscribe(self, session: str | None = None, max_events: int = 1024) -> Subscription:
        subscription = Subscription(session, max_events, self._unsubscribe)
        with self._lock:
            self._subscriptions.append(subscription)
        return subscription

    # --- tools

    def statistics(self) -> Statistics:
        with self._lock:
            now = self._clock()
            live = self._live_epochs(now)
            num_held = [len(live & replicas.keys()) for replicas in self._pages.values()]
            claims = [claim for one in live for by_match in self._claims[one].values() for claim in by_match.values()]
            return Statistics(
                num_members=len(live),
                num_pages=sum(map(bool, num_held)),
                num_replicas=sum(num_held),
                num_stale=sum(map(len, self._pages.values())) - sum(num_held),
                num_claims=sum(self._is_current(one, now) for one in claims),
                num_writes=sum(self._is_current(one, now) for one in self._writes.values()),
                num_chains=sum(one.ends_at > now for one in self._chains.values()),
            )

    def check_integrity(self) -> None:
        with self._lock:
            now = self._clock()
            held = {epoch: lease.held for epoch, lease in self._leases.items()} | self._former
            listed = {(epoch, key) for epoch, keys in held.items() for key in keys}
            stored = {(epoch, key) for key, replicas in self._pages.items() for epoch in replicas}
            assert listed == stored, f"replicas without a holder, or the reverse: {listed ^ stored}"
            assert all(self._pages.values()), "a page without replicas was not removed"
            current = {lease.node: epoch for epoch, lease in self._leases.items()}
            assert current == self._epochs, f"nodes {self._epochs} are not the members {current}"
            for epoch in self._live_epochs(now):
                removed = [key for key in list(self._claims[epoch]) if self._is_in_use(epoch, key, now)]
                removed = [key for key in removed if (epoch, key) not in stored]
                assert not removed, f"{removed} were removed in spite of their claims"

    def close(self) -> None:
        for subscription in list(self._subscriptions):
            subscription.close()

    # --- parts, under the lock

    def _order_holders(self, found: list[dict[Epoch, Replica]], live: set[Epoch], first: Epoch) -> list[Epoch]:
        """Return the holders of these pages in the order in which they are to be read; see ``match_and_claim``."""
        num_parts = dict.fromkeys(live, 0)
        for replicas in found:
            for epoch, one in replicas.items():
                if epoch in live:
                    num_parts[epoch] += one.mask.bit_count()

        def order(epoch: Epoch) -> tuple[bool, int, str]:
            return epoch != first, -num_parts[epoch], self._leases[epoch].node

        return sorted((epoch for epoch in live if num_parts[epoch]), key=order)

    def _next_number(self) -> int:
        self._last_number += 1
        return self._last_number

    def _find_lease(self, member: Member) -> Lease | None:
        lease = self._leases.get(member.epoch)
        return lease if lease is not None and lease.ends_at > self._clock() else None

    def _live_epochs(self, now: float) -> set[Epoch]:
        return {epoch for epoch, lease in self._leases.items() if lease.ends_at > now}

    def _is_live(self, epoch: Epoch, now: float) -> bool:
        lease = self._leases.get(epoch)
        return lease is not None and lease.ends_at > now

    def _is_current(self, one: Claim | Write, now: float) -> bool:
        return one.ends_at > now and self._is_live(one.epoch, now)

    def _end(self, epoch: Epoch) -> None:
        lease = self._leases.pop(epoch)
        del self._epochs[lease.node]
        if lease.held:
            self._former[epoch] = lease.held
        else:
            self._claims.pop(epoch, None)

    def _remove(self, epoch: Epoch, key: bytes) -> None:
        """Remove a replica, and the claims on it, which have expired or are a former member's."""
        replicas = self._pages[key]
        del replicas[epoch]
        if not replicas:
            del self._pages[key]
        self._claims[epoch].pop(key, None)

    def _is_in_use(self, epoch: Epoch, key: bytes, now: float) -> bool:
        """Whether a member's replica has readers; drops claims that have ended."""
        ended_or_not = self._claims[epoch].pop(key, {})
        claims = {number: one for number, one in ended_or_not.items() if self._is_current(one, now)}
        if claims:
            self._claims[epoch][key] = claims
        return bool(claims)

    def _why_protected(self, epoch: Epoch, key: bytes, now: float, discard: bool) -> Reason | None:
        write = self._writes.get(key)
        if self._is_in_use(epoch, key, now):
            return Reason.IN_USE
        if write is not None and self._is_current(write, now):
            return Reason.BEING_WRITTEN
        replica = self._pages.get(key, {}).get(epoch)
        if replica is None:
            return Reason.NOT_HELD
        if replica.is_recomputable or discard:
            return None
        others = self._live_epochs(now) - {epoch}
        return None if _is_covered(self._pages[key], others, replica.mask) else Reason.LAST_COPY

    def _end_write(self, epoch: Epoch, key: bytes) -> None:
        write = self._writes.get(key)
        if write is not None and write.epoch == epoch:
            del self._writes[key]

    def _stands(self, key: bytes, replica: Replica, now: float) -> bool:
        return self._pages.get(key, {}).get(replica.epoch) == replica and self._is_live(replica.epoch, now)

    def _find_chain(self, session: str) -> tuple[bytes, ...] | None:
        chain = self._chains.get(session)
        return chain.keys if chain is not None and chain.ends_at > self._clock() else None

    def _notify(self, event: Event) -> None:
        if event.keys:
            for one in self._subscriptions:
                if one.session == event.session:
                    one.put(event)

    def _unsubscribe(self, subscription: Subscription) -> None:
        with self._lock:
            if subscription in self._subscriptions:
                self._subscriptions.remove(subscription)


def _is_covered(replicas: Mapping[Epoch, Replica], live: Container[Epoch], mask: int) -> bool:
    for epoch, one in replicas.items():
        if epoch in live:
            mask &= ~one.mask
    return mask == 0


def _pick_cover(replicas: Mapping[Epoch, Replica], order: list[Epoch], full_mask: int) -> tuple[Replica, ...]:
    """Return the replicas that add parts, until the page is complete."""
    picked: list[Replica] = []
    mask = 0
    for epoch in order:
        one = replicas.get(epoch)
        if one is not None and one.mask & ~mask:
            picked.append(one)
            mask |= one.mask
            if mask == full_mask:
                break
    return tuple(picked)
