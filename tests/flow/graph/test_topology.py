from vllm_omni.flow.graph.topology import Loops, Paths, common_prefix
from vllm_omni.flow.graph.transfer import ENTRY

DIAMOND = {"fork": (ENTRY,), "left": ("fork",), "right": ("fork",), "join": ("left", "right"), "last": ("join",)}
LOOP = {"header": (ENTRY, "body"), "body": ("header",), "exit": ("header",)}
TWO_ENTRIES = {"first": (ENTRY, "second"), "second": ("first", ENTRY)}


def make_paths(feeds, gathering=None, **constants):
    return Paths(feeds, {name: constants.get(name, ()) for name in feeds}, gathering or {})


def make_loops(feeds, *starts):
    return Loops(feeds, lambda name, loop: name in starts)


def test_order_puts_every_node_behind_what_feeds_it():
    order = [ENTRY, *make_paths(DIAMOND).order()]
    assert all(order.index(source) < order.index(name) for name, sources in DIAMOND.items() for source in sources)


def test_order_puts_a_node_behind_its_constants():
    assert make_paths({"body": (ENTRY,), "last": (ENTRY,)}, body=("last",)).order() == ["last", "body"]


def test_dominators_of_a_join_are_those_of_its_fork():
    chains = make_paths(DIAMOND).dominators()
    assert chains["join"] == [ENTRY, "fork", "join"]
    assert chains["last"] == [ENTRY, "fork", "join", "last"]


def test_constants_are_no_paths():
    chains = make_paths({"header": (ENTRY,), "other": (ENTRY,), "body": ("header",)}, body=("other",)).dominators()
    assert chains["body"] == [ENTRY, "header", "body"]


def test_only_the_entry_dominates_the_nodes_below_a_gathering_node():
    assert make_paths(DIAMOND, {"join": ENTRY}).dominators()["last"] == [ENTRY, "join", "last"]


def test_header_of_a_loop_is_the_node_that_can_start():
    (loop,) = make_loops(LOOP, "header", "exit").all
    assert (loop.nodes, loop.header, loop.depth) == ({"header", "body"}, "header", 1)


def test_header_of_a_loop_that_may_start_at_two_nodes_is_the_first():
    assert make_loops(TWO_ENTRIES, "first", "second").of("second").header == "first"
    assert make_loops(TWO_ENTRIES, "second").of("first").header == "second"
    assert make_loops(TWO_ENTRIES).of("first").header is None


def test_edges_that_lead_back_end_at_the_header():
    loops = make_loops(LOOP, "header")
    assert loops.is_back("body", "header")
    assert not loops.is_back("header", "body") and not loops.is_back(ENTRY, "header")


def test_node_that_feeds_itself_is_a_loop():
    (loop,) = make_loops({"a": (ENTRY, "a")}, "a").all
    assert loop.header == "a"


def test_two_loops_in_a_row_are_two_loops():
    assert [loop.nodes for loop in make_loops({"a": (ENTRY, "a"), "b": ("a", "b")}, "a", "b").all] == [{"a"}, {"b"}]


def test_loop_within_a_loop_is_found():
    outer, inner = make_loops({"a": (ENTRY, "c"), "b": ("a", "c"), "c": ("b",)}, "a", "b").all
    assert (outer.nodes, outer.header, outer.depth) == ({"a", "b", "c"}, "a", 1)
    assert (inner.nodes, inner.header, inner.depth, inner.outer) == ({"b", "c"}, "b", 2, outer)


def test_loop_is_entered_elsewhere_than_at_its_header():
    loops = make_loops(TWO_ENTRIES, "first")
    assert loops.entered("first") is None
    assert loops.entered("second").header == "first"


def test_reaches_follows_constants_or_not():
    assert make_paths(DIAMOND).reaches("left") == {"left", "join", "last"}
    paths = make_paths({"header": (ENTRY,), "other": (ENTRY,), "body": ("header",)}, body=("other",))
    assert paths.reaches("other") == {"other", "body"}
    assert paths.reaches("other", with_constants=False) == {"other"}


def test_common_prefix_of_one_chain_is_the_chain():
    assert common_prefix([["a", "b"]]) == ["a", "b"]
