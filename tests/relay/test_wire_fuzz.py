"""Random and mutated input from the wire is rejected with a relay's error; nothing hangs, crashes or leaks."""

import asyncio
import contextlib
import fcntl
import gc
import itertools
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.contract.relays import BACKENDS, Pair, make_pair
from tests.contract.usable import STREAMING, USABLE
from tests.fuzz import num_cases
from tests.relay.io import await_io_thread
from vllm_omni.errors import ConfigError, MissingDependency, RelayBroken, RelayTimeout
from vllm_omni.messages.payload import DTYPES, Payload, TensorRef, decode, encode, pack, unpack
from vllm_omni.relay import Relay
from vllm_omni.relay.codec import extract, restore
from vllm_omni.relay.hub import RelayHub, RelayOptions
from vllm_omni.relay.shm import ShmRelay
from vllm_omni.relay.shm.connection import Hello
from vllm_omni.relay.shm.memory import FLAGS, SLOT_WORDS, TABLE_BYTES
from vllm_omni.relay.shm.memory import encode as encode_message
from vllm_omni.relay.slab import CHUNK_BYTES
from vllm_omni.relay.stream import Streams

DEADLINE_S = 20.0
SHORT_S = 0.05  # for peers that never answer
NUM_EXAMPLES = max(num_cases(200), 20)
wire = settings(deadline=None, max_examples=NUM_EXAMPLES, database=None, suppress_health_check=list(HealthCheck))

numbers = st.integers(-(1 << 63), (1 << 64) - 1) | st.integers(-2, 5)
plain = st.none() | st.booleans() | numbers | st.floats(allow_nan=False) | st.text(max_size=5) | st.binary(max_size=5)
trees = st.recursive(
    plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
)
dtypes = st.sampled_from([*DTYPES, "float33", "__class__", ""])
shapes = st.lists(numbers | st.just(1 << 40), max_size=4).map(tuple)


@st.composite
def mutated(draw: st.DrawFn, data: bytes) -> bytes:
    """Draw bytes with some changed, left out, doubled or added."""
    for _ in range(draw(st.integers(0, 4))):
        start, end = sorted((draw(st.integers(0, len(data))), draw(st.integers(0, len(data)))))
        end = min(end, start + 4)
        instead = draw(st.sampled_from([b"", data[start:end] * 2, draw(st.binary(max_size=4))]))
        data = data[:start] + instead + data[end:]
    return data


# -- payloads ---------------------------------------------------------------------------------------------------------

PAYLOAD = Payload(
    {"a/0": TensorRef("inline", (2,), "uint8", b"\x01\x02"), "b": TensorRef("shm", (1, 2), "float32", b"xyz", 7)},
    {"a": [None, 1], "b": None, "c": {"d": [1.5, "text", b"bytes"]}},
    {"rows": TensorRef("shm", (256, 4), "bfloat16", b"stream", 8)},
)


def open_payload(data: bytes) -> None:
    with contextlib.suppress(RelayBroken):
        payload = decode(data)
        restore(payload.values, {path: torch.zeros(1) for path in payload.tensors})


@pytest.mark.fuzz
@wire
@given(st.binary() | trees.map(msgspec.msgpack.encode))
def test_any_bytes_are_decoded_or_rejected(data: bytes) -> None:
    open_payload(data)


@pytest.mark.fuzz
@wire
@given(mutated(encode(PAYLOAD)))
def test_a_mutated_payload_is_decoded_or_rejected(data: bytes) -> None:
    open_payload(data)


@pytest.mark.fuzz
@wire
@given(st.lists(st.integers(0, 255), max_size=20), dtypes, st.integers(1, 3))
def test_any_tensor_is_unpacked_or_rejected(values: list[int], dtype: str, step: int) -> None:
    tensor = torch.tensor(values).to(DTYPES.get(dtype, torch.uint32))[::step]
    with contextlib.suppress(RelayBroken):
        unpack(tensor)


@pytest.mark.fuzz
@wire
@given(trees, st.dictionaries(st.text(max_size=6) | st.sampled_from(["0", "a/0", "~0", "~1", "/", "00", "²"]), plain))
def test_any_paths_are_restored_or_rejected(values: Any, paths: dict[str, Any]) -> None:
    with contextlib.suppress(RelayBroken):
        restore(values, {path: torch.zeros(1) for path in paths})


