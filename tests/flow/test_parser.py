import pytest

from tests.flow.builders import Talker, Thinker, Token2Wav, make_speech_graph
from vllm_omni.errors import GraphError, PlanError
from vllm_omni.flow import Field, Graph, GraphParser, Role, interface


class Echo(Role):
    run = interface(inputs_or=[["x"]], outputs={"y": Field("text", streamed=True), "z": Field("text")})


class Pair(Role):
    run = interface(inputs_or=[["left", "right"]], outputs={"y": Field("text")})


async def convert(chunks, call):
    async for chunk in chunks:
        yield chunk


def parse(graph):
    return GraphParser(graph).parse()


def make_echo(*names):
    graph = Graph("g")
    return graph, graph.placeholder("x"), *(graph.role(Echo, name) for name in names)


def test_graph_without_output_is_refused():
    with pytest.raises(GraphError, match="graph 'g' has no output"):
        parse(Graph("g"))


def test_input_left_open_names_node_field_and_what_could_feed_it():
    graph, x, a, b = make_echo("a", "b")
    a.run(x=x)
    graph.output(y=b.run().y)
    with pytest.raises(
        GraphError, match=r"node 'b.run': input 'x' is not connected.*did you mean 'x'\? there is: 'a.run.y'"
    ):
        parse(graph)


def test_several_or_groups_are_not_planned_yet():
    class Either(Role):
        run = interface(inputs_or=[["text"], ["image"]], outputs={"y": Field("text")})

    graph = Graph("g")
    graph.output(y=graph.role(Either, "llm").run(text=graph.placeholder("text")).y)
    with pytest.raises(
        PlanError, match=r"node 'llm.run': several OR groups \[\['text'\], \['image'\]\].*one interface per"
    ):
        parse(graph)


def test_activate_by_count_is_not_planned_yet():
    class Count(Role):
        run = interface(inputs_or=[["x"]], outputs={"y": Field("text")}, activate_by_count={"x": 2})

    graph = Graph("g")
    graph.output(y=graph.role(Count, "join").run(x=graph.placeholder("x")).y)
    with pytest.raises(PlanError, match=r"node 'join.run': activate_by_count \{'x': 2\}.*let one upstream node"):
        parse(graph)


def test_join_is_not_planned_yet():
    graph, x, a, b = make_echo("a", "b")
    left, right = a.run(x=x).y, b.run(x=x).y
    graph.output(y=graph.role(Pair, "pair").run(left=left, right=right).y)
    with pytest.raises(PlanError, match=r"'pair.run' joins several nodes \('left' by a.run.y, 'right' by b.run.y\)"):
        parse(graph)


def test_join_of_a_node_with_a_placeholder_is_not_planned_yet():
    graph, x, a = make_echo("a")
    graph.output(y=graph.role(Pair, "pair").run(left=a.run(x=x).y, right=x).y)
    with pytest.raises(PlanError, match=r"'pair.run' joins several nodes \('left' by a.run.y, 'right' by entry.x\)"):
        parse(graph)


def test_node_called_twice_is_a_join_that_is_not_planned_yet():
    graph, x, a, b = make_echo("a", "b")
    reply = a.run(x=x)
    b.run(x=reply.y)
    graph.output(y=b.run(x=reply.z).y)
    with pytest.raises(PlanError, match=r"'b.run' is called 2 times, so that several sources feed 'x'.*second role"):
        parse(graph)


def test_loop_is_not_planned_yet():
    graph, x, llm, tool = make_echo("llm", "tool")
    first = llm.run(x=x)
    again = llm.run(x=tool.run(x=first.y).y)
    graph.output(y=again.z)
    with pytest.raises(PlanError, match=r"'llm.run': input 'x' from tool.run.y closes the loop .*unroll it"):
        parse(graph)


def test_loop_of_one_node_is_not_planned_yet():
    graph, x, llm = make_echo("llm")
    graph.output(y=llm.run(x=llm.run(x=x).y).z)
    with pytest.raises(PlanError, match=r"input 'x' from llm.run.y closes the loop llm.run -> llm.run"):
        parse(graph)


