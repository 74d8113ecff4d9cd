"""Cost of passing a tensor to another process: this project's relay against memcpy and others, in one run.

    python -m benchmarks.relay [--rounds 20] [--seconds 10] [--sizes 4096 1048576] [--same-core] [--quick]

Baseline: *memcpy*, *shared_memory* and *torch* below, on the same tensors in the same run.

Two spawned processes: this one produces, the other consumes. A transfer is one message (a msgspec struct with the
reference to the tensor) and its answer. The ways:

* memcpy: one copy between two warm tensors of the producer, no message: the upper bound of all ways that copy once.
* empty: the message and its answer alone: the lower bound of all ways.
* zero copy: a buffer of the relay (``empty``, ``put``), read in place (``get``, ``release``); the producer, which would
  compute into the buffer, leaves it as it is.
* one copy: ``put`` copies into the relay's slab, ``get`` is a view.
* two copies: the consumer also copies the view into a warm tensor of its own.
* shared_memory: ``multiprocessing.shared_memory`` for each message: create, copy, close; attach, view, close, unlink.
  The pages are faulted in by the producer's copy, and once more when the consumer reads them, which is not counted.
* torch: ``torch.multiprocessing`` with its strategy file_descriptor; the tensor is pickled as its queues do. Each
  message has a new tensor, as in a server; creating it is not counted.
* tcp, nixl, mooncake: ``put`` and ``get`` of those relays; the consumer gets a copy. A relay that cannot be loaded here
  is skipped, with the reason on stderr and in the JSON (``left_out``).

Regimes:

* socket: over a Unix socket, SEQPACKET, both ends blocked in ``recv``: the cheapest wake-up of a thread. All ways,
  interleaved; ratios between ways are from this regime.
* link: over ``ZmqLink``, both ends on asyncio's event loop: the control plane of a graph. Only *empty*, *zero copy* and
  *one copy*: what the relay adds to the round trip that a frame makes in any case.
* messages: frames through ``ZmqLink`` from a live sender, no faster than its reader grants credit, decoded and
  dispatched to a bound receiver; with a payload of one new reference, or without; one in each iteration of the
  sender's loop, or 64, as a step of a batch produces. A message counts if it was dispatched before the sender stopped;
  the backlog is what was in flight at that moment.
* the paper's Table 1: its two edges, as [992, 3584] bfloat16 and 545 codes, beside its figures (one node, H800).

A transfer is timed three times: *round trip* from before ``put`` until the answer has arrived; *to the view* until the
consumer has its tensor (both processes share the clock), one wake-up included; *calls* is ``put`` and ``get`` alone.
Rounds are interleaved: all ways of one size follow each other in batches, each after a few warm-up transfers. Medians
are over all transfers of all rounds, ratios the median of each round's ratio of medians. CPU seconds are those of both
processes, all threads. The slab's pages are touched beforehand. Contents are checked outside the timed part.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import multiprocessing
import os
import pickle
import platform
import secrets
import signal
import socket
import statistics
import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing.reduction import ForkingPickler
from multiprocessing.shared_memory import SharedMemory
from typing import Any, NamedTuple, Protocol

import msgspec
import torch
import torch.multiprocessing

from vllm_omni.flow import Frame
from vllm_omni.flow.remote.link import TOKEN_BYTES, ZmqLink
from vllm_omni.messages.payload import Payload, TensorRef
from vllm_omni.relay import Relay
from vllm_omni.relay.select import BETWEEN_HOSTS, Placement, make_relay, why_not
from vllm_omni.relay.shm import ShmRelay

KB, MB, GB = 1 << 10, 1 << 20, 1e9
SIZES = (4 * KB, 64 * KB, MB, 16 * MB, 64 * MB)
THINKER, TALKER = "thinker2talker", "talker2vocoder"
PAPER_MS = {THINKER: (5.49, 8.28), TALKER: (0.53, 3.34)}  # shared memory, Mooncake
MEMCPY, EMPTY, ZERO, ONE, TWO, NAMED, TORCH = (
    "memcpy",
    "empty",
    "zero copy",
    "one copy",
    "two copies",
    "shared_memory",
    "torch",
)
OTHERS = BETWEEN_HOSTS
SOCKET, LINK = "socket", "link"
TOKEN = bytes(TOKEN_BYTES)  # of the links, which listen on this host alone
TIMEOUT_S = 60.0  # without an answer the other process counts as lost
REQUEST = "request"
SHM_PREFIX = "vllm-omni-benchmark-"  # of a name in /dev/shm; the producer's process id follows
NUM_WARM_UP = 3  # transfers of a batch that are not timed, at least
CREDIT, GRANT = 16_384, 1_024  # messages in flight at most; messages granted at a time
WARM_UP_S = 0.5  # of a stream of messages


class Case(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return torch.empty(self.shape, dtype=self.dtype, device="meta").nbytes

    def make(self) -> torch.Tensor:
        """Make the tensor that is sent, the same in every process."""
        generator = torch.Generator().manual_seed(0)
        return torch.randint(0, 100, self.shape, generator=generator, dtype=torch.uint8).to(self.dtype)


def make_cases(sizes: Sequence[int]) -> dict[str, Case]:
    cases = [Case(format_size(size), (size,), torch.uint8) for size in sizes]
    cases += [Case(THINKER, (992, 3584), torch.bfloat16), Case(TALKER, (545,), torch.int64)]
    return {case.name: case for case in cases}


def format_size(num_bytes: int) -> str:
    if num_bytes % MB == 0:
        return f"{num_bytes // MB} MB"
    return f"{num_bytes // KB} KB" if num_bytes % KB == 0 else f"{num_bytes} B"


class Message(msgspec.Struct, frozen=True, array_like=True):
    way: str
    case: str
    is_check: bool
    ref: TensorRef | None = None
    handle: bytes = b""  # of ways without a reference: a name, or torch's pickle


class Answer(msgspec.Struct, frozen=True, array_like=True):
    taken_at_ns: int  # when the consumer has its tensor
    took_ns: int  # of it, the consumer's own part
    error: str = ""
    cpu_s: float = 0.0  # of the consumer so far; only as an answer to USAGE


USAGE = "usage"  # in the place of a way
decode_message = msgspec.msgpack.Decoder(Message).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode
encode = msgspec.msgpack.Encoder().encode


# -- the ways ----------------------------------------------------------------------------------------------------------


class Way(Protocol):
    """One way to pass a tensor. Each process has an instance and uses one half: above or below the line."""

    def prepare(self, tensor: torch.Tensor) -> torch.Tensor:
        """Make the argument of ``send``; not timed."""

    def send(self, tensor: torch.Tensor, is_check: bool) -> tuple[TensorRef | None, bytes]: ...

    # -----------------------------------------------------

    def take(self, message: Message, case: Case) -> torch.Tensor | None: ...

    def release(self, message: Message) -> None: ...

    def close(self) -> None: ...


class Empty:
    def prepare(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def send(self, tensor: torch.Tensor, is_check: bool) -> tuple[TensorRef | None, bytes]:
        return None, b""

    def take(self, message: Message, case: Case) -> torch.Tensor | None:
        return None

    def release(self, message: Message) -> None:
        pass

    def close(self) -> None:
        pass


class OneCopy(Empty):
    def __init__(self, relay: Relay) -> None:
        self._relay = relay

    def send(self, tensor: torch.Tensor, is_check: bool) -> tuple[TensorRef | None, bytes]:
        return self._relay.put_nowait(REQUEST, tensor), b""

    def take(self, message: Message, case: Case) -> torch.Tensor | None:
        assert message.ref is not None
        return self._relay.get_blocking(message.ref)

    def release(self, message: Message) -> None:
        assert message.ref is not None
        self._relay.release(message.ref)

    def close(self) -> None:
        self._relay.close()


class ZeroCopy(OneCopy):
    def send(self, tensor: torch.Tensor, is_check: bool) -> tuple[TensorRef | None, bytes]:
        buffer = self._relay.empty(REQUEST, tuple(tensor.shape), tensor.dtype)
        if is_check:
            buffer.copy_(tensor)
        return self._relay.put_nowait(REQUEST, buffer), b""


class TwoCopies(OneCopy):
    def __init__(self, relay: Relay) -> None:
        super().__init__(relay)
        self._mine: dict[str, torch.Tensor] = {}

    def take(self, message: Message, case: Case) -> torch.Tensor | None:
        view = super().take(message, case)
        assert view is not None
        mine = self._mine.get(case.name)
        if mine is None:
            mine = self._mine[case.name] = torch.zeros(case.shape, dtype=case.dtype)
        return mine.copy_(view)


class NamedMemory(Empty):
    """The consumer removes the name; ``close`` removes one that no consumer attached to."""

    def __init__(self) -> None:
        self._taken: SharedMemory | None = None
        self._sent = ""
        self._numbers = itertools.count()

    def send(self, tensor: torch.Tensor, is_check: bool) -> tuple[TensorRef | None, bytes]:
        self._sent = f"{SHM_PREFIX}{os.getpid()}-{next(self._numbers)}"
        memory = SharedMemory(self._sent, create=True, size=tensor.nbytes)
        torch.frombuffer(memory.buf, dtype=tensor.dtype, count=tensor.numel()).copy_(tensor.view(-1))
        memory.close()
        return None, memory.name.encode()

    def take(self, message: Message, case: Case) -> torch.Tensor | None:
        self._taken = memory = SharedMemory(message.handle.decode())
        return torch.frombuffer(memory.buf, dtype=case.dtype, count=case.num_bytes // case.dtype.itemsize).view(
            case.shape
        )

    def release(self, message: Message) -> None:
        assert self._taken is not None
        self._taken.close()
        self._taken.unlink()
        self._taken = None

    def close(self) -> None:
        with suppress(FileNotFoundError):
            if self._sent:
                SharedMemory(self._sent).unlink()


class TorchSharing(Empty):
    def prepare(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def send(self, tensor: torch.Tensor, is_check: bool) -> tuple[TensorRef | None, bytes]:
        return None, bytes(ForkingPickler.dumps(tensor))

    def take(self, message: Message, case: Case) -> torch.Tensor | None:
        tensor: torch.Tensor = pickle.loads(message.handle)
        return tensor


@cache
def left_out() -> dict[str, str]:
    """Relays of ``OTHERS`` that cannot be measured on this machine -> reason. Each is reported on stderr, once."""
    reasons = {name: reason for name in OTHERS if (reason := why_not(name, Placement())) is not None}
    for name, reason in reasons.items():
        print(f"left out: {name}: {reason}", file=sys.stderr)
    return reasons


def make_ways(names: Sequence[str], num_bytes: int) -> dict[str, Way]:
    """The ways of one process; ``num_bytes``: size of a relay's slab, 0 in the consumer."""
    torch.multiprocessing.set_sharing_strategy("file_descriptor")
    shm = ShmRelay(num_bytes)
    ways: dict[str, Way] = {
        EMPTY: Empty(),
        ZERO: ZeroCopy(shm),
        ONE: OneCopy(shm),
        TWO: TwoCopies(shm),
        NAMED: NamedMemory(),
        TORCH: TorchSharing(),
    }
    ways |= {name: OneCopy(make_relay(name, num_bytes)) for name in names if name in OTHERS}
    return {name: way for name, way in ways.items() if name in names}