@pytest.mark.fuzz
@wire
@given(trees | st.recursive(st.just(torch.ones(2)) | plain, lambda inner: st.lists(inner) | st.tuples(inner)))
def test_any_tree_arrives_or_cannot_travel(tree: Any) -> None:
    values, tensors = extract(tree)
    refs = {path: TensorRef("inline", (2,), "float32", b"12345678") for path in tensors}
    payload = unpack(pack(Payload(refs, values)))
    assert payload == Payload(refs, values)
    restored, found = extract(restore(payload.values, tensors))
    assert (restored, set(found)) == (values, set(tensors))


@pytest.mark.parametrize(
    "value",
    [1 << 64, -(1 << 64), "\ud800", {"\ud800": 1}, {1: 2}, pytest.param(object(), id="object()"), {1, 2}, 1j],
    ids=ascii,
)
def test_types_unknown_to_msgpack_cannot_travel(value: Any) -> None:
    with pytest.raises(TypeError):
        encode(Payload({}, extract({"key": value})[0]))


# -- references -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=USABLE)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with make_pair(request.param) as pair:
        yield pair
        pair.producer.abort("request")
        assert pair.producer.statistics().num_leases == 0


@st.composite
def references(draw: st.DrawFn, ref: TensorRef) -> TensorRef:
    """Draw a reference that is similar to this one."""
    location = st.binary(max_size=20) | trees.map(msgspec.msgpack.encode) | mutated(ref.location)
    with contextlib.suppress(msgspec.DecodeError, TypeError, ValueError):
        address = msgspec.msgpack.decode(ref.location)[0]
        location |= st.lists(numbers, max_size=2).map(lambda rest: msgspec.msgpack.encode([address, *rest]))
    return TensorRef(
        draw(st.just(ref.backend) | st.text(max_size=3)) if draw(st.integers(0, 9)) == 0 else ref.backend,
        draw(st.just(ref.shape) | shapes),
        draw(st.just(ref.dtype) | dtypes),
        draw(st.just(ref.location) | location),
        draw(st.just(ref.lease) | numbers),
    )


def returns_in_time(function: Callable[..., object], *args: object) -> None:
    start = time.monotonic()
    with contextlib.suppress(RelayBroken, RelayTimeout):
        function(*args)
    assert time.monotonic() - start < DEADLINE_S, "it hangs"


@pytest.mark.fuzz
@wire
@given(st.data())
def test_any_reference_is_read_or_rejected(pair: Pair, data: st.DataObject) -> None:
    ref = pair.producer.put_nowait("request", torch.arange(4.0))
    wrong = data.draw(references(ref))
    for relay in (pair.consumer, pair.producer):
        returns_in_time(relay.get_nowait, wrong)
        returns_in_time(relay.get_blocking, wrong, SHORT_S)
        if isinstance(relay, Streams):
            returns_in_time(asyncio.run, relay.read_stream(wrong, timeout_s=SHORT_S))
            returns_in_time(relay.credits_of, wrong)
        returns_in_time(relay.release, wrong)
    pair.producer.abort("request")
    pair.consumer.release(ref)
    pair.producer.release(ref)


@pytest.mark.fuzz
@wire
@given(st.data())
@pytest.mark.parametrize("pair", STREAMING, indirect=True)
def test_any_reference_to_a_stream_is_read_or_rejected(pair: Pair, data: st.DataObject) -> None:
    assert isinstance(pair.producer, Streams)
    writer = pair.producer.open_stream("request", (2,), torch.int64, credits=4)
    writer.write_nowait(torch.ones(2, 2, dtype=torch.int64))
    wrong = data.draw(references(writer.ref))
    for relay in (pair.consumer, pair.producer):
        assert isinstance(relay, Streams)
        returns_in_time(relay.get_blocking, wrong, SHORT_S)
        returns_in_time(relay.credits_of, wrong)
        try:
            reader = asyncio.run(relay.read_stream(wrong, timeout_s=SHORT_S))
        except (RelayBroken, RelayTimeout):
            continue
        returns_in_time(reader.read_nowait)
        reader.close()
    pair.producer.abort("request")
    for relay in (pair.consumer, pair.producer):
        relay.release(writer.ref)


