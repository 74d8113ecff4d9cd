"""``HostListener``: the port of a front end, at which other hosts join it and serve its stages.

Everything but the constructor and ``close`` runs on the I/O thread. A host is a connection: when that ends, by its own
end or because its machine is silent, its engines have failed, and what would still come from them has another
connection, or another number of a start, and is dropped. So nothing is answered by two engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import zmq

from vllm_omni.complaints import Complaints
from vllm_omni.errors import ConfigError, RelayError
from vllm_omni.hosts import messages as msg
from vllm_omni.hosts.bridge import ClientBridge
from vllm_omni.hosts.endpoint import WILDCARDS, Endpoint
from vllm_omni.hosts.remote_engine import EngineRunThere, HostGone, RemoteEngine
from vllm_omni.names import suggest
from vllm_omni.relay.io_thread import block_on, io_thread
from vllm_omni.relay.remote.wire import Wire
from vllm_omni.relay.secret import Secret

if TYPE_CHECKING:
    from torch.distributed import TCPStore

logger = logging.getLogger(__name__)

# A host that is silent for as long as both together is lost: requests that wait for it fail or move within 3 s.
HEARTBEAT_MS = (500, 1500)
PROBE_AFTER_S = (0.0, 0.02, 0.1, 0.4)  # ZMQ reports the end of a connection before it has removed it
CLOSE_TIMEOUT_S = 10.0
BYE_TIMEOUT_S = 2.0
MAX_PEERS = 4096
GONE = "its host {host!r} ({address}) does not answer any longer"


@dataclass(eq=False)
class Peer:
    """A host that has joined."""

    name: bytes  # of its connection, in ZMQ
    address: str
    program: str
    link: str  # where the controllers of other hosts connect
    session: int
    engines: list[RemoteEngine] = field(default_factory=list)

    @property
    def host(self) -> str:
        """Its name in the deployment."""
        return self.engines[0].host


class Controllers(Protocol):
    """The front end's side of controllers on hosts, on the I/O thread; see ``engine/remote_controllers.py``."""

    def receive(self, data: memoryview) -> None:
        """Take messages of controllers on a host."""

    def end(self, engine: RemoteEngine, reason: str) -> None:
        """An engine has ended; its controller is there."""

    def lose(self, engines: Sequence[RemoteEngine], reason: str) -> None:
        """The host of these engines is lost, and with it what runs on their controllers."""

    def count(self, engine: RemoteEngine, data: memoryview) -> None:
        """Take what an engine has counted."""


