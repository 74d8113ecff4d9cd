import pytest

from vllm_omni.flow.run.activity import Activity, ActivityTracker


def make_tracker():
    idle = []
    return ActivityTracker(lambda: idle.append(True)), idle


def test_idle_comes_with_the_end_of_the_last_activity():
    tracker, idle = make_tracker()
    tracker.start(Activity("a.run", 1))
    tracker.start(Activity("b.run", 2))
    tracker.end(Activity("a.run", 1))
    assert not idle
    tracker.end(Activity("b.run", 2))
    assert idle == [True]


def test_tracker_that_never_began_is_not_idle():
    _, idle = make_tracker()
    assert not idle


def test_ending_twice_is_harmless():
    tracker, idle = make_tracker()
    tracker.start(Activity("a.run", 1))
    tracker.end(Activity("a.run", 1))
    tracker.end(Activity("a.run", 1))
    assert idle == [True]


def test_starting_twice_is_an_assertion_error():
    tracker, _ = make_tracker()
    tracker.start(Activity("a.run", 1))
    with pytest.raises(AssertionError, match="started twice"):
        tracker.start(Activity("a.run", 1))


def test_activations_of_one_node_are_distinct():
    tracker, idle = make_tracker()
    tracker.start(Activity("a.run", 1))
    tracker.start(Activity("a.run", 2))
    tracker.end(Activity("a.run", 1))
    assert tracker.inflight == {Activity("a.run", 2)}
    assert not idle
