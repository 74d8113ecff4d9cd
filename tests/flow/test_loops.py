"""Loops: what enters them from outside, and loops within loops."""

import asyncio

import pytest

from tests.flow.builders import FunctionNode, over_every_link, read, read_payloads, spin
from tests.flow.test_dependencies import STREAM, TEXT, All, Each, JoinEach, Source, emit, gather, repeat, tell
from vllm_omni.errors import CallAborted, GraphError
from vllm_omni.flow import Emission, EndReason, Graph, Role, Scheduling, interface
from vllm_omni.flow.run import credit
from vllm_omni.flow.run.credit import WINDOW
from vllm_omni.flow.run.frame import ITERATION

OUT = {"back": STREAM, "y": STREAM}


class Denoiser(Role):
    """A header whose latents lead back; the condition comes from outside."""

    run = interface([["latents", "condition"]], OUT)


class Body(Role):
    run = interface([["x", "constant"]], {"y": TEXT})
    slots = interface([["x"]], {"y": TEXT})
    either = interface([["x"], ["constant"]], {"y": TEXT})
    loop = interface([["x", "constant"]], {"y": TEXT})
    pair = interface([["x", "constant"]], {"y": TEXT}, activate_by_count={"constant": 2})


class Start(Role):
    run = interface([["x"], ["r"]], OUT)
    each = interface([["x"], ["r"]], OUT, inputs={"x": TEXT})
    twice = interface([["x"], ["r"]], OUT, max_iterations=2)
    tree = interface([["x"], ["r"]], OUT, inputs={"r": TEXT}, max_iterations=2)
    ordered = interface([["x"], ["r"]], OUT, inputs={"r": TEXT}, max_iterations=2, scheduling=Scheduling.SESSION)


def iterate(num_iterations):
    """Emits what it read, and leads back a number of times."""

    async def forward(activation):
        yield Emission("y", f"{activation.iteration}({await gather(activation)})")
        if activation.iteration < num_iterations:
            yield Emission("back", activation.iteration)

    return FunctionNode(forward)


def make_denoiser(condition):
    graph = Graph("g")
    x = graph.placeholder("x")
    denoiser = graph.role(Denoiser, "denoiser")
    made = denoiser.run(latents=x, condition=condition(graph, x))
    denoiser.run(latents=made.back)
    graph.output(y=made.y)
    return graph


def make_body(interface="run", start="run"):
    """A loop of two nodes, of which the second reads a constant of the fork above the loop."""
    graph = Graph("g")
    source = graph.role(Source, "source").run(x=graph.placeholder("x"))
    header, body = graph.role(Start, "header"), graph.role(Body, "body")
    made = getattr(header, start)(x=source.y)
    if interface == "slots":
        result = body.slots(x=made.back)
        body.slots(x=source.z)
    else:
        result = getattr(body, interface)(x=made.back, constant=source.z)
    getattr(header, start)(r=result.y)
    graph.output(y=made.y)
    return graph


@over_every_link
async def test_every_iteration_of_a_header_reads_the_condition_again(make_runtime):
    graph = make_denoiser(lambda graph, x: graph.role(All, "encoder").spread(x=x).y)
    runtime = make_runtime(graph, {"denoiser": iterate(2), "encoder": repeat(2)})
    assert await read_payloads(runtime.open("c", {"x": "p"}, {"y"})) == {
        "y": [f"{k}(latents:{latents} condition:p.0,p.1)" for k, latents in enumerate(("p", 0, 1))]
    }


@over_every_link
async def test_every_iteration_of_a_body_reads_what_enters_the_loop_there(make_runtime):
    nodes = {"source": emit({"y": "y", "z": "z0"}, {"z": "z1"}), "header": iterate(2), "body": tell()}
    runtime = make_runtime(make_body(), nodes)
    assert await read_payloads(runtime.open("c", {"x": 0}, {"y"})) == {
        "y": ["0(x:y)", "1(r:x:0 constant:z0,z1)", "2(r:x:1 constant:z0,z1)"]
    }


async def test_field_that_the_loop_feeds_takes_another_source_in_the_first_iteration(make_runtime):
    nodes = {"source": emit({"y": "y", "z": "z"}), "header": iterate(2), "body": tell()}
    runtime = make_runtime(make_body("slots"), nodes)
    assert await read_payloads(runtime.open("c", {"x": 0}, {"y"})) == {"y": ["0(x:y)", "1(r:x:0,z)", "2(r:x:1)"]}


