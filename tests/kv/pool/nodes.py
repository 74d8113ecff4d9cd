"""Engines' parts in a pool of several hosts, in one process: slabs in directories of their own, over loopback."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.kv.pool.stores import PAGE_BYTES, key_of, make_slab, page_of
from vllm_omni.kv.pool.announcer import Announcer
from vllm_omni.kv.pool.directory import Directory, Layout, MemoryDirectory
from vllm_omni.kv.pool.directory.base import Match, Member, Outcome, Page, Reason, keep_all
from vllm_omni.kv.pool.remote_pages import Limits, Place, RemotePages
from vllm_omni.relay.remote.pages import PageRelay

DEADLINE_S = 30.0
PATIENT = Limits(call_s=10.0, lookup_s=10.0, pull_s=20.0, back_off_s=5.0)
"""A test that waits for its core is no failure of what it tests."""


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class FailingDirectory(MemoryDirectory):
    """Answers as one in Redis does that is away, while ``is_away``."""

    def __init__(self, layout: Layout, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(layout, clock)
        self.is_away = False

    @property
    def is_available(self) -> bool:
        return not self.is_away

    def publish(self, member: Member, pages: Sequence[Page]) -> Outcome:
        if self.is_away:
            return keep_all([page.key for page in pages], Reason.UNAVAILABLE)
        return super().publish(member, pages)

    def evict(self, member: Member, keys: Sequence[bytes], *, discard: bool = False) -> Outcome:
        return keep_all(keys, Reason.UNAVAILABLE) if self.is_away else super().evict(member, keys, discard=discard)

    def verify(self, match: Match) -> list[bool]:
        return [False] * len(match.pages) if self.is_away else super().verify(match)


def make_directory(clock: Callable[[], float] = time.monotonic) -> FailingDirectory:
    return FailingDirectory(Layout("test"), clock)


class Node:
    """A slab, what it announces, and what it reads."""

    def __init__(
        self,
        root: Path,
        directory: Directory,
        num_slots: int = 4,
        *,
        lookups: Directory | None = None,
        limits: Limits = PATIENT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.directory = directory
        self.announcer = announcer = Announcer(directory)
        asked = {"may_evict": announcer.may_evict, "on_evicted": announcer.on_evicted, "on_kept": announcer.on_kept}
        self.slab = make_slab(root, num_slots, **asked)
        self.relay = PageRelay(self.slab.slots, PAGE_BYTES, self.slab.stride, host="127.0.0.1")
        self.pages = RemotePages(
            lookups or directory,
            self.relay,
            PAGE_BYTES,
            node=self.relay.name,
            member=lambda: announcer.member,
            limits=limits,
            clock=clock,
        )
        announcer.start(self.slab, self.relay.name)

    def store(self, *numbers: int) -> list[bool]:
        """Store pages, and publish what was stored."""
        stored = [self.slab.store(key_of(number), page_of(number)) for number in numbers]
        self.announcer.announce(key_of(number) for number, is_stored in zip(numbers, stored, strict=True) if is_stored)
        self.publish()
        return stored

    def publish(self) -> None:
        while self.announcer.step():
            pass

    def find(self, *numbers: int, request_id: str = "request") -> list[bool | None]:
        """What is known of pages of one request, without waiting."""
        return [self.pages.find(request_id, key_of(number), Place(0, at)) for at, number in enumerate(numbers)]

    def found(self, *numbers: int, request_id: str = "request") -> list[bool]:
        """What the directory says of pages of one request."""
        self.find(*numbers, request_id=request_id)
        self.pages.ask()
        wait_until(lambda: None not in self.find(*numbers, request_id=request_id))
        return [bool(answer) for answer in self.find(*numbers, request_id=request_id)]

    def load(self, *numbers: int, request_id: str = "request") -> list[bytes | None]:
        """Take and copy pages that were found; None for those that were not copied."""
        buffers = {key_of(number): bytearray(PAGE_BYTES) for number in numbers}
        taken = self.pages.take(request_id, list(buffers))
        loaded = self.pages.load([(page, memoryview(buffers[page.key])) for page in taken])
        return [bytes(buffers[key]) if key in loaded else None for key in buffers]

    def close(self) -> None:
        self.pages.close()
        self.announcer.close()
        self.relay.close()
        self.slab.check_integrity()
        self.slab.close()
