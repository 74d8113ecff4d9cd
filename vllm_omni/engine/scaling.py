"""``Scaling``: how many replicas of a stage run, changed while requests run.

From: Omni-Flow, section 6 (the replica as the unit of resources). A replica that starts moves nothing that runs; one
that ends is drained first, so that no request notices.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm_omni import envs
from vllm_omni.config import OmniConfig, StageConfig
from vllm_omni.config.epd import Instance
from vllm_omni.engine.draining import POLL_S, Draining
from vllm_omni.engine.engine_maker import EngineMaker
from vllm_omni.engine.memory import memory_sections
from vllm_omni.engine.node import ServedNode
from vllm_omni.engine.queue_limits import QueueLimits
from vllm_omni.engine.replicas import ReplicaGroup, make_replicas
from vllm_omni.engine.stage import StageEngine
from vllm_omni.engine.startup import RunningEngines
from vllm_omni.errors import InvalidRequest, OmniError, StageFailed
from vllm_omni.names import suggest
from vllm_omni.relay.hub import RelayOptions

logger = logging.getLogger(__name__)

DRAIN_TIMEOUT_S = 600.0


class StageScale(NamedTuple):
    """How many replicas of a stage there are, and shall be."""

    stage: str
    replicas: int  # that run, those included that are drained
    target: int
    max_replicas: int
    error: str | None  # why the last target was not reached


@dataclass
class _Scaled:
    config: StageConfig
    group: ReplicaGroup
    target: int
    error: str | None = None
    drain_timeout_s: float = DRAIN_TIMEOUT_S
    changed: asyncio.Event = field(default_factory=asyncio.Event)  # the target, while a replica is drained
    task: asyncio.Task[None] | None = None

    def report(self) -> StageScale:
        number, most = len(self.group.engines), self.config.max_engines
        return StageScale(self.config.name, number, self.target, most, self.error)


class Scaling:
    """Starts and ends the replicas of stages that have ``max_replicas``. Belongs to the requests' event loop.

    Args:
        nodes: by stage.
        engines: those of all stages, by name; what starts is entered, and what ends is left out.
        options_of: how an engine publishes.
        running: the processes.
        draining: no replica starts on a host that is drained.
    """

    def __init__(
        self,
        config: OmniConfig,
        nodes: Mapping[str, ServedNode],
        engines: MutableMapping[str, StageEngine],
        maker: EngineMaker,
        options_of: Callable[[StageEngine], RelayOptions],
        limits: QueueLimits,
        running: RunningEngines,
        draining: Draining,
    ) -> None:
        self._stages: dict[str, _Scaled] = {}
        for stage in config.stages:
            if stage.max_replicas is not None and isinstance(group := nodes[stage.name], ReplicaGroup):
                self._stages[stage.name] = _Scaled(stage, group, stage.replicas)
        self._engines = engines
        self._maker = maker
        self._options_of = options_of
        self._limits = limits
        self._running = running
        self._draining = draining
        self._is_closed = False
        self.on_change: Callable[[], None] = lambda: None  # called after a replica has started or ended

    def report(self) -> list[StageScale]:
        """The stages that can be scaled."""
        return [stage.report() for stage in self._stages.values()]

    def set_target(self, name: str, number: int, drain_timeout_s: float = DRAIN_TIMEOUT_S) -> StageScale:
        """Have replicas of a stage started or ended until there are so many; returns at once.

        Args:
            drain_timeout_s: how long a replica may have requests before it ends; then it stays.

        Raises:
            InvalidRequest: there is no such stage, or it cannot have so many.
        """
        stage = self._stages.get(name)
        if stage is None:
            can = suggest(name, self._stages) if self._stages else "none of this deployment's"
            raise InvalidRequest(
                f"stage {name!r} cannot be scaled; those that can, as they have max_replicas: {can}", param="stage"
            )
        if not 1 <= number <= stage.config.max_engines:
            said = f"{number} replicas of stage {name!r}: there must be 1 to {stage.config.max_engines} (max_replicas)"
            raise InvalidRequest(said, param="replicas")
        stage.target, stage.error, stage.drain_timeout_s = number, None, drain_timeout_s
        stage.changed.set()
        if not self._is_closed and (stage.task is None or stage.task.done()):
            stage.task = asyncio.create_task(self._converge(stage), name=f"scale-{name}")
        return stage.report()

    async def wait(self, name: str) -> StageScale:
        """Wait until a stage has as many replicas as it shall have, or cannot.

        Raises:
            StageFailed: it cannot.
        """
        stage = self._stages[name]
        if stage.task is not None:
            await asyncio.wait([stage.task])
        if stage.error is not None:
            raise StageFailed(name, stage.error)
        return stage.report()

    async def aclose(self) -> None:
        """Start and end nothing from now on; a start in progress ends with the server."""
        self._is_closed = True
        for stage in self._stages.values():
            if stage.task is not None:
                stage.task.cancel()
                await asyncio.wait([stage.task])

    async def _converge(self, stage: _Scaled) -> None:
        while (number := len(stage.group.engines)) != stage.target:
            try:
                await (self._add(stage) if number < stage.target else self._remove(stage))
            except OmniError as exc:
                stage.target, stage.error = len(stage.group.engines), str(exc)
                logger.error("stage %s: not scaled: %s", stage.config.name, exc)
            except Exception as exc:
                stage.target, stage.error = len(stage.group.engines), repr(exc)
                logger.exception("stage %s: not scaled", stage.config.name)

    async def _add(self, stage: _Scaled) -> None:
        """Start one more replica, unless a later target needs none.

        Raises:
            StageFailed: it did not start, or there is no host for it.
        """
        group = stage.group
        instance = await self._find_free(stage)
        if instance is None:
            return
        logger.info("stage %s: starting replica %s", stage.config.name, instance.name)
        engine = await asyncio.to_thread(self._maker.make_engine, stage.config, instance)
        self._limits.add(engine)
        try:
            await asyncio.to_thread(self._start, engine)
        except BaseException:
            self._limits.remove(engine)
            raise
        engine.set_drained(engine.config.host_of() in self._draining.drained_hosts)  # if that was drained meanwhile
        self._engines[engine.name] = engine
        group.add(engine)
        self.on_change()

    async def _find_free(self, stage: _Scaled) -> Instance | None:
        """Find the replica with the lowest number that does not run and whose host has joined; wait for one.

        Returns:
            None: a later target needs none.

        Raises:
            StageFailed: hosts are drained, or none joins for as long as a start may take.
        """
        timeout_s = envs.VLLM_OMNI_STAGE_READY_TIMEOUT_S
        deadline, name = time.monotonic() + timeout_s, stage.config.name
        is_reported = False
        while stage.target > len(stage.group.engines):
            free = [one for one in make_replicas(stage.config) if one.name not in stage.group.engines]
            listed = ", ".join(f"{one.name} on {stage.config.host_of(one.number)!r}" for one in free)
            free = [one for one in free if stage.config.host_of(one.number) not in self._draining.drained_hosts]
            if not free:
                raise StageFailed(name, f"the replicas that do not run are on hosts that are drained: {listed}")
            remotes = {one.name: self._running.remote(one.name) for one in free}
            for one in free:
                if (remote := remotes[one.name]) is None or remote.has_host:
                    return one
            missing = "; ".join(f"{remote.host!r}: {remote.how_to_join()}" for remote in remotes.values() if remote)
            if time.monotonic() >= deadline:
                raise StageFailed(name, f"no host for a replica has joined within {timeout_s:g} s: {missing}")
            if not is_reported:
                logger.info("stage %s: a replica waits for a host: %s", name, missing)
                is_reported = True
            stage.changed.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(stage.changed.wait(), POLL_S)
        return None

    def _start(self, engine: StageEngine) -> None:
        memory = memory_sections([engine]).get(engine.name) if engine.config.host_of() is None else None
        self._running.add(engine, self._options_of(engine), memory)

    async def _remove(self, stage: _Scaled) -> None:
        """Drain and end a replica: one that is drained already, or else the one with the highest number.

        Raises:
            OmniError: its requests do not end in time.
        """
        group = stage.group
        others = [engine for engine in group.engines.values() if engine is not group.front]
        engine = max(others, key=lambda one: (one.is_drained, one.instance.number if one.instance else 0))
        was_drained = engine.is_drained
        engine.set_drained(True)
        stage.changed.clear()
        try:
            async with asyncio.timeout(stage.drain_timeout_s):
                while not await group.vacate(engine.name):
                    with suppress(TimeoutError):
                        await asyncio.wait_for(stage.changed.wait(), POLL_S)
                    if stage.target >= len(group.engines):  # a later call wants it to stay
                        engine.set_drained(was_drained)
                        return
        except BaseException as exc:
            engine.set_drained(was_drained)
            if isinstance(exc, TimeoutError):
                said = f"after {stage.drain_timeout_s:g} s, {engine.num_requests} requests still run on {engine.name}"
                raise OmniError(f"{said}, or read what it has made: it stays") from exc
            raise
        group.remove(engine.name)
        del self._engines[engine.name]
        self._limits.remove(engine)
        logger.info("stage %s: replica %s ends", stage.config.name, engine.name)
        await engine.aclose()
        self.on_change()
        await asyncio.to_thread(self._running.remove, engine)