# -- the consumer ------------------------------------------------------------------------------------------------------


class Consumer:
    def __init__(self, ways: dict[str, Way], cases: dict[str, Case]) -> None:
        self._ways = ways
        self._cases = cases

    def answer(self, message: Message) -> Answer:
        if message.way == USAGE:
            return Answer(0, 0, cpu_s=time.process_time())
        began_at = time.perf_counter_ns()
        way, case = self._ways[message.way], self._cases[message.case]
        error = ""
        try:
            tensor = way.take(message, case)
            taken_at = time.perf_counter_ns()
            if message.is_check and tensor is not None and not torch.equal(tensor, case.make()):
                error = "other bytes came than were sent"
            del tensor
            way.release(message)
        except Exception as exc:
            return Answer(0, 0, error=repr(exc))
        return Answer(taken_at, taken_at - began_at, error)


def consume(end: socket.socket, regime: str, addresses: dict[str, str], names: list[str], sizes: list[int]) -> None:
    """The other process; it ends when the producer's end of the socket is closed."""
    torch.set_num_threads(1)
    ways = make_ways(names, 0)
    consumer = Consumer(ways, make_cases(sizes))
    gc.collect()
    gc.freeze()
    if regime == SOCKET:
        end.send(encode(Answer(0, 0)))
        while data := end.recv(1 << 16):
            end.send(encode(consumer.answer(decode_message(data))))
    else:
        asyncio.run(consume_from_link(end, consumer, addresses))
    for way in ways.values():
        way.close()