async def test_loops_for_each_frame_read_the_constants_of_that_frame(make_runtime):
    graph = Graph("g")
    source = graph.role(Source, "source").run(x=graph.placeholder("x"))
    header = graph.role(Start, "header")
    made = header.each(x=source.y)
    pair = graph.role(type("R", (Role,), {"run": interface([["a", "b"]], {"y": TEXT}, inputs={"b": TEXT})}), "pair")
    header.each(r=pair.run(a=made.back, b=source.z).y)
    graph.output(y=made.y)
    nodes = {"source": emit(*({"y": k, "z": f"z{k}"} for k in range(3))), "header": iterate(1), "pair": tell()}
    runtime = make_runtime(graph, nodes)
    assert [one for one in (await read_payloads(runtime.open("c", {"x": 0}, {"y"})))["y"] if one] == [
        part for k in range(3) for part in (f"0(x:{k})", f"1(r:a:0 b:z{k})")
    ]


async def test_group_that_only_the_outside_feeds_fires_in_the_first_iteration(make_runtime):
    nodes = {"source": emit({"y": "y", "z": "z"}), "header": iterate(1), "body": tell()}
    runtime = make_runtime(make_body("either"), nodes)
    assert await read_payloads(runtime.open("c", {"x": 0}, {"y"})) == {"y": ["0(x:y)", "1(r:x:0,constant:z)"]}


async def test_group_that_only_the_outside_feeds_can_start_the_second_iteration(make_runtime):
    nodes = {"source": emit({"y": "y", "z": "z"}), "header": iterate(0), "body": tell()}
    runtime = make_runtime(make_body("either"), nodes)
    assert await read_payloads(runtime.open("c", {"x": 0}, {"y"})) == {"y": ["0(x:y)", "1(r:constant:z)"]}


@over_every_link
async def test_constant_far_beyond_a_window_is_read_in_every_iteration(make_runtime):
    num = 3 * WINDOW
    graph = make_denoiser(lambda graph, x: graph.role(All, "encoder").spread(x=x).y)
    runtime = make_runtime(graph, {"denoiser": iterate(2), "encoder": repeat(num)})
    payloads = (await read_payloads(runtime.open("c", {"x": "p"}, {"y"})))["y"]
    assert [one.count("p.") for one in payloads] == [num] * 3


@over_every_link
async def test_constant_of_an_outer_fork_does_not_lock_the_forks_below_it(make_runtime, monkeypatch):
    """The join of each inner frame waits for a loop, which waits for the whole outer stream."""
    monkeypatch.setattr(credit, "WINDOW", 1)
    graph = Graph("g")
    source = graph.role(Source, "source").run(x=graph.placeholder("x"))
    fork = graph.role(Each, "fork").spread(x=source.y)
    header = graph.role(Start, "header")
    made = header.each(x=fork.y)
    header.each(r=graph.role(Body, "body").run(x=made.back, constant=source.y).y)
    graph.output(y=graph.role(JoinEach, "join").run(a=fork.y, b=made.y).y)
    nodes = {"source": emit(*({"y": k} for k in range(3))), "fork": repeat(3), "header": iterate(1), "body": tell()}
    runtime = make_runtime(graph, nodes | {"join": tell()})
    payloads = [one for one in (await read_payloads(runtime.open("c", {"x": 0}, {"y"}, deadline_s=20)))["y"] if one]
    places = [f"{k}.{number}" for k in range(3) for number in range(3)]
    assert payloads == [f"a:{one} b:0(x:{one}),1(r:x:0 constant:0,1,2)" for one in places]


async def test_loop_whose_constant_is_empty_does_not_iterate(make_runtime):
    nodes = {"source": emit({"y": "y"}), "header": iterate(2), "body": tell()}
    runtime = make_runtime(make_body(), nodes)
    assert await read_payloads(runtime.open("c", {"x": 0}, {"y"})) == {"y": ["0(x:y)"]}


async def test_constants_of_a_loop_that_does_not_start_are_dropped(make_runtime):
    nodes = {"source": emit({"z": "z"}), "header": iterate(2), "body": tell()}
    runtime = make_runtime(make_body("slots"), nodes)
    (end,) = (await read(runtime.open("c", {"x": 0}, {"y"})))["y"]
    assert end.reason is EndReason.UNREACHABLE


@over_every_link
async def test_error_of_a_constant_fails_the_call(make_runtime):
    async def fail(activation):
        yield Emission("y", "half")
        raise GraphError("broken")

    graph = make_denoiser(lambda graph, x: graph.role(All, "encoder").spread(x=x).y)
    runtime = make_runtime(graph, {"denoiser": iterate(2), "encoder": FunctionNode(fail)})
    with pytest.raises(GraphError, match="broken"):
        await read_payloads(runtime.open("c", {"x": "p"}, {"y"}))


