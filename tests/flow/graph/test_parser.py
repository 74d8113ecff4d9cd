import pytest

from tests.flow.builders import Talker, Thinker, Token2Wav, make_speech_graph
from vllm_omni.errors import GraphError
from vllm_omni.flow import ENTRY, Field, GlobalParameters, Graph, GraphParser, Role, Scheduling, interface, parse_graphs


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


def test_graph_without_output_is_rejected():
    with pytest.raises(GraphError, match="graph 'g' has no output"):
        parse(Graph("g"))


def test_unconnected_input_names_node_field_and_possible_sources():
    graph, x, a, b = make_echo("a", "b")
    a.run(x=x)
    graph.output(y=b.run().y)
    with pytest.raises(
        GraphError, match=r"node 'b.run': input 'x' is not connected.*did you mean 'x'\? valid: x, a.run.y"
    ):
        parse(graph)


class Either(Role):
    run = interface(inputs_or=[["text"], ["image", "mask"]], outputs={"y": Field("text")})


class Fork(Role):
    run = interface(
        inputs_or=[["x"]],
        outputs={"y": Field("text", streamed=True), "z": Field("text", streamed=True), "whole": Field("text")},
    )


class Each(Role):
    run = interface(inputs_or=[["x"]], inputs={"x": Field("text")}, outputs={"y": Field("text")})


class EachPair(Role):
    run = interface(
        inputs_or=[["left", "right"]],
        inputs={"left": Field("text"), "right": Field("text")},
        outputs={"y": Field("text", streamed=True)},
    )


def make_count(**counts):
    class Count(Role):
        run = interface(inputs_or=[["x", "n"]], outputs={"y": Field("text")}, activate_by_count=counts)

    return Count


def test_or_group_that_is_not_connected_is_left_out():
    graph = Graph("g")
    graph.output(y=graph.role(Either, "llm").run(text=graph.placeholder("text")).y)
    (group,) = parse(graph).nodes["llm.run"].groups
    assert list(group.slots) == ["text"]


def test_or_group_that_can_never_fill_is_rejected():
    graph = Graph("g")
    llm = graph.role(Either, "llm")
    graph.output(y=llm.run(text=graph.placeholder("text")).y)
    llm.run(image=graph.placeholder("image"))
    with pytest.raises(GraphError, match=r"'llm.run': input 'mask' is not connected, so its group \['image', 'mask'\]"):
        parse(graph)


def test_field_that_two_groups_share_does_not_ask_for_both():
    class Shared(Role):
        run = interface(inputs_or=[["text", "image"], ["text", "audio"]], outputs={"y": Field("text")})

    graph = Graph("g")
    graph.output(y=graph.role(Shared, "llm").run(text=graph.placeholder("text"), audio=graph.placeholder("audio")).y)
    (group,) = parse(graph).nodes["llm.run"].groups
    assert list(group.slots) == ["text", "audio"]


def test_root_of_a_join_is_the_nearest_node_above_all_of_its_edges():
    graph, x, a, b, c = make_echo("a", "b", "c")
    top = a.run(x=x)
    graph.output(y=graph.role(Pair, "pair").run(left=b.run(x=top.y).y, right=c.run(x=top.z).y).y)
    (group,) = parse(graph).nodes["pair.run"].groups
    assert (group.root, group.root_per_frame) == ("a.run", False)


def test_join_is_per_frame_where_every_way_out_of_its_root_is():
    graph = Graph("g")
    fork = graph.role(Fork, "fork").run(x=graph.placeholder("x"))
    left, right = graph.role(Each, "left").run(x=fork.y), graph.role(Each, "right").run(x=fork.z)
    graph.output(y=graph.role(Pair, "pair").run(left=left.y, right=right.y).y)
    (group,) = parse(graph).nodes["pair.run"].groups
    assert (group.root, group.root_per_frame) == ("fork.run", True)


def test_join_is_per_activation_where_one_way_out_of_its_root_is_read_whole():
    graph = Graph("g")
    fork = graph.role(Fork, "fork").run(x=graph.placeholder("x"))
    graph.output(y=graph.role(Pair, "pair").run(left=graph.role(Each, "left").run(x=fork.y).y, right=fork.whole).y)
    (group,) = parse(graph).nodes["pair.run"].groups
    assert (group.root, group.root_per_frame) == ("fork.run", False)


def test_join_with_a_placeholder_is_per_call():
    graph, x, a = make_echo("a")
    graph.output(y=graph.role(Pair, "pair").run(left=a.run(x=x).y, right=x).y)
    (group,) = parse(graph).nodes["pair.run"].groups
    assert group.root == ENTRY


