"""Graphs with loops and joins over two language models and a diffusers pipeline, each with two replicas."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.e2e.graphs import test_graphs as graphs
from tests.e2e.graphs.test_graphs import PROMPT, ask, start
from vllm_omni.engine.replicas import ReplicaGroup
from vllm_omni.entrypoints.async_omni import AsyncOmni

pytestmark = [pytest.mark.timeout(400), pytest.mark.long]  # units: tests/engine/test_replicas.py

STAGES = ("writer", "critic", "painter")
NUM_CALLS = 3


@pytest.fixture(scope="module")
def omni(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncOmni]:
    omni = start(tmp_path_factory.mktemp("graphs"), *(f"{name}.replicas=2" for name in STAGES))
    yield omni
    omni.shutdown()


async def ask_all(omni: AsyncOmni) -> list[Any]:
    names = ["diamond", "gathered", "agent", "illustrated", "critique"]
    return await asyncio.gather(*(ask(omni, name, PROMPT[: 2 + n]) for name in names for n in range(NUM_CALLS)))


async def test_two_replicas_of_each_stage_answer_as_one(omni: AsyncOmni) -> None:
    for name in STAGES:
        await omni.drain(f"{name}/1", 1)
    expected = await ask_all(omni)
    for name in STAGES:
        omni.undrain(f"{name}/1")
    got = await ask_all(omni)
    for one, other in zip(got, expected, strict=True):
        assert [reply.token_ids for reply in one.outputs] == [reply.token_ids for reply in other.outputs]
        assert one.multimodal_output.keys() == other.multimodal_output.keys()
        if "images" in one.multimodal_output:
            images = (each.multimodal_output["images"].int() for each in (one, other))
            torch.testing.assert_close(*images, rtol=0, atol=1)  # requests are batched otherwise, so they may round so
    for name in STAGES:
        group = omni.orchestrator.nodes[name]
        assert isinstance(group, ReplicaGroup)
        assert min(group.router.statistics().num_tasks.values()) > 0 and len(group.router.statistics().num_tasks) == 2


async def test_replicas_of_a_diffusion_stage_die_without_losing_a_request(omni: AsyncOmni) -> None:
    calls = [asyncio.create_task(ask(omni, "illustrated", PROMPT[: 2 + n])) for n in range(NUM_CALLS)]
    victim = omni.orchestrator.engines["painter/0"]
    async with asyncio.timeout(60):
        while not victim.num_requests:
            await asyncio.sleep(0.005)
            assert not all(call.done() for call in calls)
    victim.kill()
    for answer in await asyncio.gather(*calls):
        assert len(answer.multimodal_output["images"]) == 1
    await omni.check_health()


test_calls_of_a_session_share_its_history_in_order = graphs.test_calls_of_a_session_share_its_history_in_order
