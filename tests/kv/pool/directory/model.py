"""A directory as a few lists of facts, without a thought for speed: what both implementations are compared with.

Members and matches are named by their number in the order in which they were made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from vllm_omni.kv.pool.directory import Page, Reason, Statistics


class Lease(NamedTuple):
    node: str
    ends_at: float
    lease_s: float


class Claim(NamedTuple):
    match: int
    reader: int
    holder: int
    key: bytes
    ends_at: float


class Write(NamedTuple):
    member: int
    ends_at: float


class Chain(NamedTuple):
    keys: list[bytes]
    keep_s: float
    ends_at: float


class Placed(NamedTuple):
    page: Page
    publication: int


class Model:
    def __init__(self, num_parts: int, now: float):
        self.full_mask = (1 << num_parts) - 1
        self.now = now
        self.leases: dict[int, Lease] = {}  # of members that were neither replaced nor left
        self.num_members = 0
        self.num_publications = 0
        self.replicas: dict[tuple[int, bytes], Placed] = {}  # also of former members, until they are swept
        self.claims: list[Claim] = []
        self.writes: dict[bytes, Write] = {}
        self.matches: list[list[tuple[bytes, list[tuple[int, int]]]]] = []  # key -> (holder, publication)
        self.chains: dict[str, Chain] = {}

    def is_live(self, member: int) -> bool:
        return member in self.leases and self.leases[member].ends_at > self.now

    # --- members

    def join(self, node: str, lease_s: float) -> None:
        self.leases = {member: lease for member, lease in self.leases.items() if lease.node != node}
        self.leases[self.num_members] = Lease(node, self.now + lease_s, lease_s)
        self.num_members += 1

    def renew(self, member: int) -> bool:
        if not self.is_live(member):
            return False
        lease = self.leases[member]
        self.leases[member] = lease._replace(ends_at=self.now + lease.lease_s)
        return True

    def leave(self, member: int) -> None:
        self.leases.pop(member, None)

    def sweep(self) -> int:
        former = [(member, key) for member, key in self.replicas if not self.is_live(member)]
        for one in former:
            del self.replicas[one]
        return len(former)

    # --- pages

    def in_use(self, holder: int, key: bytes) -> bool:
        return any((one.holder, one.key) == (holder, key) for one in self.claims_in_force())

    def claims_in_force(self) -> list[Claim]:
        return [
            one
            for one in self.claims
            if one.ends_at > self.now and self.is_live(one.reader) and self.is_live(one.holder)
        ]

    def writer(self, key: bytes) -> int | None:
        write = self.writes.get(key)
        return write.member if write and write.ends_at > self.now and self.is_live(write.member) else None

    def covers(self, key: bytes, mask: int, besides: int | None = None) -> bool:
        held = 0
        for (member, other), placed in self.replicas.items():
            if other == key and member != besides and self.is_live(member):
                held |= placed.page.mask
        return mask & ~held == 0

    def begin_write(self, member: int, keys: list[bytes], write_s: float) -> list[Reason | None]:
        def begin(key: bytes) -> Reason | None:
            if self.writer(key) not in (None, member):
                return Reason.BEING_WRITTEN
            if self.in_use(member, key):
                return Reason.IN_USE
            self.writes[key] = Write(member, self.now + write_s)
            self.replicas.pop((member, key), None)
            return None

        return [begin(key) if self.is_live(member) else Reason.LOST for key in keys]

    def abandon(self, member: int, keys: list[bytes]) -> None:
        self.writes = {key: one for key, one in self.writes.items() if key not in keys or one.member != member}

    def publish(self, member: int, pages: list[Page]) -> list[Reason | None]:
        self.num_publications += 1

        def publish(page: Page) -> Reason | None:
            old = self.replicas.get((member, page.key))
            if old is None or old.page != page:
                if self.in_use(member, page.key):
                    return Reason.IN_USE
                self.replicas[member, page.key] = Placed(page, self.num_publications)
            self.abandon(member, [page.key])
            return None

        return [publish(page) if self.is_live(member) else Reason.LOST for page in pages]

    def match_and_claim(self, member: int, keys: list[bytes], claim_s: float) -> list[list[tuple[str, Page]]]:
        prefix: list[bytes] = []
        for key in keys:
            if not self.is_live(member) or not self.covers(key, self.full_mask):
                break
            prefix.append(key)
        parts: Counter[int] = Counter()
        for key in prefix:
            for holder in self.holders(key):
                parts[holder] += self.replicas[holder, key].page.mask.bit_count()
        picked: list[tuple[bytes, list[tuple[int, int]]]] = []
        for key in prefix:
            mask, holders = 0, []
            for holder in sorted(
                self.holders(key), key=lambda one: (one != member, -parts[one], self.leases[one].node)
            ):
                more = mask | self.replicas[holder, key].page.mask
                if more != mask:
                    holders.append(holder)
                mask = more
            picked.append((key, [(holder, self.replicas[holder, key].publication) for holder in holders]))
            claims = {Claim(len(self.matches), member, one, key, self.now + claim_s) for one in holders}
            self.claims += sorted(claims - set(self.claims))
        self.matches.append(picked)
        return [
            [(self.leases[holder].node, self.replicas[holder, key].page) for holder, _ in holders]
            for key, holders in picked
        ]

    def holders(self, key: bytes) -> Iterable[int]:
        return [member for member, other in self.replicas if other == key and self.is_live(member)]

    def verify(self, match: int) -> list[bool]:
        return [
            all(
                self.is_live(holder)
                and (holder, key) in self.replicas
                and self.replicas[holder, key].publication == publication
                for holder, publication in holders
            )
            for key, holders in self.matches[match]
        ]

    def release(self, member: int, match: int, first: int) -> None:
        keys = [key for key, _ in self.matches[match][first:]]
        self.claims = [one for one in self.claims if one.match != match or one.reader != member or one.key not in keys]

    def evict(self, member: int, keys: list[bytes], discard: bool) -> list[Reason | None]:
        def evict(key: bytes) -> Reason | None:
            if self.in_use(member, key):
                return Reason.IN_USE
            if self.writer(key) is not None:
                return Reason.BEING_WRITTEN
            if (member, key) not in self.replicas:
                return Reason.NOT_HELD
            page = self.replicas[member, key].page
            if not page.is_recomputable and not discard and not self.covers(key, page.mask, besides=member):
                return Reason.LAST_COPY
            del self.replicas[member, key]
            return None

        return [evict(key) if self.is_live(member) else Reason.LOST for key in keys]

    # --- sessions

    def append_chain(self, session: str, keys: list[bytes], keep_s: float, at: int | None) -> int:
        old = self.chains.get(session)
        kept = old.keys if old is not None and old.ends_at > self.now else []
        if at is not None and at > len(kept):
            return len(kept)
        self.chains[session] = Chain(kept[:at] + keys, keep_s, self.now + keep_s)
        return len(self.chains[session].keys)

    def chain(self, session: str) -> list[bytes]:
        old = self.chains.get(session)
        if old is None or old.ends_at <= self.now:
            return []
        kept: list[bytes] = []
        for key in old.keys:
            if not self.covers(key, self.full_mask):
                break
            kept.append(key)
        self.chains[session] = Chain(kept, old.keep_s, self.now + old.keep_s)
        return kept

    def statistics(self) -> Statistics:
        live = [key for member, key in self.replicas if self.is_live(member)]
        return Statistics(
            num_members=sum(self.is_live(member) for member in self.leases),
            num_pages=len(set(live)),
            num_replicas=len(live),
            num_stale=len(self.replicas) - len(live),
            num_claims=len(self.claims_in_force()),
            num_writes=sum(self.writer(key) is not None for key in self.writes),
            num_chains=sum(one.ends_at > self.now for one in self.chains.values()),
        )
