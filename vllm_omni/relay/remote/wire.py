"""What relays of different hosts say to each other, and the socket that carries it.

Every message is checked against its type when it is decoded, and its numbers by whoever acts on it. One that is none
of ours is dropped, with a warning now and then: the other side, and whoever else reaches the port, may send anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import re
import struct
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeAlias

import msgspec
import zmq

from vllm_omni.errors import RelayBroken
from vllm_omni.messages.payload import MAX_NUM_BYTES, TensorRef

logger = logging.getLogger(__name__)

TOKEN_BYTES = 16
MAX_LEASE = 1 << 62
MAX_ADDRESS = 64  # characters: tcp://, a numeric address, a port
MAX_CONTROL_BYTES = 4096  # of a message to a producer
MAX_BODY_BYTES = 64 << 20  # of a message to a consumer
MAX_TEXT = 1000

# A peer that is silent for as long as both together is dead. ZMQ's own threads ask and answer, so a process in which
# Python is busy is not taken for a dead one. Asking often leaves more of the second for a host that stumbles.
HEARTBEAT_MS = 1000
HEARTBEAT_TIMEOUT_MS = 5000  # a process that dies closes its connection at once; this is for a host that vanishes
CONNECT_MS = 5000  # until a producer has answered; a caller's deadline may come earlier

MAX_DRAIN = 64  # messages, then the loop's other callbacks have their turn
WARN_S = 1.0  # between two warnings of a relay

Token: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
Request: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=MAX_LEASE)]
LeaseNumber: TypeAlias = Annotated[int, msgspec.Meta(gt=0, lt=MAX_LEASE)]
NumBytes: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_NUM_BYTES)]
Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]


class Location(msgspec.Struct, frozen=True, array_like=True):
    """In a reference: where its producer listens."""

    address: Annotated[str, msgspec.Meta(max_length=MAX_ADDRESS)]
    token: Token  # of this producer, made at random; another one at the same address has another


# -- to a producer ----------------------------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The first message; answered by ``Welcome``, or by ``Refused`` with request 0."""

    producer: Token  # whom the consumer looks for; who has no reference does not know it
    reader: Token  # who comes; the same for all connections of a relay


