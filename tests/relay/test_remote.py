"""Relays between hosts: unknown and malicious peers, and peers that die. The contract suite has two good ends."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest
import torch
import zmq

from tests.relay.io import DEADLINE_S
from vllm_omni.errors import RelayBroken, RelayError, RelayTimeout
from vllm_omni.messages.payload import TensorRef
from vllm_omni.relay.io_thread import io_thread
from vllm_omni.relay.remote import wire
from vllm_omni.relay.remote.messages import (
    Abandon,
    Credit,
    End,
    Fetch,
    Granted,
    Hello,
    Location,
    Piece,
    Read,
    Rejected,
    Release,
    Rows,
    Subscribe,
    Welcome,
    decode_to_consumer,
    decode_to_producer,
    encode,
    parse_location,
)
from vllm_omni.relay.remote.tcp import TcpRelay

NUM_BYTES = 4 << 20
# Deadlines for noticing the end of a peer, and for a late answer, on a machine that is busy with other tests.
NOTICED_S = 20.0
SLACK_S = 4.0


@pytest.fixture
def quick_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let new sockets notice a vanished host within one second instead of five."""
    monkeypatch.setattr(wire, "HEARTBEAT_MS", 100)
    monkeypatch.setattr(wire, "HEARTBEAT_TIMEOUT_MS", 850)


@pytest.fixture
def relay() -> Iterator[TcpRelay]:
    relay = TcpRelay(NUM_BYTES)
    yield relay
    relay.close()
    relay.check_integrity()


@pytest.fixture
def consumer() -> Iterator[TcpRelay]:
    consumer = TcpRelay(0)
    yield consumer
    consumer.close()


async def until(condition: Callable[[], bool], timeout_s: float = DEADLINE_S) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.005)
    return True


def lies_at(ref: TensorRef, address: str | None = None, token: bytes | None = None) -> TensorRef:
    location = parse_location(ref)
    return msgspec.structs.replace(ref, location=encode(Location(address or location.address, token or location.token)))


# -- addresses --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "address",
    [
        "ipc:///tmp/socket",
        "inproc://name",
        "tcp://localhost:80",
        "tcp://example.org:80",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:0",
        "tcp://127.0.0.1:99999",
        "tcp://127.0.0.1:80;127.0.0.1:81",
        "tcp://999.0.0.1:80",
        "tcp://*:80",
        "tcp://127.0.0.1:80\n",
        "tcp://[::1%eth0]:80",
        "tcp://" + "1" * 300 + ":80",
        "",
    ],
)
async def test_invalid_addresses_are_rejected(relay: TcpRelay, consumer: TcpRelay, address: str) -> None:
    ref = relay.put_nowait("request", torch.zeros(4))
    location = msgspec.msgpack.encode((address, relay.token))
    with pytest.raises(RelayBroken, match="malformed location"):
        await consumer.get(msgspec.structs.replace(ref, location=location), timeout_s=DEADLINE_S)


async def test_an_address_where_no_relay_listens_is_broken(relay: TcpRelay, consumer: TcpRelay) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        ref = lies_at(relay.put_nowait("request", torch.zeros(4)), f"tcp://127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(RelayBroken):
            await consumer.get(ref, timeout_s=DEADLINE_S)
        consumer.release(ref)


async def test_a_silent_peer_cannot_hold_a_consumer_up(relay: TcpRelay, consumer: TcpRelay) -> None:
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        ref = lies_at(relay.put_nowait("request", torch.zeros(4)), f"tcp://127.0.0.1:{mute.getsockname()[1]}")
        begin = time.monotonic()
        with pytest.raises(RelayTimeout):
            await consumer.get(ref, timeout_s=0.1)
        assert time.monotonic() - begin < 0.1 + SLACK_S


async def test_another_producer_at_the_same_address_is_not_mistaken_for_the_first(
    relay: TcpRelay, consumer: TcpRelay
) -> None:
    ref = relay.put_nowait("request", torch.ones(4))
    with pytest.raises(RelayBroken, match="another producer"):
        await consumer.get(lies_at(ref, token=bytes(16)), timeout_s=DEADLINE_S)
    assert torch.equal(await consumer.get(ref, timeout_s=DEADLINE_S), torch.ones(4))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "*", "203.0.113.1", "nonsense"])
def test_a_host_that_consumers_cannot_reach_is_rejected(host: str) -> None:
    with pytest.raises((RelayError, ValueError)):
        TcpRelay(NUM_BYTES, host=host)


