"""Random puts, reads, releases, aborts, expiries and ends of consumers, compared with a model of all leases: nothing is
lost, nothing is changed under its reader, and nothing is left.

Requests are aborted in batches of ``BATCH``; a failing batch prints its seed (``tests/fuzz.py``: how to run it alone).
"""

import asyncio
import os
import queue
import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import msgspec
import pytest
import torch

from tests.contract.relays import make_pair
from tests.contract.usable import CROSSING
from tests.fuzz import num_cases
from tests.relay.io import await_io_thread
from tests.relay.peer import Peer, pattern, peers
from vllm_omni.errors import PoolExhausted, RelayBroken
from vllm_omni.messages.payload import TensorRef
from vllm_omni.relay import StreamReader, StreamWriter
from vllm_omni.relay.shm import ShmRelay

NUM_ABORTS = num_cases(10_000)
FIRST_SEED = int(os.environ.get("FUZZ_FIRST_SEED", "1"))
BATCH = 100
NUM_BYTES = 1 << 20
LEASE_S = 1000.0
CREDITS = 4
DEADLINE_S = 30.0

pytestmark = [pytest.mark.fuzz, pytest.mark.timeout(0)]


# -- one process, one thread: compared with the model -----------------------------------------------------------------


@dataclass(eq=False)
class Lease:
    """A tensor in the model."""

    ref: TensorRef
    request: int
    num_bytes: int
    seed: int
    num_readers: int
    expires_at: float
    is_revoked: bool = False
    views: dict[ShmRelay, torch.Tensor] = field(default_factory=dict)  # by reader
    released: set[ShmRelay] = field(default_factory=set)

    def is_over(self, now: float) -> bool:
        """Whether no reader may start to read it, once the producer has looked."""
        return self.is_revoked or len(self.released) >= self.num_readers or (now >= self.expires_at and not self.views)


@dataclass(eq=False)
class Stream:
    """A stream in the model."""

    writer: StreamWriter
    request: int
    reader: StreamReader | None = None
    of: ShmRelay | None = None  # whose reader
    rows: list[int] = field(default_factory=list)  # written and not read
    next_row: int = 0
    is_aborted: bool = False
    has_ended: bool = False
    is_closed: bool = False  # by the reader


