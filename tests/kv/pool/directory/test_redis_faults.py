"""A directory in Redis that is away, slow, restarted without data, or holds what others wrote."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from redis import Redis

from tests.kv.pool.directory.builders import Clock, key, keys, make_layout, make_redis, pages
from tests.processes import paused
from tests.redis_server import start_redis
from vllm_omni.errors import ConfigError, Unavailable
from vllm_omni.kv.pool.directory import Reason
from vllm_omni.kv.pool.directory.membership import Membership
from vllm_omni.kv.pool.directory.redis import RedisDirectory, RedisServer

DEADLINE_S = 30.0
TIMEOUT_S = 0.5  # more than the directory's own: Redis may wait for a core
MARGIN_S = 1.0  # for a machine whose cores are taken: an unbounded call would take longer


class Server:
    """A Redis server that a test may kill, and the directory's connection to it."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"unix://{directory / 'redis.sock'}"
        self.clock = Clock()
        self.connection = RedisServer(self.url, timeout_s=TIMEOUT_S, clock=self.clock)
        self.directory = RedisDirectory(self.connection, make_layout())

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        self._process, _ = start_redis(self._directory)

    def kill(self) -> None:
        if self._process is not None:
            os.kill(self.pid, signal.SIGKILL)
            self._process.wait(10)
            self._process = None

    def wait_until_usable(self) -> None:
        wait_until(lambda: not self.connection.statistics().is_open)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.directory.close()
    server.connection.close()
    server.kill()


def timed(call: Callable[[], object]) -> float:
    start = time.monotonic()
    call()
    return time.monotonic() - start


def test_redis_that_is_away_at_the_start_gives_nothing_until_it_answers(server: Server) -> None:
    assert timed(lambda: server.directory.join("a", 3.0)) < MARGIN_S
    assert server.directory.join("a", 3.0) is None
    assert server.connection.statistics().is_open
    assert server.directory.chain("s") == ()
    server.start()
    server.wait_until_usable()
    member = server.directory.join("a", 3.0)
    assert member is not None
    assert server.directory.publish(member, pages(1)).done == (key(1),)


def test_every_call_gives_nothing_while_redis_is_dead(server: Server) -> None:
    server.start()
    member = server.directory.join("a", 3.0)
    assert member is not None
    server.directory.publish(member, pages(1))
    match = server.directory.match_and_claim(member, keys(1), 1.0)
    assert match.pages
    server.kill()
    unavailable = {key(1): Reason.UNAVAILABLE}
    assert server.directory.match_and_claim(member, keys(1), 1.0).pages == ()
    assert server.directory.verify(match) == [False]
    assert server.directory.evict(member, keys(1)) == ((), unavailable)
    assert server.directory.publish(member, pages(1)) == ((), unavailable)
    assert server.directory.begin_write(member, keys(1), 1.0) == ((), unavailable)
    assert server.directory.append_chain("s", keys(1), keep_s=1.0) == 0
    assert server.directory.chain("s") == ()
    assert not server.directory.renew(member)
    assert server.directory.sweep() == 0
    server.directory.release(member, match)
    server.directory.abandon(member, keys(1))
    server.directory.leave(member)
    with pytest.raises(Unavailable, match="did not answer"):
        server.directory.statistics()


def test_a_stopped_redis_costs_one_timeout(server: Server) -> None:
    server.start()
    member = server.directory.join("a", 60.0)
    assert member is not None
    with paused(server.pid):
        first = timed(lambda: server.directory.match_and_claim(member, keys(1), 1.0))
        others = timed(lambda: [server.directory.match_and_claim(member, keys(1), 1.0) for _ in range(1000)])
        assert server.connection.statistics().is_open
    assert TIMEOUT_S * 0.9 < first < TIMEOUT_S + MARGIN_S
    assert others < MARGIN_S  # 500 s if each waited
    server.wait_until_usable()
    assert server.connection.statistics().num_openings == 1
    assert server.directory.renew(member)


