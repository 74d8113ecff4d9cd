"""Relays in separate processes, one of which is killed at every step (kill -9).

The deadline for noticing that (``NOTICED_S``) is given to the relay itself, which raises ``RelayTimeout`` instead of
``RelayBroken`` if it has not noticed by then. It is shorter than a heartbeat: a killed process is noticed by the end of
its connection.
"""

import os
import re
import time
from collections.abc import Iterator
from multiprocessing import get_context

import pytest

from tests.contract.relays import NUM_BYTES
from tests.contract.usable import CROSSING
from tests.processes import few_file_descriptors
from tests.relay.peer import Peer, peers
from vllm_omni.errors import PoolExhausted, RelayBroken, RelayTimeout
from vllm_omni.messages.payload import TensorRef
from vllm_omni.process.proc import cpu_s

NOTICED_S = 4.0
HALF = NUM_BYTES // 2
WITHOUT_S = 0.8  # how long a process has no free file descriptor


@pytest.fixture(params=CROSSING)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def ends(backend: str) -> Iterator[tuple[Peer, Peer]]:
    """A producer and a consumer without a connection."""
    with peers(backend, backend) as (producer, consumer):
        yield producer, consumer


@pytest.fixture
def connected(ends: tuple[Peer, Peer]) -> tuple[Peer, Peer]:
    """A producer and a connected consumer, which have opened all descriptors that a large tensor needs."""
    deliver(*ends, HALF, 0)
    return ends


def deliver(producer: Peer, consumer: Peer, num_bytes: int, seed: int) -> None:
    ref = producer.do("put", "request", num_bytes, seed)
    assert consumer.do("get", ref, seed)
    consumer.do("release", ref)


def assert_nothing_is_held(producer: Peer) -> None:
    """All room can be used again."""
    assert producer.do("await_leases", 0) == 0
    assert producer.do("num_expired") == 0
    producer.do("check_integrity")
    assert len(producer.do("fill", "all", HALF)) == 2
    producer.do("abort", "all")


def shm_names(*ends: Peer) -> list[str]:
    """Return the files in /dev/shm that are named after one of these processes."""
    pid = re.compile("|".join(rf"(?<![0-9a-f]){end.process.pid}(?![0-9a-f])" for end in ends))
    return [name for name in os.listdir("/dev/shm") if pid.search(name)]


# -- without failures --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["get", "get_blocking"])
def test_tensors_of_several_sizes_go_from_one_process_to_another(ends: tuple[Peer, Peer], method: str) -> None:
    producer, consumer = ends
    for seed, num_bytes in enumerate([1, 4095, 4096, 4097, 100_000, 3_000_001, 0]):
        ref = producer.do("put", "request", num_bytes, seed)
        assert consumer.do(method, ref, seed), num_bytes
        consumer.do("release", ref)
    assert_nothing_is_held(producer)


def test_a_producer_without_file_descriptors_accepts_its_reader_later(ends: tuple[Peer, Peer]) -> None:
    producer, consumer = ends
    assert producer.process.pid is not None
    ref = producer.do("put", "request", HALF, 1)
    with few_file_descriptors(producer.process.pid):
        consumer.start("get", ref, 1)
        time.sleep(WITHOUT_S)
    assert consumer.answer()
    consumer.do("release", ref)
    assert_nothing_is_held(producer)


@pytest.mark.parametrize("num_free", range(3))
def test_a_reader_without_file_descriptors_raises_and_connects_later(ends: tuple[Peer, Peer], num_free: int) -> None:
    """Shared memory needs three: for the socket, for the slab, and for Python's mapping of it."""
    producer, consumer = ends
    assert consumer.process.pid is not None
    num_fds = consumer.do("num_fds")
    ref = producer.do("put", "request", HALF, 1)
    error = "Too many open files|file descriptors? (is|are) free"
    with few_file_descriptors(consumer.process.pid, num_free), pytest.raises(RelayBroken, match=error):
        consumer.do("get", ref, 1)
    assert consumer.do("await_num_fds", num_fds) == num_fds
    deliver(producer, consumer, HALF, 2)