@over_every_link
async def test_abort_ends_a_loop_that_waits_for_its_constant(make_runtime):
    async def hang_after_the_first(activation):
        yield Emission("y", "y")
        await asyncio.get_running_loop().create_future()

    nodes = {"source": FunctionNode(hang_after_the_first), "header": iterate(2), "body": tell()}
    runtime = make_runtime(make_body(), nodes)
    call = runtime.open("c", {"x": 0}, {"y"})
    await spin(50)
    await call.abort("enough")
    with pytest.raises(CallAborted):
        await read_payloads(call)


# ---- loops within loops ----


def make_nested(inner="run"):
    """outer -> inner -> tool -> inner, and inner -> outer."""
    graph = Graph("g")
    outer, inner_role = graph.role(Start, "outer"), graph.role(Start, "inner")
    first = outer.run(x=graph.placeholder("x"))
    second = getattr(inner_role, inner)(x=first.back)
    getattr(inner_role, inner)(r=graph.role(All, "tool").run(x=second.back).y)
    outer.run(r=second.y)
    graph.output(outer=first.y, inner=second.y)
    return graph


@over_every_link
async def test_inner_loop_starts_anew_in_every_iteration_of_the_outer_one(make_runtime):
    nodes = {"outer": iterate(2), "inner": iterate(1), "tool": tell()}
    runtime = make_runtime(make_nested(), nodes)
    first, second = "0(x:0),1(r:x:0)", "0(x:1),1(r:x:0)"
    assert await read_payloads(runtime.open("c", {"x": "q"}, {"outer", "inner"})) == {
        "outer": ["0(x:q)", f"1(r:{first})", f"2(r:{second})"],
        "inner": [*first.split(","), *second.split(",")],
    }


async def test_bound_of_an_inner_loop_holds_for_each_of_its_starts(make_runtime):
    nodes = {"outer": iterate(2), "inner": iterate(1000), "tool": tell()}
    runtime = make_runtime(make_nested("twice"), nodes)
    payloads = await read_payloads(runtime.open("c", {"x": "q"}, {"outer", "inner"}))
    assert [one[0] for one in payloads["inner"]] == ["0", "1", "2"] * 2
    assert [one[0] for one in payloads["outer"]] == ["0", "1", "2"]


@pytest.mark.parametrize(("num_outer", "num_inner"), [(0, 0), (0, 3), (1, 0), (3, 2)])
async def test_each_loop_ends_by_itself(make_runtime, num_outer, num_inner):
    nodes = {"outer": iterate(num_outer), "inner": iterate(num_inner), "tool": tell()}
    runtime = make_runtime(make_nested(), nodes)
    payloads = await read_payloads(runtime.open("c", {"x": "q"}, {"outer", "inner"}))
    assert [one and one[0] for one in payloads["outer"]] == [str(k) for k in range(num_outer + 1)]
    inner = [str(k) for k in range(num_inner + 1)] * num_outer
    assert [one and one[0] for one in payloads["inner"]] == (inner or [None])


async def test_constant_of_an_inner_loop_may_come_from_the_outer_one(make_runtime):
    graph = Graph("g")
    outer, inner, body = graph.role(Start, "outer"), graph.role(Start, "inner"), graph.role(Body, "body")
    first = outer.run(x=graph.placeholder("x"))
    second = inner.run(x=first.back)
    inner.run(r=body.run(x=second.back, constant=first.y).y)
    outer.run(r=second.y)
    graph.output(y=first.y)
    runtime = make_runtime(graph, {"outer": iterate(2), "inner": iterate(2), "body": tell()})
    payloads = (await read_payloads(runtime.open("c", {"x": "q"}, {"y"})))["y"]
    first = "1(r:0(x:0),1(r:x:0 constant:0(x:q)),2(r:x:1 constant:0(x:q)))"
    assert payloads == ["0(x:q)", first, f"2(r:0(x:1),1(r:x:0 constant:{first}),2(r:x:1 constant:{first}))"]


@over_every_link
async def test_abort_ends_an_inner_loop(make_runtime):
    nodes = {"outer": iterate(10**9), "inner": iterate(10**9), "tool": tell()}
    runtime = make_runtime(make_nested(), nodes)
    call = runtime.open("c", {"x": "q"}, {"outer", "inner"})
    async for frame in call:
        if frame.seq == 50:
            break
    await call.abort("enough")
    with pytest.raises(CallAborted):
        await read_payloads(call)


# ---- one loop after another ----


