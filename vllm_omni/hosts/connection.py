"""``HostConnection``: a host's connection to its front end."""

from __future__ import annotations

import asyncio
import logging
import queue
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import zmq

from vllm_omni.complaints import Complaints
from vllm_omni.errors import ConfigError, OmniError
from vllm_omni.hosts import messages as msg
from vllm_omni.hosts.bridge import EngineBridge, Frames
from vllm_omni.hosts.endpoint import Endpoint
from vllm_omni.hosts.listener import HEARTBEAT_MS
from vllm_omni.hosts.peers import PeerLinks
from vllm_omni.relay.io_thread import block_on, io_thread
from vllm_omni.relay.remote.wire import Wire
from vllm_omni.relay.secret import Secret

logger = logging.getLogger(__name__)

RETRY_S = 0.5
REPORT_S = 10.0  # how often to say what is waited for
REACH_TIMEOUT_S = 2.0  # for one attempt to connect
ANSWER_TIMEOUT_S = 10.0  # of a front end that is connected
POLL_S = 0.25
SOCKETS_TIMEOUT_S = 10.0
NUM_WRONG_SECRETS = 3  # one handshake also fails if the front end ends meanwhile


class FrontEndLost(OmniError):
    """The connection to the front end has ended, or none was made in time."""


class Controllers(Protocol):
    """The controllers of a host, on the I/O thread; see ``engine/host_controllers.py``."""

    def receive(self, data: memoryview) -> None:
        """Take messages of the front end, or of controllers on another host."""

    def lose_peer(self, host: str) -> None:
        """What was sent to another host may be lost."""

    def end_calls(self) -> None:
        """The front end is lost, and with it all calls."""


