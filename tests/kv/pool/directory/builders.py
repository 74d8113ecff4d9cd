"""Directories under the test's clock, and pages."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from redis import Redis

from vllm_omni.kv.pool.directory import Directory, Layout, Match, MemoryDirectory, Page, Replica
from vllm_omni.kv.pool.directory.redis import RedisDirectory, RedisServer

KEY_BYTES = 8
START_S = 1000.0

_layouts = itertools.count()

CLOCK_SCRIPT = "local now = tonumber(redis.call('GET', 'clock:' .. KEYS[1]))"


class Clock:
    """Stands still until it is advanced, by whole milliseconds."""

    def __init__(self, on_change: Callable[[int], None] = lambda now_ms: None):
        self.now_ms = int(START_S * 1000)
        self._on_change = on_change
        on_change(self.now_ms)

    def __call__(self) -> float:
        return self.now_ms / 1000

    def advance(self, seconds: float) -> None:
        self.now_ms += round(seconds * 1000)
        self._on_change(self.now_ms)


class World:
    """A directory as one node after the other uses it, and its clock."""

    def __init__(self, directory: Directory, clock: Clock):
        self.directory = directory
        self.clock = clock


def make_layout(num_parts: int = 1) -> Layout:
    return Layout(f"test-{next(_layouts)}", num_parts, KEY_BYTES)


def make_memory(num_parts: int = 1) -> World:
    clock = Clock()
    return World(MemoryDirectory(make_layout(num_parts), clock), clock)


def make_redis(server: RedisServer, client: Redis, num_parts: int = 1) -> World:
    """A new layout, so that tests share a server without seeing each other's keys."""
    layout = make_layout(num_parts)
    clock = Clock(lambda now_ms: client.set(f"clock:vllm_omni:pool:{{{layout.id}}}:", now_ms))
    return World(RedisDirectory(server, layout, clock_script=CLOCK_SCRIPT), clock)


def key(number: int) -> bytes:
    """The first byte is no text, and no separator of scripts or patterns may be special in a key."""
    return b"\xff\n*[" + number.to_bytes(4, "big")


def keys(*numbers: int) -> list[bytes]:
    return [key(number) for number in numbers]


def page(number: int, **values: int) -> Page:
    values = {"slot": number, "checksum": number << 40, **values}
    return Page(key(number), **values)  # type: ignore[arg-type]


def pages(*numbers: int, **values: int) -> list[Page]:
    return [page(number, **values) for number in numbers]


def nodes_of(match: Match) -> list[list[str]]:
    """The nodes from which each page would be read."""
    return [[one.node for one in replicas] for _, replicas in match.pages]


def replica_of(match: Match) -> Replica:
    """The only replica of the only page."""
    ((_, (replica,)),) = match.pages
    return replica
