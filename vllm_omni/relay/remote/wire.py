"""The ZMQ socket of a connection between relays of different hosts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import struct
from collections.abc import Callable, Sequence

import zmq

from vllm_omni.descriptors import ZMQ_CONTEXT, check_free_descriptors
from vllm_omni.relay.remote.messages import MAX_BODY_BYTES, MAX_CONTROL_BYTES

logger = logging.getLogger(__name__)

# A peer that is silent for as long as both together is dead. ZMQ's own threads ask and answer, so that a process in
# which Python is busy does not look dead. Asking often leaves more of the second for a host that stumbles.
HEARTBEAT_MS = 1000
HEARTBEAT_TIMEOUT_MS = 5000  # for a host that vanishes; a process that dies closes its connection at once
CONNECT_MS = 5000  # until a producer has answered; a caller's deadline may come earlier

MAX_DRAIN = 64  # messages, before the loop's other callbacks run

_LOST = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class Wire:
    """A ZMQ socket that calls back on the I/O thread's loop; no other thread may touch it.

    The loop watches the socket's descriptor (``zmq.asyncio`` is twelve times slower). The descriptor signals changes
    only, and sending consumes the signal, too: so all messages are taken at every signal, and after every send.

    Args:
        kind: ``zmq.ROUTER`` or ``zmq.DEALER``.
        on_message: called with a message's frames.
        on_lost: called when a connection has ended or was rejected, after its last message.

    Raises:
        OSError, zmq.ZMQError: too few file descriptors are free.
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
        check_free_descriptors(ZMQ_CONTEXT)
        self.socket = socket = context.socket(kind)
        socket.set_hwm(0)  # windows and credits bound what is in flight; a full queue would stop the heartbeat
        socket.linger = 0
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        socket.setsockopt(zmq.HANDSHAKE_IVL, CONNECT_MS)
        if kind == zmq.ROUTER:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending to a consumer that has gone raises
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_CONTROL_BYTES)
        else:
            socket.setsockopt(zmq.RECONNECT_IVL, -1)  # a lost connection is not made again
            socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MS)
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_BODY_BYTES)
        try:
            self._monitor = socket.get_monitor_socket(_LOST)
        except zmq.ZMQError:
            socket.close()
            raise
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
        """Start to connect; ``on_lost`` is called if that fails."""
        if "[" in address:
            self.socket.setsockopt(zmq.IPV6, 1)
        self.socket.connect(address)

    def send(self, frames: Sequence[bytes | memoryview]) -> None:
        """Send frames without waiting. Large ones are not copied: they must not change until the other side has them.

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
                logger.exception("a relay failed to handle a message")
        return True

    def _drain_events(self) -> None:
        is_lost = False
        with contextlib.suppress(zmq.Again):
            while True:
                event, _ = struct.unpack_from("=HI", self._monitor.recv_multipart(zmq.NOBLOCK)[0])
                is_lost = is_lost or bool(event & _LOST)
        if is_lost:
            self._loop.call_soon(self._report_lost)

    def _report_lost(self) -> None:
        while self._take_some():
            pass
        if not self.socket.closed:
            self._on_lost()
