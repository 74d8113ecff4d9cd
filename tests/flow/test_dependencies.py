"""Joins, order, counts, choices and loops: each rule has a graph of its own.

The three problems are those of Omni-Flow section 3, the three cases those of its appendix A.
"""

import asyncio

import pytest

from tests.flow.builders import FunctionNode, ManualClock, over_every_link, read, read_payloads, spin
from vllm_omni.errors import CallAborted, DeadlineExceeded, GraphError, InvalidRequest
from vllm_omni.flow import Emission, EndReason, Field, GlobalParameters, Graph, Role, Scheduling, interface
from vllm_omni.flow.run.credit import WINDOW
from vllm_omni.flow.run.frame import ITERATION

TEXT = Field("text")
STREAM = Field("text", streamed=True)


class Source(Role):
    """Yields on two fields, frame by frame."""

    run = interface([["x"]], {"y": STREAM, "z": STREAM, "whole": TEXT})


class Each(Role):
    """One activation for each frame; one result, or a stream of several."""

    run = interface([["x"]], {"y": TEXT}, inputs={"x": TEXT})
    spread = interface([["x"]], {"y": STREAM}, inputs={"x": TEXT})


class All(Role):
    """One activation for a stream."""

    run = interface([["x"]], {"y": TEXT})
    spread = interface([["x"]], {"y": STREAM})


class Join(Role):
    run = interface([["a", "b"]], {"y": TEXT})
    ordered = interface([["a", "b"]], {"y": TEXT}, scheduling=Scheduling.SESSION)


class Either(Role):
    run = interface([["a"], ["b"]], {"y": TEXT})
    ordered = interface([["a"], ["b"]], {"y": TEXT}, scheduling=Scheduling.SESSION)
    first = interface([["a"], ["b"]], {"y": TEXT}, first_wins=True)


class JoinEach(Role):
    run = interface([["a", "b"]], {"y": TEXT}, inputs={"a": TEXT, "b": TEXT})


class EitherEach(Role):
    run = interface([["a"], ["b"]], {"y": TEXT}, inputs={"a": TEXT, "b": TEXT})
    first = interface([["a"], ["b"]], {"y": TEXT}, inputs={"a": TEXT, "b": TEXT}, first_wins=True)
    ordered = interface([["a"], ["b"]], {"y": TEXT}, inputs={"a": TEXT, "b": TEXT}, scheduling=Scheduling.SESSION)


def emit(*yields):
    """A node with the given yields: each yield is a dict of fields."""

    async def forward(activation):
        for fields in yields:
            await asyncio.sleep(0)
            yield [Emission(name, payload) for name, payload in fields.items()]

    return FunctionNode(forward)


async def gather(activation):
    """field:payloads of all inputs."""
    parts = []
    for name, chunks in activation.inputs.items():
        parts.append(f"{name}:{','.join([str(chunk.payload) async for chunk in chunks])}")
    return " ".join(parts)


def tell(delays=None):
    """A node that emits a description of its inputs, ``delays[path]`` iterations of the event loop later."""

    async def forward(activation):
        what = await gather(activation)
        for _ in range((delays or {}).get(activation.path, 0)):
            await asyncio.sleep(0)
        yield Emission("y", what)

    return FunctionNode(forward)


def pass_on(delay=0, suffix=""):
    async def forward(activation):
        (chunks,) = activation.inputs.values()
        async for chunk in chunks:
            for _ in range(delay):
                await asyncio.sleep(0)
            yield Emission("y", f"{chunk.payload}{suffix}")

    return FunctionNode(forward)


def repeat(times):
    async def forward(activation):
        async for chunk in activation.inputs["x"]:
            for number in range(times):
                yield Emission("y", f"{chunk.payload}.{number}")

    return FunctionNode(forward)


def fail_at(payload):
    async def forward(activation):
        (chunks,) = activation.inputs.values()
        async for chunk in chunks:
            if chunk.payload == payload:
                raise GraphError(f"cannot read {payload}")
            yield Emission("y", chunk.payload)

    return FunctionNode(forward)


def make_diamond(join="run", left="run", right="run"):
    """source -> left, right (for each frame) -> join"""
    graph = Graph("diamond")
    source = graph.role(Source, "source").run(x=graph.placeholder("x"))
    a = getattr(graph.role(Each, "left"), left)(x=source.y)
    b = getattr(graph.role(Each, "right"), right)(x=source.z)
    graph.output(y=getattr(graph.role(Join, "join"), join)(a=a.y, b=b.y).y)
    return graph


FRAMES = [{"y": k, "z": k} for k in range(3)]


# ---- the three problems ----


@over_every_link
async def test_problem_1_paths_of_one_frame_meet_however_fast_they_are(make_runtime):
    nodes = {"source": emit(*FRAMES), "left": pass_on(delay=7), "right": pass_on(), "join": tell()}
    runtime = make_runtime(make_diamond(), nodes)
    assert await read_payloads(runtime.open("c", {"x": 0}, {"y"})) == {"y": ["a:0 b:0", "a:1 b:1", "a:2 b:2"]}


