"""How long the operations of a directory take, for ``benchmarks``.

    python -m tests.kv.pool.directory.latency

The pages of every call are new to the processor's caches, and each has two full replicas and one of half its parts.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.redis_server import run_redis
from vllm_omni.kv.pool.directory import Directory, Layout, Match, MemoryDirectory, Page
from vllm_omni.kv.pool.directory.redis import RedisDirectory, RedisServer

OPERATIONS = ("match_and_claim", "verify", "release", "publish", "evict")


class Latency(NamedTuple):
    operation: str
    num_pages: int
    p50_us: float
    p99_us: float


def measure(directory: Directory, num_pages: int, *, repeats: int = 1000, warmup: int = 50) -> list[Latency]:
    """Time each operation ``repeats`` times over ``num_pages`` pages; the directory's layout has two parts.

    ``evict`` and ``publish`` are those of a node that holds every page for the third time; ``evict`` succeeds.
    """
    members = [directory.join(f"node{number}", 600.0) for number in range(3)]
    assert None not in members
    holder, other, half = (one for one in members if one is not None)
    keys = [number.to_bytes(directory.layout.key_bytes, "big") for number in range(num_pages * 32)]
    directory.publish(holder, make_pages(keys, mask=3))
    directory.publish(other, make_pages(keys, mask=3))
    directory.publish(half, make_pages(keys, mask=1))
    times: dict[str, list[float]] = {operation: [] for operation in OPERATIONS}

    def timed(operation: str, call: Callable[[], object]) -> object:
        start = time.perf_counter()
        result = call()
        times[operation].append(time.perf_counter() - start)
        return result

    for repeat in range(warmup + repeats):
        first = repeat % 32 * num_pages
        run = keys[first : first + num_pages]
        pages = make_pages(run, mask=3)
        match = timed("match_and_claim", lambda run=run: directory.match_and_claim(half, run, 30.0))
        assert isinstance(match, Match) and len(match.pages) == num_pages
        timed("verify", lambda match=match: directory.verify(match))
        timed("release", lambda match=match: directory.release(half, match))
        timed("evict", lambda run=run: directory.evict(other, run))
        timed("publish", lambda pages=pages: directory.publish(other, pages))
    for one in (holder, other, half):
        directory.leave(one)
    while directory.sweep():
        pass
    return [summarize(operation, num_pages, times[operation][warmup:]) for operation in OPERATIONS]


def make_pages(keys: list[bytes], mask: int) -> list[Page]:
    return [Page(key, slot, 0, mask) for slot, key in enumerate(keys)]


def summarize(operation: str, num_pages: int, times: list[float]) -> Latency:
    ordered = sorted(times)
    p50, p99 = (1e6 * ordered[int(len(ordered) * share)] for share in (0.5, 0.99))
    return Latency(operation, num_pages, p50, p99)


def main() -> None:
    layout = Layout("latency", num_parts=2)
    with tempfile.TemporaryDirectory() as path, run_redis(Path(path)) as url:
        server = RedisServer(url, timeout_s=5.0)
        directories = {"memory": MemoryDirectory(layout), "redis": RedisDirectory(server, layout)}
        for name, directory in directories.items():
            for num_pages in (16, 64):
                for one in measure(directory, num_pages):
                    print(f"{name:8}{one.operation:16}{num_pages:4} pages {one.p50_us:8.0f} / {one.p99_us:.0f} us")
        server.close()


if __name__ == "__main__":
    main()
