"""``PeerLinks``: the ways from host to host, for messages between their controllers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import msgspec
import zmq

from vllm_omni.complaints import Complaints
from vllm_omni.hosts import messages as msg
from vllm_omni.hosts.listener import HEARTBEAT_MS
from vllm_omni.relay.remote.wire import Wire
from vllm_omni.relay.secret import Secret

logger = logging.getLogger(__name__)


class PeerLinks:
    """The connections of one host to and from others. Belongs to the I/O thread.

    Each host connects to those that it sends to, and first says which connection to the front end it has. One that the
    front end has lost has an older one than others know, and is not heard.

    Args:
        address: of this host, where the others reach it.
        on_flow: called with the messages of another host.
        on_lost: called with the name of a host to which a connection has ended: what was sent may be lost.
        port: 0: a free one.

    Attributes:
        link: where the others connect.

    Raises:
        OSError, zmq.ZMQError: the address cannot be listened at.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        secret: Secret,
        address: str,
        on_flow: Callable[[memoryview], None],
        on_lost: Callable[[str], None],
        *,
        port: int = 0,
    ) -> None:
        self._context, self._secret = context, secret
        self._on_flow, self._on_lost = on_flow, on_lost
        self._complaints = Complaints(logger)
        self._hosts: dict[str, msg.Peer] = {}
        self._hello: msg.Hello | None = None  # of this host; None: it is not joined
        self._ways: dict[str, Wire] = {}  # to others
        self._known: dict[bytes, msg.Hello] = {}  # connections of others
        self._inbound = Wire(
            context,
            zmq.ROUTER,
            self._on_message,
            lambda: None,
            secret,
            heartbeat_ms=HEARTBEAT_MS,
            max_bytes=msg.MAX_PART_BYTES,
            on_rejected=lambda: self._complaints.warn("rejected a connection: it has not this deployment's secret"),
        )
        self.link = self._inbound.bind(address, port)

    def join(self, own: msg.Hello) -> None:
        """The front end is joined: learn what others are to know of this connection."""
        self.leave()
        self._hello = own

    def leave(self) -> None:
        """The front end is lost: nothing is sent or heard until it is joined again."""
        for host in list(self._ways):
            self._end(host)
        self._hello = None
        self._hosts.clear()
        self._known.clear()

    def update(self, hosts: Mapping[str, msg.Peer]) -> None:
        """Learn where others are; connections to earlier ones end, and those of earlier ones are not heard."""
        for host, peer in hosts.items():
            if host in self._ways and self._hosts.get(host) != peer:
                self._end(host)
            self._hosts[host] = peer
        self._known = {name: one for name, one in self._known.items() if self._is_current(one)}

    def send(self, host: str, data: bytes) -> None:
        """Send messages to the controllers of another host; dropped if there is none, as are its calls."""
        if self._hello is None or host not in self._hosts or not self._hosts[host].link:
            return
        try:
            way = self._ways.get(host)
            if way is None:
                way = self._ways[host] = self._connect(host)
            way.send(msg.pack_flow(data))
        except (OSError, zmq.ZMQError) as exc:  # a connection has ended, or no descriptor is free
            self._complaints.warn("messages for host %r cannot be sent: %s", host, exc)
            self._lose(host)

    def close(self) -> None:
        self.leave()
        self._inbound.close()

    def _connect(self, host: str) -> Wire:
        assert self._hello is not None
        way = Wire(
            self._context,
            zmq.DEALER,
            lambda frames: None,  # it sends on its own connection
            lambda: self._lose(host) if self._ways.get(host) is way else None,
            self._secret,
            heartbeat_ms=HEARTBEAT_MS,
            max_bytes=msg.MAX_PART_BYTES,
        )
        way.connect(self._hosts[host].link)
        way.send([msg.encode(self._hello)])
        return way

    def _lose(self, host: str) -> None:
        self._end(host)
        self._on_lost(host)

    def _end(self, host: str) -> None:
        if (way := self._ways.pop(host, None)) is not None:
            way.close()

    def _on_message(self, frames: list[zmq.Frame]) -> None:
        name = frames[0].bytes
        try:
            message = msg.decode_between_hosts(frames[1].buffer)
            if isinstance(message, msg.Hello):
                if self._is_current(message):
                    self._known[name] = message
            elif self._hello is not None and name in self._known:
                self._on_flow(msg.join_one(message.parts, frames[2:]))
        except (msgspec.MsgspecError, ValueError, IndexError) as exc:
            self._complaints.warn("dropped a message of another host: %s", exc)

    def _is_current(self, hello: msg.Hello) -> bool:
        """Whether the front end has not lost that connection. This host may learn of a new one later than of calls."""
        peer = self._hosts.get(hello.host)
        return peer is None or hello.session >= peer.session
