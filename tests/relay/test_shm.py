"""``ShmRelay`` beyond the contract suite: the order of events between two ends."""

import asyncio
import gc
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import msgspec
import pytest
import torch

from tests.contract.relays import Pair
from tests.relay.io import await_io_thread
from vllm_omni.errors import RelayBroken, RelayClosed
from vllm_omni.relay.shm import ShmRelay
from vllm_omni.relay.shm.memory import FLAGS, READING, RELEASED, SLOT_BYTES, parse_location

NUM_BYTES = 1 << 20
DEADLINE_S = 20.0


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair(ShmRelay(NUM_BYTES, prefault=False), ShmRelay(NUM_BYTES, prefault=False))
    yield pair
    pair.producer.check_integrity()
    for relay in pair:
        relay.close()


def rows(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64).reshape(-1, 1)


# -- connections ------------------------------------------------------------------------------------------------------


def test_two_relays_connect_to_each_other_at_the_same_time(pair: Pair) -> None:
    refs = [relay.put_nowait("request", torch.ones(4)) for relay in pair]
    arrived: list[torch.Tensor] = []
    start = threading.Barrier(2)

    def pull(relay: ShmRelay, ref: object) -> None:
        start.wait(DEADLINE_S)
        arrived.append(relay.get_blocking(ref, DEADLINE_S))

    threads = [threading.Thread(target=pull, args=args) for args in zip(pair, reversed(refs), strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert len(arrived) == 2


def test_a_relay_that_connects_can_answer_meanwhile(pair: Pair) -> None:
    """A relay answers a reader while it waits for a producer that never answers."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.bind(b"\0" + f"vllm-omni-silent-{os.getpid()}".encode())
        silent.listen()
        ref = pair.producer.put_nowait("request", torch.ones(4))
        location = msgspec.msgpack.encode([f"vllm-omni-silent-{os.getpid()}", 1])
        wrong = msgspec.structs.replace(ref, location=location)
        errors: list[RelayBroken] = []

        def ask() -> None:
            try:
                pair.producer.get_blocking(wrong, DEADLINE_S)
            except RelayBroken as exc:
                errors.append(exc)

        asking = threading.Thread(target=ask)
        asking.start()
        peer, _ = silent.accept()
        assert torch.equal(pair.consumer.get_blocking(ref, DEADLINE_S), torch.ones(4))
        peer.close()
        asking.join(DEADLINE_S)
        assert len(errors) == 1


def test_releasing_what_a_dead_producer_had_put_does_nothing(pair: Pair) -> None:
    refs = [pair.producer.put_nowait("request", torch.ones(4)) for _ in range(2)]
    pair.consumer.get_blocking(refs[0])
    pair.producer.close()
    await_io_thread()
    for ref in refs:
        pair.consumer.release(ref)


def descriptors() -> dict[str, str]:
    """The open ones of this process, and what each is."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the listing's own
            found[name] = os.readlink(f"/proc/self/fd/{name}")
    return found


def test_a_closed_relay_leaves_no_descriptor() -> None:
    await_io_thread()
    before = descriptors()
    pair = Pair(ShmRelay(NUM_BYTES, prefault=False), ShmRelay(0, prefault=False))
    pair.consumer.get_blocking(pair.producer.put_nowait("request", torch.ones(4)))
    for relay in pair:
        relay.close()
    await_io_thread()
    del pair, relay
    gc.collect()
    deadline = time.monotonic() + DEADLINE_S
    while left := descriptors().items() - before.items():
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


# -- leases -----------------------------------------------------------------------------------------------------------


def test_a_wrong_reference_does_not_take_a_release_back(pair: Pair) -> None:
    ref = pair.producer.put_nowait("request", torch.ones(4), num_readers=2)
    pair.consumer.release(ref)
    with pytest.raises(RelayBroken):
        pair.consumer.get_blocking(msgspec.structs.replace(ref, shape=(5,)))
    pair.producer.release(ref)
    assert pair.producer.statistics().num_leases == 0


def test_a_release_for_all_outlives_its_reader(pair: Pair) -> None:
    refs = [pair.producer.put_nowait("request", rows(1), num_readers=100) for _ in range(2)]
    pair.consumer.get_blocking(refs[0])
    for ref in refs:
        pair.consumer.release(ref, for_all=True)
    reader = pair.consumer._producers[parse_location(refs[0]).address].reader
    pair.producer._lose_reader(reader)
    assert pair.producer.statistics().num_leases == 0


def test_a_new_reader_in_the_place_of_one_that_left_is_another_reader(pair: Pair) -> None:
    ref = pair.producer.put_nowait("request", torch.ones(4), num_readers=2)
    assert torch.equal(pair.consumer.get_blocking(ref), torch.ones(4))
    pair.consumer.release(ref)
    pair.consumer.close()
    await_io_thread()
    other = ShmRelay(0, prefault=False)
    assert torch.equal(other.get_blocking(ref), torch.ones(4))
    other.release(ref)
    assert pair.producer.statistics().num_leases == 0
    other.close()


def test_a_reader_that_comes_too_late_does_not_keep_a_lease(pair: Pair) -> None:
    """It has released the lease, and starts to read again at the moment at which the producer clears the number."""
    producer = pair.producer
    ref = producer.put_nowait("request", torch.ones(4))
    pair.consumer.release(ref)
    flag = parse_location(ref).slot * SLOT_BYTES + FLAGS
    late, other = flag + 1, flag + 2
    assert producer.mapping.bytes[late] == RELEASED
    producer.mapping.bytes[other] = READING  # as a reader that was in time, with a wrong reference
    assert producer.statistics().num_leases == 1
    producer.mapping.bytes[late] = producer.mapping.bytes[other] = 0
    assert producer.statistics().num_leases == 0


def test_a_reference_without_a_lease_does_not_reach_what_was_revoked(pair: Pair) -> None:
    ref = pair.producer.put_nowait("request", torch.ones(4))
    pair.consumer.get_blocking(ref)
    pair.producer.abort("request")
    with pytest.raises(RelayBroken):
        pair.consumer.get_blocking(msgspec.structs.replace(ref, lease=0))
    pair.consumer.release(ref)


# -- streams ----------------------------------------------------------------------------------------------------------


async def test_rows_written_just_before_the_end_are_read(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = pair.producer.open_stream("request", (1,), torch.int64, credits=4)
    reader = await pair.consumer.read_stream(writer.ref)
    read_nowait = reader.read_nowait

    def read_then_write() -> torch.Tensor:
        found = read_nowait()
        monkeypatch.undo()
        writer.write_nowait(rows(1, 2))
        writer.end()
        return found

    monkeypatch.setattr(reader, "read_nowait", read_then_write)
    assert torch.equal(await reader.read(timeout_s=DEADLINE_S), rows(1, 2))
    assert not len(await reader.read(timeout_s=DEADLINE_S))
    reader.close()


async def test_a_waiting_writer_resumes_when_its_request_is_aborted(pair: Pair) -> None:
    writer = pair.producer.open_stream("request", (1,), torch.int64, credits=1)
    reader = await pair.consumer.read_stream(writer.ref)
    writer.write_nowait(rows(1))
    waiting = asyncio.create_task(writer.write(rows(2), timeout_s=DEADLINE_S))
    await asyncio.sleep(0)
    pair.producer.abort("request")
    await waiting
    assert torch.equal(reader.read_nowait(), rows(1))
    with pytest.raises(RelayBroken):
        reader.read_nowait()
    reader.close()


async def test_a_writer_that_starts_to_wait_does_not_touch_a_reused_block(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = pair.producer
    writer = producer.open_stream("request", (1,), torch.int64, credits=1)
    reader = await pair.consumer.read_stream(writer.ref)
    block = writer.lease.block
    writer.write_nowait(rows(1))
    write_nowait, refs = writer.write_nowait, []

    def write_then_close(written: torch.Tensor) -> None:
        monkeypatch.undo()
        try:
            write_nowait(written)
        finally:
            reader.close()
            producer.statistics()  # collects
            refs.append(producer.put_nowait("other", torch.zeros(block.num_bytes, dtype=torch.uint8)))

    monkeypatch.setattr(writer, "write_nowait", write_then_close)
    await writer.write(rows(2), timeout_s=DEADLINE_S)
    assert producer.lease_of(refs[0].lease).block == block
    assert not pair.consumer.get_blocking(refs[0]).any()


async def test_a_closed_reader_does_not_touch_a_reused_block(pair: Pair) -> None:
    writer = pair.producer.open_stream("request", (1,), torch.int64, credits=1)
    reader = await pair.consumer.read_stream(writer.ref)
    block = writer.lease.block
    reader.close()
    pair.producer.statistics()  # collects
    ref = pair.producer.put_nowait("other", torch.zeros(block.num_bytes, dtype=torch.uint8))
    with pytest.raises(RelayClosed):
        await reader.read(timeout_s=DEADLINE_S)
    assert not pair.producer.get_blocking(ref).any()


@pytest.mark.parametrize("closed", ["producer", "consumer"])
async def test_a_waiting_reader_notices_that_a_relay_was_closed(pair: Pair, closed: str) -> None:
    writer = pair.producer.open_stream("request", (1,), torch.int64, credits=1)
    reader = await pair.consumer.read_stream(writer.ref)
    waiting = asyncio.create_task(reader.read(timeout_s=DEADLINE_S))
    await asyncio.sleep(0)
    getattr(pair, closed).close()
    with pytest.raises(RelayBroken if closed == "producer" else RelayClosed):
        await waiting


async def test_a_waiting_writer_notices_that_its_relay_was_closed(pair: Pair) -> None:
    writer = pair.producer.open_stream("request", (1,), torch.int64, credits=1)
    writer.write_nowait(rows(1))
    waiting = asyncio.create_task(writer.write(rows(2), timeout_s=DEADLINE_S))
    await asyncio.sleep(0)
    pair.producer.close()
    with pytest.raises(RelayClosed):
        await waiting


def test_a_release_for_all_waits_for_readers() -> None:
    producer, consumer = ShmRelay(1 << 20), ShmRelay(0)
    ref = producer.put_nowait("request", torch.ones(4), num_readers=3)
    arrived = producer.get_blocking(ref)
    consumer.release(ref, for_all=True)
    assert producer.statistics().num_leases == 1
    assert arrived.all()
    producer.release(ref)
    assert producer.statistics().num_leases == 0
    consumer.close()
    producer.close()
