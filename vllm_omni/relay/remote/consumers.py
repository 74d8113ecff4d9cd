"""The producer's side of the connections between hosts: answers consumers' messages. On the I/O thread."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import msgspec
import zmq

from vllm_omni.relay.io_thread import io_thread
from vllm_omni.relay.remote import messages as msg
from vllm_omni.relay.remote.wire import Wire

if TYPE_CHECKING:
    from vllm_omni.relay.remote.relay import RemoteRelay

MAX_CONSUMERS = 4096
PIECE_BYTES = 1 << 20
PROBE_AFTER_S = (0.0, 0.02, 0.1, 0.4, 2.0)  # ZMQ reports the end of a connection before it has removed it

NOT_THERE = "the tensor is not there any longer: released, expired, aborted, or it is another one"


class Consumers:
    """All connections from consumers to one relay."""

    def __init__(self, relay: RemoteRelay, context: zmq.Context[zmq.Socket[bytes]]):
        self._relay = relay
        self._readers: dict[bytes, bytes] = {}  # the connection's name in ZMQ -> the reader's token
        self.fetching: set[tuple[bytes, int]] = set()  # connection and request of reads that a library is carrying out
        self.wire = Wire(context, zmq.ROUTER, self._on_message, self._on_lost, relay.secret)

    def send(self, peer: bytes, message: msg.ToConsumer, body: memoryview | None = None) -> None:
        frames = [peer, msg.encode(message)]
        try:
            self.wire.send(frames if body is None else [*frames, body])
        except ConnectionError:
            self._lose(peer)

    def _on_message(self, frames: list[zmq.Frame]) -> None:
        warn, backend = self._relay.complaints.warn, self._relay.backend
        if len(frames) != 2:
            warn("dropped a message of %d parts to a %s relay", len(frames), backend)
            return
        peer = frames[0].bytes
        try:
            message = msg.decode_to_producer(frames[1].buffer)
        except (msgspec.MsgspecError, ValueError) as exc:
            warn("dropped a message to a %s relay: %s", backend, exc)
            return
        if isinstance(message, msg.Hello):
            self._greet(peer, message)
        elif peer in self._readers:
            self._handle(peer, self._readers[peer], message)
        else:
            warn("dropped a %s to a %s relay, without a greeting", type(message).__name__, backend)

    def _greet(self, peer: bytes, hello: msg.Hello) -> None:
        if not secrets.compare_digest(hello.producer, self._relay.token):
            self.send(peer, msg.Rejected(0, "another producer listens here: the one that the reference names is gone"))
        elif len(self._readers) >= MAX_CONSUMERS:
            self.send(peer, msg.Rejected(0, f"more than {MAX_CONSUMERS} consumers"))
        else:
            self._readers[peer] = hello.reader
            self.send(peer, msg.Welcome(self._relay.slab.nbytes, self._relay.access()))

    def _handle(self, peer: bytes, reader: bytes, message: msg.ToProducer) -> None:
        relay = self._relay
        match message:
            case msg.Read():
                self._send_piece(peer, reader, message)
            case msg.Fetch(request, number, num_bytes):
                offset = relay.start_reading(reader, number, num_bytes)
                if offset is None:
                    self.send(peer, msg.Rejected(request, NOT_THERE))
                else:
                    self.fetching.add((peer, request))
                    self.send(peer, msg.Granted(request, offset))
                    relay.on_fetching()
            case msg.Fetched(request):
                self.fetching.discard((peer, request))
            case msg.Release(number, for_all):
                relay.end_reading(reader, number, is_released=True, for_all=for_all)
            case msg.Abandon(number):
                relay.end_reading(reader, number, is_released=False)
            case msg.Subscribe(request, number, num_bytes):
                self._subscribe(peer, reader, request, number, num_bytes)
            case msg.Credit(number, num_read):
                writer = relay.writers.get(number)
                if writer is not None and not writer.give_credit(peer, num_read):
                    relay.complaints.warn("dropped a credit for %d rows, which were not sent", num_read)

    def _send_piece(self, peer: bytes, reader: bytes, read: msg.Read) -> None:
        if not 0 < read.size <= PIECE_BYTES or read.offset + read.size > read.num_bytes:
            self.send(peer, msg.Rejected(read.request, f"there are no {read.size} bytes at {read.offset}"))
            return
        offset = self._relay.start_reading(reader, read.lease, read.num_bytes)
        if offset is None:
            self.send(peer, msg.Rejected(read.request, NOT_THERE))
            return
        start = offset + read.offset
        # Not copied. If the lease ends meanwhile, its reader has given up and drops the bytes.
        self.send(peer, msg.Piece(read.request, read.offset), self._relay.slab[start : start + read.size])

    def _subscribe(self, peer: bytes, reader: bytes, request: int, number: int, num_bytes: int) -> None:
        writer = self._relay.writers.get(number)
        if writer is None:
            self.send(peer, msg.Rejected(request, NOT_THERE))
        elif writer.has_reader:
            self.send(peer, msg.Rejected(request, "the stream has a reader already"))
        elif (offset := self._relay.start_reading(reader, number, num_bytes, is_stream=True)) is None:
            self.send(peer, msg.Rejected(request, NOT_THERE))
        else:
            self.send(peer, msg.Granted(request, offset))
            writer.subscribe(peer, self)

    def _on_lost(self) -> None:
        """A connection has ended. ZMQ does not say which one: a message to it will fail."""
        for delay_s in PROBE_AFTER_S:
            io_thread().loop.call_later(delay_s, self._probe)

    def _probe(self) -> None:
        for peer in list(self._readers):
            self.send(peer, msg.Probe())

    def _lose(self, peer: bytes) -> None:
        reader = self._readers.pop(peer, None)
        self.fetching = {one for one in self.fetching if one[0] != peer}
        if reader is not None and reader not in self._readers.values():
            self._relay.lose_reader(reader)
