"""Tiers that share Redis and nothing else read each other's pages over loopback, and recompute what they cannot.

Lookups and pulls by themselves: tests/kv/pool/test_remote_pages.py. With engines: tests/e2e/test_kv_pool_hosts.py.
"""

import itertools
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from redis import Redis
from vllm.v1.kv_offload.base import LookupResult

from tests.kv.pool.nodes import PATIENT, wait_until
from tests.kv.pool.offload.builders import PAGE_BYTES, World
from tests.kv.pool.stores import flip, key_of, page_of, place_of, start
from tests.processes import paused
from tests.redis_server import start_redis
from vllm_omni.kv.pool.hosts import Hosts
from vllm_omni.kv.pool.offload import tier as tier_module
from vllm_omni.kv.pool.remote_pages import LIMITS, Limits
from vllm_omni.kv.pool.slab import Slab
from vllm_omni.relay.secret import MIN_BYTES, Secret

HIT, MISS, RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY
PAGES = {key_of(number): page_of(number, PAGE_BYTES) for number in range(3)}
FIRST, SECOND, THIRD = PAGES
ROOM = 16 * PAGE_BYTES

PEER = """
import signal
from pathlib import Path
from tests.kv.pool.stores import PAGE_BYTES, key_of, page_of
from vllm_omni.kv.pool.hosts import Hosts
from vllm_omni.kv.pool.slab import Slab
hosts = Hosts({url!r}, {layout!r})
asked = hosts.announcer
slab = Slab({layout!r}, PAGE_BYTES, 16, directory=Path({directory!r}), may_evict=asked.may_evict)
hosts.start(slab, "127.0.0.1")
for number in range(3):
    slab.store(key_of(number), page_of(number))
    asked.announce([key_of(number)])
print("ready", flush=True)
signal.pause()
"""


class Server:
    """Redis, which a test may kill."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.process, self.url = start_redis(directory)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def restart(self) -> None:
        self.process, self.url = start_redis(self._directory)


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.kill()


Make = Callable[..., World]


def _hosts_of(limits: Limits, url: str, layout: str, token_file: str) -> Hosts:
    return Hosts(url, layout, secret=Secret.read(token_file) if token_file else None, limits=limits)


@pytest.fixture
def make(tmp_path: Path, redis: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes a tier of another host: slabs in a directory of its own."""
    worlds: list[World] = []

    def make(name: str, limits: Limits = PATIENT, **options: object) -> World:
        monkeypatch.setattr(tier_module, "_hosts", partial(_hosts_of, limits))
        given = {"redis": redis.url, "memory_bytes": ROOM, **options}
        worlds.append(World(tmp_path / name, **given))
        return worlds[-1]

    yield make
    for world in worlds:
        world.tier.shutdown()


class Peer:
    """A process with ``PAGES`` in a slab of the layout of a tier."""

    def __init__(self, directory: Path, url: str, world: World) -> None:
        slab = world.tier._stores[0]
        assert isinstance(slab, Slab)
        layout = slab.path.name.partition("-")[0]
        self.process: subprocess.Popen[str]
        self.process, _ = start(PEER.format(url=url, layout=layout, directory=str(directory)))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)


@pytest.fixture
def start_peer(tmp_path: Path, redis: Server) -> Iterator[Callable[[World], Peer]]:
    peers: list[Peer] = []

    def start(world: World) -> Peer:
        peers.append(Peer(tmp_path / "peer", redis.url, world))
        return peers[-1]

    yield start
    for peer in peers:
        peer.kill()
        assert peer.process.stdout is not None
        peer.process.stdout.close()


numbers = itertools.count()


def looked_up(world: World, *keys: bytes, request_id: str = "request") -> list[LookupResult]:
    """What the tier says, once it does not ask for a later iteration."""
    results: list[LookupResult] = []

    def iterate() -> bool:
        results[:] = [world.tier.lookup(key, world.request(request_id, *keys)) for key in keys]
        world.tier.on_schedule_end(None)
        return RETRY not in results

    wait_until(iterate)
    return results


def finds(world: World, *keys: bytes) -> bool:
    """Whether a new request finds the pages."""
    request_id = f"another-{next(numbers)}"
    results = looked_up(world, *keys, request_id=request_id)
    world.tier.on_request_finished(world.request(request_id))
    return results == [HIT] * len(keys)


def await_pages(world: World, *keys: bytes) -> None:
    """Wait until the pages are announced, and found."""
    wait_until(lambda: finds(world, *keys))
    assert looked_up(world, *keys) == [HIT] * len(keys)


def counts(world: World) -> dict[str, float]:
    remote = world.tier._remote
    assert remote is not None
    return {"hits": remote.num_hits, "damaged": remote.num_damaged, "failures": remote.num_failures}


# -- pages that are there ---------------------------------------------------------------------------------------------


def test_pages_of_another_host_are_read_and_kept(make: Make) -> None:
    one, other = make("one"), make("other")
    one.store(PAGES)
    await_pages(other, *PAGES)
    assert other.load(*PAGES).success
    assert [other.page(chunk) for chunk in range(3)] == list(PAGES.values())
    assert counts(other) == {"hits": 3, "damaged": 0, "failures": 0}
    one.tier.shutdown()
    assert finds(other, *PAGES) and other.load(THIRD).success, "in memory of its own"
    assert counts(other)["hits"] == 3


