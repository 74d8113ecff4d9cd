"""Administer the engines of all stages: pause, sleep, caches, profiles, adapters."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from vllm.lora.request import LoRARequest
from vllm.v1.engine import PauseMode

from vllm_omni.config import StageConfig
from vllm_omni.engine.orchestrator import Orchestrator
from vllm_omni.engine.stage import StageEngine, StageLLM
from vllm_omni.errors import InvalidRequest, StageFailed

Reply = TypeVar("Reply")
Call = Callable[[StageLLM], Coroutine[Any, Any, Reply]]


class StageAdmin:
    """vLLM's administrative calls, sent to the engines of a deployment.

    Every method raises ``StageFailed`` when a stage rejects the call, is dead or does not answer in time. Adapters and
    ``collective_rpc`` go to the first stage alone: the other models have no adapters, and other methods.
    """

    def __init__(self, orchestrator: Orchestrator, first: StageConfig) -> None:
        self._orchestrator = orchestrator
        self._first = first.name

    # -- every stage --------------------------------------------------------------------------------------------------

    async def pause_generation(self, mode: PauseMode, clear_cache: bool) -> None:
        await self._orchestrator.pause(mode)
        if clear_cache:
            self._orchestrator.forget_images()
        await self._call(lambda llm: llm.pause_generation(mode=mode, clear_cache=clear_cache))

    async def resume_generation(self) -> None:
        try:
            await self._call(lambda llm: llm.resume_generation())
        finally:
            self._orchestrator.resume()

    async def sleep(self, level: int, mode: PauseMode) -> None:
        await self._orchestrator.pause(mode)
        self._orchestrator.forget_images()
        can_sleep = self._engines(lambda stage: stage.is_autoregressive or stage.is_diffusion)
        others = [engine for engine in self._orchestrator.engines.values() if engine not in can_sleep]
        await self._call(lambda llm: llm.pause_generation(mode=mode), others)
        await self._call(lambda llm: llm.sleep(level, mode), can_sleep)

    async def wake_up(self, tags: list[str] | None) -> bool:
        can_sleep = self._engines(lambda stage: stage.is_autoregressive or stage.is_diffusion)
        is_awake = all(await self._call(lambda llm: llm.wake_up(tags), can_sleep))
        if is_awake:
            await self.resume_generation()
        return is_awake

    async def is_sleeping(self) -> bool:
        return all(await self._call(lambda llm: llm.is_sleeping(), self._first_engines))

    async def release_kv_cache_memory(self) -> None:
        await self._call(lambda llm: llm.release_kv_cache_memory(), self._autoregressive)

    async def reset_mm_cache(self) -> None:
        self._orchestrator.forget_images()
        await self._call(lambda llm: llm.reset_mm_cache())

    async def reset_encoder_cache(self) -> None:
        self._orchestrator.forget_images()
        await self._call(lambda llm: llm.reset_encoder_cache(), self._autoregressive)

    async def reset_prefix_cache(self, running_requests: bool, connector: bool) -> bool:
        return all(
            await self._call(lambda llm: llm.reset_prefix_cache(running_requests, connector), self._autoregressive)
        )

    async def start_profile(self, prefix: str | None, **bounds: int | None) -> None:
        started: list[StageEngine] = []
        for engine in self._profiled_engines():
            name = engine.name.replace("/", "-")  # of an instance: "thinker/PD0"
            try:
                await engine.ask(engine.llm.start_profile(name if prefix is None else f"{prefix}_{name}", **bounds))
            except StageFailed:
                await self._call(lambda llm: llm.stop_profile(), started)
                raise
            started.append(engine)

    async def stop_profile(self) -> None:
        await self._call(lambda llm: llm.stop_profile(), self._profiled_engines())

    # -- the first stage ----------------------------------------------------------------------------------------------

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        return all(await self._call_adapters(lambda llm: llm.add_lora(lora_request)))

    async def remove_lora(self, lora_id: int) -> bool:
        # An instance without a request for the adapter has not loaded it.
        return any(await self._call_adapters(lambda llm: llm.remove_lora(lora_id)))

    async def list_loras(self) -> set[int]:
        return set[int]().union(*await self._call_adapters(lambda llm: llm.list_loras()))

    async def pin_lora(self, lora_id: int) -> bool:
        return all(await self._call_adapters(lambda llm: llm.pin_lora(lora_id)))

    async def collective_rpc(
        self, method: str, timeout_s: float | None, args: tuple[Any, ...], kwargs: dict[str, Any] | None
    ) -> list[Any]:
        replies = await self._call(lambda llm: llm.collective_rpc(method, timeout_s, args, kwargs), self._first_engines)
        return [rank for ranks in replies for rank in ranks]

    # -- the engines --------------------------------------------------------------------------------------------------

    async def _call(self, call: Call[Reply], engines: Iterable[StageEngine] | None = None) -> list[Reply]:
        """Call these engines, or all, at once; when all have answered or failed, raise the first failure."""
        engines = self._orchestrator.engines.values() if engines is None else engines
        replies = await asyncio.gather(*(engine.ask(call(engine.llm)) for engine in engines), return_exceptions=True)
        for reply in replies:
            if isinstance(reply, BaseException):
                raise reply
        return [reply for reply in replies if not isinstance(reply, BaseException)]

    async def _call_adapters(self, call: Call[Reply]) -> list[Reply]:
        engines = [engine for engine in self._first_engines if engine.vllm_config.lora_config is not None]
        if not engines:
            name = self._first
            raise StageFailed(
                name, f"it was started without adapters (LoRA): start it with --stage {name}.enable_lora=true"
            )
        return await self._call(call, engines)

    def _engines(self, matches: Callable[[StageConfig], bool]) -> list[StageEngine]:
        return [engine for engine in self._orchestrator.engines.values() if matches(engine.config)]

    @property
    def _autoregressive(self) -> list[StageEngine]:
        return self._engines(lambda stage: stage.is_autoregressive)

    @property
    def _first_engines(self) -> list[StageEngine]:
        return self._orchestrator.engines_of(self._first)

    def _profiled_engines(self) -> list[StageEngine]:
        engines = self._orchestrator.engines.values()
        profiled = [engine for engine in engines if engine.vllm_config.profiler_config.profiler is not None]
        if not profiled:
            raise InvalidRequest("no stage can be profiled: start them with profiler_config")
        return profiled