@pytest.mark.parametrize(
    ("wanted", "fits"),
    [
        (Field("hidden_states"), True),
        (Field("hidden_states", dtype="float"), True),
        (Field("hidden_states", dtype="int"), False),
        (Field("text"), False),
    ],
)
def test_declared_types_of_both_sides_must_agree(wanted, fits):
    class Typed(Role):
        run = interface(inputs_or=[["rows"]], inputs={"rows": wanted}, outputs={"y": Field("text")})

    graph = Graph("g")
    rows = graph.role(Thinker, "thinker").generate(prompt=graph.placeholder("prompt")).rows
    graph.output(y=graph.role(Typed, "typed").run(rows=rows).y)
    if fits:
        parse(graph)
    else:
        with pytest.raises(GraphError, match=r"'typed.run': input 'rows' wants .*thinker.generate.rows is .*\.via"):
            parse(graph)


@pytest.mark.parametrize(("yields", "fits"), [(None, True), (Field("text"), True), (Field("audio"), False)])
def test_transfer_function_is_judged_by_what_it_says_it_yields(yields, fits):
    class Typed(Role):
        run = interface(inputs_or=[["x"]], inputs={"x": Field("text")}, outputs={"y": Field("text")})

    graph = Graph("g")
    rows = graph.role(Thinker, "thinker").generate(prompt=graph.placeholder("prompt")).rows
    graph.output(y=graph.role(Typed, "typed").run(x=rows.via(convert, yields=yields)).y)
    if fits:
        parse(graph)
    else:
        with pytest.raises(GraphError, match="wants Field"):
            parse(graph)


def test_output_that_is_a_placeholder_is_refused():
    graph, x, a = make_echo("a")
    a.run(x=x)
    graph.output(y=x)
    with pytest.raises(GraphError, match="output 'y' is the placeholder 'x' itself"):
        parse(graph)


def test_transfer_function_on_an_output_is_refused():
    graph, x, a = make_echo("a")
    graph.output(y=a.run(x=x).y.via(convert))
    with pytest.raises(PlanError, match=r"output 'y': a.run.y has a transfer function, but no node to run it in"):
        parse(graph)


def test_node_that_leads_nowhere_is_refused():
    graph, x, a, b = make_echo("a", "b")
    b.run(x=x)
    graph.output(y=a.run(x=x).y)
    with pytest.raises(GraphError, match=r"node 'b.run' leads to no output.*'y', 'z'"):
        parse(graph)


def test_role_that_is_never_called_is_refused():
    graph, x, a, _ = make_echo("a", "b")
    graph.output(y=a.run(x=x).y)
    with pytest.raises(GraphError, match="role 'b' is never called"):
        parse(graph)


def test_placeholder_that_feeds_nothing_is_refused():
    graph, x, a = make_echo("a")
    graph.placeholder("seed")
    graph.output(y=a.run(x=x).y)
    with pytest.raises(GraphError, match="placeholder 'seed' feeds no node"):
        parse(graph)


def test_plan_lists_nodes_in_topological_order():
    assert list(parse(make_speech_graph()).nodes) == ["thinker.generate", "talker.generate", "token2wav.decode"]


def test_plan_keeps_the_transfer_function_on_its_edge():
    plan = parse(make_speech_graph(to_talker=convert))
    assert plan.nodes["talker.generate"].inputs["rows"].transfer is convert
    assert plan.nodes["token2wav.decode"].inputs["codes"].transfer is None


def test_several_fields_of_one_predecessor_are_no_join():
    graph, x, a = make_echo("a")
    reply = a.run(x=x)
    graph.output(y=graph.role(Pair, "pair").run(left=reply.y, right=reply.z).y)
    assert [str(edge) for edge in parse(graph).nodes["pair.run"].inputs.values()] == [
        "a.run.y -> pair.run.left",
        "a.run.z -> pair.run.right",
    ]


def test_one_field_may_feed_several_nodes():
    graph = Graph("g")
    rows = graph.role(Thinker, "thinker").generate(prompt=graph.placeholder("prompt")).rows
    for name in ("high", "low"):
        codes = graph.role(Talker, f"talker_{name}").generate(rows=rows).codes
        graph.output(**{name: graph.role(Token2Wav, f"vocoder_{name}").decode(codes=codes).audio})
    assert len(parse(graph).nodes) == 5
