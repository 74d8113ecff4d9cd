"""``RemoteEngine``: one engine that a host starts for this front end, as the threads of its stage see it."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_omni.errors import OmniError
from vllm_omni.hosts.bridge import ClientBridge
from vllm_omni.hosts.messages import Usage
from vllm_omni.hosts.rank_store import open_store
from vllm_omni.relay.io_thread import block_on, io_thread

if TYPE_CHECKING:
    from torch.distributed import TCPStore

    from vllm_omni.hosts.listener import HostListener, Peer

logger = logging.getLogger(__name__)

REPORT_S = 10.0  # how often to say what is waited for
START_TIMEOUT_S = 10.0  # to open sockets of this host


class HostGone(OmniError):
    """No host serves the engine, or the listener was closed."""


@dataclass(eq=False)
class EngineRunThere:
    """One start of an engine; belongs to the I/O thread but for ``failure`` and ``usage``."""

    number: int
    peer: Peer
    bridge: ClientBridge | None  # None: of a part that has only ranks
    farewell: bytes
    store: TCPStore | None = None  # where the ranks of an engine on several hosts exchange their addresses
    failure: str | None = None  # why it ended
    usage: Usage | None = None


@dataclass(eq=False)
class RemoteEngine:
    """An engine on another host, or its part on one of the hosts that it spans.

    The first part stands for the whole engine, which ends when one of its parts ends. Methods may be called from any
    thread.

    Attributes:
        name: of the engine, "talker" or "talker/0", or of the part, "talker/node1".
        host: the name that the deployment gives the host; engines with one name are on one host.
        parts: of its engine, this one among them.
    """

    listener: HostListener
    name: str
    stage: str
    host: str
    peer: Peer | None = None  # the host that serves it; set on the I/O thread
    run: EngineRunThere | None = None
    why_no_host: str = ""  # not empty: the one that was started for it cannot join
    changed: threading.Condition = field(default_factory=threading.Condition)
    parts: list[RemoteEngine] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.parts.append(self)

    @property
    def part_name(self) -> str:
        """Of a part its name alone, "talker/node0" of the first one; of an engine on one host its name."""
        return f"{self.stage}/node{self.parts.index(self)}" if len(self.parts) > 1 else self.name

    @property
    def has_host(self) -> bool:
        """Whether each part has one."""
        return all(part.peer is not None for part in self.parts)

    @property
    def address(self) -> str | None:
        """Of the host that serves it, where its relays listen; None: none does."""
        peer = self.peer
        return None if peer is None else peer.address

    @property
    def has_ended(self) -> bool:
        """Whether the engine that was started last has ended, or its host is gone."""
        return self.failure() is not None

    def failure(self) -> str | None:
        """Why it ended: "ValueError: ...", or what became of its host."""
        run = self.run
        return None if run is None else run.failure

    def launch(
        self, directory: Path, options: dict[str, Any], *, log_stats: bool, farewell: bytes, timeout_s: float
    ) -> dict[str, str]:
        """Wait for its hosts, let them start the engine, and return the addresses that vLLM's client binds.

        Args:
            directory: private, of this server; the client's sockets are in it.
            options: ``RelayOptions`` of the engine, as plain types.
            farewell: the message with which an engine core tells its client that it dies.

        Raises:
            HostGone: no host has joined in time, or it has left again.
        """
        peers = [part.wait_for_host(timeout_s) for part in self.parts]
        store = open_store(self.listener.address) if len(self.parts) > 1 else None
        opening = self.listener.open_run(
            self, peers, directory, options, log_stats=log_stats, farewell=farewell, store=store
        )
        return block_on(opening, START_TIMEOUT_S, "sockets for an engine on another host")

    def wait_for_host(self, timeout_s: float) -> Peer:
        """Wait until a host serves the engine; what is waited for is logged.

        Raises:
            HostGone: none came in time, or the listener was closed.
        """
        deadline = time.monotonic() + timeout_s
        report_at = 0.0
        with self.changed:
            while self.peer is None:
                now = time.monotonic()
                if self.listener.is_closed:
                    raise HostGone("the server is shut down")
                if self.why_no_host:
                    raise HostGone(f"host {self.host!r} cannot join: {self.why_no_host}")
                if now >= deadline:
                    raise HostGone(f"host {self.host!r} has not joined within {timeout_s:g} s: {self.how_to_join()}")
                if now >= report_at:
                    logger.info("stage %s: waits for host %r: %s", self.name, self.host, self.how_to_join())
                    report_at = now + REPORT_S
                self.changed.wait(min(report_at, deadline) - now)
            return self.peer

    def how_to_join(self) -> str:
        """The command that gives the engine a host."""
        return self.listener.how_to_join(self)

    def pids(self) -> list[int]:
        """Ids of its processes, on their hosts."""
        return [pid for usage in self._usages() for pid in usage.pids]

    def cpu_s(self) -> float:
        return sum((part.run.usage.cpu_s for part in self.parts if part.run and part.run.usage), 0.0)

    def resident_bytes(self) -> int:
        return sum(usage.resident_bytes for usage in self._usages())

    def _usages(self) -> list[Usage]:
        runs = [part.run for part in self.parts]
        return [run.usage for run in runs if run is not None and run.failure is None and run.usage is not None]

    def kill(self) -> None:
        """Let its hosts kill its processes."""
        io_thread().call(self.listener.kill, self)

    def end(self) -> None:
        """Forget the engine that was started last, and let its hosts kill it: what it still sends is not heard."""
        block_on(self.listener.end_run(self), START_TIMEOUT_S, "the end of an engine's sockets")