def test_a_lease_that_ended_while_redis_was_away_is_lost(server: Server) -> None:
    server.start()
    member = server.directory.join("a", 10.0)
    assert member is not None
    with paused(server.pid):
        assert server.directory.evict(member, keys(1)).kept == {key(1): Reason.UNAVAILABLE}
        server.clock.advance(9.0)
        assert server.directory.evict(member, keys(1)).kept == {key(1): Reason.UNAVAILABLE}
        server.clock.advance(2.1)
        assert server.directory.evict(member, keys(1)).kept == {key(1): Reason.LOST}


def test_a_renewal_without_an_answer_may_have_been_made(server: Server) -> None:
    server.start()
    member = server.directory.join("a", 10.0)
    assert member is not None
    with paused(server.pid):
        assert not server.directory.renew(member)
        server.clock.advance(20.0)
        assert server.directory.evict(member, keys(1)).kept == {key(1): Reason.UNAVAILABLE}
        server.clock.advance(2.1)
        assert server.directory.evict(member, keys(1)).kept == {key(1): Reason.LOST}


def test_a_publication_without_an_answer_is_void_after_the_node_has_joined_again(server: Server) -> None:
    server.start()
    membership = Membership(server.directory, "a", lease_s=60.0)
    membership.step()
    old, reader = membership.member, server.directory.join("b", 60.0)
    assert old is not None and reader is not None
    server.directory.publish(old, pages(2))  # Redis has the script from now on
    with paused(server.pid):
        assert server.directory.publish(old, pages(1)).kept == {key(1): Reason.UNAVAILABLE}
    server.wait_until_usable()
    assert server.directory.match_and_claim(reader, keys(1), 1.0).pages  # it was made, late
    unknown = {key(1): Reason.UNAVAILABLE}
    assert server.directory.evict(old, keys(1)).kept == unknown
    assert server.directory.begin_write(old, keys(1), 1.0).kept == unknown
    assert server.directory.publish(old, pages(1)).kept == unknown
    membership.step()
    assert membership.member != old
    assert server.directory.match_and_claim(reader, keys(1), 1.0).pages == ()


def test_after_a_restart_without_data_nodes_join_again_and_publish_again(server: Server) -> None:
    server.start()
    membership = Membership(
        server.directory, "a", on_join=lambda member: server.directory.publish(member, pages(1, 2)) and None
    )
    membership.step()
    old = membership.member
    assert old is not None
    match = server.directory.match_and_claim(old, keys(1), 1.0)
    server.kill()
    server.start()
    server.directory.renew(old)  # notices it
    server.wait_until_usable()
    assert server.directory.evict(old, keys(1)).kept == {key(1): Reason.LOST}
    membership.step()
    assert membership.member is not None and membership.member.epoch > old.epoch
    assert server.directory.verify(match) == [False]
    found = server.directory.match_and_claim(membership.member, keys(1, 2), 1.0)
    assert len(found.pages) == 2 and found.claim > match.claim
    server.directory.check_integrity()


def test_scripts_that_redis_has_forgotten_are_sent_again(redis_server: RedisServer, redis_client: Redis) -> None:
    world = make_redis(redis_server, redis_client)
    member = world.directory.join("a", 3.0)
    assert member is not None
    redis_client.script_flush()
    assert world.directory.publish(member, pages(1)).done == (key(1),)


def test_nothing_but_counters_is_left_in_redis(redis_server: RedisServer, redis_client: Redis) -> None:
    world = make_redis(redis_server, redis_client)
    a, b, c = (world.directory.join(node, 3.0) for node in "abc")
    assert a is not None and b is not None and c is not None
    world.directory.publish(a, pages(1, 2, 3))
    world.directory.publish(b, pages(1, 2))
    world.directory.match_and_claim(c, keys(1, 2, 3), 1.0)
    world.directory.begin_write(c, keys(4), 1.0)
    world.directory.leave(a)
    world.clock.advance(3.0)
    world.directory.sweep()
    names = redis_client.keys(f"*{{{world.directory.layout.id}}}:*")
    assert sorted(name.decode().partition("}:")[2] for name in names) == ["", "#", "e"]  # the first is the clock