async def test_problem_2_outputs_come_in_the_order_of_production(make_runtime):
    graph = Graph("g")
    source = graph.role(Source, "source").run(x=graph.placeholder("x"))
    graph.output(y=graph.role(Each, "each").run(x=source.y).y)
    nodes = {"source": emit(*FRAMES), "each": tell({(0,): 20, (1,): 10})}
    runtime = make_runtime(graph, nodes)
    assert await read_payloads(runtime.open("c", {"x": 0}, {"y"})) == {"y": ["x:0", "x:1", "x:2"]}


@over_every_link
async def test_problem_3_join_waits_for_the_number_of_paths_of_the_request(make_runtime):
    class Parser(Role):
        run = interface([["x"]], {"image": STREAM, "text": TEXT, "num_images": TEXT})

    class Diffusion(Role):
        run = interface([["text", "image", "num_images"]], {"y": TEXT}, activate_by_count={"image": "num_images"})

    graph = Graph("g")
    parts = graph.role(Parser, "parser").run(x=graph.placeholder("x"))
    encoded = graph.role(Each, "encoder").run(x=parts.image)
    text = graph.role(Each, "embedding").run(x=parts.text)
    diffusion = graph.role(Diffusion, "diffusion").run(text=text.y, image=encoded.y, num_images=parts.num_images)
    graph.output(y=diffusion.y)

    async def parse(activation):
        yield [Emission("text", "t"), Emission("num_images", num_images)]
        for number in range(num_images):
            yield Emission("image", f"i{number}")

    nodes = {
        "parser": FunctionNode(parse),
        "encoder": tell({(0,): 9}),
        "embedding": pass_on(delay=4),
        "diffusion": tell(),
    }
    runtime = make_runtime(graph, nodes)
    for num_images in (0, 1, 5):
        expected = ",".join(f"x:i{k}" for k in range(num_images))
        assert await read_payloads(runtime.open(f"c{num_images}", {"x": 0}, {"y"})) == {
            "y": [f"text:t image:{expected} num_images:{num_images}"]
        }


# ---- appendix A ----


async def test_case_1_each_frame_of_the_fork_has_a_bucket_of_its_own(make_runtime):
    nodes = {"source": emit(*FRAMES), "left": tell({(0,): 9}), "right": tell({(2,): 5}), "join": tell()}
    runtime = make_runtime(make_diamond("ordered"), nodes)
    assert await read_payloads(runtime.open("c", {"x": 0}, {"y"})) == {
        "y": ["a:x:0 b:x:0", "a:x:1 b:x:1", "a:x:2 b:x:2"]
    }
    assert [one.path for one in nodes["join"].activations] == [(0,), (1,), (2,)]


async def test_case_2_frames_of_one_frame_gather_in_one_bucket_in_order(make_runtime):
    nodes = {"source": emit({"y": "k", "z": "k"}), "left": repeat(3), "right": pass_on(), "join": tell()}
    runtime = make_runtime(make_diamond(left="spread"), nodes)
    assert await read_payloads(runtime.open("c", {"x": 0}, {"y"})) == {"y": ["a:k.0,k.1,k.2 b:k"]}


@over_every_link
async def test_case_3_frames_of_frames_gather_in_the_bucket_of_theirs(make_runtime):
    nodes = {"source": emit(*FRAMES), "left": repeat(3), "right": repeat(2), "join": tell()}
    runtime = make_runtime(make_diamond("ordered", "spread", "spread"), nodes)
    assert await read_payloads(runtime.open("c", {"x": 0}, {"y"})) == {
        "y": [f"a:{k}.0,{k}.1,{k}.2 b:{k}.0,{k}.1" for k in range(3)]
    }


async def test_frames_of_frames_of_frames_gather_in_the_order_of_their_paths(make_runtime):
    graph = Graph("g")
    source = graph.role(Source, "source").run(x=graph.placeholder("x"))
    spread = graph.role(Each, "spread").spread(x=source.y)
    deep = graph.role(Each, "deep").run(x=spread.y)
    graph.output(y=graph.role(Join, "join").run(a=deep.y, b=source.z).y)
    nodes = {
        "source": emit({"y": 0}, {"y": 1, "z": "z"}),
        "spread": repeat(2),
        "deep": tell({(0, 0): 12, (0, 1): 6, (1, 0): 3}),
        "join": tell(),
    }
    runtime = make_runtime(graph, nodes)
    assert await read_payloads(runtime.open("c", {"x": 0}, {"y"})) == {"y": ["a:x:0.0,x:0.1,x:1.0,x:1.1 b:z"]}


# ---- unreachable ----


@over_every_link
async def test_join_of_a_frame_without_one_of_its_fields_is_unreachable_alone(make_runtime):
    nodes = {
        "source": emit({"y": 0, "z": 0}, {"y": 1}, {"y": 2, "z": 2}),
        "left": tell(),
        "right": tell(),
        "join": tell(),
    }
    runtime = make_runtime(make_diamond(), nodes)
    assert await read_payloads(runtime.open("c", {"x": 0}, {"y"})) == {"y": ["a:x:0 b:x:0", "a:x:2 b:x:2"]}