class World:
    """A producer, its readers and the model; each step is one call, checked against the model."""

    def __init__(self, rng: random.Random):
        self.rng = rng
        self.now = 0.0
        self.producer = ShmRelay(NUM_BYTES, prefault=False)
        self.producer.lease_s, self.producer.clock = LEASE_S, lambda: self.now
        self.consumers = [ShmRelay(0, prefault=False) for _ in range(2)]
        self.leases: list[Lease] = []
        self.gone: list[Lease] = []  # some that are over
        self.streams: list[Stream] = []
        self.buffers: list[tuple[int, torch.Tensor]] = []
        self.requests = [0]
        self.counts: Counter[str] = Counter()
        self.num_puts = 0

    def run(self, num_aborts: int) -> None:
        steps = {
            self.put: 10,
            self.empty: 2,
            self.put_buffer: 2,
            self.get: 14,
            self.get_wrongly: 1,
            self.get_what_is_gone: 1,
            self.release: 12,
            self.release_again: 1,
            self.abort: 4,
            self.open_stream: 2,
            self.read_stream: 2,
            self.write: 4,
            self.read: 4,
            self.close_reader: 1,
            self.look: 2,
            self.expire: 0.1,
            self.die: 0.05,
        }
        while self.counts["abort"] < num_aborts:
            step = self.rng.choices(list(steps), list(steps.values()))[0]
            step()
            self.counts[step.__name__] += 1
        self.finish()

    # producer

    def request(self) -> int:
        if self.rng.random() < 0.2:
            self.requests = [*self.requests[-6:], self.requests[-1] + 1]
        return self.rng.choice(self.requests)

    def put(self) -> None:
        num_bytes = self.rng.choice([1, 100, 4096, 5000, 40_000, 200_000])
        self.publish(self.request(), pattern(num_bytes, self.num_puts))

    def publish(self, request: int, tensor: torch.Tensor) -> None:
        num_readers = self.rng.choice([1, 1, 2])
        try:
            ref = self.producer.put_nowait(str(request), tensor, num_readers=num_readers)
        except PoolExhausted:
            assert not self.producer.pool.can_allocate(tensor.numel())
            self.counts["rejected"] += 1
            return
        seed, self.num_puts = self.num_puts, self.num_puts + 1
        self.leases.append(Lease(ref, request, tensor.numel(), seed, num_readers, self.now + LEASE_S))

    def empty(self) -> None:
        request = self.request()
        try:
            self.buffers.append(
                (request, self.producer.empty(str(request), (self.rng.randrange(1, 9000),), torch.uint8))
            )
        except PoolExhausted:
            self.counts["rejected"] += 1

    def put_buffer(self) -> None:
        if self.buffers:
            request, buffer = self.buffers.pop(self.rng.randrange(len(self.buffers)))
            buffer.copy_(pattern(len(buffer), self.num_puts))
            blocks = self.producer.pool.statistics().num_blocks
            self.publish(request, buffer)
            assert self.producer.pool.statistics().num_blocks <= blocks, "a buffer of the relay was copied"

    def abort(self) -> None:
        self.abort_one(self.request())

    def abort_one(self, request: int) -> None:
        self.producer.abort(str(request))
        self.buffers = [entry for entry in self.buffers if entry[0] != request]
        for lease in self.leases:
            lease.is_revoked |= lease.request == request
        for stream in self.streams:
            stream.is_aborted |= stream.request == request
        self.streams = [stream for stream in self.streams if stream.reader is not None or not stream.is_aborted]

    def look(self) -> None:
        """Let the producer look at its leases: then the model is exact."""
        found = self.producer.statistics()
        for lease in self.leases:
            lease.is_revoked |= lease.is_over(self.now)
        self.gone += [lease for lease in self.leases if lease.is_revoked and not lease.views]
        self.gone = self.gone[-20:]
        self.leases = [lease for lease in self.leases if not lease.is_revoked or lease.views]
        rings = [stream for stream in self.streams if not stream.is_closed]
        assert found.num_leases == len(self.leases) + len(rings)
        num_ring_bytes = sum(stream.writer.lease.num_bytes for stream in rings)
        assert found.num_bytes_leased - num_ring_bytes == sum(lease.num_bytes for lease in self.leases)
        assert found.num_puts == self.num_puts
        self.producer.check_integrity()

    def expire(self) -> None:
        for request in {stream.request for stream in self.streams if stream.reader is None}:
            self.abort_one(request)  # it has no reader: it would expire, too
        self.now += LEASE_S * self.rng.choice([0.3, 0.6, 1.1])
        self.look()

    # consumers

    def reader(self) -> ShmRelay:
        return self.rng.choice([self.producer, *self.consumers])

    def get(self) -> None:
        if not self.leases:
            return
        lease, relay = self.rng.choice(self.leases), self.reader()
        may_be_gone = lease.is_over(self.now)
        try:
            view = relay.get_blocking(lease.ref, DEADLINE_S)
        except RelayBroken:
            assert may_be_gone, "a tensor was lost"
            return
        assert not (lease.is_revoked and relay not in lease.views), "what was aborted can be read"
        lease.views[relay] = view
        lease.released.discard(relay)
        self.check(lease, view)

    def get_wrongly(self) -> None:
        """Read with a wrong reference: nothing changes."""
        if self.leases:
            lease = self.rng.choice(self.leases)
            with pytest.raises(RelayBroken):
                self.reader().get_blocking(msgspec.structs.replace(lease.ref, shape=(lease.num_bytes + 1,)), DEADLINE_S)

    def get_what_is_gone(self) -> None:
        if self.gone:
            with pytest.raises(RelayBroken):
                self.reader().get_blocking(self.rng.choice(self.gone).ref, DEADLINE_S)

    def release(self) -> None:
        read = [(lease, relay) for lease in self.leases for relay in lease.views]
        if not read or self.rng.random() < 0.1:
            read = [(lease, self.reader()) for lease in self.leases]  # without having read it
        if read:
            lease, relay = self.rng.choice(read)
            if (view := lease.views.pop(relay, None)) is not None:
                self.check(lease, view)
            relay.release(lease.ref)
            lease.released.add(relay)

    def release_again(self) -> None:
        if self.gone:
            self.reader().release(self.rng.choice(self.gone).ref)

    def check(self, lease: Lease, view: torch.Tensor) -> None:
        assert torch.equal(view, pattern(lease.num_bytes, lease.seed)), "a tensor was changed under its reader"

    def die(self) -> None:
        """Replace a consumer that dies, with all its reads, by another one."""
        place = self.rng.randrange(len(self.consumers))
        dead, self.consumers[place] = self.consumers[place], ShmRelay(0, prefault=False)
        connections = self.producer._consumers._sockets
        num_left = len(connections) - bool(dead._producers)
        dead.close()
        deadline = time.monotonic() + DEADLINE_S
        while len(connections) > num_left:
            assert time.monotonic() < deadline, "the end of a consumer was not noticed"
            await_io_thread()
        await_io_thread()
        for lease in self.leases:
            if lease.views.pop(dead, None) is not None:
                lease.released.add(dead)
        for stream in self.streams:
            if stream.of is dead:
                stream.is_closed = True
        self.streams = [stream for stream in self.streams if not stream.is_closed]

    # streams

    def open_stream(self) -> None:
        request = self.request()
        try:
            writer = self.producer.open_stream(str(request), (1,), torch.int64, credits=CREDITS)
        except PoolExhausted:
            self.counts["rejected"] += 1
            return
        self.streams.append(Stream(writer, request))

    def read_stream(self) -> None:
        for stream in self.streams:
            if stream.reader is None:
                stream.of = self.reader()
                stream.reader = asyncio.run(stream.of.read_stream(stream.writer.ref, timeout_s=DEADLINE_S))
                return

    def write(self) -> None:
        if not self.streams:
            return
        stream = self.rng.choice(self.streams)
        if stream.has_ended:
            return
        if self.rng.random() < 0.1:
            stream.writer.end()
            stream.has_ended = True
            return
        values = list(range(stream.next_row, stream.next_row + self.rng.randrange(1, CREDITS + 1)))
        try:
            stream.writer.write_nowait(torch.tensor(values).reshape(-1, 1))
        except PoolExhausted:
            assert not stream.is_aborted
            assert len(values) + len(stream.rows) > CREDITS, "a credit was lost"
            return
        if not stream.is_aborted:
            assert len(values) + len(stream.rows) <= CREDITS, "more was written than there were credits"
            stream.rows += values
            stream.next_row = values[-1] + 1

    def read(self) -> None:
        read = [stream for stream in self.streams if stream.reader is not None]
        if not read:
            return
        stream = self.rng.choice(read)
        assert stream.reader is not None
        assert stream.reader.num_unread == len(stream.rows)
        rows, stream.rows = stream.rows, []
        if stream.is_aborted and not rows and not stream.reader.has_ended:
            with pytest.raises(RelayBroken):
                stream.reader.read_nowait()
            self.close(stream)
            return
        assert stream.reader.read_nowait()[:, 0].tolist() == rows
        if stream.reader.has_ended:
            self.close(stream)

    def close_reader(self) -> None:
        read = [stream for stream in self.streams if stream.reader is not None]
        if read:
            self.close(self.rng.choice(read))

    def close(self, stream: Stream) -> None:
        assert stream.reader is not None
        stream.reader.close()
        if not stream.has_ended:
            stream.writer.write_nowait(torch.zeros(CREDITS, 1, dtype=torch.int64))  # is dropped
            assert stream.writer.num_credits == CREDITS
        stream.is_closed = True
        self.streams.remove(stream)

    # the end

    def finish(self) -> None:
        for lease in self.leases:
            for relay, view in list(lease.views.items()):
                self.check(lease, view)
                relay.release(lease.ref)
                lease.released.add(relay)
            lease.views.clear()
        for stream in list(self.streams):
            if stream.reader is not None:
                self.close(stream)
        for request in {*(lease.request for lease in self.leases), *(stream.request for stream in self.streams)}:
            self.producer.abort(str(request))
        for request, _ in self.buffers:
            self.producer.abort(str(request))
        assert self.producer.statistics().num_leases == 0
        self.producer.check_integrity()
        assert self.producer.pool.statistics().num_bytes_used == 0

    def end(self) -> None:
        for relay in (*self.consumers, self.producer):
            relay.close()


