"""The reference interpreter itself, on graphs small enough to work out by hand."""

import random
from types import SimpleNamespace

import pytest

from tests.flow.random_graphs import NodeBroke, make_case
from tests.flow.reference import NodeFails, Outcome, Unpredictable, interpret
from vllm_omni.flow.graph.declarations import Field
from vllm_omni.flow.graph.dsl import Graph, Role, interface
from vllm_omni.flow.graph.transfer import Chunk
from vllm_omni.flow.run.frame import Emission

STREAM, WHOLE = Field("text", streamed=True), Field("text")


def make_role(graph, name, groups, outputs=("a",), whole=(), single=(), **rest):
    """Inputs in ``whole`` have an activation for each frame; outputs are streamed, but those in ``single``."""
    declared = interface(
        groups,
        {each: WHOLE if each in single else STREAM for each in outputs},
        inputs=dict.fromkeys(whole, WHOLE),
        **rest,
    )
    return graph.role(type(name, (Role,), {"run": declared}), name)


def emits(*yields):
    """Whatever is read: each yield as `a0 b0`, one word for each field."""
    return lambda path, group, inputs: [[(word[0], word) for word in one.split()] for one in yields]


def passes(count=1, name=""):
    """All that was read in one word, ``count`` times: `x:a0,a1 y:b0` and a number."""

    def behave(path, group, inputs):
        read = " ".join(f"{each}:{','.join(some)}" for each, some in inputs.items())
        return [[("a", f"{name}({read}){number if count > 1 else ''}")] for number in range(count)]

    return behave


def run(graph, behave, inputs=None, outputs=None, **rest):
    behave = {f"{name}.run": what for name, what in behave.items()}
    return interpret(graph, behave, inputs or {"p": "p"}, outputs, **rest)


def make_diamond(a=("x",), b=("x",), n=()):
    """r -> (a, b) -> n; the named inputs are read frame by frame."""
    graph = Graph("diamond")
    root = make_role(graph, "r", [["p"]], ("a", "b")).run(p=graph.placeholder("p"))
    left = make_role(graph, "a", [["x"]], whole=a).run(x=root.a)
    right = make_role(graph, "b", [["x"]], whole=b).run(x=root.b)
    graph.output(out=make_role(graph, "n", [["x", "y"]], whole=n).run(x=left.a, y=right.a).a)
    return graph


def test_diamond_meets_at_each_yield_of_its_root():
    behave = {"r": emits("a0 b0", "a1 b1"), "a": passes(), "b": passes(), "n": passes()}
    result = run(make_diamond(), behave)
    assert result.outputs == {"out": ["(x:(x:a0) y:(x:b0))", "(x:(x:a1) y:(x:b1))"]}
    assert [(each.path[0].node, each.path[0].index) for each in result.runs["n.run"]] == [("r.run", 0), ("r.run", 1)]


def test_diamond_read_whole_joins_once():
    behave = {"r": emits("a0 b0", "a1"), "a": passes(), "b": passes(2), "n": passes()}
    result = run(make_diamond(a=(), b=()), behave)
    assert result.outputs == {"out": ["(x:(x:a0,a1) y:(x:b0)0,(x:b0)1)"]}


def test_many_frames_below_one_yield_are_one_stream():
    behave = {"r": emits("a0 b0"), "a": passes(2), "b": passes(), "n": passes()}
    result = run(make_diamond(n=("x", "y")), behave)
    assert result.outputs == {"out": ["(x:(x:a0)0,(x:a0)1 y:(x:b0))"]}


def test_many_frames_below_each_of_many_yields():
    behave = {"r": emits("a0 b0", "a1 b1"), "a": passes(2), "b": passes(), "n": passes()}
    result = run(make_diamond(), behave)
    assert result.outputs == {"out": ["(x:(x:a0)0,(x:a0)1 y:(x:b0))", "(x:(x:a1)0,(x:a1)1 y:(x:b1))"]}


def test_diamond_with_one_path_read_whole_joins_once():
    behave = {"r": emits("a0 b0", "a1 b1"), "a": passes(), "b": passes(), "n": passes()}
    result = run(make_diamond(b=()), behave)
    assert result.outputs == {"out": ["(x:(x:a0),(x:a1) y:(x:b0,b1))"]}


