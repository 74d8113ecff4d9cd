"""Administer the engines of all stages: pause, sleep, caches, profiles, adapters."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from vllm.engine.protocol import EngineClient
from vllm.lora.request import LoRARequest
from vllm.v1.engine import PauseMode

from vllm_omni.config import OmniConfig, StageConfig
from vllm_omni.engine.adapters import without_adapters
from vllm_omni.engine.draining import DrainedEngine
from vllm_omni.engine.orchestrator import Orchestrator
from vllm_omni.engine.scaling import DRAIN_TIMEOUT_S, StageScale
from vllm_omni.engine.stage import StageEngine, StageLLM
from vllm_omni.errors import InvalidRequest, StageFailed

Reply = TypeVar("Reply")
Call = Callable[[StageLLM], Coroutine[Any, Any, Reply]]


class StageAdmin(EngineClient):
    """The administrative calls of vLLM's ``EngineClient``, sent to the engines of a deployment.

    Every method raises ``StageFailed`` when a stage rejects the call, is dead or does not answer in time. Adapters and
    ``collective_rpc`` go to the first stage alone: the other models have no adapters, and other methods.
    """

    config: OmniConfig
    orchestrator: Orchestrator

    # -- every stage --------------------------------------------------------------------------------------------------

    async def pause_generation(self, *, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        """Stop every stage between two steps; requests that arrive now wait until ``resume_generation``.

        A request passes through several stages, so vLLM's modes apply to the whole graph: "abort" ends running requests
        with ``CallAborted``; "wait" returns when they have left their last stage; "keep" leaves them where they are,
        and a request between two stages waits in the next.

        Args:
            clear_cache: clear the prefix and media caches, also for kept requests, which are then computed again.

        Raises:
            InvalidRequest: the mode is not supported.
        """
        await self.orchestrator.pause(mode)
        if clear_cache:
            self.orchestrator.forget_images()
        await self._call(lambda llm: llm.pause_generation(mode=mode, clear_cache=clear_cache))

    async def resume_generation(self) -> None:
        try:
            await self._call(lambda llm: llm.resume_generation())
        finally:
            self.orchestrator.resume()

    async def is_paused(self) -> bool:
        return not self.orchestrator.gate.is_open

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Pause, see ``pause_generation``, and free memory of the stages, by vLLM's levels.

        In a diffusion stage, level 1 moves the weights into the CPU's memory, and level 2 drops them: waking up reads
        the files again. Generation stages have no cache, and keep their weights.
        """
        await self.orchestrator.pause(mode)
        self.orchestrator.forget_images()
        can_sleep = self._can_sleep()
        others = [engine for engine in self.orchestrator.engines.values() if engine not in can_sleep]
        await self._call(lambda llm: llm.pause_generation(mode=mode), others)
        await self._call(lambda llm: llm.sleep(level, mode), can_sleep)

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        """Undo ``sleep``, or a part of it; returns whether all memory is back, and requests are admitted again."""
        is_awake = all(await self._call(lambda llm: llm.wake_up(tags), self._can_sleep()))
        if is_awake:
            await self.resume_generation()
        return is_awake

    async def is_sleeping(self) -> bool:
        return all(await self._call(lambda llm: llm.is_sleeping(), self._first_engines()))

    async def release_kv_cache_memory(self) -> None:
        await self._call(lambda llm: llm.release_kv_cache_memory(), self._autoregressive())

    async def reset_mm_cache(self) -> None:
        self.orchestrator.forget_images()
        await self._call(lambda llm: llm.reset_mm_cache())

    async def reset_encoder_cache(self) -> None:
        self.orchestrator.forget_images()
        await self._call(lambda llm: llm.reset_encoder_cache(), self._autoregressive())

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        stages = self._autoregressive()
        return all(
            await self._call(lambda llm: llm.reset_prefix_cache(reset_running_requests, reset_connector), stages)
        )

    async def start_profile(self, profile_prefix: str | None = None, **bounds: int | None) -> None:
        """Trace every stage that was started with ``profiler_config``; file names have the prefix and the stage's name.

        The front end, which the stages share, is traced with the first stage.

        Args:
            bounds: ``delay_iterations`` and ``max_iterations``, as for vLLM's engines.

        Raises:
            InvalidRequest: no stage was started with it.
        """
        started: list[StageEngine] = []
        for engine in self._profiled_engines():
            name = engine.name.replace("/", "-")  # of an instance: "thinker/PD0"
            prefix = name if profile_prefix is None else f"{profile_prefix}_{name}"
            try:
                await engine.ask(engine.llm.start_profile(prefix, **bounds))
            except StageFailed:
                await self._call(lambda llm: llm.stop_profile(), started)
                raise
            started.append(engine)

    async def stop_profile(self) -> None:
        await self._call(lambda llm: llm.stop_profile(), self._profiled_engines())

    # -- the first stage ----------------------------------------------------------------------------------------------

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter of the first stage. A request for it (``lora_request``) does so, too.

        Raises:
            StageFailed: the stage runs without adapters, or cannot load this one.
        """
        return all(await self._call_adapters(lambda llm: llm.add_lora(lora_request)))

    async def remove_lora(self, lora_id: int) -> bool:
        # An instance without a request for the adapter has not loaded it.
        return any(await self._call_adapters(lambda llm: llm.remove_lora(lora_id)))

    async def list_loras(self) -> set[int]:
        return set[int]().union(*await self._call_adapters(lambda llm: llm.list_loras()))

    async def pin_lora(self, lora_id: int) -> bool:
        """Keep a loaded adapter: it is not evicted for others."""
        return all(await self._call_adapters(lambda llm: llm.pin_lora(lora_id)))

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,  # noqa: ASYNC109  # upstream's signature
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method on each rank of the first stage; the results instance by instance."""
        replies = await self._call(lambda llm: llm.collective_rpc(method, timeout, args, kwargs), self._first_engines())
        return [rank for ranks in replies for rank in ranks]

    # -- some engines --------------------------------------------------------------------------------------------------

    async def drain(self, name: str, timeout_s: float) -> list[DrainedEngine]:
        """Give an engine, or all engines of a host, no new requests until ``undrain``, and wait until they are idle.

        They stay drained through a restart of theirs or of the host. Other engines of their stages must get requests
        meanwhile.

        Raises:
            InvalidRequest: there is no such engine or host, or a stage without another engine that gets requests.
        """
        return await self.orchestrator.draining.drain(name, timeout_s)

    def undrain(self, name: str) -> list[DrainedEngine]:
        """Give a drained engine, or all engines of a host, requests again.

        Raises:
            InvalidRequest: there is no such engine or host.
        """
        return self.orchestrator.draining.undrain(name)

    async def scale(self, stage: str, replicas: int, drain_timeout_s: float = DRAIN_TIMEOUT_S) -> StageScale:
        """Start or end replicas of a stage that has ``max_replicas``; returns when there are so many.

        Args:
            drain_timeout_s: how long a replica that is to end may have requests; then it stays.

        Raises:
            InvalidRequest: the stage cannot have so many.
            StageFailed: a replica did not start, or has requests that do not end.
        """
        self.orchestrator.scaling.set_target(stage, replicas, drain_timeout_s)
        return await self.orchestrator.scaling.wait(stage)

    # -- the engines --------------------------------------------------------------------------------------------------

    async def _call(self, call: Call[Reply], engines: Iterable[StageEngine] | None = None) -> list[Reply]:
        """Call these engines, or all, at once; when all have answered or failed, raise the first failure."""

        async def ask(engine: StageEngine) -> Reply:
            # The coroutine is created here and not by the caller of gather: a task that is cancelled before it starts
            # would leave it unawaited.
            return await engine.ask(call(engine.llm))

        engines = self.orchestrator.engines.values() if engines is None else engines
        replies = await asyncio.gather(*map(ask, engines), return_exceptions=True)
        for reply in replies:
            if isinstance(reply, BaseException):
                raise reply
        return [reply for reply in replies if not isinstance(reply, BaseException)]

    async def _call_adapters(self, call: Call[Reply]) -> list[Reply]:
        engines = [engine for engine in self._read_adapters() if engine.vllm_config.lora_config is not None]
        if not engines:
            first = self.config.stages[0]
            raise StageFailed(first.name, f"it {without_adapters(first)}")
        # One that is being restarted has no adapters, and loads each with its first request for it.
        return await self._call(call, [engine for engine in engines if not engine.has_died] or engines)

    def _engines(self, matches: Callable[[StageConfig], bool]) -> list[StageEngine]:
        return [engine for engine in self.orchestrator.engines.values() if matches(engine.config)]

    def _autoregressive(self) -> list[StageEngine]:
        return self._engines(lambda stage: stage.is_autoregressive)

    def _can_sleep(self) -> list[StageEngine]:
        return self._engines(lambda stage: stage.is_autoregressive or stage.is_diffusion)

    def _read_adapters(self) -> list[StageEngine]:
        """Those of the first stage, and those that continue what another stage has read."""
        continuing = [one for one in self.orchestrator.engines.values() if one.cache_source is not None]
        return list(dict.fromkeys([*self._first_engines(), *continuing]))

    def _first_engines(self) -> list[StageEngine]:
        return self.orchestrator.engines_of(self.config.stages[0].name)

    def _profiled_engines(self) -> list[StageEngine]:
        engines = self.orchestrator.engines.values()
        profiled = [engine for engine in engines if engine.vllm_config.profiler_config.profiler is not None]
        if not profiled:
            raise InvalidRequest("no stage can be profiled: start them with profiler_config")
        return profiled
