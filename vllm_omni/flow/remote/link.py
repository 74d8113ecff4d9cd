"""A link over ZMQ between processes and hosts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm_omni.complaints import Complaints
from vllm_omni.descriptors import ZMQ_CONTEXT, check_free_descriptors
from vllm_omni.errors import LinkError
from vllm_omni.flow.graph.transfer import ENTRY
from vllm_omni.flow.remote.messages import NOT_VALID, MessageCodec, PayloadCodec, Unreadable
from vllm_omni.flow.run.frame import EndReason, Frame
from vllm_omni.flow.run.link import InProcessLink, Message

if TYPE_CHECKING:
    import zmq

logger = logging.getLogger(__name__)

TOKEN_BYTES = 16
MAX_MESSAGE_BYTES = 16 << 20  # large tensors travel by the relay
MAX_TOGETHER = 64  # our messages in one message of ZMQ
MAX_DRAIN = 64  # messages of ZMQ, before the loop's other callbacks run


class _Peer:
    """Another process, reached over one socket, which keeps messages in order.

    The first message of an iteration of the event loop is sent at once; further ones are sent together at its end, or
    when there are ``MAX_TOGETHER``: a call of ZMQ costs as much as making and encoding several messages.
    """

    def __init__(self, socket: zmq.Socket[bytes], link: ZmqLink):
        self._socket = socket
        self._link = link
        self._waiting: list[bytes] | None = None  # encoded; None before the first message of an iteration
        self._num_bytes = 0  # of them

    def send(self, data: bytes) -> None:
        if self._waiting is None:
            self._waiting = []
            self._link.loop.call_soon(self._flush)
            self._send_now([data])
            return
        self._waiting.append(data)
        self._num_bytes += len(data)
        if len(self._waiting) == MAX_TOGETHER or self._num_bytes >= self._link.max_message_bytes:
            self._send_now(self._waiting)
            self._waiting = []

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting and not self._socket.closed:
            self._send_now(waiting)

    def _send_now(self, messages: list[bytes]) -> None:
        self._num_bytes = 0
        count = len(messages)
        header = bytes((0x90 | count,)) if count < 16 else b"\xdc" + count.to_bytes(2, "big")  # of a msgpack array
        with contextlib.suppress(self._link.zmq.Again):  # never full without a high-water mark
            self._socket.send(self._link.token + header + b"".join(messages), self._link.zmq.NOBLOCK)


class ZmqLink(InProcessLink):
    """A link between processes: calls receivers that are bound here, and sends to the others over ZMQ.

    Each process pulls from one socket and pushes into one per peer, so messages from one process to another stay in
    order. Sending never waits: credit bounds the number of messages in flight. The socket's file descriptor is drained
    rather than awaited by ``zmq.asyncio``, which is twelve times slower. Messages are sent as an array of msgpack.

    A message that cannot be decoded fails its call. Where its call cannot be read either, or without the token, what
    arrives is counted and dropped with a warning. Nothing is encrypted.

    Args:
        address: the address that this process listens on: ``ipc://...`` or ``tcp://host:port``.
        addresses: target -> the address of its process; targets bound here may be left out.
        token: ``TOKEN_BYTES`` random bytes, the same in all processes of a graph and known to them alone.
        payloads: encodes payloads and contexts, the same in all processes; None: they are msgpack types.
        max_message_bytes: of one message, the same in all processes.

    Attributes:
        num_dropped: what arrived here for no call that is known.

    Raises:
        LinkError: this process cannot listen on the address, or the token has another length.
    """

    def __init__(
        self,
        address: str,
        addresses: Mapping[str, str],
        token: bytes,
        payloads: PayloadCodec | None = None,
        *,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        import zmq

        if len(token) != TOKEN_BYTES:
            raise LinkError(f"the token has {len(token)} bytes, not {TOKEN_BYTES}: use secrets.token_bytes")
        super().__init__()
        self.zmq = zmq
        self.token = token
        self.max_message_bytes = max_message_bytes
        self.num_dropped = 0
        self._addresses = dict(addresses)
        self._peers: dict[str, _Peer] = {}  # by address
        self._peer_of: dict[str, _Peer] = {}  # by target
        self._codec = MessageCodec(payloads)
        self._complaints = Complaints(logger)
        self._context = zmq.Context()
        try:
            check_free_descriptors(ZMQ_CONTEXT)
            self._inbound = self._make_socket(zmq.PULL)
            self._inbound.setsockopt(zmq.MAXMSGSIZE, 2 * max_message_bytes + 64)  # of messages that are sent together
            self._inbound.bind(address)
        except (OSError, zmq.ZMQError) as exc:
            self._context.destroy(linger=0)
            raise LinkError(f"cannot listen on {address}: {exc}") from exc
        self.loop = asyncio.get_running_loop()
        self.loop.add_reader(self._inbound, self._drain)
        self._drain()

    def send(self, message: Message) -> None:
        """Send a message.

        Raises:
            LinkError: the target has no known address, or the message is too long or cannot be encoded.
        """
        if message.target in self._receivers:
            super().send(message)
            return
        try:
            data = self._codec.encode(message)
            if len(data) > self.max_message_bytes:
                raise ValueError(
                    f"it has {len(data):,} bytes, and may have {self.max_message_bytes:,} (max_message_bytes of the "
                    "link); a stage publishes large tensors through the relay, and sends references"
                )
        except (TypeError, ValueError, OverflowError, RecursionError) as exc:
            raise LinkError(f"a message for {message.target!r} cannot leave this process: {exc}") from exc
        peer = self._peer_of.get(message.target)
        if peer is None:
            peer = self._peer_of[message.target] = self._peer(message.target)
        peer.send(data)

    def close(self) -> None:
        """Stop listening; messages in flight are dropped."""
        if not self._context.closed:
            self.loop.remove_reader(self._inbound)
            self._context.destroy(linger=0)

    def _peer(self, target: str) -> _Peer:
        address = self._addresses.get(target)
        if address is None:
            raise LinkError(f"no address of target {target!r}; known: {', '.join(sorted(self._addresses))}")
        peer = self._peers.get(address)
        if peer is None:
            try:
                socket = self._make_socket(self.zmq.PUSH)
                socket.connect(address)
            except self.zmq.ZMQError as exc:
                raise LinkError(f"{target!r} cannot be reached at {address}: {exc}") from exc
            peer = self._peers[address] = _Peer(socket, self)
        return peer

    def _make_socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(0)
        socket.linger = 0
        return socket

    def _drain(self) -> None:
        # The descriptor is edge-triggered: everything must be read, now or soon, or no further event comes.
        for _ in range(MAX_DRAIN):
            if self._inbound.closed:
                return
            try:
                data = self._inbound.recv(self.zmq.NOBLOCK)
            except self.zmq.Again:
                return
            for message in self._decode(data):
                if isinstance(message, Unreadable):
                    self._reject(message)
                else:
                    self._dispatch(message)
        self.loop.call_soon(self._drain)

    def _decode(self, data: bytes) -> list[Message | Unreadable]:
        if not secrets.compare_digest(data[:TOKEN_BYTES], self.token):
            self._drop("dropped %d bytes without the token of this link", len(data))
            return []
        try:
            return self._codec.decode(memoryview(data)[TOKEN_BYTES:])
        except NOT_VALID as exc:
            self._drop("dropped %d bytes that are not valid messages: %s", len(data), exc)
            return []

    def _reject(self, message: Unreadable) -> None:
        """Fail the call of a message that is lost: it would wait for it until its deadline."""
        if message.call_id is None:
            self._drop("dropped a message that is not valid: %s", message.reason)
        else:
            error = LinkError(f"a message of call {message.call_id!r} cannot be read: {message.reason}")
            self._report(message.call_id, "", error)

    def _drop(self, text: str, *args: object) -> None:
        self.num_dropped += 1
        self._complaints.warn(text, *args)

    def _dispatch(self, message: Message) -> None:
        receive = self._receivers.get(message.target)
        if receive is None:
            self._drop("dropped a message for %r, which is not bound in this process", message.target)
            return
        try:
            receive(message)
        except Exception as exc:  # the remaining messages must be delivered
            logger.exception("call %r: delivering a message to %r failed", message.call_id, message.target)
            if message.target != ENTRY:
                self._report(message.call_id, message.target, exc)

    def _report(self, call_id: str, node: str, error: Exception) -> None:
        """Report to the entry what ends a call."""
        try:
            self.send(Frame(call_id, node, ENTRY, 0, "", 0, 0, True, error, EndReason.ERROR))
        except LinkError as exc:
            logger.warning("call %r: the entry cannot be notified of an error: %s", call_id, exc)