async def consume_from_link(end: socket.socket, consumer: Consumer, addresses: dict[str, str]) -> None:
    link = ZmqLink(addresses["consumer"], addresses, TOKEN)

    def receive(frame: Frame) -> None:
        answer = consumer.answer(msgspec.convert(frame.payload, Message))
        link.send(make_frame("producer", frame.seq, answer))

    link.bind("consumer", receive)
    end.send(encode(Answer(0, 0)))
    await until_closed(end)
    link.close()


async def until_closed(end: socket.socket) -> None:
    loop, closed = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(end, closed.set)
    await closed.wait()
    loop.remove_reader(end)


def make_frame(target: str, seq: int, payload: Any) -> Frame:
    return Frame("call-0123456789", "node.run", target, 0, "hidden", 1, seq, False, payload)


@contextmanager
def child(target: Callable[..., None], *arguments: Any) -> Iterator[socket.socket]:
    """Run a process that ends when the yielded socket to it is closed; it ignores Ctrl-C."""
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    mine.settimeout(TIMEOUT_S)
    its.settimeout(None)
    process = multiprocessing.get_context("spawn").Process(target=target, args=(its, *arguments), daemon=True)
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process.start()
    finally:
        signal.signal(signal.SIGINT, handler)
    its.close()
    try:
        yield mine
    finally:
        mine.close()
        process.join(10)
        if process.is_alive():
            process.kill()
            process.join()