def test_slot_that_is_the_only_one_of_its_field_is_critical():
    graph, x, a, b = make_echo("a", "b")
    pair = graph.role(Pair, "pair")
    graph.output(y=pair.run(left=a.run(x=x).y, right=x).y)
    pair.run(left=b.run(x=x).y)
    node = parse(graph).nodes["pair.run"]
    assert [node.slots[slot].target_field for slot in node.groups[0].critical] == ["right"]


def test_node_called_twice_reads_both_sources_of_a_field():
    graph, x, a, b = make_echo("a", "b")
    reply = a.run(x=x)
    b.run(x=reply.y)
    graph.output(y=b.run(x=reply.z).y)
    assert [str(edge) for edge in parse(graph).nodes["b.run"].slots] == [
        "a.run.y -> b.run.x",
        "a.run.z -> b.run.x",
    ]


def test_join_whose_paths_have_no_common_fork_is_rejected():
    graph = Graph("g")
    x = graph.placeholder("x")
    one, two = graph.role(Fork, "one").run(x=x), graph.role(Fork, "two").run(x=x)
    left, right = graph.role(Each, "left").run(x=one.y), graph.role(Each, "right").run(x=two.y)
    graph.output(y=graph.role(EachPair, "pair").run(left=left.y, right=right.y).y)
    with pytest.raises(
        GraphError,
        match=r"'pair.run' joins fields without a common fork source: 'left' for each frame of 'one.run', 'right' for "
        r"each frame of 'two.run'.*activate_by_count",
    ):
        parse(graph)


def test_loop_leads_back_to_its_header():
    graph, x, llm, tool = make_echo("llm", "tool")
    first = llm.run(x=x)
    llm.run(x=tool.run(x=first.y).y)
    graph.output(y=first.z)
    node = parse(graph).nodes["llm.run"]
    assert [group.loop for group in node.groups] == [None, 0]
    assert [edge.is_back for edge in node.slots] == [False, True]
    assert node.groups[1].root == "llm.run"


def test_loop_of_one_node_is_planned():
    graph, x, llm = make_echo("llm")
    first = llm.run(x=x)
    llm.run(x=first.y)
    graph.output(y=first.z)
    assert parse(graph).nodes["llm.run"].loops == (0,)


def test_loop_without_an_exit_is_rejected():
    graph, x, llm, tool, other = make_echo("llm", "tool", "other")
    llm.run(x=tool.run(x=llm.run(x=x).y).y)
    graph.output(y=other.run(x=x).y)
    with pytest.raises(GraphError, match=r"the loop llm.run -> tool.run -> llm.run has no exit.*field of 'llm.run'"):
        parse(graph)


def test_loop_that_nothing_starts_is_rejected():
    graph, x, llm, tool, other = make_echo("llm", "tool", "other")
    first = llm.run()
    llm.run(x=tool.run(x=first.y).y)
    graph.output(y=first.z, z=other.run(x=x).z)
    with pytest.raises(GraphError, match=r"nothing outside of the loop llm.run -> tool.run -> llm.run feeds it"):
        parse(graph)


def test_loop_that_nothing_outside_completes_is_rejected():
    graph, x, one, two = make_echo("one", "two")
    pair = graph.role(Pair, "pair")
    pair.run(left=x, right=one.run(x=two.run(x=pair.run().y).y).y)
    graph.output(y=pair.run().y)
    with pytest.raises(
        GraphError, match=r"can never start: from outside it only gets 'left' of 'pair.run' by entry.x, which completes"
    ):
        parse(graph)


def test_loop_starts_at_the_first_of_the_nodes_that_can_start_it():
    graph, x, llm, tool = make_echo("llm", "tool")
    first = llm.run(x=x)
    result = tool.run(x=first.y)
    tool.run(x=x)
    llm.run(x=result.y)
    graph.output(y=first.z)
    plan = parse(graph)
    assert plan.nodes["llm.run"].loops == plan.nodes["tool.run"].loops_around == (0,)
    assert [str(edge) for edge in plan.nodes["tool.run"].slots if edge.is_constant] == ["entry.x -> tool.run.x"]
    assert any("starts at 'llm.run', which is called first; what feeds 'tool.run'" in each for each in plan.findings)