async def test_output_below_an_unreachable_join_ends_as_unreachable(make_runtime):
    nodes = {"source": emit({"y": 0}), "left": tell(), "right": tell(), "join": tell()}
    runtime = make_runtime(make_diamond(), nodes)
    (end,) = (await read(runtime.open("c", {"x": 0}, {"y"})))["y"]
    assert (end.payload, end.last, end.reason) == (None, True, EndReason.UNREACHABLE)


async def test_source_that_yields_nothing_ends_everything_below(make_runtime):
    nodes = {"source": emit(), "left": tell(), "right": tell(), "join": tell()}
    runtime = make_runtime(make_diamond(), nodes)
    (end,) = (await read(runtime.open("c", {"x": 0}, {"y"})))["y"]
    assert end.reason is EndReason.UNREACHABLE


async def test_unreachability_passes_through_a_chain(make_runtime):
    graph = Graph("g")
    source = graph.role(Source, "source").run(x=graph.placeholder("x"))
    first = graph.role(All, "first").run(x=source.whole)
    graph.output(y=graph.role(Each, "second").run(x=first.y).y)
    runtime = make_runtime(graph, {"source": emit({"y": 1}), "first": tell(), "second": tell()})
    (end,) = (await read(runtime.open("c", {"x": 0}, {"y"})))["y"]
    assert end.reason is EndReason.UNREACHABLE


async def test_field_of_several_sources_skips_those_without_frames(make_runtime):
    graph = Graph("g")
    source = graph.role(Source, "source").run(x=graph.placeholder("x"))
    last = graph.role(All, "last")
    reply = last.run(x=graph.role(Each, "left").run(x=source.y).y)
    last.run(x=graph.role(Each, "right").run(x=source.z).y)
    graph.output(y=reply.y)
    nodes = {"source": emit({"y": 0}, {"z": 1}, {"y": 2, "z": 2}), "left": tell(), "right": tell(), "last": tell()}
    runtime = make_runtime(graph, nodes)
    assert await read_payloads(runtime.open("c", {"x": 0}, {"y"})) == {"y": ["x:x:0", "x:x:1", "x:x:2,x:2"]}


# ---- groups ----


def make_either(interface="run"):
    graph = Graph("g")
    source = graph.role(Source, "source").run(x=graph.placeholder("x"))
    either = graph.role(Either, "either")
    reply = getattr(either, interface)(a=graph.role(Each, "left").run(x=source.y).y)
    getattr(either, interface)(b=graph.role(Each, "right").run(x=source.z).y)
    graph.output(y=reply.y)
    return graph


async def test_each_group_fires_by_itself_and_outputs_keep_the_order_of_frames(make_runtime):
    nodes = {
        "source": emit({"y": 0}, {"z": 1}, {"y": 2, "z": 2}),
        "left": tell({(0,): 9}),
        "right": tell(),
        "either": tell(),
    }
    runtime = make_runtime(make_either(), nodes)
    assert await read_payloads(runtime.open("c", {"x": 0}, {"y"})) == {"y": ["a:x:0", "b:x:1", "a:x:2", "b:x:2"]}


async def test_session_node_takes_frames_in_order_whichever_group_they_feed(make_runtime):
    nodes = {
        "source": emit({"z": 0}, {"y": 1}, {"z": 2}, {"y": 3}),
        "left": tell(),
        "right": tell({(0,): 15}),
        "either": tell(),
    }
    runtime = make_runtime(make_either("ordered"), nodes)
    payloads = (await read_payloads(runtime.open("c", {"x": 0}, {"y"})))["y"]
    assert payloads == ["b:x:0", "a:x:1", "b:x:2", "a:x:3"]
    assert [one.path for one in nodes["either"].activations] == [(0, 1), (1, 0), (2, 1), (3, 0)]


@over_every_link
async def test_session_node_takes_all_frames_of_a_group_before_those_of_the_next(make_runtime):
    """Groups with different numbers of frames for one of the source, and far more than a window of them."""
    graph = Graph("g")
    source = graph.role(Source, "source").run(x=graph.placeholder("x"))
    either = graph.role(EitherEach, "either")
    reply = either.ordered(a=graph.role(Each, "left").run(x=source.y).y)
    either.ordered(b=graph.role(Each, "right").spread(x=source.z).y)
    graph.output(y=reply.y)
    num = 3 * WINDOW
    nodes = {
        "source": emit({"y": 0, "z": 0}, {"z": 1}, {"y": 2, "z": 2}),
        "left": tell({(2,): 15}),
        "right": repeat(num),
        "either": tell(),
    }
    runtime = make_runtime(graph, nodes)
    frames = [[f"b:{k}.{number}" for number in range(num)] for k in range(3)]
    payloads = [one for one in (await read_payloads(runtime.open("c", {"x": 0}, {"y"})))["y"] if one]
    assert payloads == ["a:x:0", *frames[0], *frames[1], "a:x:2", *frames[2]]
    assert [one.path for one in nodes["either"].activations][: num + 1] == [(0, 0), *((0, 1, k) for k in range(num))]