def test_yield_without_a_field_has_no_join():
    behave = {"r": emits("a0", "a1 b1", "b2"), "a": passes(), "b": passes(), "n": passes()}
    result = run(make_diamond(), behave)
    assert result.outputs == {"out": ["(x:(x:a1) y:(x:b1))"]}
    assert len(result.runs["a.run"]) == len(result.runs["b.run"]) == 2


@pytest.mark.parametrize("whole, expected", [(("x", "y"), ["(x:a0 y:(x:b0))", "(x:a1 y:(x:b1))"]), ((), None)])
def test_edge_from_the_root_itself_counts_as_a_way(whole, expected):
    graph = Graph("triangle")
    root = make_role(graph, "r", [["p"]], ("a", "b")).run(p=graph.placeholder("p"))
    left = make_role(graph, "a", [["x"]], whole=("x",)).run(x=root.b)
    graph.output(out=make_role(graph, "n", [["x", "y"]], whole=whole).run(x=root.a, y=left.a).a)
    result = run(graph, {"r": emits("a0 b0", "a1 b1"), "a": passes(), "n": passes()})
    assert result.outputs == {"out": expected or ["(x:a0,a1 y:(x:b0),(x:b1))"]}


def test_nested_diamond():
    graph = Graph("nested")
    root = make_role(graph, "r", [["p"]], ("a", "b")).run(p=graph.placeholder("p"))
    inner = make_role(graph, "i", [["x"]], ("a", "b"), whole=("x",)).run(x=root.a)
    left = make_role(graph, "c", [["x"]], whole=("x",)).run(x=inner.a)
    right = make_role(graph, "d", [["x"]], whole=("x",)).run(x=inner.b)
    meet = make_role(graph, "j", [["x", "y"]]).run(x=left.a, y=right.a)
    other = make_role(graph, "b", [["x"]], whole=("x",)).run(x=root.b)
    graph.output(out=make_role(graph, "n", [["x", "y"]]).run(x=meet.a, y=other.a).a)

    def split(path, group, inputs):
        return [[("a", f"{inputs['x'][0]}{half}"), ("b", f"{inputs['x'][0]}{half}'")] for half in "lr"]

    behave = {name: passes() for name in "cdjbn"}
    result = run(graph, {**behave, "r": emits("a0 b0", "a1 b1"), "i": split})
    assert result.outputs == {
        "out": [
            f"(x:(x:(x:a{i}l) y:(x:a{i}l')),(x:(x:a{i}r) y:(x:a{i}r')) y:(x:b{i}))" for i in (0, 1)
        ]
    }  # fmt: skip


def test_slots_of_a_field_are_read_one_after_the_other():
    graph = Graph("slots")
    root = make_role(graph, "r", [["p"]], ("a", "b")).run(p=graph.placeholder("p"))
    node = make_role(graph, "n", [["x"]])
    node.run(x=root.b)
    graph.output(out=node.run(x=root.a).a)
    assert run(graph, {"r": emits("a0 b0", "a1"), "n": passes()}).outputs == {"out": ["(x:b0,a0,a1)"]}
    assert run(graph, {"r": emits("a0"), "n": passes()}).outputs == {"out": ["(x:a0)"]}
    assert run(graph, {"r": emits(), "n": passes()}).outputs == {"out": []}


def make_alternatives(**rest):
    graph = Graph("or")
    root = make_role(graph, "r", [["p"]], ("a", "b")).run(p=graph.placeholder("p"))
    left = make_role(graph, "a", [["x"]], whole=("x",)).run(x=root.a)
    right = make_role(graph, "b", [["x"]], whole=("x",)).run(x=root.b)
    graph.output(out=make_role(graph, "n", [["x"], ["y"]], whole=("x", "y"), **rest).run(x=left.a, y=right.a).a)
    return graph


def test_groups_alternate_below_their_common_root():
    behave = {"r": emits("a0 b0", "b1", "a2 b2"), "a": passes(2, "A"), "b": passes(1, "B"), "n": passes()}
    result = run(make_alternatives(), behave)
    reads = ["x:A(x:a0)0", "x:A(x:a0)1", "y:B(x:b0)", "y:B(x:b1)", "x:A(x:a2)0", "x:A(x:a2)1", "y:B(x:b2)"]
    assert result.outputs == {"out": [f"({one})" for one in reads]}