def make_successive(interface):
    """A loop, then one in which ``body`` reads a constant: a frame for each frame that led back in the first loop."""
    graph = Graph("g")
    first, second, body = graph.role(Start, "first"), graph.role(Start, "second"), graph.role(Body, "body")
    x = graph.placeholder("x")
    done = first.run(x=x)
    first.run(r=done.back)
    made = second.run(x=x)
    constant = graph.role(Each, "each").run(x=done.back).y
    read = getattr(body, interface)(x=made.back, constant=constant)
    if interface == "loop":
        body.loop(x=read.y)
    second.run(r=read.y)
    graph.output(y=made.y)
    return graph


@over_every_link
@pytest.mark.parametrize("interface", ["run", "loop", "pair"])
async def test_loop_whose_constant_lacks_frames_of_a_loop_before_it_ends(make_runtime, interface):
    """The constant ends with the report that the first loop did not iterate; the second one waits for ``body``."""
    nodes = {"first": iterate(0), "second": iterate(2), "each": tell(), "body": tell()}
    runtime = make_runtime(make_successive(interface), nodes)
    assert await read_payloads(runtime.open("c", {"x": "q"}, {"y"}, deadline_s=20)) == {"y": ["0(x:q)"]}


async def test_loop_reads_all_iterations_of_a_loop_before_it(make_runtime):
    nodes = {"first": iterate(2), "second": iterate(2), "each": tell(), "body": tell()}
    runtime = make_runtime(make_successive("run"), nodes)
    again = [f"{k + 1}(r:x:{k} constant:x:0,x:1)" for k in range(2)]
    assert await read_payloads(runtime.open("c", {"x": "q"}, {"y"})) == {"y": ["0(x:q)", *again]}


# ---- counts ----


class Counter(Role):
    run = interface([["x", "n"]], {"y": TEXT}, activate_by_count={"x": "n"})


def make_counting():
    """A loop whose body waits for a number of frames that comes from outside."""
    graph = Graph("g")
    header = graph.role(Start, "header")
    made = header.run(x=graph.placeholder("x"))
    header.run(r=graph.role(Counter, "counter").run(x=made.back, n=graph.placeholder("n")).y)
    graph.output(y=made.y)
    return graph


def lead_back(*counts):
    """Leads back this many frames in each iteration."""

    async def forward(activation):
        yield Emission("y", await gather(activation))
        for number in range(counts[activation.iteration]):
            yield Emission("back", number)

    return FunctionNode(forward)


@over_every_link
async def test_counting_node_in_a_loop_counts_anew_in_every_iteration(make_runtime):
    runtime = make_runtime(make_counting(), {"header": lead_back(2, 5, 2, 1), "counter": tell()})
    again = "r:x:0,1 n:2"
    assert await read_payloads(runtime.open("c", {"x": "x", "n": 2}, {"y"})) == {"y": ["x:x", again, again, again]}


async def test_loop_ends_where_too_few_frames_are_counted(make_runtime):
    runtime = make_runtime(make_counting(), {"header": lead_back(1), "counter": tell()})
    assert await read_payloads(runtime.open("c", {"x": "x", "n": 2}, {"y"})) == {"y": ["x:x"]}


async def test_number_from_outside_of_a_loop_that_is_no_number_fails_the_call(make_runtime):
    runtime = make_runtime(make_counting(), {"header": lead_back(2), "counter": tell()})
    with pytest.raises(GraphError, match="input 'n' must carry a number of frames to wait for, got 'two'"):
        await read_payloads(runtime.open("c", {"x": "x", "n": "two"}, {"y"}))


async def test_late_number_from_outside_of_a_loop_that_is_no_number_fails_the_call(make_runtime):
    graph = Graph("g")
    x = graph.placeholder("x")
    header = graph.role(Start, "header")
    made = header.run(x=x)
    header.run(r=graph.role(Counter, "counter").run(x=made.back, n=graph.role(All, "late").run(x=x).y).y)
    graph.output(y=made.y)
    nodes = {"header": lead_back(2), "late": tell({(): 30}), "counter": tell()}
    runtime = make_runtime(graph, nodes)
    with pytest.raises(GraphError, match="got 'x:2'"):
        await read_payloads(runtime.open("c", {"x": 2}, {"y"}))