async def test_session_node_runs_one_activation_at_a_time(make_runtime):
    running = most = 0

    async def count(activation):
        nonlocal running, most
        running += 1
        most = max(most, running)
        yield Emission("y", await gather(activation))
        await asyncio.sleep(0)
        running -= 1

    nodes = {"source": emit(*FRAMES), "left": tell(), "right": tell(), "join": FunctionNode(count)}
    runtime = make_runtime(make_diamond("ordered"), nodes)
    await read_payloads(runtime.open("c", {"x": 0}, {"y"}))
    assert most == 1


@over_every_link
async def test_first_group_wins_for_each_frame(make_runtime):
    late = asyncio.Event()

    async def wait_for_the_first(activation):
        if activation.path == (0,):
            await late.wait()
        yield Emission("y", await gather(activation))

    async def wait_for_the_second(activation):
        if activation.path == (1,):
            await late.wait()
        yield Emission("y", await gather(activation))

    nodes = {
        "source": emit({"y": 0, "z": 0}, {"y": 1, "z": 1}),
        "left": FunctionNode(wait_for_the_first),
        "right": FunctionNode(wait_for_the_second),
        "either": tell(),
    }
    runtime = make_runtime(make_either("first"), nodes)
    assert await read_payloads(runtime.open("c", {"x": 0}, {"y"})) == {"y": ["b:x:0", "a:x:1"]}


async def test_other_group_wins_where_the_first_is_unreachable(make_runtime):
    nodes = {"source": emit({"y": 0}, {"z": 1}, {"y": 2}), "left": tell(), "right": tell(), "either": tell()}
    runtime = make_runtime(make_either("first"), nodes)
    assert await read_payloads(runtime.open("c", {"x": 0}, {"y"})) == {"y": ["a:x:0", "b:x:1", "a:x:2"]}


# ---- loops ----


class Thinker(Role):
    think = interface([["question"], ["result"]], {"call": STREAM, "y": STREAM})
    twice = interface([["question"], ["result"]], {"call": STREAM, "y": STREAM}, max_iterations=2)


def make_agent(interface="think"):
    graph = Graph("agent")
    thinker = graph.role(Thinker, "thinker")
    thought = getattr(thinker, interface)(question=graph.placeholder("x"))
    getattr(thinker, interface)(result=graph.role(Each, "tool").run(x=thought.call).y)
    graph.output(y=thought.y)
    return graph


def think(num_iterations, calls=1, delay=0):
    async def forward(activation):
        what = await gather(activation)
        yield Emission("y", f"{activation.iteration} {what}")
        if activation.iteration < num_iterations:
            for number in range(calls):
                yield Emission("call", number)
        for _ in range(delay):
            await asyncio.sleep(0)
        yield Emission("y", ".")

    return FunctionNode(forward)


async def test_loop_runs_until_its_node_does_not_emit_the_field_that_leads_back(make_runtime):
    for num_iterations in (0, 1, 4):
        runtime = make_runtime(make_agent(), {"thinker": think(num_iterations, delay=3), "tool": tell()})
        payloads = (await read_payloads(runtime.open("c", {"x": "q"}, {"y"})))["y"]
        expected = ["0 question:q", *(f"{number} result:x:0" for number in range(1, num_iterations + 1))]
        assert payloads == [part for each in expected for part in (each, ".")]


@over_every_link
async def test_iteration_waits_for_all_activations_of_the_one_before(make_runtime):
    runtime = make_runtime(make_agent(), {"thinker": think(2, calls=3), "tool": tell({(0,): 9})})
    payloads = (await read_payloads(runtime.open("c", {"x": "q"}, {"y"})))["y"]
    assert [one for one in payloads if one != "."] == [
        "0 question:q",
        "1 result:x:0,x:1,x:2",
        "2 result:x:0,x:1,x:2",
    ]


async def test_number_of_iterations_is_bounded_by_max_iterations(make_runtime):
    nodes = {"thinker": think(1000), "tool": tell()}
    runtime = make_runtime(make_agent("twice"), nodes)
    await read_payloads(runtime.open("c", {"x": "q"}, {"y"}))
    assert [one.iteration for one in nodes["thinker"].activations] == [0, 1, 2]
    assert [one.path for one in nodes["thinker"].activations] == [(), (ITERATION,), (ITERATION, ITERATION)]


@over_every_link
async def test_iteration_streams_into_the_next_one_far_beyond_a_window(make_runtime):
    """Frames of the second iteration arrive early, which must not hold back the first one."""
    num = 3 * WINDOW

    async def stream(activation):
        (chunks,) = activation.inputs.values()
        async for _ in chunks:
            for number in range(num if activation.iteration == 0 else 1):
                yield [Emission("y", number), *([Emission("call", number)] if activation.iteration == 0 else ())]

    graph = Graph("g")
    thinker = graph.role(Thinker, "thinker")
    thought = thinker.think(question=graph.placeholder("x"))
    thinker.think(result=thought.call)
    graph.output(y=thought.y)
    runtime = make_runtime(graph, {"thinker": FunctionNode(stream)})
    payloads = (await read_payloads(runtime.open("c", {"x": 0}, {"y"})))["y"]
    assert payloads == [*range(num), *[0] * num]