def test_first_wins_at_each_yield():
    behave = {"r": emits("a0 b0", "b1", "a2 b2"), "a": passes(2, "A"), "b": passes(1, "B"), "n": passes()}
    result = run(make_alternatives(first_wins=True), behave, winners=lambda node, base, groups: max(groups))
    assert result.outputs == {"out": ["(y:B(x:b0))", "(y:B(x:b1))", "(y:B(x:b2))"]}
    result = run(make_alternatives(first_wins=True), behave)
    assert result.outputs == {"out": ["(x:A(x:a0)0,A(x:a0)1)", "(y:B(x:b1))", "(x:A(x:a2)0,A(x:a2)1)"]}


def make_loop(num_iterations, again="t"):
    """r forks into h; h -> b -> h, and b -> n outside; ``again`` leads back: x is read frame by frame."""
    graph = Graph("loop")
    root = make_role(graph, "r", [["p"]]).run(p=graph.placeholder("p"))
    header = make_role(graph, "h", [["x"], ["t"]] if again == "t" else [["x"]], whole=("x",))
    body = make_role(graph, "b", [["x"]], ("a", "c"), whole=("x",)).run(x=header.run(x=root.a).a)
    header.run(**{again: body.c})
    graph.output(out=make_role(graph, "n", [["x"]], whole=("x",)).run(x=body.a).a)

    def loop(path, group, inputs):
        (word,) = inputs["x"]
        return [[("a", word)], [("c", word)]] if word.count("+") < num_iterations else [[("a", word)]]

    def iteration(path, group, inputs):
        (read,) = inputs.values()
        return [[("a", "+".join([*read, ""]))], [("a", "+".join([*read, ""]) + "'")]]

    return graph, {"r": emits("a0", "a1"), "h": iteration, "b": loop, "n": passes()}


def test_loop_runs_iteration_after_iteration():
    graph, behave = make_loop(num_iterations=2)
    result = run(graph, behave)
    reads = []
    for start in ("a0", "a1"):
        reads += [f"{start}+", f"{start}+'"]  # the body has passed both back: the next iteration reads both
        reads += [f"{start}++{start}+'+", f"{start}++{start}+'+'"]
    assert result.outputs == {"out": [f"(x:{one})" for one in reads]}
    assert [each.num_iterations for each in result.runs["h.run"]] == [0, 1, 0, 1]


def test_each_frame_that_leads_back_starts_an_iteration():
    graph, behave = make_loop(num_iterations=2, again="x")
    result = run(graph, behave)
    reads = []
    for start in ("a0", "a1"):
        reads += [f"{start}+", f"{start}+'"]
        reads += [f"{start}{mark}{last}" for mark in ("+", "+'") for last in ("+", "+'")]
    assert result.outputs == {"out": [f"(x:{one})" for one in reads]}
    assert [each.num_iterations for each in result.runs["h.run"]] == [0, 1, 1, 0, 1, 1]


def test_join_behind_a_loop_has_one_activation_for_each_iteration():
    graph = Graph("loop")
    header = make_role(graph, "h", [["x"], ["t"]])
    first = header.run(x=graph.placeholder("p"))
    body = make_role(graph, "b", [["x"]]).run(x=first.a)
    header.run(t=body.a)
    graph.output(out=make_role(graph, "n", [["x", "y"]]).run(x=first.a, y=body.a).a)

    def iteration(path, group, inputs):
        (word,) = inputs.get("x") or inputs["t"]
        return [[("a", f"{word}+")]] if len(word) < 3 else []

    result = run(graph, {"h": iteration, "b": emits_same, "n": passes()})
    assert result.outputs == {"out": ["(x:p+ y:p+)", "(x:p++ y:p++)"]}


def emits_same(path, group, inputs):
    return [[("a", word)] for word in inputs["x"]]


@pytest.mark.parametrize("count, expected", [(4, ["(x:(x:a0),(x:a1) y:b0,b1)"]), (5, [])])
def test_count_gathers_all_in_order(count, expected):
    graph = Graph("count")
    root = make_role(graph, "r", [["p"]], ("a", "b")).run(p=graph.placeholder("p"))
    left = make_role(graph, "a", [["x"]], whole=("x",)).run(x=root.a)
    node = make_role(graph, "n", [["x"], ["y"]], whole=("x",), activate_by_count={"x": count - 2, "y": 2})
    graph.output(out=node.run(x=left.a, y=root.b).a)
    result = run(graph, {"r": emits("a0 b0", "a1 b1"), "a": passes(), "n": passes()})
    assert result.outputs == {"out": expected}
    assert result.totals == {"n.run": [{"x": 2, "y": 2}]}