async def test_header_may_count(make_runtime):
    class Pairs(Role):
        run = interface([["x"]], OUT, activate_by_count={"x": 2})

    graph = Graph("g")
    source = graph.role(Source, "source").run(x=graph.placeholder("x"))
    header = graph.role(Pairs, "header")
    made = header.run(x=source.y)
    header.run(x=made.back)
    graph.output(y=made.y)
    nodes = {"source": emit({"y": "a"}, {"y": "b"}, {"y": "c"}), "header": lead_back(3, 2, 1)}
    runtime = make_runtime(graph, nodes)
    assert await read_payloads(runtime.open("c", {"x": 0}, {"y"})) == {"y": ["x:a,b", "x:0,1", "x:0,1"]}


# ---- iterations that one frame starts each ----


def make_tree(body, interface="tree"):
    graph = Graph("g")
    header = graph.role(Start, "header")
    made = getattr(header, interface)(x=graph.placeholder("x"))
    getattr(header, interface)(r=graph.role(body, "body").spread(x=made.back).y)
    graph.output(y=made.y)
    return graph


def branch(*counts):
    """Passes on what it reads, and leads back that followed by a number, as often as the iteration says."""

    async def forward(activation):
        for chunks in activation.inputs.values():
            async for chunk in chunks:
                yield Emission("y", chunk.payload)
                for number in range(counts[activation.iteration]):
                    yield Emission("back", f"{chunk.payload}{number}")

    return FunctionNode(forward)


def pass_all(delays):
    async def forward(activation):
        async for chunk in activation.inputs["x"]:
            for _ in range(delays.get(chunk.payload, 0)):
                await asyncio.sleep(0)
            yield Emission("y", chunk.payload)

    return FunctionNode(forward)


@over_every_link
@pytest.mark.parametrize("interface", ["tree", "ordered"])
async def test_each_frame_that_leads_back_starts_an_iteration(make_runtime, interface):
    """An iteration comes before those that it led to, and these before the next one."""
    nodes = {"header": branch(2, 2, 0), "body": pass_all({"x0": 9, "x00": 5})}
    runtime = make_runtime(make_tree(All, interface), nodes)
    expected = ["x", "x0", "x00", "x01", "x1", "x10", "x11"]
    assert await read_payloads(runtime.open("c", {"x": "x"}, {"y"})) == {"y": expected}
    if interface == "ordered":
        assert [one.iteration for one in nodes["header"].activations] == [len(one) - 1 for one in expected]


async def test_iterations_of_frames_are_ordered_by_the_forks_on_their_way(make_runtime):
    nodes = {"header": branch(2, 0), "body": repeat(2)}
    runtime = make_runtime(make_tree(Each), nodes)
    assert await read_payloads(runtime.open("c", {"x": "x"}, {"y"})) == {"y": ["x", "x0.0", "x0.1", "x1.0", "x1.1"]}
    loop = ITERATION
    assert sorted(one.path for one in nodes["header"].activations) == [
        (), *((loop, fork, number) for fork in (0, 1) for number in (0, 1))
    ]  # fmt: skip


async def test_inner_loop_counts_anew_below_iterations_of_frames(make_runtime):
    graph = Graph("g")
    outer, inner = graph.role(Start, "outer"), graph.role(Start, "inner")
    first = outer.tree(x=graph.placeholder("x"))
    second = inner.run(x=first.back)
    inner.run(r=second.back)
    outer.tree(r=second.y)
    graph.output(y=second.y)
    runtime = make_runtime(graph, {"outer": branch(1, 1, 0), "inner": iterate(1)})
    payloads = (await read_payloads(runtime.open("c", {"x": "x"}, {"y"})))["y"]
    assert [one[0] for one in payloads] == ["0", "1"] * 3


@over_every_link
async def test_far_more_iterations_than_a_window_do_not_lock_the_loop(make_runtime):
    num = 3 * WINDOW
    graph = Graph("g")
    header = graph.role(Start, "header")
    made = header.tree(x=graph.placeholder("x"))
    header.tree(r=made.back)
    graph.output(y=made.y)
    runtime = make_runtime(graph, {"header": branch(num, 1, 0)})
    payloads = (await read_payloads(runtime.open("c", {"x": "x"}, {"y"})))["y"]
    assert payloads == ["x", *(f"x{number}{rest}" for number in range(num) for rest in ("", "0"))]


@over_every_link
async def test_error_in_one_of_several_iterations_fails_the_call(make_runtime):
    async def fail(activation):
        async for chunk in activation.inputs["x"]:
            if chunk.payload == "x1":
                raise GraphError("broken")
            yield Emission("y", chunk.payload)

    runtime = make_runtime(make_tree(All), {"header": branch(3, 3, 0), "body": FunctionNode(fail)})
    with pytest.raises(GraphError, match="broken"):
        await read_payloads(runtime.open("c", {"x": "x"}, {"y"}))
