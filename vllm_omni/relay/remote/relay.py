"""What relays between hosts have in common: leases, their release, and who is alive, over a connection of messages.

How the bytes of a tensor move is the backend's: over the same connection (``tcp``), or by a library that reads the
producer's memory (``nixl``, ``mooncake``). Streams go over the connection in all of them: their rows are small.

A producer has one ZMQ ROUTER, a consumer one DEALER for each producer, all on the I/O thread. A connection has one
life: who has lost one makes another, and greets again. The first message carries a token of the producer's that stands
in its references; so a producer that was started again at the same address is not mistaken for the one before, and who
was given no reference cannot read. That is all the protection there is: listen where only the deployment's hosts reach.

What a connection was reading is free when it ends: at once with its process, by its heartbeat within five seconds if
the other side's host has vanished.

From: SGLang-Omni (communication, Two Planes, Backends).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field

import msgspec
import torch
import zmq

from vllm_omni.errors import PoolExhausted, RelayBroken, RelayClosed, RelayError
from vllm_omni.messages.payload import Layout, TensorRef, check_ref, dtype_name
from vllm_omni.relay.base import LEASE_S, TIMEOUT_S, Clock, block_on, io_thread, wait_for
from vllm_omni.relay.remote.stream import RemoteReader, RemoteWriter
from vllm_omni.relay.remote.wire import (
    CONNECT_MS,
    MAX_BODY_BYTES,
    TOKEN_BYTES,
    Abandon,
    Begin,
    Complaints,
    Credit,
    End,
    Fetched,
    Granted,
    Hello,
    Location,
    Piece,
    Probe,
    Read,
    Refused,
    Release,
    Rows,
    Subscribe,
    ToConsumer,
    ToProducer,
    Welcome,
    Wire,
    decode_to_consumer,
    decode_to_producer,
    encode,
    parse_location,
)
from vllm_omni.relay.slab import CHUNK_BYTES, NUM_BYTES, Lease, SlabRelay
from vllm_omni.relay.stream import CREDITS, StreamReader, Streams, StreamWriter

HOST = "127.0.0.1"
MAX_CONSUMERS = 4096
PIECE_BYTES = 1 << 20
PROBE_AFTER_S = (0.0, 0.02, 0.1, 0.4)  # ZMQ tells of an end before it has carried it out

NOT_THERE = "the tensor is not there any more: released, expired, its request was aborted, or it is another"


@dataclass(slots=True)
class Marks:
    """Who reads a lease, by the readers' tokens."""

    reading: set[bytes] = field(default_factory=set)
    released: set[bytes] = field(default_factory=set)