class Begin(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Keep a tensor until it is released; answered by ``Granted`` or ``Refused``."""

    request: Request
    lease: LeaseNumber
    num_bytes: NumBytes  # of the whole tensor, as its reference says


class Fetched(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What ``Begin`` granted has been read, or will not be; the tensor stays until it is released."""

    request: Request


class Read(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """``Begin``, and send a piece of the tensor; answered by ``Piece`` or ``Refused``."""

    request: Request
    lease: LeaseNumber
    num_bytes: NumBytes  # of the whole tensor
    offset: NumBytes  # of the piece, in the tensor
    size: NumBytes  # of the piece


class Abandon(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A read has failed: nothing is read here, but it may be tried again."""

    lease: LeaseNumber


class Release(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Nothing will be read here any more."""

    lease: LeaseNumber
    for_all: bool = False  # nor anywhere else


class Subscribe(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Send a stream's rows as they are written; answered by ``Granted`` or ``Refused``."""

    request: Request
    lease: LeaseNumber
    num_bytes: NumBytes  # of the ring


class Credit(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """How far a stream has been read."""

    lease: LeaseNumber
    num_read: NumBytes  # rows since its begin


# -- to a consumer ----------------------------------------------------------------------------------------------------


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=True):
    num_bytes: NumBytes  # of the slab
    access: bytes  # what else a backend needs to read there


class Granted(msgspec.Struct, frozen=True, array_like=True, tag=True):
    request: Request
    offset: NumBytes  # of the tensor or ring in the slab


class Piece(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Its bytes are the message's second frame."""

    request: Request
    offset: NumBytes  # in the tensor


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=True):
    request: Request
    reason: Text


class Rows(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Rows of a stream; their bytes are the message's second frame."""

    lease: LeaseNumber
    first: NumBytes  # number of the first one since the stream's begin
    num_rows: NumBytes


class End(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """No row of a stream follows."""

    lease: LeaseNumber
    num_rows: NumBytes  # since its begin
    error: Text | None  # None: a good end


class Probe(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Asks ZMQ whether a consumer is still connected; nobody answers."""


ToProducer: TypeAlias = Hello | Begin | Fetched | Read | Abandon | Release | Subscribe | Credit
ToConsumer: TypeAlias = Welcome | Granted | Piece | Refused | Rows | End | Probe

encode = msgspec.msgpack.Encoder().encode
decode_to_producer: Callable[[Any], ToProducer] = msgspec.msgpack.Decoder(ToProducer).decode
decode_to_consumer: Callable[[Any], ToConsumer] = msgspec.msgpack.Decoder(ToConsumer).decode
_decode_location = msgspec.msgpack.Decoder(Location).decode

_ADDRESS = re.compile(r"tcp://(?:\[([0-9a-fA-F:.]+)\]|([0-9.]+)):([0-9]{1,5})")


def parse_location(ref: TensorRef) -> Location:
    """Raises ``RelayBroken`` for one that no producer gave: only numeric addresses are, so that none is looked up."""
    try:
        location = _decode_location(ref.location)
        match = _ADDRESS.fullmatch(location.address)
        if match is None or not 0 < int(match[3]) < 1 << 16:
            raise ValueError(f"{location.address!r} is no address")
        ipaddress.ip_address(match[1] or match[2])
    except ValueError as exc:  # msgspec's and Unicode's errors are ValueErrors, too
        raise RelayBroken(f"a reference does not say where it points: {exc}") from exc
    if not 0 < ref.lease < MAX_LEASE:
        raise RelayBroken(f"a reference names lease {ref.lease}, which no producer has")
    return location


class Complaints:
    """Warnings about what others send: one a second, with the number of those left out."""

    def __init__(self) -> None:
        self._next_at = 0.0
        self._num_silent = 0

    def warn(self, text: str, *args: object) -> None:
        now = time.monotonic()
        if now < self._next_at:
            self._num_silent += 1
            return
        others = f" ({self._num_silent} more like this)" if self._num_silent else ""
        logger.warning(text + "%s", *args, others)
        self._next_at, self._num_silent = now + WARN_S, 0


# -- the socket -------------------------------------------------------------------------------------------------------

_LOST = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class Wire:
    """A ZMQ socket whose messages come as calls on the I/O thread's loop, the only thread that may touch it.

    Its descriptor is drained (``zmq.asyncio`` is twelve times slower). That tells of a change only, and sending takes
    notice of changes, too: so everything is taken whenever it tells, and looked for after every send.

    Args:
        kind: ``zmq.ROUTER`` or ``zmq.DEALER``.
        on_message: takes a message's frames.
        on_lost: a connection has ended, or was refused; what came before that has been taken.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        kind: int,
        on_message: Callable[[list[zmq.Frame]], None],
        on_lost: Callable[[], None],
    ):
        self._loop = asyncio.get_running_loop()
        self._on_message = on_message
        self._on_lost = on_lost
        self._is_drain_due = False
        self.socket = socket = context.socket(kind)
        socket.set_hwm(0)  # what is under way is bounded by windows and credits; a full queue would stop the heartbeat
        socket.linger = 0
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        socket.setsockopt(zmq.HANDSHAKE_IVL, CONNECT_MS)
        if kind == zmq.ROUTER:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending to one who has gone raises
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_CONTROL_BYTES)
        else:
            socket.setsockopt(zmq.RECONNECT_IVL, -1)  # a connection has one life
            socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MS)
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_BODY_BYTES)
        self._monitor = socket.get_monitor_socket(_LOST)
        self._loop.add_reader(self._monitor, self._drain_events)
        self._loop.add_reader(socket, self._drain)
        self._drain_events()
        self._drain_soon()

    def bind(self, host: str) -> str:
        """Listen at a free port; returns the address. Raises ``zmq.ZMQError``."""
        if ":" in host:
            self.socket.setsockopt(zmq.IPV6, 1)
        self.socket.bind(f"tcp://[{host}]:0" if ":" in host else f"tcp://{host}:0")
        return self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def connect(self, address: str) -> None:
        """Begin to connect; ``on_lost`` tells if that fails."""
        if "[" in address:
            self.socket.setsockopt(zmq.IPV6, 1)
        self.socket.connect(address)

    def send(self, frames: Sequence[bytes | memoryview]) -> None:
        """Never waits. Large frames are not copied: they must stay as they are until the other side has them.

        Raises:
            ConnectionError: the consumer that the first frame names is not connected.
        """
        if self.socket.closed:
            return
        try:
            self.socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as exc:
            raise ConnectionError(str(exc)) from exc
        self._drain_soon()

    def close(self) -> None:
        if not self.socket.closed:
            self._loop.remove_reader(self.socket)
            self._loop.remove_reader(self._monitor)
            self.socket.disable_monitor()
            self._monitor.close(linger=0)
            self.socket.close(linger=0)

    def _drain_soon(self) -> None:
        if not self._is_drain_due:
            self._is_drain_due = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._is_drain_due = False
        if self._take_some():
            self._drain_soon()

    def _take_some(self) -> bool:
        """Whether there may be more."""
        for _ in range(MAX_DRAIN):
            if self.socket.closed:
                return False
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return False
            try:
                self._on_message(frames)
            except Exception:  # the others must be taken all the same
                logger.exception("a relay could not act on a message")
        return True

    def _drain_events(self) -> None:
        is_lost = False
        with contextlib.suppress(zmq.Again):
            while True:
                event, _ = struct.unpack_from("=HI", self._monitor.recv_multipart(zmq.NOBLOCK)[0])
                is_lost = is_lost or bool(event & _LOST)
        if is_lost:
            self._loop.call_soon(self._tell_lost)

    def _tell_lost(self) -> None:
        while self._take_some():
            pass
        if not self.socket.closed:
            self._on_lost()
