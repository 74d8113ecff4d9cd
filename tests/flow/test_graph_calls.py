"""A graph as a node of another one: what it computes, and how it ends."""

import asyncio

import pytest

from tests.flow.builders import FunctionNode, ManualClock, hang, over_every_link, read, read_payloads, spin
from tests.flow.test_dependencies import All, Each, Join, repeat, tell
from vllm_omni.errors import DeadlineExceeded, GraphError, InvalidRequest, StageFailed, StageUnavailable
from vllm_omni.flow import (
    Chunk,
    Emission,
    EndReason,
    Field,
    GlobalParameters,
    Graph,
    GraphParser,
    GraphRuntime,
    Role,
    interface,
    parse_graphs,
)

TEXT = Field("text")


def make_inner(spec=TEXT, **parameters):
    """x -> first -> second -> y; z is what the third makes of x"""
    inner = Graph("inner")
    x = inner.placeholder("x", spec)
    first = inner.role(All, "first", **parameters).run(x=x)
    z = inner.role(All, "third").run(x=x).y
    inner.output(y=inner.role(All, "second").run(x=first.y).y, z=z)
    inner.graph_call("both", ["y", "z"])
    inner.graph_call("quickly", ["y", "z"], until=["y"])
    inner.graph_call("one", ["y"])
    return inner


def make_outer(inner, call="both"):
    outer = Graph("outer")
    before = outer.role(All, "before").run(x=outer.placeholder("x"))
    called = getattr(outer.graph_ref(inner), call)(x=before.y)
    outer.output(y=outer.role(All, "after").run(x=called.y).y, **({} if call == "one" else {"z": called.z}))
    return outer


def make_nodes(**nodes):
    return {name: tell() for name in ("before", "first", "second", "third", "after")} | nodes


@over_every_link
async def test_a_node_runs_another_graph(make_runtime):
    runtime = make_runtime([make_outer(make_inner())], make_nodes())
    got = await read_payloads(runtime.open("c", {"x": 0}, {"y", "z"}, graph="outer"))
    assert got == {"y": ["x:x:x:x:0"], "z": ["x:x:0"]}
    assert await read_payloads(runtime.open("c", {"x": 0}, graph="inner.one")) == {"y": ["x:x:0"]}


async def test_nodes_that_the_outer_graph_does_not_need_are_not_run(make_runtime):
    nodes = make_nodes()
    runtime = make_runtime([make_outer(make_inner())], nodes)
    assert await read_payloads(runtime.open("c", {"x": 0}, {"z"}, graph="outer")) == {"z": ["x:x:0"]}
    assert [name for name, node in nodes.items() if node.activations] == ["before", "third"]


async def test_a_node_ends_with_the_outputs_that_complete_the_graph_call(make_runtime):
    nodes = make_nodes(third=FunctionNode(hang))
    runtime = make_runtime([make_outer(make_inner(), "quickly")], nodes)
    frames = await read(runtime.open("c", {"x": 0}, {"y", "z"}, graph="outer"))
    assert [frame.payload for frame in frames["y"]] == ["x:x:x:x:0"]
    assert [frame.reason for frame in frames["z"]] == [EndReason.EMPTY]
    assert nodes["third"].events == ["start", "cancelled", "clean"]


@over_every_link
async def test_each_piece_of_a_stream_starts_a_call_if_the_placeholder_is_declared(make_runtime):
    outer = Graph("outer")
    pieces = outer.role(All, "before").spread(x=outer.placeholder("x"))
    outer.output(y=outer.graph_ref(make_inner()).one(x=pieces.y).y)
    nodes = {"before": repeat(3), "first": tell(), "second": tell({(): 5}), "third": tell()}
    runtime = make_runtime([outer], nodes)
    got = await read_payloads(runtime.open("c", {"x": "a"}, {"y"}, graph="outer"))
    assert got == {"y": [f"x:x:a.{number}" for number in range(3)]}
    calls = sorted({activation.call_id for activation in nodes["first"].activations})
    assert calls == ["c/inner.one.0", "c/inner.one.1", "c/inner.one.2"]


async def test_an_iteration_of_a_loop_may_be_a_call_of_another_graph(make_runtime):
    class Header(Role):
        run = interface([["x"], ["again"]], {"y": TEXT, "end": TEXT})

    async def count(activation):
        (chunks,) = activation.inputs.values()
        async for chunk in chunks:
            yield Emission("end" if activation.iteration == 2 else "y", chunk.payload)

    outer = Graph("outer")
    header = outer.role(Header, "header")
    started = header.run(x=outer.placeholder("x"))
    header.run(again=outer.graph_ref(make_inner()).one(x=started.y).y)
    outer.output(end=started.end)
    nodes = {"header": FunctionNode(count), "first": tell(), "second": tell(), "third": tell()}
    runtime = make_runtime([outer], nodes)
    assert await read_payloads(runtime.open("c", {"x": 0}, {"end"}, graph="outer")) == {"end": ["x:x:x:x:0"]}
    assert [one.call_id for one in nodes["first"].activations] == ["c/inner.one", "c/inner.one+0"]


