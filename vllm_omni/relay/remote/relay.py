"""The common part of relays between hosts: leases and their release, over a connection of messages.

How the bytes of a tensor travel is up to the backend: over the same connection (``tcp``), or by a library that reads
the producer's memory (``nixl``, ``mooncake``). Streams use the connection in all of them: their rows are small.

A producer has one ZMQ ROUTER, a consumer one DEALER for each producer, all on the I/O thread. A lost connection is
replaced by a new one, with a new greeting. The greeting carries the producer's token, which stands in its references:
so a producer that was restarted at the same address is not mistaken for the one before, and a process without a
reference cannot read. With a secret (``relay/secret.py``), no process without it can connect, and what these sockets
carry is encrypted; the libraries of ``nixl`` and ``mooncake`` open ports of their own, which ask for no secret.

When a connection ends, the leases that it was reading are free: at once if its process ends, by its heartbeat within
five seconds if the other host vanishes. It may be the network that has ended it: what a consumer had released on it, or
releases meanwhile, is released again on the next one.

From: SGLang-Omni (communication, Two Planes, Backends).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
import zmq

from vllm_omni.complaints import Complaints
from vllm_omni.errors import PoolExhausted, RelayBroken, RelayClosed, RelayError
from vllm_omni.messages.payload import Layout, TensorRef
from vllm_omni.relay.base import TIMEOUT_S
from vllm_omni.relay.io_thread import block_on, io_thread
from vllm_omni.relay.remote.consumers import Consumers
from vllm_omni.relay.remote.messages import MAX_BODY_BYTES, TOKEN_BYTES, Location, encode, parse_location
from vllm_omni.relay.remote.producer import Producer
from vllm_omni.relay.remote.stream import RemoteReader, RemoteWriter
from vllm_omni.relay.secret import Secret
from vllm_omni.relay.slab import CHUNK_BYTES, NUM_BYTES, Lease
from vllm_omni.relay.stream import CREDITS, StreamReader, Streams, StreamWriter

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
RECONNECT_AFTER_S = (0.0, 1.0, 2.0, 4.0, 8.0)
"""Before the attempts to reach a producer that holds something for this process; then it is gone, and its leases."""


@dataclass(slots=True)
class Marks:
    """The readers of a lease, by their tokens."""

    reading: set[bytes] = field(default_factory=set)
    released: set[bytes] = field(default_factory=set)


class RemoteRelay(Streams):
    """A slab that other hosts read from, and the connections to those that this one reads from.

    Args:
        num_bytes: of the slab, whole chunks, touched at once. 0: this process only reads, and does not listen.
        host: the address to listen at, which stands in every reference: consumers must be able to reach it.
        secret: of the deployment, which consumers and producers must have; None: there is none.

    Raises:
        RelayError: the address cannot be listened at.
    """

    def __init__(self, num_bytes: int = NUM_BYTES, *, host: str = HOST, secret: Secret | None = None):
        memory = torch.empty(max(num_bytes, CHUNK_BYTES), dtype=torch.uint8)
        memory.fill_(0)  # page faults now instead of with the first tensors
        super().__init__(memory)
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self.secret = secret
        self.address = ""  # where it listens; empty if it only reads
        self.slab = memoryview(memory.numpy())
        self._marks: dict[int, Marks] = {}  # by lease
        self.writers: dict[int, RemoteWriter] = {}  # of streams, by lease
        self.complaints = Complaints(logger)
        # The following belongs to the I/O thread.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._consumers: Consumers | None = None
        self._producers: dict[Location, Producer] = {}
        self._releases: dict[Location, list[Callable[[Producer], None]]] = {}  # that wait for a connection
        self._connecting: set[asyncio.Task[None]] = set()
        if num_bytes:
            try:
                block_on(self._listen(host), TIMEOUT_S, "a socket")
            except BaseException:
                self.close()
                raise

    async def _listen(self, host: str) -> None:
        if host in ("0.0.0.0", "::", "*", ""):
            raise ValueError(f"host {host!r} stands for all addresses of this host; give one that consumers can reach")
        try:
            self._consumers = Consumers(self, self._context)
            self.address = self._consumers.wire.bind(host)
        except (OSError, zmq.ZMQError) as exc:
            raise RelayError(f"cannot listen at {host}: {exc}") from exc

    # -- inner interface: what a backend implements -------------------------------------------------------------------

    @abstractmethod
    async def _pull(self, producer: Producer, ref: TensorRef, layout: Layout) -> torch.Tensor:
        """Fetch a tensor, within ``producer.reading``; on the I/O thread."""

    def access(self) -> bytes:
        """Return what consumers need to read the slab besides this protocol."""
        return b""

    def on_fetching(self) -> None:
        """Called when a consumer's library starts to read the slab; on the I/O thread."""
        return

    def on_producer_lost(self, producer: Producer) -> None:
        """Called when a connection has ended; on the I/O thread."""
        return

    # -- producer -----------------------------------------------------------------------------------------------------

    def locate(self, lease: Lease) -> bytes:
        return encode(Location(self.address, self.token))

    def announce(self, lease: Lease) -> None:
        if not self.address:
            raise PoolExhausted("this relay was made without a slab: it only reads", is_final=True)
        self._marks[lease.number] = Marks()

    def is_released(self, lease: Lease) -> bool:
        marks = self._marks[lease.number]
        return not marks.reading and (lease.is_revoked or len(marks.released) >= lease.num_readers)

    def is_being_read(self, lease: Lease) -> bool:
        return bool(self._marks[lease.number].reading)

    def revoke(self, lease: Lease) -> bool:
        writer = self.writers.get(lease.number)
        if writer is not None:
            writer.publish()  # that it was aborted
        return bool(self._marks[lease.number].reading)

    def forget(self, lease: Lease) -> None:
        del self._marks[lease.number]
        self.writers.pop(lease.number, None)

    # -- inner interface: for the connections (``Consumers``), on the I/O thread --------------------------------------

    def start_reading(self, reader: bytes, number: int, num_bytes: int, *, is_stream: bool = False) -> int | None:
        """Keep a lease from ending while it is read; returns its offset in the slab.

        None: it has ended, or is not what the reader says.
        """
        with self.lock:
            lease = self._leases.get(number)
            if lease is None or lease.num_bytes != num_bytes or (number in self.writers) != is_stream:
                return None
            marks = self._marks[number]
            if reader not in marks.reading:
                if lease.is_revoked or self.is_released(lease):
                    return None
                marks.reading.add(reader)
                marks.released.discard(reader)
            return lease.offset

    def end_reading(self, reader: bytes, number: int, *, is_released: bool, for_all: bool = False) -> None:
        """End a reader's read of a lease, which it may start again unless it has released it."""
        with self.lock:
            lease = self._leases.get(number)
            if lease is None:
                return
            marks = self._marks[number]
            writer = self.writers.get(number)
            if writer is not None and reader in marks.reading:
                writer.unsubscribe()
            marks.reading.discard(reader)
            if is_released:
                marks.released.add(reader)
            if for_all:
                lease.num_readers = 0
            if self.is_released(lease):
                self.drop(lease)
                self.notify_room()

    def lose_reader(self, reader: bytes) -> None:
        """End the reads of a process that has died."""
        with self.lock:
            for number in [number for number, marks in self._marks.items() if reader in marks.reading]:
                self.end_reading(reader, number, is_released=True)

    # -- consumer -----------------------------------------------------------------------------------------------------

    def take(self, ref: TensorRef, layout: Layout) -> torch.Tensor | None:
        parse_location(ref)  # an invalid one is an error at once
        return None

    async def fetch(self, ref: TensorRef, layout: Layout, timeout_s: float) -> torch.Tensor:
        producer = await self._connect(parse_location(ref))
        producer.check_size(layout.num_bytes)
        with producer.reading(ref.lease):
            return await self._pull(producer, ref, layout)

    def release(self, ref: TensorRef, *, for_all: bool = False) -> None:
        if ref.lease and not self.is_closed:
            io_thread().call(self._release, parse_location(ref), ref.lease, for_all)

    def _release(self, location: Location, number: int, for_all: bool) -> None:
        producer = self._producers.get(location)
        if producer is not None and producer.is_welcome:
            producer.release(number, for_all)
        else:
            self.release_later(location, [lambda producer: producer.release(number, for_all)])

    def release_later(self, location: Location, releases: Iterable[Callable[[Producer], None]]) -> None:
        """Release leases on the next connection; for ``Producer``, too.

        Args:
            releases: called with it.
        """
        if self.is_closed or not (releases := list(releases)):
            return
        if location in self._releases:
            self._releases[location] += releases
            return
        self._releases[location] = releases
        task = asyncio.ensure_future(self._send_releases(location))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _send_releases(self, location: Location) -> None:
        try:
            for delay_s in RECONNECT_AFTER_S:
                await asyncio.sleep(delay_s)
                with contextlib.suppress(RelayError):
                    producer = await self._connect(location)
                    for release in self._releases[location]:
                        release(producer)
                    return
        finally:
            del self._releases[location]

    async def _connect(self, location: Location) -> Producer:
        self.check_open()
        producer = self._producers.get(location)
        if producer is None:
            try:
                producer = self._producers[location] = Producer(self, self._context, location)
            except (OSError, zmq.ZMQError) as exc:
                raise RelayBroken(f"the producer {location.address} cannot be reached: {exc}") from exc
        if not producer.is_welcome:
            await asyncio.shield(producer.welcomed)
        return producer

    def remove_producer(self, producer: Producer) -> None:
        """For ``Producer``: its connection has ended."""
        self._producers.pop(producer.location, None)
        self.on_producer_lost(producer)

    # -- streams ------------------------------------------------------------------------------------------------------

    def open_stream(
        self, request_id: str, row_shape: tuple[int, ...], dtype: torch.dtype, *, credits: int = CREDITS
    ) -> StreamWriter:
        row_bytes = torch.empty(row_shape, dtype=dtype, device="meta").nbytes
        if not 0 < row_bytes <= MAX_BODY_BYTES:
            raise ValueError(f"a stream of rows {list(row_shape)}: a row has 1 to {MAX_BODY_BYTES} bytes")
        with self.lock:
            ref, lease = self.open_ring(request_id, row_shape, dtype, credits)
            writer = self.writers[lease.number] = RemoteWriter(self, ref, lease, self.slab)
        return writer

    async def _subscribe(self, ref: TensorRef, layout: Layout, timeout_s: float) -> StreamReader:
        producer = await self._connect(parse_location(ref))
        producer.check_size(layout.num_bytes)
        reader = RemoteReader(ref, layout, producer.send, self.release)
        with producer.reading(ref.lease):
            await producer.subscribe(reader, layout.num_bytes)
        return reader

    def credits_of(self, ref: TensorRef) -> Callable[[], int] | None:
        location = parse_location(ref)
        if location.token != self.token:
            return None
        writer = self.writers.get(ref.lease)
        if writer is None:  # the stream has ended: rows written to it are dropped
            return lambda: ref.num_rows
        return lambda: writer.num_credits if writer.has_reader else ref.num_rows

    # -- both ---------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        if not self.is_closed:
            super().close()
            io_thread().call(self._close)

    def _close(self) -> None:
        for producer in list(self._producers.values()):
            producer.fail(RelayClosed(f"this {self.backend!r} relay was closed"))
        if self._consumers is not None:
            self._consumers.wire.close()
        for task in self._connecting:
            task.cancel()
        self._context.destroy(linger=0)
