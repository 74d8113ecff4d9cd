"""Requests through the orchestrator, on a stage without an engine: errors of the pipeline, and the end of a server."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from vllm import SamplingParams
from vllm.outputs import RequestOutput

from vllm_omni.engine.admission import AdmissionGate
from vllm_omni.engine.flow_metrics import FlowMetrics
from vllm_omni.engine.latency_metrics import LatencyMetrics
from vllm_omni.engine.node import StageNode
from vllm_omni.engine.orchestrator import Orchestrator
from vllm_omni.engine.queue_limits import QueueLimits
from vllm_omni.engine.running import RunningRequests
from vllm_omni.engine.scaling import Scaling
from vllm_omni.engine.streamed_reply import StreamedReplies
from vllm_omni.engine.traces import Traces
from vllm_omni.entrypoints.openai.errors import body_of
from vllm_omni.errors import ConfigError, GraphError, InvalidRequest, OmniError, ShuttingDown
from vllm_omni.flow import Field, Graph, GraphParser, GraphRuntime, Role, interface, parse_graphs
from vllm_omni.flow.run.scope import index_plans
from vllm_omni.messages.outputs import OmniRequestOutput, collect
from vllm_omni.messages.report import Reporter, ignore
from vllm_omni.model_executor.pipeline import Pipeline, RequestContext, StageRequest, StageSpec
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
        self,
        request: StageRequest,
        context: RequestContext,
        wanted: frozenset[str],
        suffix: str = "",
        report: Reporter = ignore,
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

    async def request_inputs(prompt: Any, context: RequestContext) -> Mapping[str, Any]:
        return made.pipeline.inputs(prompt, context.options)

    made.pipeline = SimpleNamespace(  # type: ignore[assignment]
        graph=graph,
        inputs=lambda prompt, options: {"prompt": StageRequest(prompt)},
        request_inputs=request_inputs,
        stages=[StageSpec("writer", "", "text")],
        modalities={"text": "text"},
        extra_outputs={},
        sample_rate=0,
        check_options=lambda options: options,
    )
    made.config = SimpleNamespace(stages=[SimpleNamespace(name="writer", max_replicas=None)])  # type: ignore[assignment]
    made.plans = {"g": GraphParser(graph).parse()}
    made.models = made._graphs = made.plans
    made._cache_sources, made.controllers = {}, None
    made._route, made.sessions = lambda name, outputs: made.plans[name].route(outputs), None
    made.engines, made.nodes = {}, {"writer": Stage()}
    made.gate, made.latency_metrics = AdmissionGate(), LatencyMetrics()
    made.streamed_replies, made.traces = StreamedReplies(), Traces()
    made.queue_limits, made.flow_metrics = QueueLimits({}), FlowMetrics()
    nothing: Any = None  # is scaled
    parts = made.config, made.nodes, made.engines, nothing, nothing, made.queue_limits, nothing, nothing
    made.scaling = Scaling(*parts)
    made.runtime = GraphRuntime(made.plans["g"], made.nodes)
    made.nodes["writer"].gate, made.requests = made.gate, RunningRequests()
    return made


class Choosy(Pipeline):
    """Checks the options of a request with ``check``."""

    def __init__(self, check: Callable[[Any], Any]) -> None:
        self._check = check

    def validate(self, options: Mapping[str, Any]) -> dict[str, Any]:
        return dict(self._check(options))


async def test_only_what_validate_rejects_is_the_clients_fault(orchestrator: Orchestrator) -> None:
    def reject(options: Any) -> Any:
        raise InvalidRequest("option 'x': unknown", param="x")

    orchestrator.pipeline.check_options = Choosy(reject).check_options  # type: ignore[method-assign]
    with pytest.raises(InvalidRequest, match=r"^option 'x': unknown$"):
        await ask(orchestrator)
    for error in (ValueError("x"), KeyError("x"), ConfigError("x")):
        orchestrator.pipeline.check_options = Choosy(Mock(side_effect=error)).check_options  # type: ignore[method-assign]
        with pytest.raises(OmniError, match=r"the pipeline failed: Choosy.validate: .*Error\('x'\)") as failed:
            await ask(orchestrator)
        assert not isinstance(failed.value, ValueError)
        assert body_of(failed.value)["error"]["code"] == 500


async def test_a_prompt_that_inputs_rejects_is_the_clients_fault(orchestrator: Orchestrator) -> None:
    orchestrator.pipeline.inputs = Mock(side_effect=InvalidRequest("no text"))  # type: ignore[method-assign]
    with pytest.raises(InvalidRequest, match=r"^no text$"):
        await ask(orchestrator)
    orchestrator.pipeline.inputs = Mock(side_effect=ValueError("x"))  # type: ignore[method-assign]
    with pytest.raises(OmniError, match="did not fill its placeholders"):
        await ask(orchestrator)


def ask(orchestrator: Orchestrator, request_id: str = "request") -> "asyncio.Task[OmniRequestOutput]":
    return asyncio.ensure_future(collect(orchestrator.generate("hello", {"writer": SamplingParams()}, request_id)))


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
    await asyncio.wait_for(orchestrator.requests.wait_until_none(), 60)


def test_a_graph_needs_the_stages_of_the_graphs_that_it_calls(orchestrator: Orchestrator) -> None:
    inner, outer = orchestrator.pipeline.graph, Graph("outer")
    inner.output(more=inner.role(Writer, "other").write(prompt=inner.placeholder("more")).text)
    inner.graph_call("both", ["text", "more"])
    called = outer.graph_ref(inner).both(prompt=outer.placeholder("prompt"), more=outer.placeholder("more"))
    outer.output(text=called.text, more=called.more)
    plans = parse_graphs([outer])
    orchestrator._graphs, _ = index_plans(list(plans.values()))
    orchestrator.models = {"outer": plans["outer"]}
    orchestrator._route = lambda graph, outputs: orchestrator._graphs[graph].route(outputs)
    assert orchestrator.stages_of(["text"], "outer") == ["writer"]
    assert sorted(orchestrator.stages_of(["text", "more"], "outer")) == ["other", "writer"]
    assert [orchestrator.stage_of(output, "outer") for output in ("text", "more")] == ["writer", "other"]