@pytest.mark.parametrize("number, expected", [("0", ["(x: n:0)"]), ("2", ["(x:a0,a1 n:2)"]), ("4", [])])
def test_count_from_a_payload(number, expected):
    graph = Graph("count")
    root = make_role(graph, "r", [["p"]]).run(p=graph.placeholder("p"))
    node = make_role(graph, "n", [["x", "n"]], activate_by_count={"x": "n"})
    graph.output(out=node.run(x=root.a, n=graph.placeholder("n")).a)
    result = run(graph, {"r": emits("a0", "a1", "a2"), "n": passes()}, {"p": "p", "n": number})
    assert result.outputs == {"out": expected}


def test_some_of_parallel_frames_cannot_be_predicted():
    graph = Graph("count")
    root = make_role(graph, "r", [["p"]]).run(p=graph.placeholder("p"))
    left = make_role(graph, "a", [["x"]], whole=("x",)).run(x=root.a)
    graph.output(out=make_role(graph, "n", [["x"]], activate_by_count={"x": 1}).run(x=left.a).a)
    with pytest.raises(Unpredictable):
        run(graph, {"r": emits("a0", "a1"), "a": passes(), "n": passes()})


def test_yields_are_numbered_by_the_wanted_outputs():
    graph = make_diamond()
    left = make_role(graph, "l", [["x"]], whole=("x",)).run(x=graph.declarations.calls[1].sources["x"])
    graph.output(left=left.a)
    behave = {"r": emits("b0", "a1", "b2"), **{name: passes() for name in "abnl"}}
    result = run(graph, behave, outputs=["left"])
    assert result.outputs == {"left": ["(x:a1)"]}
    assert [each.index for each in result.runs["l.run"]] == [0]
    assert set(result.runs) == {"r.run", "l.run"}


def fails(path, group, inputs):
    raise NodeFails([[("a", "last words")]])


def test_failing_node_fails_the_call_unless_it_is_optional():
    graph = Graph("line")
    first = make_role(graph, "a", [["x"]]).run(x=graph.placeholder("p"))
    graph.output(out=make_role(graph, "n", [["x"]]).run(x=first.a).a)
    assert run(graph, {"a": fails, "n": passes()}).outcome is Outcome.FAILS
    behave = {"r": emits("a0 b0"), "a": fails, "b": passes(), "n": passes()}
    assert run(make_alternatives(), behave).outcome is Outcome.FAILS  # each group fires by itself
    assert run(make_alternatives(first_wins=True), behave).outcome is Outcome.OPEN
    assert run(make_alternatives(), behave | {"r": emits("b0")}).outcome is Outcome.DONE


def test_random_cases_are_the_same_for_the_same_seed():
    for seed in range(20):
        one, other = make_case(random.Random(seed)), make_case(random.Random(seed))
        assert str(one) == str(other)
        assert one.interpret().outputs == other.expected.outputs


async def stream(payloads):
    for payload in payloads:
        yield Chunk(payload)


async def serve(node, inputs):
    """The yields of an activation of a random node, and whether it fails."""
    yields = []
    try:
        async for one in node.forward(
            SimpleNamespace(path=(), inputs={name: stream(some) for name, some in inputs.items()})
        ):
            yields.append([(each.field, each.payload) for each in ([one] if isinstance(one, Emission) else one)])
    except NodeBroke:
        return yields, True
    return yields, False


async def test_random_nodes_do_what_the_reference_says():
    for seed in range(50):
        rng = random.Random(seed)
        case = make_case(rng)
        nodes = case.make_nodes(rng)
        for name, runs in case.expected.runs.items():
            for each in runs:
                assert await serve(nodes[case.behaviours[name].name], each.inputs) == (each.yields, each.fails)
        error = NodeBroke() if case.expected.outcome is Outcome.FAILS else None
        case.check(nodes, case.expected.outputs, error)
