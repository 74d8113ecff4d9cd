import itertools
from typing import NamedTuple

import pytest

from vllm_omni.flow.run.frame import ITERATION
from vllm_omni.flow.run.order import PathOrder


class Item(NamedTuple):
    name: str
    seq: int = 0
    last: bool = True


def names(items):
    return [item.name for item in items]


def test_single_activation_is_passed_on_as_it_comes():
    order = PathOrder()
    assert names(order.push((), Item("a", 0, False), ())) == ["a"]
    assert names(order.push((), Item("b", 1, True), ())) == ["b"]
    assert order.done


# Case 1 of appendix A and its nesting: yields of a fork, each with yields of its own.
LEAVES = [((0, 0), "a"), ((0, 1), "b"), ((2, 0), "d")]
COUNTS = [((), 3), ((0,), 2), ((2,), 1)]


@pytest.mark.parametrize("seed", range(60))
def test_any_order_of_arrival_gives_the_order_of_paths(seed):
    events = [("leaf", *leaf) for leaf in LEAVES] + [("count", *count) for count in COUNTS] + [("leaf", (1,), "c")]
    arrival = next(itertools.islice(itertools.permutations(events), seed * 83, None))
    order, got = PathOrder(), []
    for kind, path, value in arrival:
        got += order.push(path, Item(value), ()) if kind == "leaf" else order.set_count(path, value, ())
    assert names(got) == ["a", "b", "c", "d"]
    assert order.done
    assert len(order) == 0


def test_leaf_passes_before_anybody_has_counted():
    order = PathOrder()
    assert names(order.push((0,), Item("a"), ())) == ["a"]
    assert names(order.push((1,), Item("b"), ())) == ["b"]
    assert not order.done
    assert order.set_count((), 2, ()) == []
    assert order.done


def test_nothing_below_a_path_is_known_by_its_count():
    order = PathOrder()
    order.set_count((), 0, ())
    assert order.done


def test_iteration_follows_the_activation_before_it_and_is_awaited():
    order = PathOrder()
    assert order.push((ITERATION,), Item("second"), ()) == []
    assert names(order.push((), Item("first"), (0,))) == ["first", "second"]
    assert order.done


def test_iteration_follows_all_yields_of_the_one_before():
    order = PathOrder()
    assert order.push((ITERATION, 0), Item("c"), ()) == []
    order.set_count((ITERATION,), 1, ())
    assert names(order.push((0,), Item("a"), ())) == ["a"]
    assert names(order.push((1,), Item("b"), ())) == ["b"]
    assert not order.done
    assert names(order.set_count((), 2, (0,))) == ["c"]
    assert order.done


def test_iterations_of_two_loops_follow_each_other():
    order = PathOrder()
    order.push((ITERATION + 1,), Item("b"), ())
    order.push((ITERATION,), Item("a"), ())
    assert names(order.push((), Item("first"), (0, 1))) == ["first", "a", "b"]


@pytest.mark.parametrize("path", [(0, 0), (0,), ()])
def test_duplicates_are_dropped(path):
    order = PathOrder()
    order.push((0, 0), Item("a"), ())
    order.set_count((0,), 1, ())
    order.set_count((), 2, ())
    order.push((0, 0), Item("a"), ())
    order.set_count(path, 1, ())
    assert names(order.push((1,), Item("b"), ())) == ["b"]
    assert order.done


def test_duplicates_of_a_complete_iteration_are_dropped():
    order = PathOrder()
    order.push((), Item("a"), (0, 1))
    order.push((ITERATION,), Item("b"), ())
    assert order.push((ITERATION,), Item("b"), ()) == []
    assert names(order.push((ITERATION + 1,), Item("c"), ())) == ["c"]


def test_early_items_are_counted():
    order = PathOrder()
    order.push((1,), Item("b"), ())
    order.push((0,), Item("a", 1), ())
    assert len(order) == 2
