"""Two replicas whose engines have adapters, two ranks, or budgets: they answer as one engine of vLLM does."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from vllm.lora.request import LoRARequest

from tests.e2e.engines import MARKS, UPSTREAM, engine_here, greedy, tokens_of
from tests.e2e.test_epd_recovery import ENGINE, ONE_AT_A_TIME, Upstream, adapter, make_prompts, read, read_all, upstream
from tests.e2e.test_replicas import until
from tests.processes import paused
from vllm_omni import OmniLLM
from vllm_omni.engine.replicas import ReplicaGroup
from vllm_omni.process.status import StageState, StageStatus

pytestmark = [*MARKS, pytest.mark.timeout(400), pytest.mark.long]  # units: tests/engine/test_replicas.py

__all__ = ["adapter", "upstream"]  # fixtures

TWICE = ("language.replicas=2",)


def group_of(omni: OmniLLM) -> ReplicaGroup:
    group = omni.engine.orchestrator.nodes["language"]
    assert isinstance(group, ReplicaGroup)
    return group


def assert_both_have_worked(omni: OmniLLM) -> None:
    assert set(group_of(omni).router.statistics().num_tasks) == {"language/0", "language/1"}


@pytest.fixture(scope="module")
def plain(llava_checkpoint: Path) -> list[list[int]]:
    """Replies of vLLM without this project."""
    with engine_here(llava_checkpoint) as llm:
        return tokens_of(llm.generate(make_prompts(), greedy(), use_tqdm=False))


async def ask_all(omni: OmniLLM) -> list[list[int]]:
    return await asyncio.gather(*(read(omni, prompt, None) for prompt in make_prompts()))


async def ask_while_one_dies(omni: OmniLLM, victims: Sequence[int]) -> list[list[int]]:
    """Kill processes of the second replica while it has requests, and wait until it is back."""
    group = group_of(omni)
    engine = group.engines["language/1"]
    with paused(*engine.pids()):
        answers = asyncio.create_task(ask_all(omni))
        await until(lambda: engine.num_requests > 0)
        for pid in victims:
            psutil.Process(pid).kill()
    replies = await answers
    await until(lambda: engine.current_status() == StageStatus(StageState.RUNNING, None, 1))
    return replies


def test_replicas_with_adapters(llava_checkpoint: Path, upstream: Upstream, adapter: LoRARequest) -> None:
    with OmniLLM(llava_checkpoint, **ENGINE | ONE_AT_A_TIME, stage_overrides=TWICE) as omni:
        for _ in range(2):
            assert omni.run(read_all(omni, adapter)) == (upstream.plain, upstream.adapted)
        assert_both_have_worked(omni)

        async def manage() -> None:
            engine = omni.engine
            assert await engine.list_loras() == {1} and await engine.remove_lora(1) and not await engine.list_loras()
            assert await engine.add_lora(adapter) and await engine.pin_lora(1)
            victim = group_of(omni).engines["language/1"]
            victim.kill()
            await until(lambda: victim.has_died)
            assert await engine.add_lora(adapter)  # by those that run: the other one loads it with its first request
            await until(lambda: victim.current_status() == StageStatus(StageState.RUNNING, None, 1))

        omni.run(manage())
        assert omni.run(read_all(omni, adapter)) == (upstream.plain, upstream.adapted)


def test_replicas_with_two_ranks(llava_checkpoint: Path, plain: list[list[int]]) -> None:
    with OmniLLM(llava_checkpoint, **UPSTREAM, tensor_parallel_size=2, stage_overrides=TWICE) as omni:
        assert omni.run(ask_all(omni)) == plain
        assert_both_have_worked(omni)
        pids = group_of(omni).engines["language/1"].pids()
        assert len(pids) == 3
        assert omni.run(ask_while_one_dies(omni, pids[-1:])) == plain  # a worker, without which the engine cannot go on
        assert omni.run(ask_all(omni)) == plain


def test_replicas_with_budgets(llava_checkpoint: Path, plain: list[list[int]]) -> None:
    budgets: dict[str, Any] = {"token_budget": 16, "image_budget": 16}
    with OmniLLM(llava_checkpoint, **UPSTREAM, epd=budgets, stage_overrides=TWICE) as omni:
        assert omni.run(ask_all(omni)) == plain
        assert_both_have_worked(omni)
        assert omni.run(ask_while_one_dies(omni, group_of(omni).engines["language/1"].pids())) == plain