def test_a_reader_with_too_few_file_descriptors_for_zmq_is_not_ended_by_it() -> None:
    with peers("tcp", "tcp") as (producer, consumer):
        assert consumer.process.pid is not None
        consumer.do("num_fds")  # it has started
        ref = producer.do("put", "request", HALF, 1)
        with few_file_descriptors(consumer.process.pid, 5), pytest.raises(RelayBroken, match="descriptors are free"):
            consumer.do("get", ref, 1)
        deliver(producer, consumer, HALF, 2)


def test_a_producer_of_shared_memory_does_not_spin_while_it_has_no_file_descriptor() -> None:
    with peers("shm", "shm") as (producer, consumer):
        assert producer.process.pid is not None
        ref = producer.do("put", "request", HALF, 1)
        with few_file_descriptors(producer.process.pid):
            consumer.start("get", ref, 1)
            before_s = cpu_s([producer.process.pid])
            time.sleep(WITHOUT_S)
            assert cpu_s([producer.process.pid]) - before_s < WITHOUT_S / 4
        assert consumer.answer()


def test_a_forwarded_reference_is_pulled_from_its_producer(backend: str) -> None:
    with peers(backend, backend, backend) as (source, middle, sink):
        for seed in range(3):
            ref = middle.do("forward", source.do("put", "request", 10_000, seed))
            assert sink.do("get", ref, seed)
            sink.do("release", ref)
        ref = middle.do("forward", source.do("put", "request", 10_000, 9))
        middle.kill()
        assert sink.do("get", ref, 9)
        sink.do("release", ref)
        assert_nothing_is_held(source)


def test_rows_go_from_one_process_to_another(ends: tuple[Peer, Peer]) -> None:
    producer, consumer = ends
    consumer.do("read_stream", producer.do("open_stream", "request", 8))
    consumer.start("read")
    producer.do("write", [1, 2, 3])
    assert consumer.answer() == [1, 2, 3]
    producer.do("write", list(range(8)))
    producer.start("write", [9])
    assert consumer.do("await_unread", 8) == 8  # between hosts, they may come in several messages
    assert consumer.do("read") == list(range(8))
    producer.answer()
    producer.do("end")
    assert consumer.do("read") == [9]
    assert consumer.do("read") == []
    consumer.do("close_reader")
    assert_nothing_is_held(producer)


def test_processes_that_come_and_go_leave_no_descriptor(backend: str) -> None:
    with peers(backend, backend) as (producer, consumer):
        deliver(producer, consumer, 64, 0)
        before = [end.do("num_fds") for end in (producer, consumer)]
        with peers(backend, backend) as (other_producer, other_consumer):
            deliver(producer, other_consumer, 64, 1)
            deliver(other_producer, consumer, 64, 2)
            other_producer.do("close")
            other_consumer.do("close")
            for end, num_fds in zip((producer, consumer), before, strict=True):
                assert end.do("await_num_fds", num_fds) == num_fds
            assert shm_names(other_producer, other_consumer) == []


# -- the consumer dies ------------------------------------------------------------------------------------------------


def test_a_consumer_dies_before_it_pulls(connected: tuple[Peer, Peer]) -> None:
    producer, consumer = connected
    producer.do("put", "request", 64, 1)
    consumer.kill()
    assert producer.do("await_leases", 1) == 1  # another reader may come, until the request is aborted
    producer.do("abort", "request")
    assert_nothing_is_held(producer)


def test_a_consumer_dies_while_it_holds_a_view(connected: tuple[Peer, Peer]) -> None:
    producer, consumer = connected
    num_fds = producer.do("num_fds")
    assert consumer.do("get", producer.do("put", "request", HALF, 1), 1)
    consumer.kill()
    assert_nothing_is_held(producer)
    assert producer.do("await_fewer_fds", num_fds) < num_fds  # the connection's
    assert shm_names(producer, consumer) == []


def test_a_consumer_dies_holding_an_aborted_tensor(connected: tuple[Peer, Peer]) -> None:
    producer, consumer = connected
    assert consumer.do("get", producer.do("put", "request", HALF, 1), 1)
    producer.do("abort", "request")
    assert producer.do("await_leases", 1) == 1
    consumer.kill()
    assert_nothing_is_held(producer)


