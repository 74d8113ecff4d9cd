"""A link over sockets of its own, for graphs without a server, whose connections have a secret (``hosts/``)."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from vllm_omni.descriptors import ZMQ_CONTEXT, check_free_descriptors
from vllm_omni.errors import LinkError
from vllm_omni.flow.remote.encoded_link import MAX_MESSAGE_BYTES, EncodedLink, Outbox
from vllm_omni.flow.remote.messages import PayloadCodec
from vllm_omni.flow.run.link import Message

if TYPE_CHECKING:
    import zmq

TOKEN_BYTES = 16
MAX_DRAIN = 64  # messages of ZMQ, before the loop's other callbacks run


class ZmqLink(EncodedLink):
    """A link whose processes pull from one socket each, and push into one per peer.

    So messages from one process to another stay in order. Sending never waits: credit bounds the number of messages in
    flight. The socket's file descriptor is drained rather than awaited by ``zmq.asyncio``, which is twelve times
    slower. What arrives without the token is dropped. Nothing is encrypted.

    Args:
        address: the address that this process listens on: ``ipc://...`` or ``tcp://host:port``.
        addresses: target -> the address of its process; targets bound here may be left out.
        token: ``TOKEN_BYTES`` random bytes, the same in all processes of a graph and known to them alone.
        payloads, max_message_bytes: see ``EncodedLink``.

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
        super().__init__(self._outbox, payloads, max_message_bytes=max_message_bytes)
        self.zmq = zmq
        self.token = token
        self._addresses = dict(addresses)
        self._by_address: dict[str, Outbox] = {}
        self._by_target: dict[str, Outbox] = {}
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

    def close(self) -> None:
        """Stop listening; messages in flight are dropped."""
        if not self._context.closed:
            self.loop.remove_reader(self._inbound)
            self._context.destroy(linger=0)

    def _outbox(self, message: Message) -> Outbox:
        target: str = message.target
        outbox = self._by_target.get(target)
        if outbox is None:
            outbox = self._by_target[target] = self._outbox_at(target)
        return outbox

    def _outbox_at(self, target: str) -> Outbox:
        address = self._addresses.get(target)
        if address is None:
            raise LinkError(f"no address of target {target!r}; known: {', '.join(sorted(self._addresses))}")
        outbox = self._by_address.get(address)
        if outbox is None:
            try:
                socket = self._make_socket(self.zmq.PUSH)
                socket.connect(address)
            except self.zmq.ZMQError as exc:
                raise LinkError(f"{target!r} cannot be reached at {address}: {exc}") from exc
            outbox = self._by_address[address] = Outbox(partial(self._push, socket), self.max_message_bytes)
        return outbox

    def _push(self, socket: zmq.Socket[bytes], data: bytes) -> None:
        if not socket.closed:
            with contextlib.suppress(self.zmq.Again):  # never full without a high-water mark
                socket.send(self.token + data, self.zmq.NOBLOCK)

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
            if secrets.compare_digest(data[:TOKEN_BYTES], self.token):
                self.receive(memoryview(data)[TOKEN_BYTES:])
            else:
                self.drop("dropped %d bytes without the token of this link", len(data))
        self.loop.call_soon(self._drain)