async def test_iterations_are_counted_for_the_loop_of_the_node(make_runtime):
    graph = Graph("g")
    one, two = graph.role(Thinker, "one"), graph.role(Thinker, "two")
    first = one.think(question=graph.placeholder("x"))
    one.think(result=first.call)
    second = two.think(question=first.y)
    two.think(result=second.call)
    graph.output(y=second.y)
    nodes = {"one": think(2), "two": think(1)}
    runtime = make_runtime(graph, nodes)
    await read_payloads(runtime.open("c", {"x": "q"}, {"y"}))
    assert sorted(one.iteration for one in nodes["one"].activations) == [0, 1, 2]
    assert sorted(one.iteration for one in nodes["two"].activations) == [0, 0, 0, 1, 1, 1]


async def test_unreachable_ends_at_the_header_of_a_loop(make_runtime):
    graph = Graph("g")
    source = graph.role(Source, "source").run(x=graph.placeholder("x"))
    thinker = graph.role(Thinker, "thinker")
    thought = thinker.think(question=source.whole)
    thinker.think(result=graph.role(Each, "tool").run(x=thought.call).y)
    graph.output(y=thought.y)
    runtime = make_runtime(graph, {"source": emit(), "thinker": think(3), "tool": tell()})
    (end,) = (await read(runtime.open("c", {"x": 0}, {"y"})))["y"]
    assert end.reason is EndReason.UNREACHABLE


async def test_loop_for_each_frame_keeps_the_order_of_frames_then_of_iterations(make_runtime):
    class ThinkEach(Role):
        think = interface([["question"], ["result"]], {"call": STREAM, "y": STREAM}, inputs={"question": TEXT})

    graph = Graph("g")
    source = graph.role(Source, "source").run(x=graph.placeholder("x"))
    thinker = graph.role(ThinkEach, "thinker")
    thought = thinker.think(question=source.y)
    thinker.think(result=graph.role(Each, "tool").run(x=thought.call).y)
    graph.output(y=thought.y)
    nodes = {"source": emit(*FRAMES), "thinker": think(1), "tool": tell({(0, 0): 9})}
    runtime = make_runtime(graph, nodes)
    payloads = (await read_payloads(runtime.open("c", {"x": 0}, {"y"})))["y"]
    assert [one for one in payloads if one not in (".", None)] == [
        part for k in range(3) for part in (f"0 question:{k}", "1 result:x:0")
    ]


# ---- faults ----


@over_every_link
@pytest.mark.parametrize("broken", ["source", "left", "join"])
async def test_node_that_raises_fails_the_call_if_it_has_no_alternative(make_runtime, broken):
    nodes = {"source": emit(*FRAMES), "left": tell(), "right": tell(), "join": tell()}
    nodes[broken] = FunctionNode(raise_at_once)
    runtime = make_runtime(make_diamond(), nodes)
    with pytest.raises(GraphError, match="broken"):
        await read_payloads(runtime.open("c", {"x": 0}, {"y"}))


async def raise_at_once(activation):
    raise GraphError("broken")
    yield


async def test_call_continues_with_the_other_group_of_a_node_that_raises(make_runtime):
    nodes = {"source": emit({"y": 0, "z": 0}), "left": FunctionNode(raise_at_once), "right": tell(), "either": tell()}
    runtime = make_runtime(make_either("first"), nodes)
    assert await read_payloads(runtime.open("c", {"x": 0}, {"y"})) == {"y": ["b:x:0"]}


async def test_call_continues_with_the_other_source_of_a_field(make_runtime):
    graph = Graph("g")
    source = graph.role(Source, "source").run(x=graph.placeholder("x"))
    last = graph.role(All, "last")
    reply = last.run(x=graph.role(Each, "left").run(x=source.y).y)
    last.run(x=graph.role(Each, "right").run(x=source.z).y)
    graph.output(y=reply.y)
    nodes = {"source": emit({"y": 0, "z": 0}), "left": FunctionNode(raise_at_once), "right": tell(), "last": tell()}
    runtime = make_runtime(graph, nodes)
    assert await read_payloads(runtime.open("c", {"x": 0}, {"y"})) == {"y": ["x:x:0"]}


async def test_node_that_raises_fails_the_call_where_each_group_fires_by_itself(make_runtime):
    nodes = {"source": emit({"y": 0, "z": 0}), "left": FunctionNode(raise_at_once), "right": tell(), "either": tell()}
    runtime = make_runtime(make_either(), nodes)
    with pytest.raises(GraphError, match="broken"):
        await read_payloads(runtime.open("c", {"x": 0}, {"y"}))


@over_every_link
async def test_reader_of_a_stream_that_breaks_off_gets_the_error_of_an_optional_node(make_runtime):
    async def break_off(activation):
        yield Emission("y", 1)
        raise GraphError("broken")

    graph = Graph("g")
    source = graph.role(Source, "source").run(x=graph.placeholder("x"))
    last = graph.role(All, "last")
    reply = last.run(x=graph.role(All, "left").spread(x=source.y).y)
    last.run(x=graph.role(All, "right").spread(x=source.z).y)
    graph.output(y=reply.y)
    nodes = {"source": emit({"y": 0, "z": 0}), "left": FunctionNode(break_off), "right": repeat(1), "last": tell()}
    runtime = make_runtime(graph, nodes)
    with pytest.raises(GraphError, match="broken"):
        await read_payloads(runtime.open("c", {"x": 0}, {"y"}))


