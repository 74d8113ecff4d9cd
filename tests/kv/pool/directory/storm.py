"""One node of a storm: a process that writes, reads, moves and evicts pages of a slab as fast as it can.

    python -m tests.kv.pool.directory.storm URL LAYOUT NUMBER DIRECTORY SEED TIMEOUT_S

Nodes are processes of one machine that map each other's slabs. Every page has the bytes that follow from its key, so
that a reader sees by itself whether they were overwritten under it. Pages are written and copied in two halves; readers
pause before they copy, some for longer than their claims and leases last.

With a short timeout, Redis itself is stopped, killed and restarted without data. Then a page may vanish at any time,
but what stands is still never overwritten.
"""

import contextlib
import hashlib
import mmap
import random
import struct
import sys
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from vllm_omni.kv.pool.directory import Layout, Match, Member, Membership, Page, Reason, Replica
from vllm_omni.kv.pool.directory.redis import RedisDirectory, RedisServer

NUM_NODES = 4
NUM_SLOTS = 24
NUM_PROMPTS = 6
PROMPT_PAGES = 8
HALF = 32
SLOT_BYTES = 2 * HALF
LEASE_S = 1.0
CLAIM_S = 0.3
RENEW_S = 0.25
END_TIMEOUT_S = 20.0

STOP_BYTE = 8 * NUM_NODES
COUNTERS_BYTES = STOP_BYTE + 1


def page_key(prompt: int, index: int) -> bytes:
    return struct.pack(">II", prompt, index)


def content(key: bytes) -> bytes:
    return hashlib.sha512(key).digest()


class Board:
    """A file that all processes map: the number of operations of each node, and whether to stop."""

    def __init__(self, directory: Path):
        path = directory / "board"
        if not path.exists():
            path.write_bytes(bytes(COUNTERS_BYTES))
        self._file = path.open("r+b")
        self._map = mmap.mmap(self._file.fileno(), COUNTERS_BYTES)

    def count(self, node: int) -> None:
        (number,) = struct.unpack_from(">Q", self._map, 8 * node)
        struct.pack_into(">Q", self._map, 8 * node, number + 1)

    @property
    def num_operations(self) -> int:
        return sum(struct.unpack_from(f">{NUM_NODES}Q", self._map))

    @property
    def is_stopped(self) -> bool:
        return self._map[STOP_BYTE] == 1

    def stop(self) -> None:
        self._map[STOP_BYTE] = 1

    def close(self) -> None:
        self._map.close()
        self._file.close()


def make_slabs(directory: Path) -> None:
    for number in range(NUM_NODES):
        (directory / f"slab{number}").write_bytes(bytes(NUM_SLOTS * SLOT_BYTES))


class Violation(Exception):
    """What must never happen has happened."""


class Held(NamedTuple):
    slot: int
    is_recomputable: bool