class HostListener:
    """Waits for hosts. Closed by ``close``, which ends their engines.

    Args:
        endpoint: where to listen: one interface, which the hosts reach.
        identity: of this front end; hosts must have the same.
        config: the deployment, for the hosts.

    Attributes:
        engines: by name; those that hosts serve.
        address: where it listens, numeric.
    """

    def __init__(self, endpoint: Endpoint, secret: Secret, identity: msg.Identity, config: bytes) -> None:
        self._endpoint, self._secret = endpoint, secret
        self._identity, self._config = identity, config
        self.engines: dict[str, RemoteEngine] = {}
        self.address = ""
        self.is_closed = False
        self._complaints = Complaints(logger)
        self._peers: dict[bytes, Peer] = {}
        self._by_host: dict[str, Peer] = {}
        self._runs: dict[int, RemoteEngine] = {}  # by the number of the start
        self._next_number = 0
        self._next_session = time.time_ns()  # larger than those of a front end that was here before
        self.controllers: Controllers | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._wire: Wire | None = None
        self._has_none = asyncio.Event()  # set when the last host has left a closed listener

    def add(self, name: str, stage: str, host: str, first: RemoteEngine | None = None) -> RemoteEngine:
        """Add an engine for a host to serve, or a part of one; before ``open``.

        Args:
            first: the first part of its engine; None: it is the first.
        """
        parts = [] if first is None else first.parts
        engine = self.engines[name] = RemoteEngine(self, name, stage, host, parts=parts)
        return engine

    def open(self) -> None:
        """Start to listen.

        Raises:
            ConfigError: the address cannot be listened at.
        """
        try:
            if self._endpoint.host in WILDCARDS:
                raise ValueError("it stands for all interfaces; give the address of the one that the hosts reach")
            numeric = self._endpoint.resolve()
            self.address = numeric.host
            block_on(self._bind(numeric), CLOSE_TIMEOUT_S, "a socket")
        except (OSError, ValueError, zmq.ZMQError, RelayError) as exc:
            self._context.destroy(linger=0)
            raise ConfigError(f"listen = {self._endpoint}: cannot be listened at: {exc}") from exc
        logger.info("hosts join at %s", self._endpoint)

    def fail(self, host: str, reason: str) -> None:
        """Let the engines that wait for a host fail, until it joins after all."""
        for engine in self.engines.values():
            if engine.host == host:
                with engine.changed:
                    engine.why_no_host = reason
                    engine.changed.notify_all()

    def how_to_join(self, engine: RemoteEngine) -> str:
        stages = " ".join(f"--stage {one.name}" for one in self.engines.values() if one.host == engine.host)
        return f"vllm serve MODEL --omni --headless {stages} --join {self._endpoint} --token-file FILE"

    def close(self) -> None:
        """End the engines of all hosts, and stop listening; a second call does nothing."""
        if self.is_closed:
            return
        self.is_closed = True
        for engine in self.engines.values():
            with engine.changed:
                engine.changed.notify_all()
        # At the interpreter's exit the thread may have ended; hosts then notice the end of the connection.
        if self._wire is not None and io_thread().loop.is_running():
            block_on(self._close(), CLOSE_TIMEOUT_S, "the end of the hosts' connections")

    # -- I/O thread ---------------------------------------------------------------------------------------------------

    async def _bind(self, endpoint: Endpoint) -> None:
        self._wire = Wire(
            self._context,
            zmq.ROUTER,
            self._on_message,
            self._on_lost,
            self._secret,
            heartbeat_ms=HEARTBEAT_MS,
            max_bytes=msg.MAX_PART_BYTES,
            on_rejected=self._on_rejected,
        )
        try:
            self._wire.bind(*endpoint)
        except (OSError, zmq.ZMQError):
            self._wire = None
            raise

    async def _close(self) -> None:
        assert self._wire is not None
        for peer in list(self._peers):
            self._send(peer, msg.Bye())
        with contextlib.suppress(TimeoutError):  # a host ends the connection when it has read this
            async with asyncio.timeout(BYE_TIMEOUT_S if self._peers else 0):
                await self._has_none.wait()
        for engine in self._runs.values():
            if engine.run is not None and engine.run.bridge is not None:
                engine.run.bridge.close()
        self._wire.close()
        self._context.destroy(linger=0)

    async def open_run(
        self,
        engine: RemoteEngine,
        peers: Sequence[Peer],
        directory: Path,
        options: dict[str, Any],
        *,
        log_stats: bool,
        farewell: bytes,
        store: TCPStore | None,
    ) -> dict[str, str]:
        """See ``RemoteEngine.launch``.

        Args:
            peers: the host of each part.
            store: of the ranks of an engine with several parts.
        """
        for part, peer in zip(engine.parts, peers, strict=True):
            if part.peer is not peer:
                raise HostGone(GONE.format(host=part.host, address=peer.address))
        first = self._next_number + 1
        addresses, bridge = self._open_bridge(first, peers[0], directory)
        for rank, (part, peer) in enumerate(zip(engine.parts, peers, strict=True)):
            self._next_number += 1
            part.run = EngineRunThere(self._next_number, peer, bridge if rank == 0 else None, farewell, store)
            self._runs[self._next_number] = part
        for rank, part in enumerate(engine.parts):
            node = None if store is None else msg.Node(rank, self.address, store.port)
            self._send(peers[rank].name, msg.Start(first + rank, part.name, options, log_stats, node))
        return addresses

    def _open_bridge(self, number: int, peer: Peer, directory: Path) -> tuple[dict[str, str], ClientBridge]:
        addresses = {f"{way}_address": f"ipc://{directory}/host-{number}-{way}" for way in ("input", "output")}

        def send_request(frames: Sequence[Any]) -> None:
            counts, parts = msg.split(frames)
            self._send(peer.name, msg.Request(number, counts), parts)

        return addresses, ClientBridge(self._context, **addresses, on_request=send_request)

    def send_flow(self, host: str, data: bytes) -> None:
        """Send messages to the controllers of a host; dropped if there is none, as are its calls."""
        if (peer := self._by_host.get(host)) is not None:
            counts, parts = msg.split([data])
            self._send(peer.name, msg.Flow(counts), parts)

    async def end_run(self, engine: RemoteEngine) -> None:
        """See ``RemoteEngine.end``."""
        self.kill(engine)
        for part in engine.parts:
            if part.run is not None:
                self._runs.pop(part.run.number, None)
                if part.run.bridge is not None:
                    part.run.bridge.close()
                part.run = None

    def kill(self, engine: RemoteEngine) -> None:
        for run in [part.run for part in engine.parts]:
            if run is not None and run.failure is None:
                self._send(run.peer.name, msg.Kill(run.number))

    def _send(self, peer: bytes, message: msg.ToHost, frames: Sequence[Any] = ()) -> None:
        assert self._wire is not None
        try:
            self._wire.send([peer, msg.encode(message), *frames])
        except ConnectionError:
            self._lose(peer)

    def _on_message(self, frames: list[zmq.Frame]) -> None:
        name = frames[0].bytes
        try:
            message = msg.decode_to_front_end(frames[1].buffer)
            if isinstance(message, msg.Join):
                self._join(name, message)
            elif name not in self._peers:
                raise ValueError(f"a {type(message).__name__} of a host that has not joined")
            else:
                self._handle(self._peers[name], message, frames[2:])
        except (msgspec.MsgspecError, ValueError, IndexError) as exc:
            self._complaints.warn("dropped a message of a host: %s", exc)

    def _handle(self, peer: Peer, message: msg.ToFrontEnd, parts: list[zmq.Frame]) -> None:
        assert not isinstance(message, msg.Join)
        if isinstance(message, msg.Flow):
            if self.controllers is not None:
                self.controllers.receive(msg.join_one(message.parts, parts))
            return
        engine = self._runs.get(message.number)
        run = None if engine is None else engine.run
        if engine is not None and run is not None and run.peer is peer and run.failure is None:
            self._handle_of_run(engine, run, message, parts)  # and not of an earlier start

    def _handle_of_run(
        self,
        engine: RemoteEngine,
        run: EngineRunThere,
        message: msg.Ready | msg.Output | msg.Ended | msg.Usage | msg.Statistics,
        parts: list[zmq.Frame],
    ) -> None:
        match message:
            case msg.Ready(_, counts) if run.bridge is not None:
                run.bridge.ready(msg.join_parts(counts, parts))
            case msg.Output(_, counts) if run.bridge is not None:
                run.bridge.put(msg.join_parts(counts, parts))
            case msg.Ended(_, reason):
                self._end(engine, run, reason if len(engine.parts) == 1 else f"on host {engine.host!r}: {reason}")
                if self.controllers is not None:
                    self.controllers.end(engine, reason)
            case msg.Usage():
                run.usage = message
            case msg.Statistics(_, counts) if self.controllers is not None:
                self.controllers.count(engine, msg.join_one(counts, parts))

    def _end(self, engine: RemoteEngine, run: EngineRunThere, reason: str) -> None:
        """Note the end of an engine, or of a part: then the others, which would wait for it, are killed."""
        if run.failure is not None:
            return
        run.failure = reason
        others = [part.run for part in engine.parts if part.run is not None and part.run.failure is None]
        for other in others:
            other.failure = reason
        for one in (run, *others):
            if one.bridge is not None:
                one.bridge.fail(one.farewell)
        for other in others:
            self._send(other.peer.name, msg.Kill(other.number))

    # -- hosts that join and leave ------------------------------------------------------------------------------------

    def _join(self, name: bytes, join: msg.Join) -> None:
        try:
            engines = self._find_engines(name, join)
        except ConfigError as exc:
            logger.warning("host %s cannot join: %s", join.address, exc)
            self._send(name, msg.Rejected(str(exc)[: msg.MAX_TEXT]))
            return
        self._next_session += 1
        peer = Peer(name, join.address, join.program, join.link, self._next_session, engines)
        self._send(name, msg.Joined([engine.name for engine in engines], self._config, peer.host, peer.session))
        others = {one.host: msg.Peer(one.link, one.session) for one in self._peers.values()}
        self._peers[name] = self._by_host[peer.host] = peer
        self._send(name, msg.Peers(others))
        self._announce(peer.host, msg.Peer(peer.link, peer.session), but=name)
        for engine in engines:
            logger.info("stage %s: host %r has joined from %s", engine.name, engine.host, peer.address)
            with engine.changed:
                engine.peer, engine.why_no_host = peer, ""
                engine.changed.notify_all()

    def _announce(self, host: str, peer: msg.Peer, *, but: bytes = b"") -> None:
        for name in [one for one in self._peers if one != but]:
            self._send(name, msg.Peers({host: peer}))

    def _find_engines(self, name: bytes, join: msg.Join) -> list[RemoteEngine]:
        """The engines that a host asks to serve.

        Raises:
            ConfigError: it differs from this one, or they are not there for it.
        """
        if join.protocol != msg.PROTOCOL:
            raise ConfigError(f"it joins by protocol {join.protocol}, and the front end has {msg.PROTOCOL}")
        if different := self._identity.differences(join.identity):
            raise ConfigError(f"it differs from the front end's host: {'; '.join(different)}")
        if name in self._peers or len(self._peers) >= MAX_PEERS:
            raise ConfigError(f"it has joined already, or {MAX_PEERS} others have")
        for peer in [one for one in self._peers.values() if one.program == join.program]:
            self._lose(peer.name)  # it has ended that connection, which is not noticed yet
        found: list[RemoteEngine] = []
        for stage in join.stages:
            found.append(self._find_engine(stage, found))
        self._check_complete(found)
        return found

    def _check_complete(self, found: Sequence[RemoteEngine]) -> None:
        """Raises ``ConfigError`` if the deployment has further engines on the hosts of these."""
        for engine in found:
            with_it = [one for one in self.engines.values() if one.host == engine.host and one not in found]
            if with_it:
                more = " ".join(f"--stage {one.name}" for one in with_it)
                raise ConfigError(f"the deployment has further stages on host {engine.host!r}: give {more} as well")

    def _find_engine(self, stage: str, taken: Sequence[RemoteEngine]) -> RemoteEngine:
        own = [one for one in self.engines.values() if stage in (one.name, one.stage, one.part_name)]
        if not own:
            raise ConfigError(f"no stage {stage!r} is for another host: {suggest(stage, list(self.engines))}")
        free = [one for one in own if one.peer is None and one not in taken]
        if not free:
            where = own[0].peer.address if own[0].peer is not None else "the same host"
            raise ConfigError(f"stage {stage!r} is served by {where} already")
        return free[0]

    def _on_lost(self) -> None:
        """A connection has ended. ZMQ does not say which one: a message to it will fail."""
        for delay_s in PROBE_AFTER_S:
            io_thread().loop.call_later(delay_s, self._probe)

    def _on_rejected(self) -> None:
        self._complaints.warn("rejected a connection at %s: it has not this deployment's secret", self._endpoint)

    def _probe(self) -> None:
        for peer in list(self._peers):
            self._send(peer, msg.Probe())

    def _lose(self, name: bytes) -> None:
        peer = self._peers.pop(name, None)
        if self.is_closed and not self._peers:
            self._has_none.set()
        if peer is None or self.is_closed:
            return
        del self._by_host[peer.host]
        for engine in peer.engines:
            reason = GONE.format(host=engine.host, address=peer.address)
            logger.error("stage %s: %s; it waits for a host: %s", engine.name, reason, self.how_to_join(engine))
            with engine.changed:
                engine.peer = None
            if engine.run is not None and engine.run.peer is peer:
                self._end(engine, engine.run, reason)
        if self.controllers is not None:
            self.controllers.lose(peer.engines, GONE.format(host=peer.host, address=peer.address))
        self._announce(peer.host, msg.Peer("", peer.session + 1))
