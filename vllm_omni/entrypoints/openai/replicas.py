"""``Membership``: what a server publishes of its replicas, and knows of those of other servers; ``GET /replicas``.

A server balances requests between its own engines alone: their supervisors report to it directly, and sooner than any
registry. What it publishes is for balancers in front of several servers, and for operators.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from argparse import Namespace
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from msgspec import to_builtins

from vllm_omni.engine.group import EngineGroup
from vllm_omni.engine.orchestrator import Orchestrator
from vllm_omni.engine.running import STOPPING
from vllm_omni.errors import RegistryUnavailable
from vllm_omni.flow.remote.registry import HEARTBEAT_S, Replica
from vllm_omni.process.status import StageState, StageStatus

if TYPE_CHECKING:
    from vllm_omni.flow.remote.registry.redis import RedisRegistry

logger = logging.getLogger(__name__)

replicas_router = APIRouter()


@replicas_router.get("/replicas")
async def replicas(raw_request: Request) -> JSONResponse:
    """The engines of every server that shares this one's registry, as each has described them last."""
    membership: Membership = raw_request.app.state.membership
    return JSONResponse(membership.report())


class Membership:
    """Joins a registry with this server's engines, renews the lease with each heartbeat, and leaves at the end.

    While the registry does not answer, the server continues: ``report`` has its own engines as they are, and those of
    others as they were, with the age of that knowledge.

    Args:
        registry: None: the server knows its own engines alone.
        address: of this server, for clients.
        model: the name under which it serves.
    """

    def __init__(
        self,
        orchestrator: Orchestrator,
        registry: RedisRegistry | None,
        address: str,
        model: str,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self._orchestrator = orchestrator
        self._registry = registry
        self._address = address
        self._model = model
        self._heartbeat_s = heartbeat_s
        # Not the address alone: another server may start there before the lease of the one before it has ended.
        self.server = f"{socket.gethostname()}-{os.getpid()}-{os.urandom(3).hex()}"
        self._others: tuple[Replica, ...] = ()
        self._read_at: float | None = None  # when the registry answered last
        self._failure: str | None = None  # why it does not answer now
        self._stopped = asyncio.Event()

    def own(self) -> tuple[Replica, ...]:
        """This server's engines as they are now."""
        orchestrator = self._orchestrator
        work: dict[str, float] = {}
        for node in orchestrator.nodes.values():
            if isinstance(node, EngineGroup):
                work |= node.router.statistics().work
        return tuple(
            Replica(
                *(self.server, name, self._address, self._model),
                *self._state_of(engine.current_status()),
                engine.num_requests,
                work.get(name, 0.0),
                engine.current_status().num_restarts,
            )
            for name, engine in orchestrator.engines.items()
        )

    def _state_of(self, status: StageStatus) -> tuple[str, str | None]:
        if status.state is StageState.RUNNING and self._orchestrator.requests.is_draining:
            return StageState.DRAINED.value, STOPPING
        return status.state.value, status.reason

    def report(self) -> dict[str, Any]:
        """What ``GET /replicas`` answers."""
        everyone = [to_builtins(one) for one in (*self.own(), *self._others)]
        report: dict[str, Any] = {"server": self.server, "replicas": everyone, "registry": None}
        if self._registry is not None:
            age_s = None if self._read_at is None else round(time.monotonic() - self._read_at, 1)
            report["registry"] = {"url": self._registry.where, "age_s": age_s, "error": self._failure}
        return report

    @asynccontextmanager
    async def joined(self) -> AsyncIterator[None]:
        """Be a member inside the block. The end takes as long as two answers of the registry may, at most."""
        if self._registry is None:
            yield
            return
        beating = asyncio.create_task(self._beat(self._registry), name="replica-registry")
        try:
            yield
        finally:
            self._stopped.set()
            await beating  # not cancelled: a heartbeat in flight must not bring back the server that has left
            with suppress(RegistryUnavailable):  # the lease expires
                await self._registry.withdraw(self.server)
            await self._registry.aclose()

    async def _beat(self, registry: RedisRegistry) -> None:
        while not self._stopped.is_set():
            try:
                await registry.publish(self.server, self.own())
                everyone = await registry.replicas()
            except RegistryUnavailable as exc:
                self._note(str(exc))
            else:
                self._others = tuple(one for one in everyone if one.server != self.server)
                self._read_at = time.monotonic()
                self._note(None)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopped.wait(), self._heartbeat_s)

    def _note(self, failure: str | None) -> None:
        """Log that the registry is away, and that it is back, once each."""
        if failure is not None and self._failure is None:
            logger.warning("%s; this server continues, and others stop seeing its replicas", failure)
        elif failure is None and self._failure is not None:
            logger.info("the registry of replicas answers again")
        self._failure = failure


def open_registry(url: str | None) -> RedisRegistry | None:
    """Make the client of ``--replica-registry``; nothing is sent yet.

    Raises:
        ConfigError: not a URL of Redis.
        MissingDependency: the extra ``redis`` is not installed.
    """
    if url is None:
        return None
    from vllm_omni.flow.remote.registry.redis import RedisRegistry

    return RedisRegistry(url)


def address_of(args: Namespace) -> str:
    """Where clients on other hosts reach the server."""
    if args.uds:
        return f"unix:{args.uds}"
    host = socket.gethostname() if args.host in (None, "", "0.0.0.0", "::") else args.host
    return f"{'https' if args.ssl_certfile else 'http'}://{f'[{host}]' if ':' in host else host}:{args.port}"