@pytest.mark.parametrize("length", [0, 5, 8, 20, 30, 37])
def test_a_record_of_others_is_not_matched(server: Server, length: int) -> None:
    server.start()
    member = server.directory.join("a", 3.0)
    assert member is not None
    server.directory.publish(member, pages(1))
    with Redis.from_url(server.url) as client:
        (name,) = client.keys("*}:p")
        record = member.epoch.to_bytes(8, "big") + bytes(11) + b"\x01" * 19
        client.hset(name, key(1), record[:length])
        assert server.directory.match_and_claim(member, keys(1), 1.0).pages == ()
        client.delete(name)
        client.set(name, b"a string")
        assert server.directory.match_and_claim(member, keys(1), 1.0).pages == ()
    assert not server.connection.statistics().num_openings


def test_a_redis_without_memory_fails_what_needs_some_and_nothing_else(server: Server) -> None:
    server.start()
    holder, reader = server.directory.join("a", 60.0), server.directory.join("b", 60.0)
    assert holder is not None and reader is not None
    server.directory.publish(holder, pages(1, 2))
    with Redis.from_url(server.url) as client:
        client.config_set("maxmemory", 1)
        assert server.directory.publish(reader, pages(3)).kept == {key(3): Reason.UNAVAILABLE}
        assert server.directory.match_and_claim(reader, keys(1), 1.0).pages == ()
        assert server.directory.evict(holder, keys(1)).done == (key(1),)
        client.config_set("maxmemory", 0)
    assert server.directory.match_and_claim(reader, keys(2), 1.0).pages
    assert server.directory.publish(reader, pages(3)).done == (key(3),)
    assert not server.connection.statistics().num_openings
    server.directory.check_integrity()


def test_events_that_were_sent_without_a_connection_are_counted(server: Server) -> None:
    server.start()
    member = server.directory.join("a", 60.0)
    assert member is not None
    subscription = server.directory.subscribe()
    server.directory.publish(member, pages(1))
    assert subscription.get(DEADLINE_S) is not None
    with Redis.from_url(server.url) as client:
        client.client_kill_filter(_type="pubsub")
        for number in range(2, 5):
            server.directory.publish(member, pages(number))
        wait_until(lambda: bool(client.pubsub_channels("*")))
    server.directory.publish(member, pages(5))
    event = subscription.get(DEADLINE_S)
    assert event is not None and event.keys == (key(5),)
    assert subscription.num_lost == 3


def test_a_message_of_others_is_ignored(server: Server) -> None:
    server.start()
    member = server.directory.join("a", 60.0)
    assert member is not None
    subscription = server.directory.subscribe()
    with Redis.from_url(server.url) as client:
        (channel,) = client.pubsub_channels("*")
        client.publish(channel, b"short")
        client.publish(channel, bytes(8) + b"\x01\xff\0")
    server.directory.publish(member, pages(1))
    event = subscription.get(DEADLINE_S)
    assert event is not None and event.keys == (key(1),)


@pytest.mark.parametrize("url", ["localhost", "http://localhost:6379", "redis://h:x"])
def test_what_is_no_url_of_redis_is_rejected(url: str) -> None:
    with pytest.raises(ConfigError, match=f"'{url}' is no URL of Redis, such as redis://HOST:6379/0"):
        RedisServer(url)


def test_a_server_is_named_without_its_password() -> None:
    server = RedisServer("redis://user:secret@127.0.0.1:1/0")
    directory = RedisDirectory(server, make_layout())
    with pytest.raises(Unavailable, match=r"at redis://127\.0\.0\.1:1/0 does not answer") as raised:
        directory.statistics()
    assert "secret" not in str(raised.value)
    server.close()
