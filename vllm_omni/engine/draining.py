"""``drain`` and ``undrain``: take engines out of service, one or all of a host, while requests run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from vllm_omni.engine.group import EngineGroup
from vllm_omni.engine.node import ServedNode
from vllm_omni.engine.stage import StageEngine
from vllm_omni.errors import InvalidRequest
from vllm_omni.names import suggest
from vllm_omni.process.status import StageState, StageStatus

POLL_S = 0.05


@dataclass(frozen=True)
class DrainedEngine:
    """One of the engines that a call has named."""

    engine: str
    num_requests: int
    is_idle: bool  # no request needs it, and no stage reads what it has made
    status: StageStatus

    def report(self) -> dict[str, Any]:
        """As the routes answer."""
        counts = {"engine": self.engine, "num_requests": self.num_requests, "is_idle": self.is_idle}
        return counts | asdict(self.status)


@dataclass(frozen=True)
class HostStatus:
    """Another host than the front end's."""

    engines: list[str]  # that run there, or are restarted
    address: str | None  # None: it has not joined, or is lost
    is_drained: bool


class Draining:
    """Drains the engines of a server, by their names or those of their hosts. Belongs to the requests' event loop.

    Args:
        engines: by name.
        nodes: by stage.
        hosts: the names of the other hosts, also of those without an engine -> where they are.

    Attributes:
        drained_hosts: those that were drained by their names.
    """

    def __init__(
        self,
        engines: Mapping[str, StageEngine],
        nodes: Mapping[str, ServedNode],
        hosts: Callable[[], Mapping[str, str | None]],
    ) -> None:
        self._engines = engines
        self._nodes = nodes
        self._hosts = hosts
        self.drained_hosts: set[str] = set()

    async def drain(self, name: str, timeout_s: float) -> list[DrainedEngine]:
        """Give engines no new requests, and wait until they are idle or the time is over.

        They stay drained until ``undrain``, also while they or their host are restarted.

        Args:
            name: of an engine or a host.

        Raises:
            InvalidRequest: there is no such name; or a stage would be left without an engine that gets requests, and
                nothing is drained.
        """
        engines = self._find(name)
        self._set_drained(name, engines)
        if name in self._hosts():
            self.drained_hosts.add(name)
        deadline = time.monotonic() + timeout_s
        return list(await asyncio.gather(*(self._wait_until_idle(engine, deadline) for engine in engines)))

    def undrain(self, name: str) -> list[DrainedEngine]:
        """Give drained engines requests again.

        Args:
            name: of an engine or a host.

        Raises:
            InvalidRequest: there is no such name.
        """
        engines = self._find(name)
        for engine in engines:
            engine.set_drained(False)
            self.drained_hosts.difference_update(engine.config.part_hosts)  # a part of it is back
        self.drained_hosts.discard(name)
        return [DrainedEngine(one.name, one.num_requests, False, one.current_status()) for one in engines]

    def host_report(self) -> dict[str, HostStatus]:
        """The other hosts of the deployment, by their names there."""
        return {
            name: HostStatus([one.name for one in self._engines_on(name)], address, name in self.drained_hosts)
            for name, address in self._hosts().items()
        }

    def _engines_on(self, host: str) -> list[StageEngine]:
        return [engine for engine in self._engines.values() if host in engine.config.part_hosts]

    def _find(self, name: str) -> list[StageEngine]:
        hosts = self._hosts()
        of_host = self._engines_on(name)
        if name not in self._engines:
            if name not in hosts:
                what = "engine or host" if hosts else "engine"
                raise InvalidRequest(f"no {what} {name!r}: {suggest(name, [*self._engines, *hosts])}", param="name")
            return of_host
        if name in hosts:
            names = ", ".join(engine.name for engine in of_host)
            raise InvalidRequest(f"{name!r} is an engine, and a host: give the host's engines: {names}", param="name")
        return [self._engines[name]]

    def _set_drained(self, name: str, engines: list[StageEngine]) -> None:
        changed = [engine for engine in engines if not engine.is_drained]
        for engine in changed:
            engine.set_drained(True)
        stages = dict.fromkeys(engine.config.name for engine in changed)
        left = [one for one in stages if self._nodes[one].current_status().state is not StageState.RUNNING]
        if not left:
            return
        for engine in changed:  # nothing ran meanwhile
            engine.set_drained(False)
        if name in self._engines:
            said = f"engine {name!r} cannot be drained: no other engine of its stage gets requests"
        else:
            listed = " and ".join(map(repr, left))
            said = f"host {name!r} cannot be drained: no engine elsewhere gets the requests of stage {listed}"
        raise InvalidRequest(said, param="name")

    async def _wait_until_idle(self, engine: StageEngine, deadline: float) -> DrainedEngine:
        group = self._nodes[engine.config.name]
        assert isinstance(group, EngineGroup), "the only engine of a stage is not drained"
        while not (is_idle := await group.vacate(engine.name)) and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
        return DrainedEngine(engine.name, group.num_requests(engine.name), is_idle, engine.current_status())