class RemoteRelay(SlabRelay, Streams):
    """A slab that other hosts read from, and the connections to those that this one reads from.

    Args:
        num_bytes: of the slab, whole chunks, touched at once. 0: this process only reads, and does not listen.
        host: the address to listen at, which stands in every reference: one by which the consumers reach this host.
        lease_s: how long a tensor waits for its readers.
        clock: seconds, monotonic.

    Raises:
        RelayError: the address cannot be listened at.
    """

    def __init__(
        self,
        num_bytes: int = NUM_BYTES,
        *,
        host: str = HOST,
        lease_s: float = LEASE_S,
        clock: Clock = time.monotonic,
    ):
        memory = torch.empty(max(num_bytes, CHUNK_BYTES), dtype=torch.uint8)
        memory.fill_(0)  # page faults now rather than with the first tensors
        super().__init__(memory, lease_s=lease_s, clock=clock)
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self.address = ""  # of the producer; none if there is no slab
        self._bytes = memoryview(memory.numpy())
        self._marks: dict[int, Marks] = {}  # by lease
        self._writers: dict[int, RemoteWriter] = {}  # by lease; those of streams
        self._complaints = Complaints()
        # What follows belongs to the I/O thread.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._consumers: Consumers | None = None
        self._producers: dict[Location, Producer] = {}
        self._releases: set[asyncio.Task[None]] = set()
        if num_bytes:
            try:
                block_on(self._listen(host), TIMEOUT_S, "a socket")
            except BaseException:
                self.close()
                raise

    async def _listen(self, host: str) -> None:
        if host in ("0.0.0.0", "::", "*", ""):
            raise ValueError(f"host {host!r} stands for all addresses of this host; name one that consumers can reach")
        self._consumers = Consumers(self, self._context)
        try:
            self.address = self._consumers.wire.bind(host)
        except zmq.ZMQError as exc:
            raise RelayError(f"cannot listen at {host}: {exc}") from exc

    # -- the backend's part -------------------------------------------------------------------------------------------

    @abstractmethod
    async def _pull(self, producer: Producer, ref: TensorRef, layout: Layout) -> torch.Tensor:
        """Get a tensor's bytes, within ``producer.reading``; on the I/O thread."""

    def _access(self) -> bytes:
        """What consumers need to read the slab, besides this protocol."""
        return b""

    def on_fetching(self) -> None:
        """A consumer's library begins to read the slab; on the I/O thread."""
        return

    def on_producer_lost(self, producer: Producer) -> None:
        """A connection is over; on the I/O thread."""
        return

    # -- producer -----------------------------------------------------------------------------------------------------

    def _locate(self, lease: Lease) -> bytes:
        return encode(Location(self.address, self.token))

    def _announce(self, lease: Lease) -> None:
        if not self.address:
            raise PoolExhausted("this relay was made without a slab: it only reads", is_final=True)
        self._marks[lease.number] = Marks()

    def _is_released(self, lease: Lease) -> bool:
        marks = self._marks[lease.number]
        return not marks.reading and (lease.is_revoked or len(marks.released) >= lease.num_readers)

    def _is_being_read(self, lease: Lease) -> bool:
        return bool(self._marks[lease.number].reading)

    def _revoke(self, lease: Lease) -> bool:
        writer = self._writers.get(lease.number)
        if writer is not None:
            writer.push_soon()  # the reader hears of it
        return bool(self._marks[lease.number].reading)

    def _forget(self, lease: Lease) -> None:
        del self._marks[lease.number]
        self._writers.pop(lease.number, None)

    def begin_reading(self, reader: bytes, number: int, num_bytes: int, *, is_stream: bool = False) -> Lease | None:
        """Keep a lease from ending while it is read; None: it has ended, or is of something else."""
        with self._lock:
            lease = self._leases.get(number)
            if lease is None or lease.num_bytes != num_bytes or (number in self._writers) != is_stream:
                return None
            marks = self._marks[number]
            if reader not in marks.reading:
                if lease.is_revoked or self._is_released(lease):
                    return None
                marks.reading.add(reader)
                marks.released.discard(reader)
            return lease

    def end_reading(self, reader: bytes, number: int, *, is_released: bool, for_all: bool = False) -> None:
        """A reader has released a lease, or does not read it any more and may come again."""
        with self._lock:
            lease = self._leases.get(number)
            if lease is None:
                return
            marks = self._marks[number]
            writer = self._writers.get(number)
            if writer is not None and reader in marks.reading:
                writer.unsubscribe()
            marks.reading.discard(reader)
            if is_released:
                marks.released.add(reader)
            if for_all:
                lease.num_readers = 0
            if self._is_released(lease):
                self._drop(lease)
                self._tell_room()

    def lose_reader(self, reader: bytes) -> None:
        """It has died: what it was reading, it reads no more."""
        with self._lock:
            for number in [number for number, marks in self._marks.items() if reader in marks.reading]:
                self.end_reading(reader, number, is_released=True)

    # -- consumer -----------------------------------------------------------------------------------------------------

    def get_nowait(self, ref: TensorRef) -> torch.Tensor | None:
        layout = check_ref(ref, self.backend)
        self._check_open()
        if layout.num_bytes:
            parse_location(ref)
            return None
        self._num_gets += 1
        return torch.empty(layout.shape, dtype=layout.dtype)

    async def _fetch(self, ref: TensorRef) -> torch.Tensor:
        layout = check_ref(ref, self.backend)
        producer = await self._connect(parse_location(ref))
        producer.check_size(layout.num_bytes)
        with producer.reading(ref.lease):
            tensor = await self._pull(producer, ref, layout)
        self._num_gets += 1
        return tensor

    def release(self, ref: TensorRef, *, for_all: bool = False) -> None:
        if ref.lease and not self._closed:
            io_thread().call(self._release, parse_location(ref), ref.lease, for_all)

    def _release(self, location: Location, number: int, for_all: bool) -> None:
        producer = self._producers.get(location)
        if producer is not None and producer.is_welcome:
            producer.release(number, for_all)
        elif not self._closed:
            task = asyncio.ensure_future(self._release_later(location, number, for_all))
            self._releases.add(task)
            task.add_done_callback(self._releases.discard)

    async def _release_later(self, location: Location, number: int, for_all: bool) -> None:
        with contextlib.suppress(RelayError):  # who cannot be reached has nothing left to be released
            (await self._connect(location)).release(number, for_all)

    async def _connect(self, location: Location) -> Producer:
        self._check_open()
        producer = self._producers.get(location)
        if producer is None:
            producer = self._producers[location] = Producer(self, self._context, location)
        if not producer.is_welcome:
            await asyncio.shield(producer.welcomed)
        return producer

    # -- streams ------------------------------------------------------------------------------------------------------

    def open_stream(
        self, request_id: str, row_shape: tuple[int, ...], dtype: torch.dtype, *, credits: int = CREDITS
    ) -> StreamWriter:
        shape = (credits, *row_shape)
        ring = torch.empty(shape, dtype=dtype, device="meta")
        num_bytes = ring.numel() * ring.element_size()
        if not 0 < num_bytes <= credits * MAX_BODY_BYTES:
            raise ValueError(f"a stream of rows {list(row_shape)}: a row has 1 to {MAX_BODY_BYTES} bytes")
        with self._lock:
            self._check_open()
            block = self._allocate(num_bytes)
            try:
                lease = self._grant(request_id, block, block.offset, num_bytes, 1)
            except BaseException:
                self.pool.free(block)
                raise
            ref = TensorRef(self.backend, shape, dtype_name(ring), self._locate(lease), lease.number)
            writer = self._writers[lease.number] = RemoteWriter(self, ref, lease)
        return writer

    async def read_stream(self, ref: TensorRef, *, timeout_s: float = TIMEOUT_S) -> StreamReader:
        self._check_open()
        return await wait_for(self._subscribe(ref), timeout_s, "a stream")

    def read_stream_blocking(self, ref: TensorRef, timeout_s: float = TIMEOUT_S) -> StreamReader:
        self._check_open()
        return block_on(self._subscribe(ref), timeout_s, "a stream")

    async def _subscribe(self, ref: TensorRef) -> StreamReader:
        layout = check_ref(ref, self.backend)
        if not layout.num_bytes or not layout.shape:
            raise RelayBroken(f"a stream's reference has the shape {list(ref.shape)}")
        producer = await self._connect(parse_location(ref))
        producer.check_size(layout.num_bytes)
        reader = RemoteReader(self, producer, ref, layout)
        with producer.reading(ref.lease):
            await producer.subscribe(reader, layout.num_bytes)
        return reader

    def credits_of(self, ref: TensorRef) -> Callable[[], int] | None:
        location = parse_location(ref)
        if location.token != self.token:
            return None
        writer = self._writers.get(ref.lease)
        if writer is None:  # it is over: what is written to it is dropped
            return lambda: ref.num_rows
        return lambda: writer.num_credits

    # -- both ---------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        if not self._closed:
            super().close()
            io_thread().call(self._close)

    def _close(self) -> None:
        for producer in list(self._producers.values()):
            producer.fail(RelayClosed(f"this {self.backend!r} relay was closed"))
        if self._consumers is not None:
            self._consumers.wire.close()
        self._context.destroy(linger=0)