async def test_call_fails_if_no_group_remains(make_runtime):
    nodes = {
        "source": emit({"y": 0, "z": 0}),
        "left": FunctionNode(raise_at_once),
        "right": FunctionNode(raise_at_once),
    }
    runtime = make_runtime(make_either("first"), nodes | {"either": tell()})
    with pytest.raises(GraphError, match="broken"):
        await read_payloads(runtime.open("c", {"x": 0}, {"y"}))


@over_every_link
async def test_field_that_was_not_declared_makes_the_rest_unreachable_by_error(make_runtime):
    nodes = {"source": emit({"y": 0, "z": 0}), "left": emit({"yy": 0}), "right": tell(), "either": tell()}
    runtime = make_runtime(make_either("first"), nodes)
    assert await read_payloads(runtime.open("c", {"x": 0}, {"y"})) == {"y": ["b:x:0"]}


async def test_field_yielded_twice_at_once_is_rejected(make_runtime):
    async def twice(activation):
        yield [Emission("y", 1), Emission("y", 2)]

    nodes = {"source": FunctionNode(twice), "left": tell(), "right": tell(), "join": tell()}
    runtime = make_runtime(make_diamond(), nodes)
    with pytest.raises(GraphError, match="yielded field 'y' twice at once"):
        await read_payloads(runtime.open("c", {"x": 0}, {"y"}))


@over_every_link
async def test_abort_ends_buckets_that_wait_and_activations_that_run(make_runtime):
    async def hang(activation):
        await asyncio.get_running_loop().create_future()
        yield

    nodes = {"source": emit(*FRAMES), "left": tell(), "right": FunctionNode(hang), "join": tell()}
    runtime = make_runtime(make_diamond("ordered"), nodes)
    call = runtime.open("c", {"x": 0}, {"y"})
    await spin(50)
    await call.abort("enough")
    with pytest.raises(CallAborted):
        await read_payloads(call)


# ---- back-pressure ----


@over_every_link
async def test_fork_is_held_back_by_its_unfinished_activations(make_runtime, request):
    gate = asyncio.Event()

    async def wait(activation):
        await gate.wait()
        yield Emission("y", await gather(activation))

    nodes = {"source": emit(*({"y": k} for k in range(10 * WINDOW))), "each": FunctionNode(wait)}
    graph = Graph("g")
    source = graph.role(Source, "source").run(x=graph.placeholder("x"))
    graph.output(y=graph.role(Each, "each").run(x=source.y).y)
    runtime = make_runtime(graph, nodes)
    call = runtime.open("c", {"x": 0}, {"y"})
    while len(nodes["each"].activations) < WINDOW:  # noqa: ASYNC110
        await asyncio.sleep(0)
    await spin(100)
    assert len(nodes["each"].activations) == WINDOW
    gate.set()
    assert len([one for one in (await read_payloads(call))["y"] if one]) == 10 * WINDOW


@over_every_link
@pytest.mark.parametrize("scheduling", ["run", "ordered"])
async def test_slow_path_of_a_join_does_not_lock_the_fast_one(make_runtime, scheduling):
    """Far more frames than a window, all of them late on one path."""
    num = 3 * WINDOW

    async def hold(activation):
        chunks = [chunk.payload async for chunk in activation.inputs["x"]]
        for payload in chunks:
            yield Emission("y", payload)

    graph = Graph("g")
    source = graph.role(Source, "source").run(x=graph.placeholder("x"))
    late = graph.role(All, "late").spread(x=source.y)
    graph.output(y=getattr(graph.role(Join, "join"), scheduling)(a=late.y, b=source.z).y)
    nodes = {"source": emit(*({"y": k, "z": k} for k in range(num))), "late": FunctionNode(hold), "join": tell()}
    runtime = make_runtime(graph, nodes)
    numbers = ",".join(map(str, range(num)))
    assert await read_payloads(runtime.open("c", {"x": 0}, {"y"})) == {"y": [f"a:{numbers} b:{numbers}"]}


@over_every_link
async def test_late_first_activation_of_a_session_node_does_not_lock_its_source(make_runtime):
    nodes = {
        "source": emit(*({"y": k, "z": k} for k in range(3 * WINDOW))),
        "left": tell({(0,): 500}),
        "right": tell(),
        "join": tell(),
    }
    runtime = make_runtime(make_diamond("ordered"), nodes)
    payloads = (await read_payloads(runtime.open("c", {"x": 0}, {"y"})))["y"]
    assert payloads == [f"a:x:{k} b:x:{k}" for k in range(3 * WINDOW)]