async def test_two_calls_of_one_graph_meet_in_a_join_and_may_be_nested(make_runtime):
    inner = make_inner()
    middle = Graph("middle")
    middle.output(y=middle.graph_ref(inner).one(x=middle.placeholder("x")).y)
    middle.graph_call("go", ["y"])
    outer = Graph("outer")
    x = outer.placeholder("x")
    left, right = outer.graph_ref(middle, "left").go(x=x), outer.graph_ref(inner, "right").one(x=x)
    outer.output(y=outer.role(Join, "join").run(a=left.y, b=right.y).y)
    nodes = {"join": tell(), "first": tell(), "second": tell(), "third": tell()}
    runtime = make_runtime([outer], nodes)
    assert await read_payloads(runtime.open("c", {"x": 0}, {"y"}, graph="outer")) == {"y": ["a:x:x:0 b:x:x:0"]}
    calls = sorted(activation.call_id for activation in nodes["first"].activations)
    assert calls == ["c/left.go/inner.one", "c/right.one"]


async def test_what_the_inner_graph_does_not_emit_is_not_emitted(make_runtime):
    async def nothing(activation):
        for _ in ():
            yield

    runtime = make_runtime([make_outer(make_inner())], make_nodes(first=FunctionNode(nothing)))
    frames = await read(runtime.open("c", {"x": 0}, {"y", "z"}, graph="outer"))
    assert [frame.reason for frame in frames["y"]] == [EndReason.UNREACHABLE]
    assert [frame.payload for frame in frames["z"]] == ["x:x:0"]


async def test_a_slow_reader_of_the_outer_graph_holds_back_a_node_of_the_inner_one(make_runtime):
    class Source(Role):
        run = interface([["x"]], {"y": Field("text", streamed=True)})

    made = 0

    async def stream(activation):
        nonlocal made
        for made in range(1000):
            yield Emission("y", made)

    inner, outer = Graph("inner"), Graph("outer")
    inner.output(y=inner.role(Source, "source").run(x=inner.placeholder("x")).y)
    inner.graph_call("go", ["y"])
    outer.output(y=outer.graph_ref(inner).go(x=outer.placeholder("x")).y)
    runtime = make_runtime([outer], {"source": FunctionNode(stream)})
    call = runtime.open("c", {"x": 0}, {"y"}, graph="outer")
    assert (await anext(call)).payload == 0
    await spin(2000)
    assert made < 200
    assert [frame.payload async for frame in call if frame.payload is not None] == list(range(1, 1000))


# ---- ends ----


@over_every_link
async def test_an_abort_ends_the_inner_call_before_the_outer_one(make_runtime):
    nodes = make_nodes(second=FunctionNode(hang))
    runtime = make_runtime([make_outer(make_inner())], nodes)
    call = runtime.open("c", {"x": 0}, {"y"}, graph="outer")
    while runtime.statistics().num_open_calls < 2:  # noqa: ASYNC110 - messages are in flight on sockets
        await asyncio.sleep(0.001)
    await call.aclose()
    assert runtime.statistics().num_open_calls == 0


async def test_a_deadline_names_the_inner_node_that_runs(make_runtime):
    clock = ManualClock()
    nodes = make_nodes(second=FunctionNode(hang))
    runtime = make_runtime([make_outer(make_inner())], nodes, clock=clock)
    call = runtime.open("c", {"x": 0}, {"y"}, graph="outer", deadline_s=2.0)
    await spin(100)
    clock.advance(2.0)
    with pytest.raises(DeadlineExceeded, match=r"still running: inner.both, inner.both > second.run; outputs not"):
        await read(call)
    assert nodes["second"].events == ["start", "cancelled", "clean"]


async def test_closing_the_runtime_ends_inner_calls_with_the_outer_ones(make_runtime):
    runtime = make_runtime([make_outer(make_inner())], make_nodes(second=FunctionNode(hang)))
    call = runtime.open("c", {"x": 0}, {"y"}, graph="outer")
    await spin(100)
    await runtime.aclose()
    assert "runtime was closed" in str(call.error)
    assert not hasattr(call.error, "__notes__")


@pytest.mark.parametrize("error", [StageFailed, StageUnavailable])
async def test_an_error_of_an_inner_node_fails_the_outer_call_and_names_the_path(make_runtime, error):
    async def fail(activation):
        raise error("second", "is broken")
        yield

    runtime = make_runtime([make_outer(make_inner())], make_nodes(second=FunctionNode(fail)))
    with pytest.raises(error, match=r"stage 'inner.both > second': is broken") as raised:
        await read(runtime.open("c", {"x": 0}, {"y"}, graph="outer"))
    assert raised.value.__notes__ == ["in node 'inner.both' of call 'c'"]