class Consumers:
    """The producer's side of the connections: who reads. On the I/O thread."""

    def __init__(self, relay: RemoteRelay, context: zmq.Context[zmq.Socket[bytes]]):
        self._relay = relay
        self._readers: dict[bytes, bytes] = {}  # the connection's name in ZMQ -> the reader's token
        self.fetching: set[tuple[bytes, int]] = set()  # connection and request of what a library is reading
        self.wire = Wire(context, zmq.ROUTER, self._on_message, self._on_lost)

    def send(self, peer: bytes, message: ToConsumer, body: memoryview | None = None) -> None:
        frames = [peer, encode(message)]
        try:
            self.wire.send(frames if body is None else [*frames, body])
        except ConnectionError:
            self._lose(peer)

    def _on_message(self, frames: list[zmq.Frame]) -> None:
        complain = self._relay._complaints.warn
        if len(frames) != 2:
            complain("dropped a message of %d parts to a %s relay", len(frames), self._relay.backend)
            return
        peer = frames[0].bytes
        try:
            message = decode_to_producer(frames[1].buffer)
        except (msgspec.MsgspecError, ValueError) as exc:
            complain("dropped a message to a %s relay: %s", self._relay.backend, exc)
            return
        if isinstance(message, Hello):
            self._greet(peer, message)
        elif peer in self._readers:
            self._act(peer, self._readers[peer], message)
        else:
            complain("dropped a %s to a %s relay, without a greeting", type(message).__name__, self._relay.backend)

    def _greet(self, peer: bytes, hello: Hello) -> None:
        if not secrets.compare_digest(hello.producer, self._relay.token):
            self.send(peer, Refused(0, "another producer listens here: the one that it names is gone"))
        elif len(self._readers) >= MAX_CONSUMERS:
            self.send(peer, Refused(0, f"more than {MAX_CONSUMERS} consumers"))
        else:
            self._readers[peer] = hello.reader
            self.send(peer, Welcome(self._relay.pool.num_bytes, self._relay._access()))

    def _act(self, peer: bytes, reader: bytes, message: ToProducer) -> None:
        relay = self._relay
        match message:
            case Read():
                self._send_piece(peer, reader, message)
            case Begin(request, number, num_bytes):
                lease = relay.begin_reading(reader, number, num_bytes)
                if lease is None:
                    self.send(peer, Refused(request, NOT_THERE))
                else:
                    self.fetching.add((peer, request))
                    self.send(peer, Granted(request, lease.offset))
                    relay.on_fetching()
            case Fetched(request):
                self.fetching.discard((peer, request))
            case Release(number, for_all):
                relay.end_reading(reader, number, is_released=True, for_all=for_all)
            case Abandon(number):
                relay.end_reading(reader, number, is_released=False)
            case Subscribe(request, number, num_bytes):
                self._subscribe(peer, reader, request, number, num_bytes)
            case Credit(number, num_read):
                writer = relay._writers.get(number)
                if writer is not None and not writer.give_credit(peer, num_read):
                    relay._complaints.warn("dropped a credit for %d rows, which were not sent", num_read)

    def _send_piece(self, peer: bytes, reader: bytes, read: Read) -> None:
        if not 0 < read.size <= PIECE_BYTES or read.offset + read.size > read.num_bytes:
            self.send(peer, Refused(read.request, f"there are no {read.size} bytes at {read.offset}"))
            return
        lease = self._relay.begin_reading(reader, read.lease, read.num_bytes)
        if lease is None:
            self.send(peer, Refused(read.request, NOT_THERE))
            return
        start = lease.offset + read.offset
        # Not copied. If the lease ends meanwhile, its reader has given up, and drops what still comes.
        self.send(peer, Piece(read.request, read.offset), self._relay._bytes[start : start + read.size])

    def _subscribe(self, peer: bytes, reader: bytes, request: int, number: int, num_bytes: int) -> None:
        writer = self._relay._writers.get(number)
        if writer is None:
            self.send(peer, Refused(request, NOT_THERE))
        elif writer.has_reader:
            self.send(peer, Refused(request, "the stream has a reader already"))
        elif (lease := self._relay.begin_reading(reader, number, num_bytes, is_stream=True)) is None:
            self.send(peer, Refused(request, NOT_THERE))
        else:
            self.send(peer, Granted(request, lease.offset))
            writer.subscribe(peer, self)

    def _on_lost(self) -> None:
        """Somebody has gone; ZMQ does not say who."""
        for delay_s in PROBE_AFTER_S:
            io_thread().loop.call_later(delay_s, self._probe)

    def _probe(self) -> None:
        for peer in list(self._readers):
            self.send(peer, Probe())

    def _lose(self, peer: bytes) -> None:
        reader = self._readers.pop(peer, None)
        self.fetching = {one for one in self.fetching if one[0] != peer}
        if reader is not None and reader not in self._readers.values():
            self._relay.lose_reader(reader)