# -- the producer ------------------------------------------------------------------------------------------------------


class Exchange(Protocol):
    """Sends a message to the consumer and returns its answer."""

    async def ask(self, message: Message) -> Answer: ...


class SocketExchange:
    def __init__(self, end: socket.socket) -> None:
        self._end = end

    async def ask(self, message: Message) -> Answer:
        """Blocks the event loop, on which nothing else runs."""
        self._end.send(encode(message))
        return decode_answer(self._end.recv(1 << 16))


class LinkExchange:
    def __init__(self, link: ZmqLink) -> None:
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._answer: asyncio.Future[Answer]
        link.bind("producer", self._receive)

    async def ask(self, message: Message) -> Answer:
        self._answer = self._loop.create_future()
        self._link.send(make_frame("consumer", 0, message))
        return await self._answer

    def _receive(self, frame: Frame) -> None:
        self._answer.set_result(msgspec.convert(frame.payload, Answer))


class Batch(NamedTuple):
    """The transfers of one round, in microseconds each."""

    round_trips: list[float]
    to_view: list[float]
    calls: list[float]
    cpu_s: float


class Producer:
    def __init__(self, ways: dict[str, Way], exchange: Exchange) -> None:
        self._ways = ways
        self._exchange = exchange
        self._sources: dict[str, torch.Tensor] = {}
        self._targets: dict[str, torch.Tensor] = {}

    async def measure(self, name: str, case: Case, num_transfers: int, num_warm_up: int) -> Batch:
        source = self._sources.get(case.name)
        if source is None:
            source = self._sources[case.name] = case.make()
        if name == MEMCPY:
            return self._copy(source, case, num_transfers, num_warm_up)
        await self._transfer(name, source, case, is_check=True)
        for _ in range(num_warm_up):
            await self._transfer(name, source, case)
        gc.collect()
        cpu_s = await self._cpu_s()
        transfers = [await self._transfer(name, source, case) for _ in range(num_transfers)]
        cpu_s = await self._cpu_s() - cpu_s
        round_trips, to_view, calls = (list(column) for column in zip(*transfers, strict=True))
        return Batch(round_trips, to_view, calls, cpu_s)

    async def _transfer(
        self, name: str, source: torch.Tensor, case: Case, is_check: bool = False
    ) -> tuple[float, float, float]:
        way = self._ways[name]
        tensor = way.prepare(source)
        began_at = time.perf_counter_ns()
        ref, handle = way.send(tensor, is_check)
        put_at = time.perf_counter_ns()
        answer = await self._exchange.ask(Message(name, case.name, is_check, ref, handle))
        ended_at = time.perf_counter_ns()
        if answer.error:
            raise RuntimeError(f"{name}, {case.name}: {answer.error}")
        calls = put_at - began_at + answer.took_ns
        return (ended_at - began_at) / 1e3, (answer.taken_at_ns - began_at) / 1e3, calls / 1e3

    async def _cpu_s(self) -> float:
        return time.process_time() + (await self._exchange.ask(Message(USAGE, "", False))).cpu_s

    def _copy(self, source: torch.Tensor, case: Case, num_copies: int, num_warm_up: int) -> Batch:
        target = self._targets.get(case.name)
        if target is None:
            target = self._targets[case.name] = torch.zeros_like(source)
        for _ in range(num_warm_up):
            target.copy_(source)
        gc.collect()
        cpu_s = time.process_time()
        times = []
        for _ in range(num_copies):
            began_at = time.perf_counter_ns()
            target.copy_(source)
            times.append((time.perf_counter_ns() - began_at) / 1e3)
        return Batch(times, times, times, time.process_time() - cpu_s)