async def test_several_values_for_a_placeholder_fail_the_call(make_runtime):
    async def split(chunks, call):
        async for chunk in chunks:
            yield Chunk(chunk.payload, 0)
            yield Chunk(chunk.payload, 1, last=True)

    outer = Graph("outer")
    before = outer.role(All, "before").run(x=outer.placeholder("x"))
    outer.output(y=outer.graph_ref(make_inner()).one(x=before.y.via(split)).y)
    nodes = make_nodes()
    del nodes["after"]
    runtime = make_runtime([outer], nodes)
    with pytest.raises(GraphError, match=r"'inner.one': input 'x' has 2 values, and a placeholder takes one"):
        await read(runtime.open("c", {"x": 0}, {"y"}, graph="outer"))


@pytest.mark.parametrize("session", [None, "s"])
async def test_inner_calls_share_the_parameters_of_the_outer_one_and_do_not_wait_for_it(make_runtime, session):
    released = []
    history = GlobalParameters("history", list, released.append)

    async def remember(activation):
        activation.parameters["history"].append(activation.node)
        assert activation.session == session
        yield Emission("y", list(activation.parameters["history"]))

    outer = Graph("outer")
    before = outer.role(All, "before", parameters=[history]).run(x=outer.placeholder("x"))
    outer.output(y=outer.graph_ref(make_inner(parameters=[history])).one(x=before.y).y)
    nodes = {"before": FunctionNode(remember), "first": FunctionNode(remember), "second": tell(), "third": tell()}
    runtime = make_runtime([outer], nodes)
    await read(runtime.open("c", {"x": 0}, {"y"}, graph="outer", session=session))
    if session is not None:
        assert not released
        runtime.end_session(session)
    assert released == [["before.run", "first.run"]]


# ---- mistakes ----


def test_a_graph_cannot_call_itself_nor_one_that_calls_it():
    inner = make_inner()
    with pytest.raises(GraphError, match="graph 'inner' calls itself"):
        inner.graph_ref(inner)
    outer = make_outer(inner)
    outer.graph_call("go", ["y"])
    for change in (
        lambda: inner.graph_ref(outer),
        lambda: inner.placeholder("more"),
        lambda: inner.output(more=outer.declarations.outputs["y"]),
        lambda: inner.graph_call("more", ["y"]),
    ):
        with pytest.raises(GraphError, match="graph 'inner' is called by another graph already: complete it before"):
            change()


def test_a_call_that_the_other_graph_has_not_is_rejected():
    outer, inner = Graph("outer"), make_inner()
    with pytest.raises(GraphError, match="graph 'inner' has no graph call 'bot'; did you mean 'both'"):
        outer.graph_ref(inner).bot(x=outer.placeholder("x"))
    with pytest.raises(GraphError, match=r"graph 'none' has no graph calls: declare one"):
        outer.graph_ref(Graph("none"))
    with pytest.raises(GraphError, match=r"node 'again.one' has no input 'y'; valid: x"):
        outer.graph_ref(inner, "again").one(y=outer.placeholder("y"))


def test_a_stream_needs_a_placeholder_with_a_type_or_a_transfer_function():
    outer = Graph("outer")
    pieces = outer.role(All, "before").spread(x=outer.placeholder("x"))
    outer.output(y=outer.graph_ref(make_inner(spec=None)).one(x=pieces.y).y)
    with pytest.raises(GraphError, match=r"input 'x' is a placeholder of another graph.* before.spread.y is streamed"):
        parse_graphs([outer])


def test_the_plans_of_called_graphs_are_needed():
    plan = GraphParser(make_outer(make_inner())).parse()
    with pytest.raises(GraphError, match=r"node 'inner.both' calls graph 'inner', whose plan is missing"):
        GraphRuntime(plan, {"before": tell(), "after": tell()})


def test_a_graph_and_a_graph_call_cannot_have_one_name():
    other = Graph("inner.one")
    other.output(y=other.role(All, "other").run(x=other.placeholder("x")).y)
    with pytest.raises(GraphError, match=r"'inner.one' is a graph, and a graph call of another one"):
        parse_graphs([make_inner(), other])


def test_an_output_that_may_come_several_times_is_streamed():
    class Either(Role):
        run = interface([["a"], ["b"]], {"y": TEXT})

    graph = Graph("inner")
    x = graph.placeholder("x")
    either = graph.role(Either, "either")
    either.run(a=x)
    each = graph.role(Each, "each").run(x=graph.role(All, "spread").spread(x=x).y)
    graph.output(once=graph.role(All, "once").run(x=x).y, twice=either.run(b=x).y, each=each.y)
    graph.graph_call("all", ["once", "twice", "each"])
    outer = Graph("outer")
    called = outer.graph_ref(graph).all(x=outer.placeholder("x"))
    assert [getattr(called, name).spec.streamed for name in ("once", "twice", "each")] == [False, True, True]


async def test_an_inner_call_is_no_graph_call_of_the_user(make_runtime):
    runtime = make_runtime([make_outer(make_inner())], make_nodes())
    with pytest.raises(InvalidRequest, match=r"no graph 'inner.two'"):
        runtime.open("c", {"x": 0}, graph="inner.two")