def test_hosts_with_a_secret_read_each_other_and_others_nothing(make: Make, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_bytes(b"s" * MIN_BYTES)
    file.chmod(0o600)
    hasty = PATIENT._replace(pull_s=0.5)
    one, other = (make(name, token_file=str(file)) for name in ("one", "other"))
    stranger = make("stranger", hasty)
    one.store(PAGES)
    await_pages(other, *PAGES)
    await_pages(stranger, *PAGES)  # the directory tells it
    assert other.load(*PAGES).success
    assert not stranger.load(*PAGES).success
    assert counts(other) == {"hits": 3, "damaged": 0, "failures": 0}
    assert counts(stranger) == {"hits": 0, "damaged": 0, "failures": 1}


def test_a_third_host_reads_what_the_second_has_read(make: Make) -> None:
    one, second, third = make("one"), make("second"), make("third")
    one.store(PAGES)
    await_pages(second, *PAGES)
    second.load(*PAGES)
    one.tier.shutdown()
    await_pages(third, *PAGES)
    assert third.load(*PAGES).success and third.page(1) == PAGES[SECOND]


def test_pages_of_a_slab_that_was_adopted_are_found(make: Make, tmp_path: Path) -> None:
    one = make("one", redis="")
    one.store(PAGES)
    one.tier.shutdown()
    make("one")
    other = make("other")
    await_pages(other, *PAGES)
    assert other.load(*PAGES).success


def test_own_pages_and_those_of_others_are_one_prefix(make: Make) -> None:
    one, other = make("one"), make("other")
    one.store({SECOND: PAGES[SECOND], THIRD: PAGES[THIRD]})
    other.store({FIRST: PAGES[FIRST]})
    await_pages(other, *PAGES)
    assert other.load(*PAGES).success
    assert [other.page(chunk) for chunk in range(3)] == list(PAGES.values()) and counts(other)["hits"] == 2


def test_a_page_that_has_arrived_since_it_was_found_is_not_pulled(make: Make) -> None:
    one, other = make("one"), make("other")
    one.store(PAGES)
    await_pages(other, *PAGES)
    other.store({SECOND: PAGES[SECOND]})
    assert other.load(*PAGES).success and counts(other)["hits"] == 2


def test_engines_of_one_host_read_each_other_in_place(make: Make) -> None:
    one, other = make("host"), make("host")
    one.store(PAGES)
    assert looked_up(other, *PAGES) == [HIT] * 3
    assert other.load(*PAGES).success
    assert other.tier._peers.num_hits == 3 and counts(other)["hits"] == 0


def test_other_stages_and_weights_share_nothing(make: Make) -> None:
    one, same, stage = make("one"), make("same"), make("stage", stage="talker")
    one.store(PAGES)
    await_pages(same, FIRST)
    assert looked_up(stage, FIRST) == [MISS]


def test_what_was_read_is_counted_by_origin(make: Make) -> None:
    one, other = make("one"), make("other")
    one.store(PAGES)
    await_pages(other, *PAGES)
    other.load(*PAGES)
    stats = other.tier.get_stats()
    assert stats is not None
    data = stats.reduce()
    assert data["vllm:kv_pool_hits:('remote',)"] == 3 and data["vllm:kv_pool_lookups:('asked',)"] >= 1
    assert any(name.startswith("vllm:kv_pool_read_seconds") and "remote" in name for name in data)
    assert {name.split(":(")[0] for name in data if ":(" in name} <= other.tier.build_metric_definitions({}).keys()


# -- pages that are not -----------------------------------------------------------------------------------------------


def test_a_page_with_a_flipped_byte_is_recomputed(make: Make) -> None:
    one, other = make("one"), make("other")
    one.store(PAGES)
    await_pages(other, *PAGES)
    flip(*place_of(one.tier._stores[0], SECOND))
    result = other.load(*PAGES)
    assert not result.success and result.successful_keys == (FIRST,)
    assert looked_up(other, *PAGES) == [HIT, MISS, MISS], "the request does not try again"
    assert counts(other) == {"hits": 1, "damaged": 1, "failures": 0}


def test_pages_that_were_evicted_meanwhile_are_recomputed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_omni.kv.pool.remote_pages.CLAIM_S", 0.001)  # the reader was stopped for too long
    one, other = make("one", memory_bytes=3 * PAGE_BYTES), make("other")
    one.store(PAGES)
    await_pages(other, *PAGES)
    for number in range(10, 20):
        one.store({key_of(number): page_of(number, PAGE_BYTES)})
    assert not any(key in one.tier._stores[0] for key in PAGES)
    result = other.load(*PAGES)
    assert not result.success and result.successful_keys == ()
    assert looked_up(other, *PAGES) == [MISS] * 3


def test_pages_that_another_host_reads_are_not_evicted(make: Make) -> None:
    one, other = make("one", memory_bytes=3 * PAGE_BYTES), make("other")
    one.store(PAGES)
    await_pages(other, *PAGES)
    assert one.store({key_of(10): page_of(10, PAGE_BYTES)}).transfer_bytes == 0
    assert other.load(*PAGES).success
    assert one.store({key_of(10): page_of(10, PAGE_BYTES)}).transfer_bytes == PAGE_BYTES


def test_pages_of_a_killed_process_are_recomputed(
    make: Make, start_peer: Callable[[World], Peer], caplog: pytest.LogCaptureFixture
) -> None:
    other = make("other")
    peer = start_peer(other)
    await_pages(other, *PAGES)
    peer.kill()
    result = other.load(*PAGES)
    assert not result.success and result.successful_keys == ()
    assert looked_up(other, *PAGES) == [MISS] * 3 and counts(other)["failures"] == 1
    assert "No pages are read from tcp://127.0.0.1:" in caplog.text and "#" not in caplog.text
    wait_until(lambda: not finds(other, FIRST))


def test_a_stopped_process_is_not_waited_for_and_is_left_alone_for_a_while(
    make: Make, start_peer: Callable[[World], Peer]
) -> None:
    strict = make("strict", PATIENT._replace(pull_s=0.2, back_off_s=3600.0))
    lenient = make("lenient", PATIENT._replace(pull_s=0.2, back_off_s=0.001))
    peer = start_peer(strict)
    for world in (strict, lenient):
        await_pages(world, *PAGES)
    with paused(peer.process.pid):
        assert not strict.load(*PAGES).success and counts(strict)["failures"] == 1
        assert not lenient.load(*PAGES).success and counts(lenient)["failures"] == 1

    def reads(world: World) -> bool:
        request_id = f"another-{next(numbers)}"
        is_found = looked_up(world, FIRST, request_id=request_id) == [HIT]
        return is_found and bool(world.load(FIRST, request_id=request_id).success)

    assert not finds(strict, FIRST), "although it runs again"
    wait_until(lambda: reads(lenient))
    assert lenient.page(0) == PAGES[FIRST]


# -- Redis ------------------------------------------------------------------------------------------------------------


def test_without_redis_at_the_start_a_host_works_alone_and_shares_later(make: Make, redis: Server) -> None:
    redis.kill()
    one, other = make("one"), make("other")
    one.store(PAGES)
    assert looked_up(one, *PAGES) == [HIT] * 3 and one.load(*PAGES).success
    assert other.tier.lookup(FIRST, other.request("request", FIRST)) is MISS, "at once"
    redis.restart()
    wait_until(lambda: finds(other, *PAGES))


def test_when_redis_dies_nothing_is_taken_that_it_cannot_confirm(make: Make, redis: Server) -> None:
    one, other = make("one"), make("other")
    one.store(PAGES)
    await_pages(other, *PAGES)
    redis.kill()
    assert not other.load(*PAGES).success
    assert other.tier.lookup(FIRST, other.request("another", FIRST)) is MISS, "at once"
    assert looked_up(one, *PAGES) == [HIT] * 3
    assert one.store({key_of(9): page_of(9, PAGE_BYTES)}).transfer_bytes == PAGE_BYTES
    redis.restart()
    wait_until(lambda: finds(other, *PAGES, key_of(9)))


def test_a_stopped_redis_is_asked_once(make: Make, redis: Server) -> None:
    one, other = make("one"), make("other", LIMITS)
    one.store(PAGES)
    wait_until(lambda: finds(other, *PAGES))
    remote = other.tier._remote
    assert remote is not None
    with paused(redis.process.pid):
        before = remote.num_lookups
        wait_until(lambda: other.tier.lookup(FIRST, other.request("request", FIRST)) is not RETRY)
        for _ in range(3):
            assert looked_up(other, FIRST) == [MISS]
        wait_until(lambda: other.tier._hosts._lookup_server.is_away)  # type: ignore[union-attr]
        for number in range(100):
            assert other.tier.lookup(FIRST, other.request(str(number), FIRST)) is MISS
            other.tier.on_schedule_end(None)
        assert remote.num_lookups <= before + 1
    wait_until(lambda: finds(other, *PAGES))


def test_an_emptied_redis_is_told_everything_again(make: Make, redis: Server) -> None:
    one, other = make("one"), make("other")
    one.store(PAGES)
    await_pages(other, *PAGES)
    with Redis.from_url(redis.url) as client:
        client.flushall()
    assert not other.load(*PAGES).success
    wait_until(lambda: finds(other, *PAGES))


def test_nothing_is_left_in_redis_when_all_have_ended(make: Make, redis: Server) -> None:
    one, other = make("one"), make("other")
    one.store(PAGES)
    await_pages(other, *PAGES)
    for world in (one, other):
        world.tier.shutdown()
    last = make("last", memory_bytes=PAGE_BYTES)
    with Redis.from_url(redis.url) as client:
        wait_until(lambda: not client.keys("*}:p") and not client.keys("*}:h*"))
        assert client.keys("*}:n"), "the lease of the last one"
    last.tier.shutdown()