def run_batch(seed: int, num_aborts: int) -> Counter[str]:
    world = World(random.Random(seed))
    try:
        world.run(num_aborts)
    except Exception as exc:
        raise AssertionError(f"FUZZ_SEED={seed}: {exc!r}") from exc
    finally:
        world.end()
    return world.counts


def test_random_aborts_leave_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    if "FUZZ_SEED" in os.environ:
        run_batch(int(os.environ["FUZZ_SEED"]), BATCH)
        return
    counts: Counter[str] = Counter()
    for number in range(-(-NUM_ABORTS // BATCH)):
        counts += run_batch(FIRST_SEED + number, BATCH)
    with capsys.disabled():
        print(f"\nrandom aborts: seeds from {FIRST_SEED}, {dict(counts)}")
    assert counts["abort"] >= NUM_ABORTS


# -- threads, and processes -------------------------------------------------------------------------------------------


@pytest.fixture(params=CROSSING)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


def test_threads_that_put_abort_and_read_leave_nothing(backend: str) -> None:
    """Two threads put and abort, two read and compare, one looks at the statistics."""
    num_requests = NUM_ABORTS // (2 if backend == "shm" else 50)  # between hosts, a message for each step
    wrong: list[BaseException] = []
    announced: queue.Queue[tuple[TensorRef, int] | None] = queue.Queue()
    has_ended = threading.Event()

    def produce(seed: int) -> None:
        rng = random.Random(seed)
        for number in range(num_requests // 2):
            request = f"{seed}-{number}"
            for _ in range(rng.randrange(1, 5)):
                try:
                    ref = pair.producer.put_nowait(request, pattern(rng.choice([100, 5000, 100_000]), number))
                except PoolExhausted:
                    break
                announced.put((ref, number))
            pair.producer.abort(request if rng.random() < 0.5 else f"{seed}-{number - 3}")
        for number in range(num_requests // 2):
            pair.producer.abort(f"{seed}-{number}")

    def consume(seed: int) -> None:
        rng = random.Random(seed)
        while (entry := announced.get()) is not None:
            ref, number = entry
            if rng.random() < 0.9:
                try:
                    view = pair.consumer.get_blocking(ref, DEADLINE_S)
                except RelayBroken:
                    continue
                assert torch.equal(view, pattern(view.numel(), number)), "a tensor was changed under its reader"
            pair.consumer.release(ref)

    def look() -> None:
        while not has_ended.is_set():
            pair.producer.statistics()
            pair.producer.check_integrity()

    def guard(function, *args) -> None:
        try:
            function(*args)
        except BaseException as exc:
            wrong.append(exc)

    with make_pair(backend) as pair:
        producers = [threading.Thread(target=guard, args=(produce, FIRST_SEED + number)) for number in range(2)]
        consumers = [threading.Thread(target=guard, args=(consume, FIRST_SEED + number)) for number in range(2)]
        looking = threading.Thread(target=guard, args=(look,))
        for thread in (*producers, *consumers, looking):
            thread.start()
        for thread in producers:
            thread.join()
        for _ in consumers:
            announced.put(None)
        for thread in consumers:
            thread.join(DEADLINE_S)
        has_ended.set()
        looking.join(DEADLINE_S)
        assert not wrong
        assert_nothing_is_left(pair.producer)


def test_a_stream_between_two_threads_loses_and_doubles_nothing(backend: str) -> None:
    num_rows = NUM_ABORTS

    async def write() -> None:
        rng, row = random.Random(FIRST_SEED), 0
        while row < num_rows:
            values = torch.arange(row, min(row + rng.randrange(1, 9), num_rows)).reshape(-1, 1)
            await writer.write(values, timeout_s=DEADLINE_S)
            row += len(values)
        writer.end()

    async def read() -> list[int]:
        found: list[int] = []
        while len(rows := await reader.read(timeout_s=DEADLINE_S)):
            found += rows[:, 0].tolist()
        return found

    with make_pair(backend) as pair:
        writer = pair.producer.open_stream("request", (1,), torch.int64, credits=8)
        reader = asyncio.run(pair.consumer.read_stream(writer.ref, timeout_s=DEADLINE_S))
        with ThreadPoolExecutor() as pool:
            writing = pool.submit(asyncio.run, write())
            assert asyncio.run(read()) == list(range(num_rows))
            writing.result(DEADLINE_S)
        reader.close()
        assert_nothing_is_left(pair.producer)


def test_readers_that_are_killed_at_random_leave_nothing(backend: str) -> None:
    """Kill readers in other processes that hold or have released tensors, while requests are aborted."""
    rng = random.Random(FIRST_SEED)
    with peers(backend) as (producer,):
        readers: list[Peer] = []
        try:
            for number in range(min(max(NUM_ABORTS // 100, 10), 1000)):
                if not readers or (number % 10 == 0 and len(readers) < 3):
                    readers.append(Peer(backend))
                refs = [producer.do("put", str(number), rng.choice([64, 9000, 100_000]), seed) for seed in range(3)]
                for seed, ref in enumerate(refs):
                    reader = rng.choice(readers)
                    if rng.random() < 0.8:
                        assert reader.do("get", ref, seed)
                    if rng.random() < 0.6:
                        reader.do("release", ref)
                if rng.random() < 0.1:
                    dead = readers.pop(rng.randrange(len(readers)))
                    dead.kill()
                    dead.close()
                producer.do("abort", str(number - rng.randrange(3)))
                producer.do("check_integrity")
                for reader in readers:
                    assert reader.do("check_all")
            for reader in readers:
                reader.kill()
            for request in range(number + 1):
                producer.do("abort", str(request))
            assert producer.do("await_leases", 0) == 0
            producer.do("check_integrity")
        finally:
            for reader in readers:
                reader.close()


def assert_nothing_is_left(producer) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while producer.statistics().num_leases and time.monotonic() < deadline:
        await_io_thread()
    assert producer.statistics().num_leases == 0
    producer.check_integrity()
    assert producer.pool.statistics().num_bytes_used == 0