async def test_fork_whose_joins_are_unreachable_is_not_held_back(make_runtime):
    graph = Graph("g")
    source = graph.role(Source, "source").run(x=graph.placeholder("x"))
    graph.output(y=graph.role(JoinEach, "join").run(a=source.y, b=source.z).y)
    num = 3 * WINDOW
    nodes = {"source": emit(*({"y": k} for k in range(num)), *({"z": k} for k in range(num))), "join": tell()}
    runtime = make_runtime(graph, nodes)
    (end,) = (await read(runtime.open("c", {"x": 0}, {"y"})))["y"]
    assert end.reason is EndReason.UNREACHABLE


@pytest.mark.parametrize("interface", ["run", "first"])
async def test_fork_whose_frames_lose_every_choice_is_not_held_back(make_runtime, interface):
    graph = Graph("g")
    source = graph.role(Source, "source").run(x=graph.placeholder("x"))
    either = graph.role(EitherEach, "either")
    reply = getattr(either, interface)(a=source.y, b=source.z)
    graph.output(y=reply.y)
    nodes = {"source": emit(*({"y": k, "z": k} for k in range(3 * WINDOW))), "either": tell()}
    runtime = make_runtime(graph, nodes)
    payloads = (await read_payloads(runtime.open("c", {"x": 0}, {"y"})))["y"]
    assert len([one for one in payloads if one]) == 3 * WINDOW * (2 if interface == "run" else 1)


async def test_fork_without_readers_ends(make_runtime):
    """It has sent its last frame and still waits for credit when the outputs have ended without it."""
    graph = Graph("g")
    x = graph.placeholder("x")
    source = graph.role(Source, "source").run(x=x)
    either = graph.role(Either, "either")
    reply = either.first(a=graph.role(All, "quick").run(x=x).y)
    either.first(b=graph.role(Each, "each").run(x=source.y).y)
    graph.output(y=reply.y)
    is_held_back, is_chosen = asyncio.Event(), asyncio.Event()

    async def answer_at_last(activation):
        await is_held_back.wait()
        yield Emission("y", await gather(activation))

    async def choose(activation):
        is_chosen.set()
        yield Emission("y", await gather(activation))

    async def lose(activation):
        await is_chosen.wait()
        yield Emission("y", await gather(activation))

    nodes = {
        "source": emit(*({"y": k} for k in range(2 * WINDOW))),
        "quick": FunctionNode(answer_at_last),
        "each": FunctionNode(lose),
        "either": FunctionNode(choose),
    }
    runtime = make_runtime(graph, nodes)
    call = runtime.open("c", {"x": 0}, {"y"}, deadline_s=10)
    while len(nodes["each"].activations) < WINDOW:  # noqa: ASYNC110
        await asyncio.sleep(0)
    is_held_back.set()
    assert await read_payloads(call) == {"y": ["a:x:0"]}


# ---- calls, graphs, parameters ----


@over_every_link
async def test_graph_call_is_over_when_the_outputs_that_complete_it_have_ended(make_runtime):
    async def hang(activation):
        await asyncio.get_running_loop().create_future()
        yield

    graph = Graph("g")
    x = graph.placeholder("x")
    graph.output(y=graph.role(All, "quick").run(x=x).y, slow=graph.role(All, "slow").run(x=x).y)
    graph.graph_call("quickly", ["y", "slow"], until=["y"])
    nodes = {"quick": tell(), "slow": FunctionNode(hang)}
    runtime = make_runtime(graph, nodes)
    frames = await read(runtime.open("c", {"x": 0}, entry="quickly"))
    assert [frame.payload for frame in frames["y"]] == ["x:0"]
    assert [frame.reason for frame in frames["slow"]] == [EndReason.CANCEL]
    while "start" in nodes["slow"].events and "clean" not in nodes["slow"].events:  # noqa: ASYNC110 - in another process
        await asyncio.sleep(0.001)


async def test_unknown_entry_is_rejected(make_runtime):
    graph = make_diamond()
    graph.graph_call("pair", ["y"])
    runtime = make_runtime(graph, {name: tell() for name in ("source", "left", "right", "join")})
    with pytest.raises(InvalidRequest, match="no graph call 'pear'; did you mean 'pair'"):
        runtime.open("c", {"x": 0}, entry="pear")
    with pytest.raises(InvalidRequest, match=r"graph 'diamond.pair': no output 'z'; valid: y"):
        runtime.open("c", {"x": 0}, {"z"}, entry="pair")


@over_every_link
async def test_one_node_serves_two_graphs(make_runtime):
    one, two = Graph("one"), Graph("two")
    shared = one.role(All, "shared")
    one.output(y=shared.run(x=one.placeholder("x")).y)
    two.output(y=two.role_ref(shared).run(x=two.role(All, "before").run(x=two.placeholder("x")).y).y)
    nodes = {"shared": tell(), "before": tell()}
    runtime = make_runtime([one, two], nodes)
    assert await read_payloads(runtime.open("c1", {"x": 0}, {"y"}, graph="one")) == {"y": ["x:0"]}
    assert await read_payloads(runtime.open("c2", {"x": 0}, {"y"}, graph="two")) == {"y": ["x:x:0"]}
    assert len(nodes["shared"].activations) == 2
    with pytest.raises(InvalidRequest, match="there are several graphs, name one; valid: one, two"):
        runtime.open("c3", {"x": 0}, {"y"})
    with pytest.raises(InvalidRequest, match="no graph 'tow'; did you mean 'two'"):
        runtime.open("c3", {"x": 0}, {"y"}, graph="tow")