def test_roots_of_a_constant_are_those_of_the_loop_and_its_source():
    graph, x, llm = make_echo("llm")
    fork = graph.role(Fork, "fork").run(x=x)
    start = graph.role(Each, "start")
    first = start.run(x=fork.y)
    pair = graph.role(EachPair, "pair").run(left=first.y, right=fork.z)
    start.run(x=llm.run(x=pair.y).y)
    graph.output(y=pair.y)
    plan = parse(graph)
    (edge,) = [edge for edge in plan.edges if edge.is_constant]
    assert (edge.source_field, edge.root, edge.root_per_frame, edge.per_frame) == ("z", "fork.run", True, True)
    (group,) = plan.nodes["pair.run"].groups
    assert (group.root, group.root_per_frame) == ("start.run", False)


def test_edge_that_leads_back_is_per_frame_if_it_is_alone_and_read_piece_by_piece():
    class Pieces(Role):
        run = interface(
            inputs_or=[["x"], ["a"], ["b", "c"]],
            inputs=dict.fromkeys(("a", "b", "c"), Field("text")),
            outputs={"y": Field("text", streamed=True)},
        )

    graph, x, other = make_echo("other")
    node = graph.role(Pieces, "node")
    made = node.run(x=x)
    node.run(a=made.y, b=other.run(x=made.y).y, c=made.y)
    graph.output(y=made.y)
    plan = parse(graph).nodes["node.run"]
    assert [(group.root, group.loop) for group in plan.groups] == [(None, None), (None, 0), ("node.run", 1)]
    assert [edge.per_frame for edge in plan.slots] == [False, True, False, False]


def test_loop_within_a_loop_is_planned():
    graph, x, outer, inner, tool = make_echo("outer", "inner", "tool")
    first = outer.run(x=x)
    second = inner.run(x=first.y)
    inner.run(x=tool.run(x=second.y).y)
    outer.run(x=second.z)
    graph.output(y=first.z)
    nodes = parse(graph).nodes
    assert {name: (node.loops, node.loop_depth) for name, node in nodes.items()} == {
        "outer.run": ((0,), 1),
        "inner.run": ((1,), 2),
        "tool.run": ((), 2),
    }
    assert nodes["tool.run"].loops_around == (1,)
    assert [(edge.is_back, edge.loop_depth) for edge in nodes["inner.run"].slots] == [(False, 0), (True, 2)]
    assert nodes["outer.run"].slots[1].loop_depth == 1


def test_field_of_the_header_that_no_iteration_passes_on_is_a_constant():
    class Chat(Role):
        run = interface(inputs_or=[["question", "image"]], outputs={"y": Field("text"), "z": Field("text")})

    graph, x, tool = make_echo("tool")
    chat = graph.role(Chat, "chat")
    first = chat.run(question=x, image=x)
    chat.run(question=tool.run(x=first.y).y)
    graph.output(y=first.z)
    node = parse(graph).nodes["chat.run"]
    start, again = node.groups
    assert (len(start.constants), start.loop, again.loop) == (0, None, 0)
    assert [str(node.slots[slot]) for slot in again.constants] == ["entry.x -> chat.run.image"]


def test_count_that_can_never_be_reached_is_rejected():
    graph, x, a = make_echo("a")
    count = graph.role(make_count(x=2), "count")
    graph.output(y=count.run(x=a.run(x=x).z, n=x).y)
    with pytest.raises(GraphError, match=r"'count.run': activate_by_count wants 2 of 'x', but at most 1 can arrive"):
        parse(graph)


def test_count_of_a_stream_may_be_any():
    graph, x, a = make_echo("a")
    graph.output(y=graph.role(make_count(x=2), "count").run(x=a.run(x=x).y, n=x).y)
    (group,) = parse(graph).nodes["count.run"].groups
    assert (group.root, group.counts) == (ENTRY, {"x": 2})


def test_count_within_a_loop_counts_in_every_iteration():
    graph, x, llm = make_echo("llm")
    first = llm.run(x=x)
    counted = graph.role(make_count(x=2), "count").run(x=first.y, n=x)
    llm.run(x=counted.y)
    graph.output(y=first.z)
    (group,) = parse(graph).nodes["count.run"].groups
    assert (group.root, group.counts, len(group.constants)) == ("llm.run", {"x": 2}, 1)


def test_groups_of_a_session_node_may_have_different_numbers_of_frames():
    class Ordered(Role):
        run = interface(
            inputs_or=[["a"], ["b"]],
            inputs={"b": Field("text")},
            outputs={"y": Field("text")},
            scheduling=Scheduling.SESSION,
        )

    graph = Graph("g")
    fork = graph.role(Fork, "fork").run(x=graph.placeholder("x"))
    node = graph.role(Ordered, "ordered")
    graph.output(y=node.run(a=fork.whole, b=fork.y).y)
    plan = parse(graph).nodes["ordered.run"]
    assert (plan.choice_root, plan.choice_per_frame) == ("fork.run", False)


