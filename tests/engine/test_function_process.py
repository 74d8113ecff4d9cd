"""Functions in processes of their own: real processes, through the graph's runtime or one by one."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.engine.functions import CODEC, act
from tests.process.programs import wait_for
from vllm_omni.engine import function_process
from vllm_omni.engine.flow_metrics import FlowMetrics
from vllm_omni.engine.function_messages import WINDOW
from vllm_omni.engine.function_node import FunctionNode
from vllm_omni.engine.function_process import FunctionProcess
from vllm_omni.engine.graph_metrics import collect
from vllm_omni.engine.latency_metrics import LatencyMetrics
from vllm_omni.engine.media_budget import MediaBudget
from vllm_omni.engine.queue_limits import QueueLimits
from vllm_omni.engine.startup import start_engines
from vllm_omni.errors import CallAborted, StageFailed, StageUnavailable
from vllm_omni.flow import (
    Activation,
    Chunk,
    Field,
    FlowStatistics,
    Graph,
    GraphCall,
    GraphParser,
    GraphRuntime,
    Role,
    interface,
)
from vllm_omni.model_executor.pipeline import FunctionSpec, RequestContext
from vllm_omni.process import supervisor
from vllm_omni.process.status import StageState
from vllm_omni.relay.hub import RelayHub, RelayOptions

TIMEOUT_S = 60.0


class Tool(Role):
    use = interface([["call"]], {"result": Field("text", streamed=True)})


async def wait_until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not is_true():  # noqa: ASYNC110 - of another process
            await asyncio.sleep(0.005)


@pytest.fixture(scope="module")
async def node(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[FunctionNode, None]:
    """One function in two processes."""
    made = FunctionNode(FunctionSpec("tool", act, processes=2), CODEC)
    hub = RelayHub(RelayOptions(), prefault=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervisor, "FIRST_DELAY_S", 0.0)
        running = await asyncio.to_thread(start_engines, {}, {}, hub, {}, made.processes)
        pids = [pid for process in made.processes for pid in process.pids()]
        yield made
        for process in made.processes:
            await process.aclose()
        await asyncio.to_thread(running.shutdown)
        hub.close()
    assert not any(map(psutil.pid_exists, pids))


def open_call(node: FunctionNode, *payloads: Any, call_id: str = "request") -> GraphCall:
    graph = Graph("g")
    graph.output(result=graph.role(Tool, "tool").use(call=graph.placeholder("call")).result)
    runtime = GraphRuntime(GraphParser(graph).parse(), {"tool": node})
    (payload,) = payloads
    return runtime.open(call_id, {"call": payload}, ["result"], context=RequestContext(call_id, {}, {}))


async def run(node: FunctionNode, payload: Any) -> list[Any]:
    return [frame.payload async for frame in open_call(node, payload) if frame.payload is not None]


def activation_of(inputs: AsyncIterator[Chunk]) -> Activation:
    return Activation("c", "tool.use", "use", 1, {"call": inputs}, frozenset({"result"}), None)


async def chunks_of(*payloads: Any) -> AsyncIterator[Chunk]:
    for seq, payload in enumerate(payloads):
        yield Chunk(payload, seq, last=seq == len(payloads) - 1)


async def payloads_of(process: FunctionProcess, payload: Any) -> list[Any]:
    async with aclosing(process.run(activation_of(chunks_of(payload)))) as yields:
        return [emission.payload async for emissions in yields for emission in emissions]  # type: ignore[union-attr]


async def test_it_runs_in_another_process_with_a_copy_of_the_context(node: FunctionNode) -> None:
    (copied,) = await run(node, {"do": "return context"})
    assert copied["request_id"] == "request"
    own = [psutil.Process(pid) for one in node.processes for pid in one.pids()]
    assert len({one.pid for one in own} | {os.getpid()}) == 3
    assert all(psutil.Process() in one.parents() for one in own)


async def test_its_error_is_its_own_and_counted(node: FunctionNode) -> None:
    before = node.num_failed
    with pytest.raises(StageFailed, match=r"stage 'tool/[01]': the pipeline's function failed: KeyError\('bad'\)"):
        await run(node, {"do": "raise"})
    assert node.num_failed == before + 1
    assert await run(node, "abc") == ["ABC"]


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        ({"do": "emit no value"}, r"output 'result': .*list_iterator"),
        ({"do": "emit no emission"}, r"it yielded a str: an Emission is needed, or a list of them"),
        ({"do": "return", "value": object()}, r"stage 'tool/\d': input 'call': .*object"),
    ],
)
async def test_a_value_that_cannot_be_sent_names_the_function_and_the_field(
    node: FunctionNode, payload: Any, said: str
) -> None:
    with pytest.raises(StageFailed, match=said):
        await run(node, payload)


async def test_a_blocked_process_holds_up_neither_the_event_loop_nor_the_other_process(
    node: FunctionNode, tmp_path: Path
) -> None:
    blocked = asyncio.ensure_future(run(node, {"do": "block", "in": str(tmp_path)}))
    await wait_until((tmp_path / "blocks").exists)
    assert await run(node, "abc") == ["ABC"]
    assert not blocked.done()
    (tmp_path / "go").touch()
    assert await blocked == ["done"]


async def test_an_abort_cancels_it_and_its_clean_up_runs(node: FunctionNode, tmp_path: Path) -> None:
    call = open_call(node, {"do": "wait", "in": str(tmp_path)})
    await wait_until((tmp_path / "waits").exists)
    await call.abort()
    assert (tmp_path / "cleaned up").read_text() == "0"
    assert [one.load for one in node.processes] == [(0, 0), (0, 0)]


async def test_each_process_is_among_the_metrics(node: FunctionNode) -> None:
    runtime = SimpleNamespace(statistics=lambda: FlowStatistics(0, 0, 0, 0))
    sources = LatencyMetrics(), QueueLimits({}), FlowMetrics(), MediaBudget(1, 1)
    metrics = {one.name: one for one in collect(runtime, [], [node], *sources)}  # type: ignore[arg-type]
    up = {one.labels["stage"]: one.value for one in metrics["vllm_omni:stage_up"].samples}
    assert up == {"tool/0": 1, "tool/1": 1}
    assert metrics["vllm_omni:function_runs"].samples[0].value == node.num_runs


async def test_a_slow_reader_holds_it_back(node: FunctionNode) -> None:
    yields = node.processes[0].run(activation_of(chunks_of({"do": "count", "to": 10 * WINDOW})))
    assert [one.payload for one in await anext(yields)] == [0]  # type: ignore[union-attr]
    for number in range(1, 10 * WINDOW):
        assert [one.payload for one in await anext(yields)] == [number]  # type: ignore[union-attr]
        (at_work,) = node.processes[0]._started.runs.values() or (None,)
        assert at_work is None or at_work.events.qsize() <= WINDOW + 1
    with pytest.raises(StopAsyncIteration):
        await anext(yields)


async def test_it_reads_a_chunk_only_when_it_asks_for_it(node: FunctionNode) -> None:
    read: list[str] = []

    async def chunks() -> AsyncIterator[Chunk]:
        for text in ("a", "b", "c"):
            read.append(text)
            yield Chunk(text, len(read) - 1, last=text == "c")

    yields = node.processes[0].run(activation_of(chunks()))
    async for (emission,) in yields:  # type: ignore[misc]
        assert emission.payload == read[-1].upper() or len(read) <= WINDOW
    assert read == ["a", "b", "c"]


async def test_an_input_that_breaks_off_raises_in_it_and_stays_its_producers_error(node: FunctionNode) -> None:
    error = StageFailed("writer", "no memory")

    async def broken() -> AsyncIterator[Chunk]:
        yield Chunk({"do": "read the rest"}, 0)
        raise error

    yields = node.processes[0].run(activation_of(broken()))
    (emission,) = await anext(yields)  # type: ignore[misc]
    assert emission.payload == "writer"
    with pytest.raises(StageFailed) as raised:
        await anext(yields)
    assert raised.value is error


async def test_one_that_dies_fails_its_runs_and_is_restarted_while_others_serve(
    node: FunctionNode, tmp_path: Path
) -> None:
    dying = node.processes[0]
    running = asyncio.ensure_future(payloads_of(dying, {"do": "wait", "in": str(tmp_path)}))
    await wait_until((tmp_path / "waits").exists)
    num_restarts = dying.current_status().num_restarts
    os.kill(dying.pids()[0], signal.SIGKILL)
    with pytest.raises(StageFailed, match=r"stage 'tool/0': its process has died: killed by SIGKILL"):
        await running
    assert dying.current_status().state is StageState.RESTARTING
    with pytest.raises(StageUnavailable, match="tool/0"):
        await payloads_of(dying, "abc")
    assert node.current_status().state is StageState.RUNNING
    assert await run(node, "abc") == ["ABC"]
    await wait_until(lambda: dying.current_status().state is StageState.RUNNING)
    assert dying.current_status().num_restarts == num_restarts + 1
    assert await payloads_of(dying, "again") == ["AGAIN"]


async def test_one_that_is_blocked_holds_no_abort_up_and_is_killed_unless_another_run_computes(
    node: FunctionNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(function_process, "ABORT_TIMEOUT_S", 0.01)
    monkeypatch.setattr(function_process, "KILL_TIMEOUT_S", 0.02)
    process = node.processes[1]
    (waits, blocks) = tmp_path / "1", tmp_path / "2"
    waits.mkdir()
    blocks.mkdir()

    def start(what: str, directory: Path) -> "asyncio.Task[Any]":
        return asyncio.ensure_future(payloads_of(process, {"do": what, "in": str(directory)}))

    waiting = start("wait", waits)
    await wait_until((waits / "waits").exists)
    blocking = start("block", blocks)
    await wait_until((blocks / "blocks").exists)
    waiting.cancel()  # it cannot end while the other computes, which is not at fault
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert process.load == (1, 2)
    await wait_until(lambda: caplog.text.count("has not ended") == 1)
    await asyncio.sleep(0.1)
    assert process.pids()
    pid = process.pids()[0]
    blocking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await blocking
    await wait_until(lambda: process.current_status().state is StageState.RESTARTING)
    reason = process.current_status().reason or ""
    assert "its process was killed: request c had not ended" in reason
    await wait_until(lambda: process.current_status().state is StageState.RUNNING)
    assert process.pids() != [pid]
    assert await payloads_of(process, "again") == ["AGAIN"]


async def test_an_abort_of_a_call_is_over_although_the_function_computes(
    node: FunctionNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(function_process, "ABORT_TIMEOUT_S", 0.01)
    call = open_call(node, {"do": "block", "in": str(tmp_path)})
    await wait_until((tmp_path / "blocks").exists)
    await call.abort()
    with pytest.raises(CallAborted):
        await anext(call)
    (tmp_path / "go").touch()
    await wait_until(lambda: [one.load for one in node.processes] == [(0, 0), (0, 0)])


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_it_ends_with_its_server_although_it_computes(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "tests.engine.function_program", tmp_path]
    runtime = Path(tempfile.mkdtemp(prefix="omni-", dir="/tmp"))  # the path of a socket must be short
    environ = os.environ | {"VLLM_OMNI_RUNTIME_DIR": str(runtime)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ, start_new_session=True) as program:
        assert program.stdout is not None
        process = psutil.Process(int(program.stdout.readline()))
        wait_for((tmp_path / "blocks").exists)
        os.killpg(program.pid, number) if number == signal.SIGINT else program.kill()
        program.wait(TIMEOUT_S)
    process.wait(TIMEOUT_S)
    wait_for(lambda: not list(runtime.iterdir()))
    runtime.rmdir()


async def test_an_import_that_fails_ends_the_start_and_nothing_is_left() -> None:
    process = FunctionProcess("tool", "tests.engine.no_such_module:act", CODEC)
    hub = RelayHub(RelayOptions(), prefault=False)
    with pytest.raises(StageFailed, match=r"'tool': its process did not start: importing .*no_such_module"):
        await asyncio.to_thread(start_engines, {}, {}, hub, {}, [process])
    hub.close()
    assert not process.pids()