class Node:
    def __init__(self, url: str, layout: Layout, number: int, directory: Path, seed: int, timeout_s: float):
        self.rng = random.Random(seed)
        self.number = number
        self.is_redis_reliable = timeout_s > 1.0
        self.board = Board(directory)
        self.slabs = []
        for other in range(NUM_NODES):
            with (directory / f"slab{other}").open("r+b") as file:
                self.slabs.append(mmap.mmap(file.fileno(), NUM_SLOTS * SLOT_BYTES))
        self.server = RedisServer(url, timeout_s=timeout_s)
        self.directory = RedisDirectory(self.server, layout)
        self.held: dict[bytes, Held] = {}
        self.free = list(range(NUM_SLOTS))
        self.in_doubt: list[int] = []  # slots of moves that may have been published, until the node joins again
        self.counts: Counter[str] = Counter()
        self.membership = Membership(self.directory, f"node{number}", lease_s=LEASE_S, on_join=self.publish_again)
        while self.membership.member is None:
            self.renew()

    @property
    def member(self) -> Member:
        assert self.membership.member is not None
        return self.membership.member

    def renew(self) -> None:
        self.renewed_at = time.monotonic()
        self.membership.step()
        self.count("renew")

    def publish_again(self, member: Member) -> None:
        self.counts["joined"] += 1
        self.free += self.in_doubt
        self.in_doubt.clear()
        outcome = self.directory.publish(member, [self.as_page(key) for key in self.held])
        if outcome.kept and self.is_redis_reliable:
            raise Violation("a new member's pages were not accepted")

    def run(self) -> None:
        actions = [self.read] * 8 + [self.write] * 6 + [self.move] * 2 + [self.evict_some] * 2 + [self.chain]
        while not self.board.is_stopped:
            if time.monotonic() - self.renewed_at > RENEW_S:
                self.renew()
            self.rng.choice(actions)()
        self.finish()

    def count(self, name: str) -> None:
        """Count an operation, unless there was no Redis to do it."""
        if self.server.statistics().is_open:
            self.counts["without Redis"] += 1
            time.sleep(0.001)
            return
        self.counts[name] += 1
        self.board.count(self.number)

    def pause(self) -> None:
        """Mostly not at all; now and then past the end of claims, or of the lease."""
        dice = self.rng.random()
        if dice < 0.001:
            time.sleep(LEASE_S * 1.1)
        elif dice < 0.01:
            time.sleep(CLAIM_S * 1.1)
        elif dice < 0.1:
            time.sleep(0.02)

    def as_page(self, key: bytes, slot: int | None = None) -> Page:
        held = self.held[key]
        return Page(key, held.slot if slot is None else slot, 0, is_recomputable=held.is_recomputable)

    # --- readers

    def read(self) -> None:
        prompt, length = self.rng.randrange(NUM_PROMPTS), self.rng.randint(1, PROMPT_PAGES)
        started = time.monotonic()
        match = self.directory.match_and_claim(self.member, [page_key(prompt, i) for i in range(length)], CLAIM_S)
        self.count("match")
        self.pause()
        copies = [self.copy(replica) for _, (replica,) in match.pages]
        stands = self.directory.verify(match)
        is_claimed = time.monotonic() - started < CLAIM_S
        self.count("verify")
        for (key, replicas), copy, it_stands in zip(match.pages, copies, stands, strict=True):
            self.counts["pages read" if it_stands else "pages gone"] += 1
            if it_stands and copy != content(key):
                raise Violation(f"a page that stands was overwritten under its reader: {key!r} {replicas}")
        if match.pages and is_claimed and not all(stands) and self.is_redis_reliable:
            self.explain(match, stands)
        if self.rng.random() < 0.9:
            self.directory.release(self.member, match)
            self.count("release")

    def explain(self, match: Match, stands: list[bool]) -> None:
        """Claimed replicas may only be gone with their holder, or with this reader's own lease."""
        if not self.directory.renew(self.member):
            return
        for (_, (replica,)), it_stands in zip(match.pages, stands, strict=True):
            holder = Member(replica.node, replica.epoch, LEASE_S)
            if not it_stands and self.is_live(holder):
                raise Violation(f"a replica was removed in spite of its claim: {replica}")

    def is_live(self, member: Member) -> bool:
        """A write of a key that nobody else uses is accepted from live members alone."""
        key = b"probe" + bytes([0, 0, self.number])
        is_accepted = bool(self.directory.begin_write(member, [key], 1.0).done)
        self.directory.abandon(member, [key])
        return is_accepted

    def copy(self, replica: Replica) -> bytes:
        slab, slot = self.slabs[int(replica.node.removeprefix("node"))], replica.slot
        first = slab[slot * SLOT_BYTES : slot * SLOT_BYTES + HALF]
        time.sleep(0)  # others may run
        return first + slab[slot * SLOT_BYTES + HALF : (slot + 1) * SLOT_BYTES]

    # --- holders

    def fill(self, slot: int, key: bytes) -> None:
        slab, data = self.slabs[self.number], content(key)
        slab[slot * SLOT_BYTES : slot * SLOT_BYTES + HALF] = data[:HALF]
        time.sleep(0)
        slab[slot * SLOT_BYTES + HALF : (slot + 1) * SLOT_BYTES] = data[HALF:]

    def write(self) -> None:
        prompt = self.rng.randrange(NUM_PROMPTS)
        wanted = [one for one in (page_key(prompt, i) for i in range(PROMPT_PAGES)) if one not in self.held][:4]
        if len(self.free) < len(wanted):
            self.evict_some()
        granted = self.directory.begin_write(self.member, wanted[: len(self.free)], CLAIM_S).done
        self.count("begin_write")
        for key in granted:
            self.held[key] = Held(self.free.pop(), key[-1] % 4 != 0)
            self.fill(self.held[key].slot, key)
        if self.rng.random() < 0.1:
            self.pause()
        if self.rng.random() < 0.05:
            self.directory.abandon(self.member, granted)
            self.forget(granted)
            self.count("abandon")
        else:
            outcome = self.directory.publish(self.member, [self.as_page(key) for key in granted])
            self.forget([key for key, reason in outcome.kept.items() if reason is Reason.LOST])
            self.count("publish")

    def move(self) -> None:
        if not self.held or not self.free:
            return
        key, slot = self.rng.choice(list(self.held)), self.free.pop()
        self.fill(slot, key)
        outcome = self.directory.publish(self.member, [self.as_page(key, slot)])
        if outcome.done:
            self.counts["moved"] += 1
            self.free.append(self.held[key].slot)
            self.held[key] = self.held[key]._replace(slot=slot)
        elif outcome.kept[key] is Reason.UNAVAILABLE:
            self.in_doubt.append(slot)
        else:
            self.free.append(slot)
        self.count("move")

    def evict_some(self) -> None:
        self.evict(self.rng.sample(list(self.held), min(6, len(self.held))))

    def evict(self, keys: list[bytes], discard: bool = False) -> None:
        outcome = self.directory.evict(self.member, keys, discard=discard)
        self.forget(outcome.done)
        self.counts["pages evicted"] += len(outcome.done)
        for key, reason in outcome.kept.items():
            self.counts[f"kept {reason.name}"] += 1
            if reason is Reason.NOT_HELD:
                if self.is_redis_reliable:
                    raise Violation(f"a page of this node was removed by another: {key!r}")
                self.forget([key])
            elif reason is Reason.LOST and self.held[key].is_recomputable:
                self.forget([key])
        self.count("evict")

    def forget(self, keys: object) -> None:
        for key in keys:  # type: ignore[attr-defined]
            self.free.append(self.held.pop(key).slot)

    # --- sessions

    def chain(self) -> None:
        session = f"session{self.rng.randrange(4)}"
        prompt = self.rng.randrange(NUM_PROMPTS)
        self.directory.append_chain(session, [page_key(prompt, i) for i in range(4)], keep_s=1.0, at=0)
        self.directory.chain(session)
        self.count("chain")

    def finish(self) -> None:
        """Evict all that this node holds, as soon as the claims of others have ended, and leave."""
        deadline = time.monotonic() + END_TIMEOUT_S
        while self.held:
            assert time.monotonic() < deadline, f"{len(self.held)} pages cannot be evicted: {self.counts}"
            self.renew()
            self.evict(list(self.held), discard=True)
            time.sleep(0.02)
        self.membership.close()


def main() -> None:
    url, layout, number, directory, seed, timeout_s = sys.argv[1:]
    node = Node(url, Layout(layout, key_bytes=8), int(number), Path(directory), int(seed), float(timeout_s))
    with contextlib.suppress(KeyboardInterrupt):
        node.run()
    print(dict(node.counts))


if __name__ == "__main__":
    main()