@pytest.fixture(scope="module")
def hub() -> Iterator[RelayHub]:
    hub = RelayHub(RelayOptions(), prefault=False)
    yield hub
    hub.close()


@pytest.mark.fuzz
@wire
@given(st.sampled_from([*BACKENDS, "nothing", ""]), shapes, dtypes, st.binary(max_size=20), numbers)
def test_a_hub_reads_or_rejects_any_reference(
    hub: RelayHub, backend: str, shape: tuple[int, ...], dtype: str, location: bytes, lease: int
) -> None:
    ref = TensorRef(backend, shape, dtype, location, lease)
    for call in (hub.get_blocking, hub.release, hub.credits_of):
        with contextlib.suppress(MissingDependency, ConfigError):  # a backend that this machine does not have
            returns_in_time(call, ref)


# -- handshakes of shared memory --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def relay() -> Iterator[Relay]:
    relay = ShmRelay(0, prefault=False)
    yield relay
    relay.close()


def num_fds() -> int:
    await_io_thread()
    return len(os.listdir("/proc/self/fd"))


def assert_num_fds(expected: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while num_fds() > expected:
        assert time.monotonic() < deadline, "a descriptor was lost"
        gc.collect()


@pytest.mark.fuzz
@wire
@given(st.lists(st.binary(min_size=1, max_size=100), max_size=3), st.booleans())
def test_a_consumer_that_sends_garbage_harms_no_other(messages: list[bytes], waits: bool) -> None:
    producer, consumer = ShmRelay(CHUNK_BYTES, prefault=False), ShmRelay(0, prefault=False)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as hostile:
            hostile.settimeout(DEADLINE_S)
            hostile.connect(b"\0" + producer.address.encode())
            if waits:
                _, fds, _, _ = socket.recv_fds(hostile, 4096, 1)
                os.close(fds[0])
            for message in messages:
                hostile.send(message)
            if messages and messages[0][0] % 2:
                hostile.shutdown(socket.SHUT_WR)
            ref = producer.put_nowait("request", torch.ones(4))
            assert torch.equal(consumer.get_blocking(ref, DEADLINE_S), torch.ones(4))
            consumer.release(ref)
            assert producer.statistics().num_leases == 0
    finally:
        consumer.close()
        producer.close()


def test_consumers_that_come_and_go_leave_no_descriptor() -> None:
    producer = ShmRelay(CHUNK_BYTES, prefault=False)
    before = num_fds()
    for _ in range(100):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as hostile:
            hostile.connect(b"\0" + producer.address.encode())
    assert_num_fds(before)
    producer.close()


SLAB_BYTES = 16 * CHUNK_BYTES
GOOD = encode_message(Hello(SLAB_BYTES, 1))


def make_descriptors(kind: str) -> list[int]:
    if kind == "none":
        return []
    if kind == "pipe":
        return list(os.pipe())
    if kind == "directory":
        return [os.open("/", os.O_RDONLY)]
    if kind == "file":
        with tempfile.TemporaryFile() as file:
            file.truncate(TABLE_BYTES + SLAB_BYTES)
            return [os.dup(file.fileno())]
    fd = os.memfd_create("hostile", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    num_bytes = {"empty": 0, "short": TABLE_BYTES + SLAB_BYTES - 1, "table only": TABLE_BYTES}
    os.truncate(fd, num_bytes.get(kind, TABLE_BYTES + SLAB_BYTES))
    if kind != "unsealed":
        seal(fd)
    if kind == "read-only":
        read_only = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
        os.close(fd)
        return [read_only]
    return [fd]


def seal(fd: int) -> None:
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)


KINDS = ["none", "pipe", "directory", "file", "empty", "short", "table only", "unsealed", "read-only", "good"]


class HostileProducer:
    """Sends one message with descriptors to each relay that connects."""

    numbers = itertools.count()

    def __init__(self, message: bytes | None, kind: str):
        self.address = f"vllm-omni-hostile-{os.getpid()}-{next(HostileProducer.numbers)}"
        self.fds = make_descriptors(kind)
        self.connection: socket.socket | None = None
        self._message = message
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.settimeout(DEADLINE_S)
        self._listener.bind(b"\0" + self.address.encode())
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # no relay connected, or it closed the connection
            self.connection, _ = self._listener.accept()
            if self._message is not None and self.fds:
                socket.send_fds(self.connection, [self._message], self.fds)
            elif self._message is not None:
                self.connection.send(self._message)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # accept returns
        self._thread.join(DEADLINE_S)
        self._listener.close()
        if self.connection is not None:
            self.connection.close()
        for fd in self.fds:
            os.close(fd)

    def refer(self, slot: int = 1, shape: tuple[int, ...] = (4,), dtype: str = "float32", lease: int = 1) -> TensorRef:
        return TensorRef("shm", shape, dtype, msgspec.msgpack.encode([self.address, slot]), lease)


def meet(relay: Relay, message: bytes | None, kind: str) -> Exception | None:
    """Pull from such a producer; returns what that raises."""
    before = num_fds()
    producer = HostileProducer(message, kind)
    error = None
    try:
        relay.get_blocking(producer.refer(), SHORT_S if message is None else DEADLINE_S)
    except (RelayBroken, RelayTimeout) as exc:
        error = exc
    finally:
        producer.close()
    del producer
    if error is not None:
        error = error.with_traceback(None)
        error.__cause__ = None
    assert_num_fds(before)
    return error


@pytest.mark.parametrize("kind", KINDS)
def test_a_producer_with_an_invalid_descriptor_is_rejected(relay: Relay, kind: str) -> None:
    assert isinstance(meet(relay, GOOD, kind), RelayBroken)


def test_a_silent_producer_is_waited_for_until_the_deadline(relay: Relay) -> None:
    assert isinstance(meet(relay, None, "none"), RelayTimeout)


@pytest.mark.fuzz
@wire
@given(
    mutated(GOOD)
    | st.binary(min_size=1, max_size=50)
    | st.builds(lambda num_bytes, reader: msgspec.msgpack.encode([num_bytes, reader]), numbers, numbers)
    | st.sampled_from([-TABLE_BYTES, 0, 1, 7, 1 << 40]).map(lambda num_bytes: msgspec.msgpack.encode([num_bytes, 1])),
    st.sampled_from(KINDS),
)
def test_a_producer_with_an_invalid_greeting_is_rejected(relay: Relay, message: bytes, kind: str) -> None:
    if message:  # an empty one is the end of the connection
        assert isinstance(meet(relay, message, kind), RelayBroken)


@pytest.mark.fuzz
@wire
@given(st.data())
def test_a_slab_of_random_words_is_read_within_its_bounds(relay: ShmRelay, data: st.DataObject) -> None:
    """Table and rings are random: reads may return nonsense, but stay within the slab."""
    producer = HostileProducer(GOOD, "good")
    words = st.integers(0, 1 << 17) | st.integers(0, (1 << 64) - 1)
    table = b"".join(data.draw(words).to_bytes(8, "little") for _ in range(3))
    ring = b"".join(data.draw(words).to_bytes(8, "little") for _ in range(6))
    os.pwrite(producer.fds[0], table, SLOT_WORDS * 8)
    offset = int.from_bytes(table[8:16], "little")
    if offset < SLAB_BYTES:
        os.pwrite(producer.fds[0], ring, TABLE_BYTES + offset)
    lease, num_bytes = int.from_bytes(table[:8], "little"), int.from_bytes(table[16:24], "little")
    assert len(table) == FLAGS
    try:
        returns_in_time(relay.get_blocking, producer.refer(1, (num_bytes,), "uint8", lease), DEADLINE_S)
        for num_rows in (4, max(num_bytes - 256, 1)):
            ref = producer.refer(1, (num_rows,), "uint8", lease)
            returns_in_time(lambda ref: relay.credits_of(ref)(), ref)
            try:
                reader = asyncio.run(relay.read_stream(ref, timeout_s=DEADLINE_S))
            except RelayBroken:
                continue
            returns_in_time(reader.read_nowait)
            reader.close()
    finally:
        producer.close()