class HostConnection:
    """One connection after another to a front end. All methods block; they belong to the host's main thread, except
    ``send``.

    Args:
        endpoint: of the front end.

    Attributes:
        inbox: messages of the front end, in their order; None: the connection has ended.
    """

    def __init__(self, endpoint: Endpoint, secret: Secret) -> None:
        self.inbox: queue.Queue[msg.ToHost | None] = queue.Queue()
        self._endpoint, self._secret = endpoint, secret
        self._complaints = Complaints(logger)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._wire: Wire | None = None
        self._bridges: dict[int, EngineBridge] = {}  # by the number of a start
        self._peers: PeerLinks | None = None
        self.controllers: Controllers | None = None  # of this host, on the I/O thread

    def join(self, join: msg.Join, timeout_s: float, should_stop: Callable[[], bool] = lambda: False) -> msg.Joined:
        """Connect and join; wait for a front end that is not there yet, and say so every ``REPORT_S``.

        Raises:
            FrontEndLost: there was none in time, or ``should_stop``.
            ConfigError: the front end rejects the host, or does not know its secret.
        """
        deadline, report_at = time.monotonic() + timeout_s, 0.0
        num_wrong = 0
        while True:
            why = self._connect(join, deadline)
            if isinstance(why, msg.Joined):
                return why
            if isinstance(why, msg.Rejected):
                raise ConfigError(f"the front end at {self._endpoint} rejects this host: {why.reason}")
            num_wrong = num_wrong + 1 if why is WRONG_SECRET else 0
            if num_wrong == NUM_WRONG_SECRETS:
                raise ConfigError(
                    f"the front end at {self._endpoint} does not accept the secret of this host's token file: "
                    "give both the same"
                )
            now = time.monotonic()
            if now >= deadline or should_stop():
                raise FrontEndLost(f"no front end at {self._endpoint} within {timeout_s:g} s: {why}")
            if now >= report_at:
                logger.info("waits for the front end at %s: %s", self._endpoint, why)
                report_at = now + REPORT_S
            time.sleep(min(RETRY_S, deadline - now))

    def _connect(self, join: msg.Join, deadline: float) -> msg.Joined | msg.Rejected | str:
        """One attempt; returns the answer, or why there is none.

        A new one reaches a front end that is back sooner than TCP, which repeats itself ever less often.
        """
        self.disconnect()
        try:
            wire = block_on(self._open(f"tcp://{self._endpoint.resolve()}", join), SOCKETS_TIMEOUT_S, "a socket")
        except (OSError, zmq.ZMQError) as exc:
            return str(exc)
        started = time.monotonic()
        deadline = min(deadline, started + ANSWER_TIMEOUT_S)
        while (now := time.monotonic()) < deadline:
            if not wire.has_reached and now > started + REACH_TIMEOUT_S:
                return f"it was not reached within {REACH_TIMEOUT_S:g} s"
            try:
                answer = self.inbox.get(timeout=min(POLL_S, deadline - now))
            except queue.Empty:
                continue
            if isinstance(answer, msg.Joined | msg.Rejected):
                return answer
            if answer is None:
                return WRONG_SECRET if wire.has_reached and not wire.is_secure else "the connection was refused"
        return "it does not answer"

    def send(self, message: msg.ToFrontEnd) -> None:
        """Send a message, from any thread; without a connection it is dropped."""
        io_thread().call(self._send, message)

    def listen(self, address: str) -> str:
        """Listen for the controllers of other hosts at an address of this one; returns where they connect.

        Raises:
            ConfigError: it cannot be listened at.
        """
        try:
            return block_on(self._listen(address), SOCKETS_TIMEOUT_S, "a socket")
        except (OSError, zmq.ZMQError) as exc:
            raise ConfigError(f"{address}: cannot be listened at: {exc}") from exc

    def send_flow(self, host: str | None, data: bytes) -> None:
        """Send messages of the graph to another host, or to the front end (None), from any thread."""
        io_thread().call(self._send_flow, host, data)

    def send_statistics(self, number: int, data: bytes) -> None:
        """Send what an engine has counted, from any thread."""
        counts, parts = msg.split([data])
        io_thread().call(self._send, msg.Statistics(number, counts), parts)

    def open_bridge(self, number: int, directory: Path, *, is_held: bool = False) -> dict[str, list[str]]:
        """Make the sockets to which an engine core connects; returns their addresses as vLLM's launcher takes them.

        Args:
            is_held: the front end learns that the engine core is ready when ``release_bridge`` is called.
        """
        addresses = {f"{way}_address": f"ipc://{directory}/engine-{number}-{way}" for way in ("input", "output")}
        block_on(self._open_bridge(number, addresses, is_held), SOCKETS_TIMEOUT_S, "sockets for an engine")
        return {"inputs": [addresses["input_address"]], "outputs": [addresses["output_address"]]}

    def release_bridge(self, number: int) -> None:
        """See ``open_bridge``."""
        io_thread().call(self._release_bridge, number)

    def close_bridge(self, number: int) -> None:
        """Close them: nothing of this start is sent any longer."""
        block_on(self._close_bridge(number), SOCKETS_TIMEOUT_S, "the end of an engine's sockets")

    def ask_engine(self, number: int, requests: Sequence[Frames], on_output: Callable[[Frames], None]) -> bool:
        """Give an engine core requests of this host; its outputs go to ``on_output``, on the I/O thread, until
        ``continue_as``. False: it is not ready."""
        return block_on(self._ask_engine(number, requests, on_output), SOCKETS_TIMEOUT_S, "an engine's sockets")

    def continue_as(self, number: int, to: int) -> None:
        """Let an engine core that was ready as of one start serve another one, from its first message on."""
        block_on(self._rename(number, to), SOCKETS_TIMEOUT_S, "an engine's sockets")

    def disconnect(self) -> None:
        """End the connection; what was received of it is forgotten."""
        block_on(self._disconnect(), SOCKETS_TIMEOUT_S, "the end of the connection")
        with_messages = True
        while with_messages:
            try:
                self.inbox.get_nowait()
            except queue.Empty:
                with_messages = False

    def close(self) -> None:
        """End the connection and close all sockets."""
        self.disconnect()
        block_on(self._close_all(), SOCKETS_TIMEOUT_S, "the end of the sockets")

    # -- I/O thread ---------------------------------------------------------------------------------------------------

    async def _open(self, address: str, join: msg.Join) -> Wire:
        self._wire = wire = Wire(
            self._context,
            zmq.DEALER,
            self._on_message,
            self._on_lost,
            self._secret,
            heartbeat_ms=HEARTBEAT_MS,
            max_bytes=msg.MAX_PART_BYTES,
        )
        wire.connect(address)
        self._send(join)
        return wire

    async def _disconnect(self) -> None:
        self._close()
        await asyncio.sleep(0)  # callbacks of the socket that were due

    async def _listen(self, address: str) -> str:
        self._peers = PeerLinks(self._context, self._secret, address, self._on_flow, self._on_peer_lost)
        return self._peers.link

    def _on_flow(self, data: memoryview) -> None:
        if self.controllers is not None:
            self.controllers.receive(data)

    def _on_peer_lost(self, host: str) -> None:
        if self.controllers is not None:
            self.controllers.lose_peer(host)

    def _send_flow(self, host: str | None, data: bytes) -> None:
        if host is not None:
            assert self._peers is not None, "listen was called"
            self._peers.send(host, data)
        elif self._wire is not None:
            self._wire.send(msg.pack_flow(data))

    async def _open_bridge(self, number: int, addresses: dict[str, str], is_held: bool) -> None:
        on_ready, on_output = self._senders(number)
        bridge = EngineBridge(self._context, **addresses, on_ready=on_ready, on_output=on_output)
        bridge.is_held = is_held
        self._bridges[number] = bridge

    def _release_bridge(self, number: int) -> None:
        if (bridge := self._bridges.get(number)) is not None:
            bridge.release()

    def _senders(self, number: int) -> tuple[Callable[[Frames], None], Callable[[Frames], None]]:
        """What sends an engine core's first message, and its outputs, as of one start."""

        def send_ready(frames: Frames) -> None:
            counts, parts = msg.split(frames)
            self._send(msg.Ready(number, counts), parts)

        def send_output(frames: Frames) -> None:
            counts, parts = msg.split(frames)
            self._send(msg.Output(number, counts), parts)

        return send_ready, send_output

    async def _ask_engine(self, number: int, requests: Sequence[Frames], on_output: Callable[[Frames], None]) -> bool:
        bridge = self._bridges.get(number)
        if bridge is None or not bridge.first:
            return False
        bridge.on_output = on_output
        for frames in requests:
            bridge.request(frames)
        return True

    async def _rename(self, number: int, to: int) -> None:
        bridge = self._bridges[to] = self._bridges.pop(number)
        bridge.on_ready, bridge.on_output = self._senders(to)
        bridge.on_ready(bridge.first)

    async def _close_all(self) -> None:
        for bridge in self._bridges.values():
            bridge.close()
        self._bridges.clear()
        if self._peers is not None:
            self._peers.close()
        self._context.destroy(linger=0)

    async def _close_bridge(self, number: int) -> None:
        if (bridge := self._bridges.pop(number, None)) is not None:
            bridge.close()

    def _send(self, message: msg.ToFrontEnd, parts: Sequence[Any] = ()) -> None:
        if self._wire is not None:
            self._wire.send([msg.encode(message), *parts])

    def _on_message(self, frames: list[zmq.Frame]) -> None:
        try:
            message = msg.decode_to_host(frames[0].buffer)
            match message:
                case msg.Request(number, parts):
                    if (bridge := self._bridges.get(number)) is not None:
                        bridge.request(msg.join_parts(parts, frames[1:]))
                case msg.Flow(parts):
                    self._on_flow(msg.join_one(parts, frames[1:]))
                case msg.Peers(hosts):
                    if self._peers is not None:
                        self._peers.update(hosts)
                case msg.Probe():
                    pass
                case _:
                    if isinstance(message, msg.Joined) and self._peers is not None:
                        self._peers.join(msg.Hello(message.host, message.session))
                    self.inbox.put(message)
            if isinstance(message, msg.Bye):
                self._close()
        except (msgspec.MsgspecError, ValueError) as exc:
            self._complaints.warn("dropped a message of the front end: %s", exc)

    def _on_lost(self) -> None:
        if self._wire is not None:
            self._close()
            self.inbox.put(None)

    def _close(self) -> None:
        if self._wire is not None:
            self._wire.close()
            self._wire = None
            if self._peers is not None:
                self._peers.leave()
            if self.controllers is not None:
                self.controllers.end_calls()
            for bridge in self._bridges.values():  # what engines still send belongs to this connection
                bridge.mute()


WRONG_SECRET = "it ended the connection before it was secure: it has another secret, or no such port"