def test_a_consumer_dies_after_it_released(connected: tuple[Peer, Peer]) -> None:
    producer, consumer = connected
    ref = producer.do("put", "request", 64, 1)
    consumer.do("release", ref)
    assert producer.do("await_leases", 0) == 0  # between hosts this is a message, which may be lost with its sender
    consumer.kill()
    assert_nothing_is_held(producer)


def test_one_of_two_readers_dies(backend: str) -> None:
    with peers(backend, backend, backend) as (producer, first, second):
        ref = producer.do("put", "request", 10_000, 1, 2)
        assert first.do("get", ref, 1)
        assert second.do("get", ref, 1)
        first.kill()
        assert producer.do("await_leases", 1) == 1
        assert second.do("check", ref)
        second.do("release", ref)
        assert_nothing_is_held(producer)


def test_a_waiting_put_resumes_when_the_consumer_dies(connected: tuple[Peer, Peer]) -> None:
    producer, consumer = connected
    for seed, ref in enumerate(producer.do("fill", "request", HALF)):
        assert consumer.do("get", ref, seed)
    producer.start("put", "other", HALF, 7, 1, NOTICED_S)
    consumer.kill()
    producer.answer()
    producer.do("abort", "other")
    assert_nothing_is_held(producer)


@pytest.mark.parametrize("num_read", [0, 3])
def test_a_writer_resumes_when_its_reader_dies(ends: tuple[Peer, Peer], num_read: int) -> None:
    producer, consumer = ends
    consumer.do("read_stream", producer.do("open_stream", "request", 4))
    if num_read:
        producer.do("write", list(range(num_read)))
        assert consumer.do("read") == list(range(num_read))
    producer.do("write", [1, 2, 3, 4])
    producer.start("write", [5], NOTICED_S)
    consumer.kill()
    producer.answer()
    assert producer.do("await_credits", 4) == 4
    producer.do("write_nowait", [1, 2, 3, 4])
    producer.do("end")
    assert_nothing_is_held(producer)


def test_a_reader_dies_while_it_waits(ends: tuple[Peer, Peer]) -> None:
    producer, consumer = ends
    consumer.do("read_stream", producer.do("open_stream", "request", 4))
    consumer.start("read")
    consumer.kill()
    assert producer.do("await_leases", 0) == 0
    producer.do("write", [1, 2, 3, 4])
    producer.do("write", [1, 2, 3, 4])
    assert_nothing_is_held(producer)


# -- the producer dies ------------------------------------------------------------------------------------------------


def test_a_producer_dies_before_a_consumer_has_connected(ends: tuple[Peer, Peer]) -> None:
    producer, consumer = ends
    ref = producer.do("put", "request", 64, 1)
    producer.kill()
    with pytest.raises(RelayBroken):
        consumer.do("get", ref, 1, NOTICED_S)
    consumer.do("release", ref)


def test_a_producer_dies_before_its_announcement_is_answered(connected: tuple[Peer, Peer]) -> None:
    producer, consumer = connected
    ref = producer.do("put", "request", 64, 1)
    producer.kill()
    assert consumer.do("await_broken", ref)
    consumer.do("release", ref)


def test_a_producer_dies_while_a_consumer_connects(ends: tuple[Peer, Peer]) -> None:
    producer, consumer = ends
    ref = producer.do("put", "request", 64, 1)
    producer.pause()  # the system accepts the connection, and no process answers
    with pytest.raises(RelayTimeout):
        consumer.do("get", ref, 1, 0.05)
    consumer.start("get", ref, 1)
    producer.kill()
    with pytest.raises(RelayBroken):
        consumer.answer()


def test_tensors_pulled_from_a_dead_producer_stay_readable(ends: tuple[Peer, Peer]) -> None:
    producer, consumer = ends
    num_fds = consumer.do("num_fds")
    first = producer.do("put", "request", HALF, 1)
    second = producer.do("put", "request", 64, 2)
    assert consumer.do("get", first, 1)
    producer.kill()
    assert consumer.do("await_broken", second)
    assert consumer.do("check", first)
    consumer.do("release", first)
    consumer.do("release", second)
    assert consumer.do("await_num_fds", num_fds) == num_fds
    assert shm_names(producer, consumer) == []
    consumer.do("check_integrity")


