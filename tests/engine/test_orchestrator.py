"""Requests through the orchestrator, on a stage without an engine: errors of the pipeline, and the end of a server."""

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.outputs import RequestOutput

from vllm_omni.engine.admission import AdmissionGate
from vllm_omni.engine.latency_metrics import LatencyMetrics
from vllm_omni.engine.node import StageNode
from vllm_omni.engine.orchestrator import Orchestrator
from vllm_omni.engine.running import RunningRequests
from vllm_omni.errors import GraphError, InvalidRequest, OmniError, ShuttingDown
from vllm_omni.flow import Field, Graph, GraphParser, GraphRuntime, Role, interface
from vllm_omni.messages.outputs import OmniRequestOutput, collect
from vllm_omni.model_executor.pipeline import RequestContext, StageRequest, StageSpec
from vllm_omni.process.status import StageStatus


class Writer(Role):
    write = interface([["prompt"]], {"text": Field("text", streamed=True)})


class Stage(StageNode):
    """Answers a request once ``may_end`` is set, or raises."""

    name = "writer"
    spec = StageSpec("writer", "", "text")

    def __init__(self) -> None:
        self.may_end = asyncio.Event()
        self.error: Exception | None = None

    async def generate(
        self, request: StageRequest, context: RequestContext, wanted: frozenset[str], suffix: str = ""
    ) -> AsyncGenerator[OmniRequestOutput, None]:
        if self.error is not None:
            raise self.error
        await self.may_end.wait()
        yield OmniRequestOutput.of(RequestOutput("id", None, [1], None, outputs=[], finished=True))

    def current_status(self) -> StageStatus:
        return StageStatus()


@pytest.fixture
async def orchestrator() -> Orchestrator:
    graph = Graph("g")
    graph.output(text=graph.role(Writer, "writer").write(prompt=graph.placeholder("prompt")).text)
    made = object.__new__(Orchestrator)
    made.pipeline = SimpleNamespace(  # type: ignore[assignment]
        graph=graph,
        inputs=lambda prompt, options: {"prompt": StageRequest(prompt)},
        stages=[StageSpec("writer", "", "text")],
        modalities={"text": "text"},
        extra_outputs={},
        sample_rate=0,
        check_options=lambda options: options,
    )
    made.config = SimpleNamespace(stages=[SimpleNamespace(name="writer")])  # type: ignore[assignment]
    made.plans = {"g": GraphParser(graph).parse()}
    made._route, made.sessions = lambda name, outputs: made.plans[name].route(outputs), None
    made.engines, made.nodes = {}, {"writer": Stage()}
    made.gate, made.latency_metrics = AdmissionGate(), LatencyMetrics()
    made.runtime = GraphRuntime(made.plans["g"], made.nodes)
    made.nodes["writer"].gate, made.requests = made.gate, RunningRequests()
    return made


def ask(orchestrator: Orchestrator, request_id: str = "request") -> "asyncio.Task[OmniRequestOutput]":
    return asyncio.ensure_future(collect(orchestrator.generate("hello", {}, request_id)))


def stage_of(orchestrator: Orchestrator) -> Any:
    return orchestrator.nodes["writer"]


async def test_a_drain_ends_with_the_requests_that_run_and_rejects_others(orchestrator: Orchestrator) -> None:
    running = ask(orchestrator)
    await asyncio.sleep(0)
    draining = asyncio.ensure_future(orchestrator.drain(timeout_s=60))
    await asyncio.sleep(0)
    with pytest.raises(ShuttingDown):
        await ask(orchestrator, "another")
    assert not draining.done()
    stage_of(orchestrator).may_end.set()
    assert (await running).finished
    await draining


async def test_requests_left_after_a_drain_are_aborted_as_to_be_tried_again(orchestrator: Orchestrator) -> None:
    running = ask(orchestrator)
    await asyncio.sleep(0)
    await orchestrator.drain(timeout_s=0)
    await orchestrator.aclose()
    with pytest.raises(ShuttingDown, match="shutting down"):
        await running


async def test_a_drain_awaits_what_a_request_asks_for_that_arrived_before_it(orchestrator: Orchestrator) -> None:
    """A handler reads its request first, and asks the engines afterwards."""
    has_read = asyncio.Event()

    async def handle() -> OmniRequestOutput:
        with orchestrator.requests.arrive():
            await has_read.wait()
            return await ask(orchestrator)

    handled = asyncio.ensure_future(handle())
    await asyncio.sleep(0)
    draining = asyncio.ensure_future(orchestrator.drain(timeout_s=60))
    await asyncio.sleep(0)
    has_read.set()
    stage_of(orchestrator).may_end.set()
    assert (await handled).finished
    await draining


@pytest.mark.parametrize("timeout_s", [0, 0.05])
async def test_a_paused_server_that_ends_rejects_the_requests_at_its_gate(
    orchestrator: Orchestrator, timeout_s: float
) -> None:
    await orchestrator.pause("keep")
    waiting = ask(orchestrator)
    await orchestrator.drain(timeout_s)
    assert not waiting.done()
    await orchestrator.aclose()
    with pytest.raises(ShuttingDown):
        await waiting


async def test_a_server_that_is_resumed_in_time_ends_with_the_requests_at_its_gate(orchestrator: Orchestrator) -> None:
    await orchestrator.pause("keep")
    waiting = ask(orchestrator)
    await asyncio.sleep(0)
    draining = asyncio.ensure_future(orchestrator.drain(timeout_s=60))
    orchestrator.resume()
    stage_of(orchestrator).may_end.set()
    assert (await waiting).finished
    await draining


async def test_a_drain_without_requests_ends_at_once(orchestrator: Orchestrator) -> None:
    await orchestrator.drain(timeout_s=60)


@pytest.mark.parametrize("error", [ValueError("bad"), KeyError("bad"), GraphError("bad field")], ids=repr)
async def test_an_unexpected_error_is_no_fault_of_the_request(orchestrator: Orchestrator, error: Exception) -> None:
    stage_of(orchestrator).error = error
    with pytest.raises(OmniError, match=r"the pipeline failed: .*bad.* in node 'writer.write'") as raised:
        await ask(orchestrator)
    assert not isinstance(raised.value, ValueError)


async def test_a_rejection_by_a_stage_stays_one(orchestrator: Orchestrator) -> None:
    stage_of(orchestrator).error = InvalidRequest("no")
    with pytest.raises(InvalidRequest):
        await ask(orchestrator)


async def test_a_request_whose_clean_up_is_cancelled_again_leaves_nothing(orchestrator: Orchestrator) -> None:
    asked = ask(orchestrator)
    for _ in range(5):
        await asyncio.sleep(0)
    assert orchestrator.gate.admitted
    while not asked.done():  # as anyio cancels the tasks of a scope, at each of their awaits
        asked.cancel()
        await asyncio.sleep(0)
    for _ in range(5):
        await asyncio.sleep(0)
    assert not orchestrator.gate.admitted
    await asyncio.wait_for(orchestrator.requests.wait_until_none(), 1)
