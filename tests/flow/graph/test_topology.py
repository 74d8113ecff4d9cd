from vllm_omni.flow.graph.topology import Topology, common_prefix
from vllm_omni.flow.graph.transfer import ENTRY

DIAMOND = {"fork": [ENTRY], "left": ["fork"], "right": ["fork"], "join": ["left", "right"], "last": ["join"]}
LOOP = {"header": [ENTRY, "body"], "body": ["header"], "exit": ["header"]}


def test_order_puts_every_node_behind_what_feeds_it():
    order = list(Topology(DIAMOND).order())
    assert all(
        order.index(source) < order.index(name)
        for name, all_ in DIAMOND.items()
        for source in all_[:]
        if source != ENTRY
    )


def test_dominators_of_a_join_are_those_of_its_fork():
    chains = Topology(DIAMOND).dominators()
    assert chains["join"] == [ENTRY, "fork", "join"]
    assert chains["last"] == [ENTRY, "fork", "join", "last"]


def test_only_the_entry_dominates_the_nodes_below_a_gathering_node():
    assert Topology(DIAMOND, ["join"]).dominators()["last"] == [ENTRY, "join", "last"]


def test_header_of_a_loop_is_the_node_that_is_fed_from_outside():
    (cycle,) = Topology(LOOP).cycles
    assert (cycle.nodes, cycle.headers) == ({"header", "body"}, ("header",))


def test_forward_is_the_graph_without_what_leads_back():
    topology = Topology(LOOP)
    assert topology.forward == {"header": (ENTRY,), "body": ("header",), "exit": ("header",)}
    assert topology.is_back("body", "header")
    assert not topology.is_back("header", "body")


def test_node_that_feeds_itself_is_a_loop():
    (cycle,) = Topology({"a": [ENTRY, "a"]}).cycles
    assert cycle.headers == ("a",)


def test_two_loops_are_two_cycles():
    topology = Topology({"a": [ENTRY, "a"], "b": ["a", "b"]})
    assert [cycle.nodes for cycle in topology.cycles] == [{"a"}, {"b"}]


def test_order_leaves_out_a_loop_within_a_loop():
    topology = Topology({"a": [ENTRY, "c"], "b": ["a", "c"], "c": ["b"]})
    assert list(topology.order()) == ["a"]


def test_reaches_follows_forward_edges_only():
    assert Topology(LOOP).reaches("body") == {"body"}
    assert Topology(DIAMOND).reaches("left") == {"left", "join", "last"}


def test_common_prefix_of_one_chain_is_the_chain():
    assert common_prefix([["a", "b"]]) == ["a", "b"]