def test_two_graphs_that_disagree_about_a_role_are_rejected():
    one, x, a = make_echo("llm")
    one.output(y=a.run(x=x).y)
    two = Graph("h")
    two.output(y=two.role(Each, "llm").run(x=two.placeholder("x")).y)
    with pytest.raises(
        GraphError, match=r"graphs 'g' and 'h' disagree about role 'llm': it is Echo in the one and Each"
    ):
        parse_graphs([one, two])


def test_role_ref_lets_two_graphs_share_a_role():
    one, x, a = make_echo("llm")
    one.output(y=a.run(x=x).y)
    two = Graph("h")
    two.output(y=two.role_ref(a).run(x=two.placeholder("x")).y)
    assert set(parse_graphs([one, two])) == {"g", "h"}


def test_two_graphs_with_different_parameters_of_one_name_are_rejected():
    graphs = [Graph("g"), Graph("h")]
    for graph, make in zip(graphs, (list, dict), strict=True):
        role = graph.role(Echo, f"in_{graph.name}", parameters=[GlobalParameters("history", make)])
        graph.output(y=role.run(x=graph.placeholder("x")).y)
    with pytest.raises(GraphError, match="graphs 'g' and 'h' have two different parameters named 'history'"):
        parse_graphs(graphs)


def test_two_graphs_of_one_name_are_rejected():
    one, x, a = make_echo("llm")
    one.output(y=a.run(x=x).y)
    with pytest.raises(GraphError, match="two graphs are named 'g'"):
        parse_graphs([one, one])


def test_output_field_without_a_reader_is_found():
    graph, x, a = make_echo("a")
    graph.output(y=a.run(x=x).y)
    assert parse(graph).findings == ("output 'z' of node 'a.run' has no reader",)


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
def test_transfer_function_is_checked_by_its_declared_type(yields, fits):
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


def test_output_that_is_a_placeholder_is_rejected():
    graph, x, a = make_echo("a")
    a.run(x=x)
    graph.output(y=x)
    with pytest.raises(GraphError, match="output 'y' is the placeholder 'x' itself"):
        parse(graph)


def test_transfer_function_on_an_output_is_rejected():
    graph, x, a = make_echo("a")
    graph.output(y=a.run(x=x).y.via(convert))
    with pytest.raises(GraphError, match=r"output 'y': a.run.y has a transfer function, but no node to run it in"):
        parse(graph)


def test_node_that_leads_nowhere_is_rejected():
    graph, x, a, b = make_echo("a", "b")
    b.run(x=x)
    graph.output(y=a.run(x=x).y)
    with pytest.raises(GraphError, match=r"node 'b.run' leads to no output.*'y', 'z'"):
        parse(graph)


def test_role_that_is_never_called_is_rejected():
    graph, x, a, _ = make_echo("a", "b")
    graph.output(y=a.run(x=x).y)
    with pytest.raises(GraphError, match="role 'b' is never called"):
        parse(graph)


def test_placeholder_that_feeds_nothing_is_rejected():
    graph, x, a = make_echo("a")
    graph.placeholder("seed")
    graph.output(y=a.run(x=x).y)
    with pytest.raises(GraphError, match="placeholder 'seed' feeds no node"):
        parse(graph)


def test_plan_lists_nodes_in_topological_order():
    assert list(parse(make_speech_graph()).nodes) == ["thinker.generate", "talker.generate", "token2wav.decode"]


def test_plan_keeps_the_transfer_function_on_its_edge():
    plan = parse(make_speech_graph(to_talker=convert))
    assert plan.nodes["talker.generate"].slots[0].transfer is convert
    assert plan.nodes["token2wav.decode"].slots[0].transfer is None


def test_several_fields_of_one_predecessor_meet_in_a_bucket_of_its_activation():
    graph, x, a = make_echo("a")
    reply = a.run(x=x)
    graph.output(y=graph.role(Pair, "pair").run(left=reply.y, right=reply.z).y)
    (group,) = parse(graph).nodes["pair.run"].groups
    assert (group.root, group.root_per_frame) == ("a.run", False)


def test_one_field_may_feed_several_nodes():
    graph = Graph("g")
    rows = graph.role(Thinker, "thinker").generate(prompt=graph.placeholder("prompt")).rows
    for name in ("high", "low"):
        codes = graph.role(Talker, f"talker_{name}").generate(rows=rows).codes
        graph.output(**{name: graph.role(Token2Wav, f"vocoder_{name}").decode(codes=codes).audio})
    assert len(parse(graph).nodes) == 5