async def test_a_host_s_name_becomes_a_number(consumer: TcpRelay) -> None:
    relay = TcpRelay(NUM_BYTES, host="localhost")
    assert torch.equal(
        await consumer.get(relay.put_nowait("request", torch.ones(4)), timeout_s=DEADLINE_S), torch.ones(4)
    )
    relay.close()


async def test_ipv6(consumer: TcpRelay) -> None:
    try:
        relay = TcpRelay(NUM_BYTES, host="::1")
    except RelayError as exc:
        pytest.skip(f"no IPv6 here: {exc}")
    assert torch.equal(
        await consumer.get(relay.put_nowait("request", torch.ones(4)), timeout_s=DEADLINE_S), torch.ones(4)
    )
    relay.close()


async def test_a_relay_without_a_slab_cannot_put(consumer: TcpRelay) -> None:
    with pytest.raises(RelayError):
        consumer.put_nowait("request", torch.zeros(4))
    consumer.check_integrity()


# -- strangers --------------------------------------------------------------------------------------------------------


class Stranger:
    """A DEALER that sends any message."""

    def __init__(self, address: str):
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.connect(address)

    def send(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    def receive(self) -> list[bytes]:
        assert self._socket.poll(5000), "the producer does not answer"
        return self._socket.recv_multipart()

    def ask(self, message: msgspec.Struct) -> list[bytes]:
        self.send(encode(message))
        return self.receive()

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def stranger(relay: TcpRelay) -> Iterator[Stranger]:
    stranger = Stranger(relay.address)
    yield stranger
    stranger.close()


GARBAGE = [
    [b""],
    [b"\xc1"],
    [b"x" * 4000],
    [b"a", b"b", b"c"],
    [msgspec.msgpack.encode(["Unknown", 1])],
    [msgspec.msgpack.encode(["Release"])],
    [msgspec.msgpack.encode(["Release", -1])],
    [msgspec.msgpack.encode(["Release", 1 << 63])],
    [msgspec.msgpack.encode(["Release", "1"])],
    [msgspec.msgpack.encode(["Hello", b"short", b"short"])],
    [msgspec.msgpack.encode(["Read", 1, 1, 1, -5, 10])],
    [msgspec.msgpack.encode({"Read": 1})],
    [b"\x91" * 3000],
]


@pytest.mark.parametrize("is_greeted", [False, True])
async def test_garbage_is_dropped(relay: TcpRelay, consumer: TcpRelay, stranger: Stranger, is_greeted: bool) -> None:
    ref = relay.put_nowait("request", torch.ones(4))
    if is_greeted:
        stranger.ask(Hello(relay.token, bytes(16)))
    for frames in GARBAGE:
        stranger.send(*frames)
    for message in (Release(1 << 40), Credit(ref.lease, 5), Credit(1 << 40, 1)):
        stranger.send(encode(message))
    assert torch.equal(await consumer.get(ref, timeout_s=DEADLINE_S), torch.ones(4))
    assert relay.statistics().num_leases == 1


def test_a_peer_without_a_reference_cannot_read(relay: TcpRelay, stranger: Stranger) -> None:
    ref = relay.put_nowait("request", torch.ones(4))
    stranger.send(encode(Read(1, ref.lease, 16, 0, 16)))
    stranger.send(encode(Release(ref.lease)))
    (answer,) = stranger.ask(Hello(bytes(16), bytes(16)))
    assert isinstance(decode_to_consumer(answer), Rejected)
    assert relay.statistics().num_leases == 1


@pytest.mark.parametrize(
    "change",
    [
        {"lease": 1 << 40},
        {"num_bytes": 15},
        {"num_bytes": 17},
        {"num_bytes": 1 << 40},
        {"offset": 16},
        {"offset": 8},
        {"offset": 1 << 40},
        {"size": 0},
        {"size": 17},
        {"size": 1 << 40},
    ],
    ids=str,
)
def test_only_published_tensors_can_be_read(relay: TcpRelay, stranger: Stranger, change: dict[str, int]) -> None:
    ref = relay.put_nowait("request", torch.ones(4))
    stranger.ask(Hello(relay.token, bytes(16)))
    good = Read(1, ref.lease, 16, 0, 16)
    (rejected,) = stranger.ask(msgspec.structs.replace(good, **change))
    assert isinstance(decode_to_consumer(rejected), Rejected)
    piece, body = stranger.ask(good)
    assert decode_to_consumer(piece) == Piece(1, 0)
    assert body == torch.ones(4).numpy().tobytes()


def test_a_peer_that_sends_too_large_messages_is_disconnected(relay: TcpRelay, stranger: Stranger) -> None:
    stranger.send(b"x" * 100_000)
    other = Stranger(relay.address)
    assert isinstance(decode_to_consumer(other.ask(Hello(relay.token, bytes(16)))[0]), Welcome)
    other.close()


async def test_a_credit_for_rows_that_were_not_sent_gives_none(relay: TcpRelay, stranger: Stranger) -> None:
    writer = relay.open_stream("request", (2,), torch.float32, credits=4)
    writer.write_nowait(torch.zeros(3, 2))
    stranger.ask(Hello(relay.token, bytes(16)))
    (granted,) = stranger.ask(Subscribe(1, writer.ref.lease, 32))
    assert isinstance(decode_to_consumer(granted), Granted)
    stranger.send(encode(Credit(writer.ref.lease, 100)))
    stranger.send(encode(Credit(writer.ref.lease, 2)))
    assert await until(lambda: writer.num_credits == 3)
    stranger.send(encode(Credit(writer.ref.lease, 1)))
    while not isinstance(decode_to_consumer(stranger.ask(Fetch(7, 1 << 40, 1))[0]), Rejected):
        pass  # the rows come first
    assert writer.num_credits == 3


async def test_a_second_reader_of_a_stream_is_rejected_and_does_not_disturb_the_first(
    relay: TcpRelay, consumer: TcpRelay
) -> None:
    writer = relay.open_stream("request", (2,), torch.float32, credits=4)
    reader = await consumer.read_stream(writer.ref)
    other = TcpRelay(0)
    for second in (other, consumer, relay):
        with pytest.raises(RelayBroken, match="a reader already"):
            await second.read_stream(writer.ref, timeout_s=DEADLINE_S)
    other.close()
    for _ in range(3):
        writer.write_nowait(torch.ones(4, 2))
        assert await until(lambda: reader.num_unread == 4)
        assert torch.equal(reader.read_nowait(), torch.ones(4, 2))
        assert await until(lambda: writer.num_credits == 4)
    reader.close()


async def test_a_reader_may_retry_after_a_timeout(relay: TcpRelay, stranger: Stranger) -> None:
    writer = relay.open_stream("request", (2,), torch.float32, credits=4)
    writer.write_nowait(torch.ones(2, 2))
    stranger.ask(Hello(relay.token, bytes(16)))
    for request in (1, 2):
        (granted,) = stranger.ask(Subscribe(request, writer.ref.lease, 32))
        assert decode_to_consumer(granted) == Granted(request, 0)
        rows, body = stranger.receive()
        assert decode_to_consumer(rows) == Rows(writer.ref.lease, 0, 2)
        assert body == torch.ones(2, 2).numpy().tobytes()
        stranger.send(encode(Abandon(writer.ref.lease)))


class Impostor:
    """A producer that sends any message."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.location = Location(f"tcp://127.0.0.1:{port}", bytes(16))
        self._peer = b""

    def receive(self) -> msgspec.Struct:
        assert self._socket.poll(5000), "the consumer sends nothing"
        self._peer, data = self._socket.recv_multipart()
        return decode_to_producer(data)

    def has_message(self) -> bool:
        return bool(self._socket.poll(50))

    def send(self, *frames: bytes) -> None:
        self._socket.send_multipart([self._peer, *frames])

    def welcome(self) -> None:
        assert isinstance(self.receive(), Hello)
        self.send(encode(Welcome(1 << 20, b"")))

    def ref(self, shape: tuple[int, ...]) -> TensorRef:
        return TensorRef("tcp", shape, "uint8", encode(self.location), 1)

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def impostor() -> Iterator[Impostor]:
    impostor = Impostor()
    yield impostor
    impostor.close()


async def test_a_consumer_drops_messages_that_it_did_not_request(consumer: TcpRelay, impostor: Impostor) -> None:
    getting = asyncio.create_task(consumer.get(impostor.ref((8,)), timeout_s=DEADLINE_S))
    await asyncio.to_thread(impostor.welcome)
    read = await asyncio.to_thread(impostor.receive)
    assert read == Read(1, 1, 8, 0, 8)
    for frames in GARBAGE:
        impostor.send(*frames)
    impostor.send(encode(Piece(1, 0)))  # without its bytes
    impostor.send(encode(Piece(1, 0)), b"x" * 9)
    impostor.send(encode(Piece(1, 4)), b"x" * 8)
    impostor.send(encode(Piece(99, 0)), b"x" * 8)
    impostor.send(encode(Granted(99, 0)))
    impostor.send(encode(Rows(77, 0, 1)), b"x")
    impostor.send(encode(End(77, 0, None)))
    impostor.send(encode(Piece(1, 0)), b"12345678")
    assert bytes((await getting).tolist()) == b"12345678"


async def test_a_consumer_allocates_no_more_than_its_producer_has(consumer: TcpRelay, impostor: Impostor) -> None:
    getting = asyncio.create_task(consumer.get(impostor.ref((1 << 39,)), timeout_s=DEADLINE_S))
    await asyncio.to_thread(impostor.welcome)
    with pytest.raises(RelayBroken, match="more than its producer has"):
        await getting


async def test_a_tensor_is_given_up_when_its_last_pull_has_failed(consumer: TcpRelay, impostor: Impostor) -> None:
    first, second = (asyncio.create_task(consumer.get(impostor.ref((8,)), timeout_s=DEADLINE_S)) for _ in range(2))
    await asyncio.to_thread(impostor.welcome)
    for _ in range(2):
        assert isinstance(await asyncio.to_thread(impostor.receive), Read)
    for getting in (first, second):
        assert not impostor.has_message()
        getting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await getting
    assert await asyncio.to_thread(impostor.receive) == Abandon(1)


@pytest.mark.parametrize(
    "frames",
    [
        [encode(Rows(1, 5, 1)), b"x" * 4],
        [encode(Rows(1, 0, 3)), b"x" * 12],
        [encode(Rows(1, 0, 0)), b""],
        [encode(Rows(1, 0, 1)), b"x" * 3],
    ],
    ids=["a gap", "beyond the credit", "no rows", "half a row"],
)
async def test_rows_that_do_not_fit_break_a_stream(consumer: TcpRelay, impostor: Impostor, frames: list[bytes]) -> None:
    reading = asyncio.create_task(consumer.read_stream(impostor.ref((2, 4)), timeout_s=DEADLINE_S))
    await asyncio.to_thread(impostor.welcome)
    subscribe = await asyncio.to_thread(impostor.receive)
    assert isinstance(subscribe, Subscribe)
    impostor.send(encode(Granted(subscribe.request, 0)))
    reader = await reading
    if frames[0] == encode(Rows(1, 5, 1)):
        impostor.send(encode(Rows(1, 0, 1)), b"y" * 4)
        assert len(await reader.read(timeout_s=DEADLINE_S)) == 1
    impostor.send(*frames)
    with pytest.raises(RelayBroken, match="do not fit"):
        await reader.read(timeout_s=DEADLINE_S)


# -- deaths -----------------------------------------------------------------------------------------------------------

PRODUCER = """
import sys, torch, msgspec
from vllm_omni.relay.remote import wire
from vllm_omni.relay.remote.tcp import TcpRelay
relay = TcpRelay(4 << 20)
refs = [relay.put_nowait("request", torch.ones(1000)) for _ in range(2)]
writer = relay.open_stream("request", (2,), torch.float32)
writer.write_nowait(torch.ones(1, 2))
print(msgspec.json.encode([*refs, writer.ref]).decode(), flush=True)
sys.stdin.read()
"""

CONSUMER = """
import asyncio, sys, torch, msgspec
from vllm_omni.messages.payload import TensorRef
from vllm_omni.relay.remote import wire
from vllm_omni.relay.remote.tcp import TcpRelay
relay = TcpRelay(0)
ref, stream = msgspec.json.decode(sys.stdin.readline(), type=list[TensorRef])
relay.get_blocking(ref)
reader = asyncio.run(relay.read_stream(stream))
print("reading", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def start() -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []

    def start(program: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        process = subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe, text=True)
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


async def stop(process: subprocess.Popen[str], end: signal.Signals) -> None:
    """Send a signal; returns when all threads have stopped. A thread without the signal would still answer."""
    process.send_signal(end)
    await asyncio.to_thread(os.waitid, os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "vanished"])
async def test_the_end_of_a_producer_is_noticed(
    quick_heartbeat: None, start: Callable[[str], subprocess.Popen[str]], consumer: TcpRelay, end: signal.Signals
) -> None:
    producer = start(PRODUCER)
    line = await asyncio.to_thread(producer.stdout.readline)
    first, second, stream = msgspec.json.decode(line, type=list[TensorRef])
    assert torch.equal(await consumer.get(first), torch.ones(1000))
    reader = await consumer.read_stream(stream)
    assert len(await reader.read(timeout_s=DEADLINE_S)) == 1
    waiting = asyncio.create_task(reader.read())
    await asyncio.sleep(0)
    await stop(producer, end)
    with pytest.raises(RelayBroken):
        await consumer.get(second, timeout_s=NOTICED_S)
    with pytest.raises(RelayBroken):
        await waiting
    consumer.release(first)
    reader.close()


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "vanished"])
async def test_tensors_that_a_dead_consumer_was_reading_are_freed(
    quick_heartbeat: None, start: Callable[[str], subprocess.Popen[str]], relay: TcpRelay, end: signal.Signals
) -> None:
    ref = relay.put_nowait("request", torch.ones(1000))
    writer = relay.open_stream("request", (2,), torch.float32, credits=4)
    writer.write_nowait(torch.zeros(4, 2))
    process = start(CONSUMER)
    process.stdin.write(msgspec.json.encode([ref, writer.ref]).decode() + "\n")
    process.stdin.flush()
    assert await asyncio.to_thread(process.stdout.readline) == "reading\n"
    relay.abort("request")
    assert relay.statistics().num_leases == 2  # both are being read
    await stop(process, end)
    assert await until(lambda: relay.statistics().num_leases == 0, NOTICED_S)
    assert writer.num_credits == 4


