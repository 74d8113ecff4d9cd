"""The consumer's side of a connection to a producer on another host. On the I/O thread."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from operator import methodcaller
from typing import TYPE_CHECKING

import msgspec
import zmq

from vllm_omni.errors import RelayBroken, RelayError
from vllm_omni.relay.io_thread import io_thread
from vllm_omni.relay.remote import messages as msg
from vllm_omni.relay.remote.stream import RemoteReader
from vllm_omni.relay.remote.wire import CONNECT_MS, HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS, Wire

if TYPE_CHECKING:
    from vllm_omni.relay.remote.relay import RemoteRelay

NOTICED_S = (HEARTBEAT_MS + HEARTBEAT_TIMEOUT_MS) / 1000 + 2.0  # after which the end of a connection is noticed


class Producer:
    """One connection, which is never made again: after its end the relay makes another one.

    Raises:
        OSError, zmq.ZMQError: the address is malformed, or too few file descriptors are free.
    """

    def __init__(self, relay: RemoteRelay, context: zmq.Context[zmq.Socket[bytes]], location: msg.Location):
        self._relay = relay
        self.location = location
        loop = io_thread().loop
        self.is_broken = False
        self.is_welcome = False
        self.welcomed: asyncio.Future[msg.Welcome] = loop.create_future()
        # It may never be awaited: let asyncio not log its exception.
        self.welcomed.add_done_callback(lambda future: future.cancelled() or future.exception())
        self.pieces: dict[int, Callable[[int, memoryview], None]] = {}  # by request: called with an offset and bytes
        self._next_request = 0
        self._requests: dict[int, tuple[int, asyncio.Future[int]]] = {}  # -> lease, the answer
        self._subscribing: dict[int, RemoteReader] = {}  # by request
        self._streams: dict[int, RemoteReader] = {}  # by lease
        self._num_pulls: dict[int, int] = {}  # running pulls by lease
        self._held: set[int] = set()  # leases that have been read and not yet released
        self._released: deque[tuple[float, int, bool]] = deque()  # when, and what: it may not have arrived yet
        self._wire = Wire(context, zmq.DEALER, self._on_message, self._on_lost, relay.secret)
        self._wire.connect(location.address)
        silence = RelayBroken(f"the producer {location.address} does not answer")
        self._timer = loop.call_later(CONNECT_MS / 1000, self.fail, silence)
        self.send(msg.Hello(location.token, relay.token))

    def send(self, message: msg.ToProducer) -> None:
        if not self.is_broken:
            with contextlib.suppress(ConnectionError):  # the socket's monitor reports it
                self._wire.send([msg.encode(message)])

    def check_size(self, num_bytes: int) -> None:
        """Raises ``RelayBroken`` for more bytes than the producer's slab has."""
        if num_bytes > self.welcomed.result().num_bytes:
            raise RelayBroken(f"a reference claims {num_bytes} bytes, more than its producer has")

    # -- requests -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def request(self, lease: int) -> Iterator[tuple[int, asyncio.Future[int]]]:
        """Yields a request's number and its answer; the answer fails when the producer rejects the request or dies."""
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
                future.exception()  # a cancelled caller has not retrieved it, which asyncio would log

    @contextlib.contextmanager
    def reading(self, lease: int) -> Iterator[None]:
        """Encloses a pull; if it fails, the producer need not keep the lease for this reader."""
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
                    self.send(msg.Abandon(lease))

    @contextlib.asynccontextmanager
    async def fetching(self, lease: int, num_bytes: int) -> AsyncIterator[tuple[int, asyncio.Future[int]]]:
        """Encloses a library's read of a tensor: yields its offset in the slab, and a future that fails if the producer
        dies. The tensor stays there until it is released."""
        with self.request(lease) as (request, granted):
            self.send(msg.Fetch(request, lease, num_bytes))
            offset = await granted
            try:
                with self.request(lease) as (_, failed):
                    yield offset, failed
            finally:
                self.send(msg.Fetched(request))

    async def subscribe(self, reader: RemoteReader, num_bytes: int) -> None:
        """Let a stream's rows come to its reader."""
        with self.request(reader.lease) as (request, granted):
            self._subscribing[request] = reader  # rows may follow the answer at once
            try:
                self.send(msg.Subscribe(request, reader.lease, num_bytes))
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
        self.send(msg.Release(lease, for_all))
        self._released.append((time.monotonic(), lease, for_all))
        self._forget_arrived()

    def _forget_arrived(self) -> None:
        """Forget releases before which the connection would have been found broken."""
        since = time.monotonic() - NOTICED_S
        while self._released and self._released[0][0] < since:
            self._released.popleft()

    def release_again(self, lease: int, for_all: bool) -> None:
        """Release what an earlier connection may not have released, unless it is being read again."""
        if for_all or not (lease in self._num_pulls or lease in self._held or lease in self._streams):
            self.release(lease, for_all)

    # -- the producer's messages --------------------------------------------------------------------------------------

    def _on_message(self, frames: list[zmq.Frame]) -> None:
        try:
            message = msg.decode_to_consumer(frames[0].buffer)
            if len(frames) != 1 + isinstance(message, msg.Piece | msg.Rows):
                raise ValueError(f"a {type(message).__name__} of {len(frames)} parts")
            self._handle(message, frames)
        except (msgspec.MsgspecError, ValueError) as exc:
            self._relay.complaints.warn("dropped a message of the producer %s: %s", self.location.address, exc)

    def _handle(self, message: msg.ToConsumer, frames: list[zmq.Frame]) -> None:
        match message:
            case msg.Welcome():
                if not self.welcomed.done():
                    self._timer.cancel()
                    self.is_welcome = True
                    self.welcomed.set_result(message)
            case msg.Granted(request, offset):
                if request in self._subscribing:
                    reader = self._subscribing.pop(request)
                    self._streams[reader.lease] = reader
                self._settle(request, offset)
            case msg.Piece(request, offset):
                if request in self.pieces:  # otherwise its pull has ended
                    self.pieces[request](offset, frames[1].buffer)
            case msg.Rejected(0, reason):
                self.fail(RelayBroken(f"the producer {self.location.address} rejects the connection: {reason}"))
            case msg.Rejected(request, reason):
                self._settle(request, RelayBroken(reason))
            case msg.Rows(number, first, num_rows):
                if number in self._streams:
                    self._streams[number].take(first, num_rows, frames[1])
            case msg.End(number, num_rows, error):
                if number in self._streams:
                    self._streams[number].take_end(num_rows, error)

    def _settle(self, request: int, answer: int | Exception) -> None:
        _, future = self._requests.get(request, (0, None))
        if future is None or future.done():
            return
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    # -- the end of the connection ------------------------------------------------------------------------------------

    def _gone(self) -> RelayBroken:
        return RelayBroken(f"the producer {self.location.address} is gone")

    def _on_lost(self) -> None:
        self.fail(self._gone())

    def fail(self, error: RelayError) -> None:
        """End the connection; everything that waits for it raises the error."""
        if self.is_broken:
            return
        self.is_broken, self.is_welcome = True, False
        self._timer.cancel()
        self._wire.close()
        self._relay.remove_producer(self)
        self._forget_arrived()
        again = [methodcaller("release_again", lease, for_all) for _, lease, for_all in self._released]
        self._relay.release_later(self.location, again)
        if not self.welcomed.done():
            self.welcomed.set_exception(error)
        for _, future in self._requests.values():
            if not future.done():
                future.set_exception(error)
        for reader in self._streams.values():
            reader.fail(error)
        self._streams.clear()