async def test_calls_of_a_session_share_its_parameters_until_it_ends(make_runtime):
    released = []
    graph = Graph("g")
    history = GlobalParameters("history", list, released.append)
    graph.output(y=graph.role(All, "chat", parameters=[history]).run(x=graph.placeholder("x")).y)

    async def remember(activation):
        activation.parameters["history"].append(await gather(activation))
        yield Emission("y", list(activation.parameters["history"]))

    runtime = make_runtime(graph, {"chat": FunctionNode(remember)})
    for expected in (["x:0"], ["x:0", "x:0"]):
        assert await read_payloads(runtime.open("c", {"x": 0}, {"y"}, session="s")) == {"y": [expected]}
    assert await read_payloads(runtime.open("c", {"x": 1}, {"y"})) == {"y": [["x:1"]]}
    assert released == [["x:1"]]
    runtime.end_session("s")
    assert released[1:] == [["x:0", "x:0"]]
    assert await read_payloads(runtime.open("c", {"x": 0}, {"y"}, session="s")) == {"y": [["x:0"]]}
    runtime.end_session("s")


# ---- identity ----


@over_every_link
async def test_buckets_of_two_calls_do_not_mix(make_runtime):
    async def echo(activation):
        async for chunk in activation.inputs["x"]:
            for number in range(3):
                yield [Emission("y", f"{chunk.payload}{number}"), Emission("z", f"{chunk.payload}{number}")]

    nodes = {"source": FunctionNode(echo), "left": tell({(0,): 9}), "right": tell({(1,): 5}), "join": tell()}
    runtime = make_runtime(make_diamond(), nodes)
    calls = {name: runtime.open(name, {"x": name}, {"y"}) for name in "pqr"}
    for name, call in calls.items():
        assert await read_payloads(call) == {"y": [f"a:x:{name}{k} b:x:{name}{k}" for k in range(3)]}


async def test_groups_of_a_node_that_share_a_field_have_buckets_of_their_own(make_runtime):
    class Shared(Role):
        run = interface([["a", "b"], ["a", "c"]], {"y": TEXT})

    graph = Graph("g")
    source = graph.role(Source, "source").run(x=graph.placeholder("x"))
    reply = graph.role(Shared, "shared").run(a=source.whole, b=source.y, c=source.z)
    graph.output(y=reply.y)
    nodes = {"source": emit({"whole": "w", "y": 1}, {"z": 2}), "shared": tell()}
    runtime = make_runtime(graph, nodes)
    assert await read_payloads(runtime.open("c", {"x": 0}, {"y"})) == {"y": ["a:w b:1", "a:w c:2"]}


async def test_slow_branch_does_not_hold_back_its_sibling(make_runtime):
    gate = asyncio.Event()

    async def wait(activation):
        await gate.wait()
        yield Emission("y", await gather(activation))

    graph = Graph("g")
    source = graph.role(Source, "source").run(x=graph.placeholder("x"))
    graph.output(slow=graph.role(Each, "slow").run(x=source.y).y, fast=graph.role(Each, "fast").run(x=source.y).y)
    runtime = make_runtime(graph, {"source": emit(*FRAMES), "slow": FunctionNode(wait), "fast": tell()})
    got = []
    async for frame in runtime.open("c", {"x": 0}, {"slow", "fast"}):
        got.append(frame.field)
        if len(got) == 3:
            gate.set()
    assert got[:3] == ["fast"] * 3


@over_every_link
async def test_deadline_names_the_nodes_that_hang(make_runtime):
    async def hang(activation):
        await asyncio.get_running_loop().create_future()
        yield

    nodes = {"source": emit(*FRAMES), "left": tell(), "right": FunctionNode(hang), "join": tell()}
    clock = ManualClock()
    call = make_runtime(make_diamond(), nodes, clock=clock).open("c", {"x": 0}, {"y"}, deadline_s=1)
    while len(nodes["right"].activations) < len(FRAMES) or call.running_nodes != {"right.run"}:  # noqa: ASYNC110
        await asyncio.sleep(0)
    clock.advance(1)
    with pytest.raises(DeadlineExceeded, match=r"nodes still running: right.run; outputs not ended: y"):
        await read_payloads(call)


@over_every_link
async def test_unreachability_passes_through_a_long_chain(make_runtime):
    graph = Graph("g")
    field = graph.role(Source, "source").run(x=graph.placeholder("x")).whole
    names = [f"n{number}" for number in range(200)]
    for name in names:
        field = graph.role(All, name).run(x=field).y
    graph.output(y=field)
    runtime = make_runtime(graph, {"source": emit()} | {name: tell() for name in names})
    (end,) = (await read(runtime.open("c", {"x": 0}, {"y"})))["y"]
    assert end.reason is EndReason.UNREACHABLE
