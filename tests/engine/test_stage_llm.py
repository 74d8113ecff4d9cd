"""Calls of an engine that dies, is no longer read, or does not answer; ids that it is sent."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_omni.engine.adapters import load_adapter
from vllm_omni.engine.stage import StageEngine
from vllm_omni.engine.stage_llm import StageLLM
from vllm_omni.errors import InvalidRequest, StageFailed


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


async def test_end_ids_beyond_the_vocabulary_do_not_reach_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async def send(llm: AsyncLLM, request: Any, prompt: str | None) -> None:
        assert request.sampling_params.all_stop_token_ids == {3, 5}

    monkeypatch.setattr(AsyncLLM, "_add_request", send)
    llm = DyingLLM()
    llm.model_config = SimpleNamespace(get_vocab_size=lambda: 10)
    params = SamplingParams(stop_token_ids=[3], min_tokens=1)
    params.update_from_generation_config({"eos_token_id": [5, 10]}, eos_token_id=99)  # as upstream does before
    request = EngineCoreRequest("request", [1, 2], None, params, None, 0.0, None, None, None)
    await llm._add_request(request, None)
    llm.die()


async def test_a_call_that_is_not_answered_in_time_is_given_up() -> None:
    llm = DyingLLM()
    with pytest.raises(TimeoutError):
        await llm.answer(asyncio.Event().wait(), timeout_s=0)
    assert await llm.answer(asyncio.sleep(0, "answered")) == "answered"
    llm.die()


async def test_calls_fail_as_those_of_a_dead_engine_once_its_outputs_are_no_longer_read() -> None:
    llm = DyingLLM()
    asked = asyncio.create_task(llm.answer(asyncio.Event().wait()))
    await asyncio.sleep(0)
    await llm.stop_reading()
    with pytest.raises(EngineDeadError):
        await asked
    assert not llm.has_failed  # so that the supervisor leaves it alone


class AdapterStage(StageEngine):
    """Without an engine: it answers that an adapter is loaded with an error, or as ``llm`` does."""

    def __init__(self, llm: Any) -> None:
        self.name, self.instance, self._llm = "writer", None, llm
        self._processes: Any = SimpleNamespace(has_ended=False)
        self.vllm_config = SimpleNamespace(lora_config="any")  # type: ignore[assignment]

    async def load(self) -> None:
        await load_adapter(self, LoRARequest("adapter", 1, "path"))


async def test_an_adapter_is_not_at_fault_if_its_engine_is_no_longer_read() -> None:
    llm: Any = DyingLLM()
    llm.add_lora = lambda adapter: asyncio.Event().wait()
    loading = asyncio.create_task(AdapterStage(llm).load())
    await asyncio.sleep(0)
    await llm.stop_reading()
    with pytest.raises(StageFailed, match="stage 'writer': its outputs are no longer read"):
        await loading


@pytest.mark.parametrize(
    ("error", "raised"),
    [(TimeoutError(), StageFailed), (EngineDeadError(), StageFailed), (Exception("no such rank"), InvalidRequest)],
    ids=repr,
)
async def test_only_an_engines_own_answer_blames_the_adapter(error: Exception, raised: type[Exception]) -> None:
    async def answer(call: Any, timeout_s: float) -> None:
        raise error

    llm = SimpleNamespace(add_lora=lambda adapter: None, answer=answer, has_failed=False)
    with pytest.raises(raised):
        await AdapterStage(llm).load()