class Producer:
    """The consumer's side of a connection, as long as that lives. On the I/O thread."""

    def __init__(self, relay: RemoteRelay, context: zmq.Context[zmq.Socket[bytes]], location: Location):
        self._relay = relay
        self._location = location
        loop = io_thread().loop
        self.is_broken = False
        self.is_welcome = False
        self.welcomed: asyncio.Future[Welcome] = loop.create_future()
        self.welcomed.add_done_callback(lambda future: future.cancelled() or future.exception())  # not all are awaited
        self.pieces: dict[int, Callable[[int, memoryview], None]] = {}  # by request: takes an offset and its bytes
        self._next_request = 0
        self._requests: dict[int, tuple[int, asyncio.Future[int]]] = {}  # -> lease, what it waits for
        self._subscribing: dict[int, RemoteReader] = {}  # by request
        self._streams: dict[int, RemoteReader] = {}  # by lease
        self._num_pulls: dict[int, int] = {}  # by lease: those that are running
        self._held: set[int] = set()  # leases that have been read and not yet released
        self._wire = Wire(context, zmq.DEALER, self._on_message, self._on_lost)
        self._timer = loop.call_later(CONNECT_MS / 1000, self._on_silence)
        try:
            self._wire.connect(location.address)
        except zmq.ZMQError as exc:
            self.fail(RelayBroken(f"the producer {location.address} cannot be reached: {exc}"))
            return
        self.send(Hello(location.token, relay.token))

    def send(self, message: ToProducer) -> None:
        if not self.is_broken:
            with contextlib.suppress(ConnectionError):  # the monitor tells
                self._wire.send([encode(message)])

    def check_size(self, num_bytes: int) -> None:
        if num_bytes > self.welcomed.result().num_bytes:
            raise RelayBroken(f"a reference claims {num_bytes} bytes, more than its producer has")

    # -- requests -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def request(self, lease: int) -> Iterator[tuple[int, asyncio.Future[int]]]:
        """A number to ask with, and what will hold the answer; fails when the producer refuses or dies."""
        if self.is_broken:
            raise self._gone()
        number = self._next_request = self._next_request + 1
        future: asyncio.Future[int] = io_thread().loop.create_future()
        self._requests[number] = lease, future
        try:
            yield number, future
        finally:
            del self._requests[number]
            self.pieces.pop(number, None)
            if future.done() and not future.cancelled():
                future.exception()  # whoever was cancelled meanwhile has not asked

    @contextlib.contextmanager
    def reading(self, lease: int) -> Iterator[None]:
        """While something of a lease is pulled; if that fails, the producer need not keep it for this reader."""
        self._num_pulls[lease] = self._num_pulls.get(lease, 0) + 1
        is_read = False
        try:
            yield
            is_read = True
        finally:
            if is_read:
                self._held.add(lease)
            self._num_pulls[lease] -= 1
            if not self._num_pulls[lease]:
                del self._num_pulls[lease]
                if lease not in self._held:
                    self.send(Abandon(lease))

    @contextlib.asynccontextmanager
    async def fetching(self, lease: int, num_bytes: int) -> AsyncIterator[tuple[int, asyncio.Future[int]]]:
        """While a library reads a tensor: where that lies in the slab, and what fails if the producer dies. It stays
        there until it is released."""
        with self.request(lease) as (request, granted):
            self.send(Begin(request, lease, num_bytes))
            offset = await granted
            try:
                with self.request(lease) as (_, failed):
                    yield offset, failed
            finally:
                self.send(Fetched(request))

    async def subscribe(self, reader: RemoteReader, num_bytes: int) -> None:
        with self.request(reader.lease) as (request, granted):
            self._subscribing[request] = reader  # its rows come right behind the answer
            try:
                self.send(Subscribe(request, reader.lease, num_bytes))
                await granted
            except BaseException:
                if self._streams.get(reader.lease) is reader:
                    del self._streams[reader.lease]
                raise
            finally:
                self._subscribing.pop(request, None)

    def release(self, lease: int, for_all: bool) -> None:
        self._held.discard(lease)
        self._streams.pop(lease, None)
        for of_lease, future in self._requests.values():
            if of_lease == lease and not future.done():
                future.set_exception(RelayBroken("a tensor was released while it was pulled"))
        self.send(Release(lease, for_all))

    # -- what the producer says ---------------------------------------------------------------------------------------

    def _on_message(self, frames: list[zmq.Frame]) -> None:
        try:
            message = decode_to_consumer(frames[0].buffer)
            if len(frames) != 1 + isinstance(message, Piece | Rows):
                raise ValueError(f"a {type(message).__name__} of {len(frames)} parts")
        except (msgspec.MsgspecError, ValueError) as exc:
            self._complain(exc)
            return
        match message:
            case Welcome():
                if not self.welcomed.done():
                    self._timer.cancel()
                    self.is_welcome = True
                    self.welcomed.set_result(message)
            case Granted(request, offset):
                if request in self._subscribing:
                    reader = self._subscribing.pop(request)
                    self._streams[reader.lease] = reader
                if request in self._requests:
                    self._settle(request, offset)
            case Piece(request, offset):
                if request in self.pieces:  # otherwise nobody waits for it any more
                    try:
                        self.pieces[request](offset, frames[1].buffer)
                    except ValueError as exc:
                        self._complain(exc)
            case Refused(0, reason):
                self.fail(RelayBroken(f"the producer {self._location.address} refuses: {reason}"))
            case Refused(request, reason):
                if request in self._requests:
                    self._settle(request, RelayBroken(reason))
            case Rows(number, first, num_rows):
                if number in self._streams:
                    self._streams[number].take(first, num_rows, frames[1])
            case End(number, num_rows, error):
                if number in self._streams:
                    self._streams[number].take_end(num_rows, error)

    def _settle(self, request: int, answer: int | Exception) -> None:
        _, future = self._requests[request]
        if not future.done():
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)

    def _complain(self, error: Exception) -> None:
        self._relay._complaints.warn("dropped a message of the producer %s: %s", self._location.address, error)

    # -- its end ------------------------------------------------------------------------------------------------------

    def _gone(self) -> RelayBroken:
        return RelayBroken(f"the producer {self._location.address} is gone")

    def _on_lost(self) -> None:
        self.fail(self._gone())

    def _on_silence(self) -> None:
        self.fail(RelayBroken(f"the producer {self._location.address} does not answer"))

    def fail(self, error: RelayError) -> None:
        """The connection is over; everything that waits for it hears why."""
        if self.is_broken:
            return
        self.is_broken, self.is_welcome = True, False
        self._timer.cancel()
        self._wire.close()
        self._relay._producers.pop(self._location, None)
        self._relay.on_producer_lost(self)
        if not self.welcomed.done():
            self.welcomed.set_exception(error)
        for _, future in self._requests.values():
            if not future.done():
                future.set_exception(error)
        for reader in self._streams.values():
            reader.fail(error)
        self._streams.clear()
