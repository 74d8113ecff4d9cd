"""Calls of an engine that dies, or does not answer."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_omni.engine.stage_llm import StageLLM


class DyingLLM(StageLLM):
    """Without an engine: its outputs are read until ``die``."""

    def __init__(self) -> None:
        never: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        resources = SimpleNamespace(engine_dead=False)
        self.engine_core: Any = SimpleNamespace(resources=resources, get_supported_tasks_async=lambda: never)
        self._dead = asyncio.Event()
        self.output_handler = asyncio.create_task(self._dead.wait())  # type: ignore[assignment]

    def die(self) -> None:
        self.engine_core.resources.engine_dead = True
        self._dead.set()


async def test_the_first_request_of_an_engine_that_dies_does_not_wait_for_its_tasks() -> None:
    llm = DyingLLM()
    asked = [asyncio.create_task(llm.get_supported_tasks()) for _ in range(2)]
    await asyncio.sleep(0)
    llm.die()
    assert [type(one) for one in await asyncio.gather(*asked, return_exceptions=True)] == [EngineDeadError] * 2


async def test_a_call_that_is_not_answered_in_time_is_given_up() -> None:
    llm = DyingLLM()
    with pytest.raises(TimeoutError):
        await llm.answer(asyncio.Event().wait(), timeout_s=0)
    assert await llm.answer(asyncio.sleep(0, "answered")) == "answered"
    llm.die()