Table = dict[str, dict[str, list[Batch]]]  # case -> way -> batches, one for each round


async def measure_regime(regime: str, names: list[str], options: argparse.Namespace) -> Table:
    cases = make_cases(options.sizes)
    addresses = {end: f"ipc://@vllm-omni-benchmark-{secrets.token_hex(8)}" for end in ("producer", "consumer")}
    table: Table = {case: {name: [] for name in names} for case in cases}
    # Enough for the largest case: two buffers, and two copies that are not collected yet.
    ways = make_ways(names, 4 * max(case.num_bytes for case in cases.values()))
    link = ZmqLink(addresses["producer"], addresses, TOKEN) if regime == LINK else None
    try:
        with child(consume, regime, addresses, names, list(options.sizes)) as end:
            end.recv(1 << 16)  # the consumer is ready
            exchange = LinkExchange(link) if link is not None else SocketExchange(end)
            producer = Producer(ways, exchange)
            gc.collect()
            gc.freeze()
            for round_ in range(options.rounds):
                for case in cases.values():
                    count = count_transfers(case, options)
                    # Each round starts with another way, so that no way always follows the same one.
                    for name in rotate(names, round_):
                        warm_up = max(NUM_WARM_UP, count // 10)
                        await asyncio.sleep(0)  # lets Ctrl-C in: an exchange over a socket blocks the loop
                        async with asyncio.timeout(TIMEOUT_S):
                            table[case.name][name].append(await producer.measure(name, case, count, warm_up))
                print(f"{regime}, round {round_ + 1} of {options.rounds}", file=sys.stderr)
    finally:
        for way in ways.values():
            way.close()
        if link is not None:
            link.close()
    return table


def rotate(names: Sequence[str], places: int) -> list[str]:
    places %= len(names)
    return [*names[places:], *names[:places]]


def count_transfers(case: Case, options: argparse.Namespace) -> int:
    """Return the size of a batch: as many transfers as take a few milliseconds, within bounds."""
    return min(max(64 * MB // case.num_bytes, 3), options.max_transfers)


# -- messages ----------------------------------------------------------------------------------------------------------


class Stopped(msgspec.Struct, frozen=True):
    """The sender's last message: how many it sent, when, and its CPU time."""

    began_at_ns: int  # after its warm-up
    num_sent_before: int
    stopped_at_ns: int
    num_sent: int
    cpu_s: float


def send_messages(
    end: socket.socket, addresses: dict[str, str], burst: int, with_payload: bool, seconds: float
) -> None:
    """The other process: sends ``burst`` frames in each iteration of its loop, while it has credit."""
    asyncio.run(send_to_link(end, addresses, burst, with_payload, seconds))


async def send_to_link(
    end: socket.socket, addresses: dict[str, str], burst: int, with_payload: bool, seconds: float
) -> None:
    link = ZmqLink(addresses["sender"], addresses, TOKEN)
    granted = CREDIT

    def receive(frame: Frame) -> None:
        nonlocal granted
        granted = frame.seq

    link.bind("sender", receive)
    gc.collect()
    gc.freeze()
    location = encode(("vllm-omni-4242-0123456789abcdef", 7))
    num_sent, payload = 0, None
    marks = []
    for duration_s in (min(WARM_UP_S, seconds), seconds):
        marks.append((time.perf_counter_ns(), num_sent, time.process_time()))
        ends_at = time.perf_counter() + duration_s
        while time.perf_counter() < ends_at:
            for _ in range(min(burst, granted - num_sent)):
                if with_payload:
                    payload = Payload({"hidden": TensorRef("shm", (1, 3584), "bfloat16", location, num_sent)})
                link.send(make_frame("receiver", num_sent, payload))
                num_sent += 1
            await asyncio.sleep(0)
    (began_at, num_before, cpu_before), cpu_s = marks[1], time.process_time()
    stopped = Stopped(began_at, num_before, time.perf_counter_ns(), num_sent, cpu_s - cpu_before)
    link.send(make_frame("stopped", 0, stopped))
    await until_closed(end)
    link.close()


async def measure_messages(burst: int, with_payload: bool, seconds: float) -> dict[str, float]:
    addresses = {end: f"ipc://@vllm-omni-benchmark-{secrets.token_hex(8)}" for end in ("sender", "receiver")}
    addresses["stopped"] = addresses["receiver"]
    link = ZmqLink(addresses["receiver"], addresses, TOKEN)
    num_received = 0
    arrivals: list[int] = []  # when each GRANT messages were there
    usage: list[float] = []
    stopped: asyncio.Future[Stopped] = asyncio.get_running_loop().create_future()

    def receive(frame: Frame) -> None:
        nonlocal num_received
        assert frame.seq == num_received, "a message was lost"
        if with_payload:
            payload = msgspec.convert(frame.payload, Payload)
            assert payload.tensors["hidden"].lease == num_received
        num_received += 1
        if num_received % GRANT == 0:
            arrivals.append(time.perf_counter_ns())
            usage.append(time.process_time())
            link.send(make_frame("sender", num_received + CREDIT, None))

    link.bind("receiver", receive)
    link.bind("stopped", lambda frame: stopped.set_result(msgspec.convert(frame.payload, Stopped)))
    try:
        with child(send_messages, addresses, burst, with_payload, seconds):
            end = await asyncio.wait_for(stopped, seconds + TIMEOUT_S)
    finally:
        link.close()
    assert num_received == end.num_sent, f"{num_received} of {end.num_sent} messages came"
    before, after = bisect_right(arrivals, end.began_at_ns), bisect_right(arrivals, end.stopped_at_ns)
    window_s = (end.stopped_at_ns - end.began_at_ns) / 1e9
    num_counted = (after - before) * GRANT
    receiver_cpu_s = usage[after - 1] - usage[before - 1] if 0 < before < after else 0.0
    return {
        "seconds": window_s,
        "messages_s": num_counted / window_s,
        "num_sent": end.num_sent - end.num_sent_before,
        "backlog": max(end.num_sent - after * GRANT, 0),
        "sender_cpu": end.cpu_s / window_s,
        "receiver_cpu": receiver_cpu_s / window_s,
    }


MESSAGES = {
    f"{'a reference' if with_payload else 'no payload'}, {burst} in a turn": (burst, with_payload)
    for burst in (1, 64)
    for with_payload in (False, True)
}
JUDGED_MESSAGES = "a reference, 64 in a turn"


# -- the whole ---------------------------------------------------------------------------------------------------------


def percentile(values: Sequence[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * percent / 100), len(ordered) - 1)]


def summarize(batches: list[Batch], num_bytes: int, moves: bool) -> dict[str, float]:
    """``moves``: whether it passes a tensor."""
    trips = [one for batch in batches for one in batch.round_trips]
    row = {
        "p50_us": statistics.median(trips),
        "p99_us": percentile(trips, 99),
        "to_view_us": statistics.median(one for batch in batches for one in batch.to_view),
        "calls_us": statistics.median(one for batch in batches for one in batch.calls),
        "num": len(trips),
    }
    if moves:
        row["gb_s"] = num_bytes / row["p50_us"] * 1e6 / GB
        row["cpu_s_per_gb"] = sum(batch.cpu_s for batch in batches) / (len(trips) * num_bytes) * GB
    return row


def summarize_table(table: Table, cases: dict[str, Case]) -> dict[str, dict[str, dict[str, float]]]:
    return {
        case: {name: summarize(batches, cases[case].num_bytes, name != EMPTY) for name, batches in ways.items()}
        for case, ways in table.items()
    }


def ratio(above: list[Batch], below: list[Batch], of: str = "round_trips", below_of: str = "") -> float:
    """The median of the rounds' ratios: a slow round affects both sides."""
    pairs = zip(above, below, strict=True)
    return statistics.median(
        statistics.median(getattr(one, of)) / statistics.median(getattr(other, below_of or of)) for one, other in pairs
    )


class Goal(NamedTuple):
    what: str
    limit: float
    got: float
    is_least: bool = False
    is_judged: bool = True  # otherwise only for comparison

    @property
    def verdict(self) -> str:
        reached = self.got >= self.limit if self.is_least else self.got <= self.limit
        return ("reached" if reached else "MISSED") + ("" if self.is_judged else ", for comparison")


def goals(tables: dict[str, Table], messages: dict[str, dict[str, float]], sizes: Sequence[int]) -> list[Goal]:
    rows = []
    for regime, table in tables.items():
        for case in map(format_size, sizes):
            got = ratio(table[case][ZERO], table[case][EMPTY])
            what = f"{case}, {regime}: round trip of zero copy, times an empty one"
            rows.append(Goal(what, 1.3, got, is_judged=regime == LINK))
    by_size = tables[SOCKET]
    for size, limit in ((MB, 2.0), (16 * MB, 1.6), (64 * MB, 1.2)):
        if size in sizes:
            ways = by_size[format_size(size)]
            for of, what in (("to_view", "to the view"), ("round_trips", "round trip"), ("calls", "put + get alone")):
                got = ratio(ways[ONE], ways[MEMCPY], of, "round_trips")
                rows.append(
                    Goal(f"{format_size(size)}: one copy, {what}, times memcpy", limit, got, False, of == "to_view")
                )
    for size, limit in ((MB, 12.0), (16 * MB, 8.0)):
        if size in sizes:
            ways = by_size[format_size(size)]
            for of, what in (("to_view", "to the view"), ("round_trips", "round trip")):
                got = ratio(ways[NAMED], ways[ONE], of)
                what = f"{format_size(size)}: shared_memory for each message, {what}, times one copy"
                rows.append(Goal(what, limit, got, True, of == "to_view"))
    for name, row in messages.items():
        rows.append(Goal(f"messages/s, {name}", 200_000, row["messages_s"], True, name == JUDGED_MESSAGES))
    return rows


def report(
    machine: dict[str, Any],
    summaries: dict[str, dict[str, dict[str, dict[str, float]]]],
    messages: dict[str, dict[str, float]],
    judged: list[Goal],
) -> None:
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    for regime, table in summaries.items():
        print(f"\n| {regime} | way | round trip, µs, p50 | p99 | to the view | calls | GB/s | CPU s/GB | transfers |")
        print("|---" * 9 + "|")
        for case, ways in table.items():
            for name, row in ways.items():
                times = [f"{row[column]:.4g}" for column in ("p50_us", "p99_us", "to_view_us", "calls_us")]
                rates = [f"{row[column]:.3g}" if column in row else "" for column in ("gb_s", "cpu_s_per_gb")]
                print(f"| {case} | {name} | " + " | ".join([*times, *rates, f"{row['num']:,}"]) + " |")
    print("\n| messages | per second | seconds | backlog | CPU of the sender | of the receiver |")
    print("|---" * 6 + "|")
    for name, row in messages.items():
        cells = [f"{row['messages_s']:,.0f}", f"{row['seconds']:.1f}", f"{row['backlog']:,.0f}"]
        cells += [f"{row[side]:.0%}" for side in ("sender_cpu", "receiver_cpu")]
        print(f"| {name} | " + " | ".join(cells) + " |")
    report_paper(summaries)
    print("\n| goal | at least / at most | measured | |\n|---|---|---|---|")
    for goal in judged:
        bound = "at least" if goal.is_least else "at most"
        print(f"| {goal.what} | {bound} {goal.limit:,g} | {goal.got:,.2f} | {goal.verdict} |")


def report_paper(summaries: dict[str, dict[str, dict[str, dict[str, float]]]]) -> None:
    others = [name for name in OTHERS if name in summaries[SOCKET][THINKER]]
    columns = [(SOCKET, NAMED), (SOCKET, ONE), (LINK, ONE), *((SOCKET, name) for name in others)]
    heads = " | ".join(f"{way}, {regime}" for regime, way in columns)
    print(f"\n| ms, to the view | the paper's shared memory | the paper's Mooncake | {heads} |")
    print("|---" * (3 + len(columns)) + "|")
    for edge, published in PAPER_MS.items():
        cells = [f"{time_ms:g}" for time_ms in published]
        cells += [f"{summaries[regime][edge][way]['to_view_us'] / 1e3:.3g}" for regime, way in columns]
        print(f"| {edge} | " + " | ".join(cells) + " |")


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--max-transfers", type=int, default=200, help="of a way and size in a round")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), metavar="BYTES")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each kind of messages")
    parser.add_argument("--same-core", action="store_true", help="both processes on one core")
    parser.add_argument("--quick", action="store_true", help="all of it in seconds: shows that it works, no more")
    options = parser.parse_args(arguments)
    if min(options.sizes) < 1 or options.rounds < 1:
        parser.error("sizes and rounds are at least 1")
    if options.quick:
        options.rounds, options.max_transfers, options.seconds = 2, 3, 0.3
        options.sizes = [size for size in options.sizes if size <= MB]
    return options


def describe_machine() -> dict[str, Any]:
    return {
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "relays": "+".join(["shm", *(name for name in OTHERS if name not in left_out())]),
    }


async def measure(options: argparse.Namespace) -> None:
    names = {
        SOCKET: [MEMCPY, EMPTY, ZERO, ONE, TWO, NAMED, TORCH, *(name for name in OTHERS if name not in left_out())],
        LINK: [EMPTY, ZERO, ONE],
    }
    tables = {regime: await measure_regime(regime, ways, options) for regime, ways in names.items()}
    messages = {}
    for name, case in MESSAGES.items():
        messages[name] = await measure_messages(*case, options.seconds)
        print(f"messages, {name}", file=sys.stderr)
    cases = make_cases(options.sizes)
    summaries = {regime: summarize_table(table, cases) for regime, table in tables.items()}
    machine, judged = describe_machine(), goals(tables, messages, options.sizes)
    report(machine, summaries, messages, judged)
    rows = [{**goal._asdict(), "verdict": goal.verdict} for goal in judged]
    result = {"machine": machine, "left_out": left_out(), **summaries, "messages": messages}
    print(json.dumps({**result, "paper_ms": PAPER_MS, "goals": rows}))


def main() -> None:
    options = parse_options()
    torch.set_num_threads(1)
    if options.same_core:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with suppress(KeyboardInterrupt):
        asyncio.run(measure(options))
        return
    raise SystemExit(130)


if __name__ == "__main__":
    main()
    # NIXL and Mooncake load two copies of libnl; with RDMA providers installed, their destructors crash each other.
    sys.stdout.flush()
    os._exit(0)