# -- networks that lose what was sent ----------------------------------------------------------------------------------


class Road:
    """A network between a consumer and a producer. When it is cut, what is sent is lost; connections stay open.

    Attributes:
        address: for the consumer, of the producer.
    """

    def __init__(self, address: str) -> None:
        self._to = address.rpartition(":")[2]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self.address = f"tcp://127.0.0.1:{self._port}"
        self._lost: set[asyncio.StreamWriter] = set()
        self._open: set[asyncio.StreamWriter] = set()
        self._ways: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", self._port)

    def cut(self) -> None:
        """Lose what is sent on the connections that there are."""
        self._lost |= self._open

    async def close(self) -> None:
        self._server.close()
        for way in self._ways:
            way.cancel()
        for writer in self._open:
            writer.close()
        closing = (writer.wait_closed() for writer in self._open)
        await asyncio.gather(*self._ways, *closing, return_exceptions=True)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._to)
        self._open |= {writer, back}
        self._ways |= {asyncio.create_task(self._carry(*way)) for way in ((reader, back), (there, writer))}

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            if writer not in self._lost:
                writer.write(data)


async def test_what_is_released_before_a_connection_is_found_broken_is_released_on_the_next(
    quick_heartbeat: None, relay: TcpRelay, consumer: TcpRelay
) -> None:
    ref = relay.put_nowait("request", torch.ones(1000), num_readers=2)
    road = Road(parse_location(ref).address)
    await road.open()
    distant = lies_at(ref, road.address)
    assert torch.equal(await consumer.get(distant), torch.ones(1000))
    road.cut()
    consumer.release(distant, for_all=True)
    assert await until(lambda: relay.statistics().num_leases == 0, NOTICED_S)
    await road.close()


async def test_what_is_released_while_a_producer_cannot_be_reached_is_released_later(
    relay: TcpRelay, consumer: TcpRelay
) -> None:
    ref = relay.put_nowait("request", torch.ones(1000))
    road = Road(parse_location(ref).address)
    consumer.release(lies_at(ref, road.address), for_all=True)
    assert not await until(lambda: relay.statistics().num_leases == 0, 0.5)
    await road.open()
    assert await until(lambda: relay.statistics().num_leases == 0, NOTICED_S)
    await road.close()


async def test_what_is_read_again_is_not_released_by_an_earlier_release(relay: TcpRelay, consumer: TcpRelay) -> None:
    ref = relay.put_nowait("request", torch.ones(1000))
    await consumer.get(ref)
    (producer,) = consumer._producers.values()
    io_thread().call(producer.release_again, ref.lease, False)
    assert not await until(lambda: relay.statistics().num_leases == 0, 0.2)
    consumer.release(ref)
    assert await until(lambda: relay.statistics().num_leases == 0)
