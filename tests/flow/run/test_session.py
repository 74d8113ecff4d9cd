import asyncio

import pytest

from tests.flow.builders import TEXT
from vllm_omni.errors import InvalidRequest, OmniError
from vllm_omni.flow import (
    Activation,
    Emission,
    Field,
    GlobalParameters,
    Graph,
    GraphParser,
    GraphRuntime,
    Role,
    interface,
)
from vllm_omni.flow.run.session import GCScheduler, ParameterStore


def test_head_starts_at_once_and_the_next_when_it_leaves():
    scheduler, started = GCScheduler(), []
    for call in "abc":
        scheduler.enter("s", call, lambda call=call: started.append(call))
    assert started == ["a"]
    assert scheduler.num_waiting == 2
    scheduler.leave("s", "a")
    assert started == ["a", "b"]
    scheduler.leave("s", "b")
    scheduler.leave("s", "c")
    assert started == ["a", "b", "c"]
    assert scheduler.num_waiting == 0


def test_call_that_leaves_the_queue_never_starts():
    scheduler, started = GCScheduler(), []
    for call in "abc":
        scheduler.enter("s", call, lambda call=call: started.append(call))
    scheduler.leave("s", "b")
    scheduler.leave("s", "a")
    assert started == ["a", "c"]


def test_sessions_are_independent():
    scheduler, started = GCScheduler(), []
    for session in "xy":
        scheduler.enter(session, session, lambda session=session: started.append(session))
    assert started == ["x", "y"]


def test_call_that_ends_while_it_starts_lets_the_next_one_in():
    scheduler, started = GCScheduler(), []
    scheduler.enter("s", "a", lambda: started.append("a"))
    scheduler.enter("s", "b", lambda: (started.append("b"), scheduler.leave("s", "b")))
    scheduler.enter("s", "c", lambda: started.append("c"))
    scheduler.leave("s", "a")
    assert started == ["a", "b", "c"]


class Echo(Role):
    echo = interface([["line"]], {"line": Field(TEXT)})


class EchoNode:
    async def forward(self, activation: Activation):
        async for chunk in activation.inputs["line"]:
            yield Emission("line", chunk.payload)


def make_runtime(*parameters: GlobalParameters) -> GraphRuntime:
    graph = Graph("g")
    graph.output(line=graph.role(Echo, "echo", parameters=parameters).echo(line=graph.placeholder("line")).line)
    return GraphRuntime(GraphParser(graph).parse(), {"echo": EchoNode()})


def broken(value: object) -> None:
    raise KeyError("release")


async def read(runtime: GraphRuntime, call_id: str, session: str | None = None) -> list[str]:
    return [frame.payload async for frame in runtime.open(call_id, {"line": call_id}, ["line"], session=session)]


async def test_parameters_that_cannot_be_released_end_neither_the_call_nor_the_others(caplog):
    released = []
    runtime = make_runtime(GlobalParameters("a", list, broken), GlobalParameters("b", list, released.append))
    assert await asyncio.wait_for(read(runtime, "1"), 1) == ["1"]
    assert released == [[]] and "parameters 'a' could not be released" in caplog.text
    for session in "xy":
        await read(runtime, session, session)
    runtime.end_session("x")
    await runtime.aclose()
    assert released == [[]] * 3


async def test_parameters_that_cannot_be_made_fail_the_call_and_release_those_before_them():
    def fail() -> None:
        raise InvalidRequest("full")

    released = []
    runtime = make_runtime(GlobalParameters("a", list, released.append), GlobalParameters("b", fail))
    for session in (None, "x"):
        with pytest.raises(OmniError, match=r"parameters 'b' could not be made: .*full") as raised:
            await read(runtime, "1", session)
        assert not isinstance(raised.value, InvalidRequest)
    assert released == [[], []]
    assert runtime.statistics().num_open_calls == 0


def test_a_session_without_a_name_is_a_session():
    store = ParameterStore([GlobalParameters("a", list)])
    assert store.of("", "1") is store.of("", "2")
    store.end("")
    assert len(store) == 0