def test_a_reader_notices_the_writers_end_behind_the_rows(connected: tuple[Peer, Peer]) -> None:
    producer, consumer = connected
    num_fds = consumer.do("num_fds")
    consumer.do("read_stream", producer.do("open_stream", "request", 4))
    producer.do("write", [1, 2, 3])
    assert consumer.do("await_unread", 3) == 3
    producer.kill()
    assert consumer.do("read", NOTICED_S) == [1, 2, 3]
    with pytest.raises(RelayBroken):
        consumer.do("read", NOTICED_S)
    consumer.do("close_reader")
    assert consumer.do("await_fewer_fds", num_fds) < num_fds


def test_a_waiting_reader_notices_the_writers_end(ends: tuple[Peer, Peer]) -> None:
    producer, consumer = ends
    consumer.do("read_stream", producer.do("open_stream", "request", 4))
    consumer.start("read", NOTICED_S)
    producer.kill()
    with pytest.raises(RelayBroken):
        consumer.answer()


def test_rows_that_were_ended_outlive_their_writer(ends: tuple[Peer, Peer]) -> None:
    producer, consumer = ends
    consumer.do("read_stream", producer.do("open_stream", "request", 4))
    producer.do("write", [1, 2, 3])
    producer.do("end")
    assert consumer.do("await_end")  # between hosts, rows may die with their sender
    producer.kill()
    assert consumer.do("read", NOTICED_S) == [1, 2, 3]
    assert consumer.do("read", NOTICED_S) == []


# -- at any step ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_seen", [1, 7, 50])
def test_a_producer_dies_at_any_step(ends: tuple[Peer, Peer], num_seen: int) -> None:
    producer, consumer = ends
    ours, theirs = get_context("forkserver").Pipe()
    producer.start("produce", theirs, 300_000)
    announced: list[tuple[TensorRef, int]] = []
    while len(announced) < num_seen:
        announced.append(ours.recv())
        assert consumer.do("get", *announced[-1])
        consumer.do("release", announced[-1][0])
    last = ours.recv()
    producer.kill()
    assert consumer.do("await_broken", last[0])
    for ref, _ in [*announced, last]:
        consumer.do("release", ref)
    consumer.do("check_integrity")
    ours.close()
    theirs.close()


@pytest.mark.parametrize("num_sent", [1, 7, 50])
def test_a_consumer_dies_at_any_step(ends: tuple[Peer, Peer], num_sent: int) -> None:
    producer, consumer = ends
    theirs, ours = get_context("forkserver").Pipe(duplex=False)
    consumer.start("consume", theirs)
    for seed in range(num_sent):
        ours.send((producer.do("put", "request", 300_000, seed), seed))
    consumer.kill()
    producer.do("abort", "request")
    assert_nothing_is_held(producer)
    ours.close()
    theirs.close()


# -- a stopped process ------------------------------------------------------------------------------------------------


def test_a_stopped_consumer_takes_no_more_than_its_credits(connected: tuple[Peer, Peer]) -> None:
    producer, consumer = connected
    consumer.do("read_stream", producer.do("open_stream", "stream", 4))
    held = producer.do("put", "request", HALF, 5)
    assert consumer.do("get", held, 5)
    consumer.pause()
    producer.do("write", [1, 2, 3, 4])
    with pytest.raises(PoolExhausted):
        producer.do("write_nowait", [5])
    with pytest.raises(RelayTimeout):
        producer.do("write", [5], 0.01)
    refs = producer.do("fill", "request", 100_000)
    assert 100_000 * len(refs) < NUM_BYTES - HALF
    with pytest.raises(RelayTimeout):
        producer.do("put", "request", 100_000, 0, 1, 0.01)
    consumer.resume()
    assert consumer.do("check", held)
    assert consumer.do("read") == [1, 2, 3, 4]
    for seed, ref in enumerate(refs):
        assert consumer.do("get", ref, seed)
        consumer.do("release", ref)
    consumer.do("release", held)
    consumer.do("close_reader")
    assert_nothing_is_held(producer)
