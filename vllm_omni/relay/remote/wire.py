"""ZMQ sockets on the I/O thread: ``DrainedSocket``, and ``Wire`` for connections between hosts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import struct
from collections.abc import Callable, Sequence

import zmq

from vllm_omni.descriptors import ZMQ_CONTEXT, check_free_descriptors
from vllm_omni.relay.remote.messages import MAX_BODY_BYTES, MAX_CONTROL_BYTES
from vllm_omni.relay.remote.newcomers import Newcomers
from vllm_omni.relay.secret import Secret

logger = logging.getLogger(__name__)

# A peer that is silent for as long as both together is dead. ZMQ's own threads ask and answer, so that a process in
# which Python is busy does not look dead. Asking often leaves more of the second for a host that stumbles.
HEARTBEAT_MS = 1000
HEARTBEAT_TIMEOUT_MS = 5000  # for a host that vanishes; a process that dies closes its connection at once
CONNECT_MS = 5000  # until a producer has answered; a caller's deadline may come earlier

MAX_EVENTS = 8192  # frames of a full queue of events, and more
MAX_DRAIN = 64  # messages, before the loop's other callbacks run

_REJECTED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_ENDED = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
_MADE = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_ACCEPTED


class DrainedSocket:
    """A ZMQ socket that calls back on the I/O thread's loop; no other thread may touch it.

    The loop watches the socket's descriptor (``zmq.asyncio`` is twelve times slower). The descriptor signals changes
    only, and sending consumes the signal, too: so all messages are taken at every signal, and after every send.

    It must be closed before its context. Otherwise the loop would keep the number of a descriptor that is closed, and
    not watch the next one of that number, which may be any relay's: it would wait for ever.

    Args:
        kind: a type of ZMQ's sockets.
        on_message: called with a message's frames.

    Raises:
        OSError, zmq.ZMQError: too few file descriptors are free.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], kind: int, on_message: Callable[[list[zmq.Frame]], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_message = on_message
        self._is_drain_due = False
        check_free_descriptors(ZMQ_CONTEXT)
        self.socket = context.socket(kind)
        self.socket.set_hwm(0)  # windows and credits bound what is in flight; a full queue would stop the heartbeat
        self.socket.linger = 0
        if kind != zmq.PUSH:  # which receives nothing
            self._loop.add_reader(self.socket, self._drain)
            self._drain_soon()

    def send(self, frames: Sequence[bytes | memoryview | zmq.Frame]) -> None:
        """Send frames without waiting. Large ones are not copied: they must not change until the other side has them.

        Raises:
            ConnectionError: the peer that the first frame names is not connected.
        """
        if self.socket.closed:
            return
        try:
            self.socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as exc:
            raise ConnectionError(str(exc)) from exc
        if self.socket.type != zmq.PUSH:
            self._drain_soon()

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket; what was sent has so long to leave."""
        if not self.socket.closed:
            if self.socket.type != zmq.PUSH:
                self._loop.remove_reader(self.socket)
            self.socket.close(linger=linger_ms)

    def _drain_soon(self) -> None:
        if not self._is_drain_due:
            self._is_drain_due = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._is_drain_due = False
        if self._take_some():
            self._drain_soon()

    def _take_some(self) -> bool:
        """Take up to ``MAX_DRAIN`` messages; returns whether there may be more."""
        for _ in range(MAX_DRAIN):
            if self.socket.closed:
                return False
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return False
            try:
                self._on_message(frames)
            except Exception:  # the other messages must be taken nevertheless
                logger.exception("a message between processes could not be handled")
        return True


class Wire(DrainedSocket):
    """A connection between hosts, or all connections to a port, with heartbeats.

    Args:
        kind: ``zmq.ROUTER`` or ``zmq.DEALER``.
        on_message: called with a message's frames.
        on_lost: called when a connection has ended, after its last message; a listener's only if it sent one.
        on_rejected: called when a listener has ended connections before their handshake succeeded.
        secret: what both sides must have; None: anyone that reaches the port can connect.
        heartbeat_ms: how often to ask a silent peer, and how long to wait for its answer; None: as a relay.
        max_bytes: of one frame of a message; None: as a relay's.

    Attributes:
        has_reached: whether a connection of TCP was made.
        is_secure: whether the peer's handshake succeeded.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        kind: int,
        on_message: Callable[[list[zmq.Frame]], None],
        on_lost: Callable[[], None],
        secret: Secret | None = None,
        *,
        heartbeat_ms: tuple[int, int] | None = None,
        max_bytes: int | None = None,
        on_rejected: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(context, kind, self._receive if kind == zmq.ROUTER else on_message)
        self._on_peer_message, self._on_lost, self._on_rejected = on_message, on_lost, on_rejected
        self.has_reached = self.is_secure = False
        self.newcomers: Newcomers | None = None  # of a listener
        self._ended: set[int] = set()  # descriptors of newcomers whose last messages may not be read yet
        self._has_lost = False
        try:
            self._set_options(kind, secret, heartbeat_ms or (HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS), max_bytes)
            self._monitor = self.socket.get_monitor_socket(_ENDED | _REJECTED | _MADE)
        except BaseException:
            super().close()
            raise
        self._loop.add_reader(self._monitor, self._drain_events)
        self._drain_events()

    def _set_options(
        self, kind: int, secret: Secret | None, heartbeat_ms: tuple[int, int], max_bytes: int | None
    ) -> None:
        socket, (every_ms, timeout_ms) = self.socket, heartbeat_ms
        socket.setsockopt(zmq.HEARTBEAT_IVL, every_ms)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, timeout_ms)
        # While the kernel takes no more bytes, ZMQ does not ask, and so waits for no answer: a host that vanishes with
        # a large message under way would be noticed by TCP alone after 15 minutes, and one that hangs not at all.
        socket.setsockopt(zmq.TCP_MAXRT, every_ms + timeout_ms)
        socket.setsockopt(zmq.HANDSHAKE_IVL, CONNECT_MS)
        if kind == zmq.ROUTER:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending to a consumer that has gone raises
            socket.setsockopt(zmq.MAXMSGSIZE, max_bytes or MAX_CONTROL_BYTES)
        else:
            socket.setsockopt(zmq.RECONNECT_IVL, -1)  # a lost connection is not made again
            socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MS)
            socket.setsockopt(zmq.MAXMSGSIZE, max_bytes or MAX_BODY_BYTES)
        if secret is not None:
            (secret.protect_listener if kind == zmq.ROUTER else secret.protect_caller)(socket)

    def bind(self, host: str, port: int = 0) -> str:
        """Listen at a port, or at a free one; returns the address.

        Raises:
            OSError, zmq.ZMQError: it cannot be listened at, and the socket is closed.
        """
        try:
            if ":" in host:
                self.socket.setsockopt(zmq.IPV6, 1)
            self.socket.bind(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")
            address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
            self.newcomers = Newcomers(int(address.rpartition(":")[2]))
        except BaseException:
            self.close()
            raise
        return address

    def connect(self, address: str) -> None:
        """Start to connect; ``on_lost`` is called if that fails.

        Raises:
            zmq.ZMQError: the address is malformed, and the socket is closed.
        """
        try:
            if "[" in address:
                self.socket.setsockopt(zmq.IPV6, 1)
            self.socket.connect(address)
        except BaseException:
            self.close()
            raise

    def close(self, linger_ms: int = 0) -> None:
        if not self.socket.closed:
            self._loop.remove_reader(self._monitor)
            with contextlib.suppress(zmq.Again):  # with a full queue, ZMQ's thread would wait for us, and we for it
                for _ in range(MAX_EVENTS):
                    self._monitor.recv(zmq.NOBLOCK)
            self.socket.disable_monitor()
            self._monitor.close(linger=0)
            super().close(linger_ms)
            if self.newcomers is not None:
                self.newcomers.close()

    def _receive(self, frames: list[zmq.Frame]) -> None:
        assert self.newcomers is not None, "only a listener gets messages as a ROUTER"
        if not self.newcomers.knows(name := frames[0].bytes):
            descriptor = int(frames[0].get(zmq.SRCFD))
            self.newcomers.heard(name, descriptor)
            self._has_lost |= descriptor in self._ended
        self._on_peer_message(frames)

    def _drain_events(self) -> None:
        if self.socket.closed:
            return
        is_rejected = False
        for _ in range(MAX_DRAIN):
            try:
                event, value = struct.unpack_from("=HI", self._monitor.recv_multipart(zmq.NOBLOCK)[0])
            except zmq.Again:
                break
            self.has_reached |= bool(event & zmq.EVENT_CONNECTED)
            self.is_secure |= bool(event & zmq.EVENT_HANDSHAKE_SUCCEEDED)
            is_rejected |= bool(event & _REJECTED)
            if self.newcomers is None:
                self._has_lost |= bool(event & (_ENDED | _REJECTED))
            elif event & zmq.EVENT_ACCEPTED:
                self.newcomers.accepted(value)
            elif event & _ENDED:
                if self.newcomers.closed(value):
                    self._ended.add(value)
                else:
                    self._has_lost = True
        else:  # the descriptor signals changes only
            self._loop.call_soon(self._drain_events)
        if is_rejected:
            self._on_rejected()
        if self._has_lost or self._ended:
            self._loop.call_soon(self._report_ended)

    def _report_ended(self) -> None:
        while self._take_some():
            pass
        has_lost, self._has_lost = self._has_lost, False
        self._ended.clear()
        if has_lost and not self.socket.closed:
            self._on_lost()
