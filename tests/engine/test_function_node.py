"""A function of the pipeline as a node."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_omni.engine.admission import AdmissionGate
from vllm_omni.engine.flow_metrics import FlowMetrics
from vllm_omni.engine.function_node import FunctionNode
from vllm_omni.engine.graph_metrics import collect
from vllm_omni.engine.latency_metrics import LatencyMetrics
from vllm_omni.engine.media_budget import MediaBudget
from vllm_omni.engine.queue_limits import QueueLimits
from vllm_omni.engine.request_record import RequestRecord
from vllm_omni.errors import DeadlineExceeded, InvalidRequest, StageFailed
from vllm_omni.flow import (
    Activation,
    Emission,
    Field,
    FlowStatistics,
    Graph,
    GraphParser,
    GraphRuntime,
    Role,
    interface,
)
from vllm_omni.model_executor.pipeline import FunctionSpec, RequestContext


class Tool(Role):
    use = interface([["call"]], {"result": Field("text")})


async def run(node: FunctionNode, deadline_s: float | None = None) -> tuple[list[Any], RequestRecord]:
    graph = Graph("g")
    graph.output(result=graph.role(Tool, "tool").use(call=graph.placeholder("call")).result)
    context, record = RequestContext("request", {}, {}), RequestRecord()
    runtime = GraphRuntime(GraphParser(graph).parse(), {"tool": node})
    call = runtime.open(
        "request", {"call": "abc"}, ["result"], context=context, deadline_s=deadline_s, on_report=record.add
    )
    return [frame.payload async for frame in call], record


async def shout(activation: Activation) -> AsyncIterator[Emission]:
    async for chunk in activation.inputs["call"]:
        yield Emission("result", chunk.payload.upper())


async def test_it_emits_and_reports_its_time() -> None:
    payloads, record = await run(FunctionNode(FunctionSpec("tool", shout)))
    assert payloads == ["ABC"]
    assert record.stage_durations.keys() == {"tool"}


@pytest.mark.parametrize("error", [InvalidRequest("bad"), KeyError("bad")], ids=repr)
async def test_its_error_is_its_own_and_never_the_clients(error: Exception) -> None:
    async def fail(activation: Activation) -> AsyncIterator[Emission]:
        raise error
        yield Emission("result", "")

    node = FunctionNode(FunctionSpec("tool", fail))
    with pytest.raises(StageFailed, match=r"stage 'tool': the pipeline's function failed: .*bad"):
        await run(node)
    assert node.num_failed == 1


async def test_a_deadline_cancels_it_and_its_clean_up_runs() -> None:
    has_cleaned_up = False

    async def wait(activation: Activation) -> AsyncIterator[Emission]:
        nonlocal has_cleaned_up
        try:
            await asyncio.Event().wait()
            yield Emission("result", "")
        finally:
            has_cleaned_up = True

    with pytest.raises(DeadlineExceeded, match=r"tool.use"):
        await run(FunctionNode(FunctionSpec("tool", wait)), deadline_s=0.01)
    assert has_cleaned_up


async def test_a_pause_holds_it_back() -> None:
    node = FunctionNode(FunctionSpec("tool", shout))
    node.gate = AdmissionGate()
    node.gate.close()
    running = asyncio.ensure_future(run(node))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not running.done()
    node.gate.open()
    assert (await running)[0] == ["ABC"]


async def test_one_that_is_no_generator_may_fail_as_one() -> None:
    def fail(activation: Activation) -> AsyncIterator[Emission]:
        raise InvalidRequest("no such tool")

    with pytest.raises(StageFailed, match=r"stage 'tool': the pipeline's function failed: .*no such tool"):
        await run(FunctionNode(FunctionSpec("tool", fail)))


async def test_its_runs_and_failures_are_counted_for_the_metrics() -> None:
    async def fail(activation: Activation) -> AsyncIterator[Emission]:
        raise KeyError("bad")
        yield Emission("result", "")

    good, bad = FunctionNode(FunctionSpec("shout", shout)), FunctionNode(FunctionSpec("tool", fail))
    await run(good)
    with pytest.raises(StageFailed):
        await run(bad)
    runtime = SimpleNamespace(statistics=lambda: FlowStatistics(0, 0, 0, 0))
    sources = LatencyMetrics(), QueueLimits({}), FlowMetrics(), MediaBudget(1, 1)
    metrics = collect(runtime, [], [good, bad], *sources)  # type: ignore[arg-type]
    counted = {metric.name: metric.samples for metric in metrics if "function" in metric.name}
    values = {name: {one.labels["stage"]: one.value for one in samples} for name, samples in counted.items()}
    assert values == {
        "vllm_omni:function_runs": {"shout": 1, "tool": 1},
        "vllm_omni:function_failures": {"shout": 0, "tool": 1},
    }
