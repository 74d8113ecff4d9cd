"""Proposals of an autoscaler, by a clock that is passed in."""

from typing import Any

import pytest

from vllm_omni.deploy.autoscale import GROW_S, SHRINK_S, STARTS, Autoscaler, Bounds, Load, Proposal

SLOTS = 10


class Stage:
    """One stage, looked at once a second."""

    def __init__(self, fewest: int = 1, most: int = 4, replicas: int = 1) -> None:
        self.now, self.replicas, self.bounds = 0.0, replicas, (fewest, most)
        self.autoscaler = Autoscaler({"talker": Bounds(fewest, most)}, lambda: self.now)

    def look(self, seconds: float, requests: int, *, target: int | None = None, **more: Any) -> list[Proposal]:
        """What is proposed in so many seconds of a load."""
        proposals = []
        for _ in range(round(seconds)):
            load = Load(self.replicas, target or self.replicas, SLOTS, requests, **more)
            proposals.append(self.autoscaler.propose("talker", load))
            self.now += 1.0
        return [one for one in proposals if one is not None]

    def follow(self, seconds: float, requests: int, **more: Any) -> list[int]:
        """The replicas second by second, where proposals are done at once."""
        counts = []
        for _ in range(round(seconds)):
            for proposal in self.look(1, requests, **more):
                self.replicas = proposal.replicas
            counts.append(self.replicas)
        return counts


def test_a_load_with_room_changes_nothing() -> None:
    assert Stage().look(600, 8) == []


def test_a_load_that_lasts_gets_as_many_replicas_as_it_needs_at_once() -> None:
    stage = Stage()
    assert stage.look(GROW_S, 25) == []
    assert stage.look(1, 25) == [Proposal(4, "25 requests, 10 slots each")]


def test_a_burst_changes_nothing() -> None:
    stage = Stage()
    for _ in range(10):
        assert stage.look(GROW_S - 1, 100) == []
        assert stage.look(1, 5) == []


def test_there_are_never_more_or_fewer_than_the_bounds() -> None:
    stage = Stage(fewest=2, most=3, replicas=2)
    assert set(stage.follow(60, 1000)) == {2, 3}
    assert stage.follow(10 * SHRINK_S, 0)[-1] == 2


def test_requests_that_wait_need_more_replicas_though_slots_are_few() -> None:
    assert Stage().look(GROW_S + 1, 5, waiting=3) == [Proposal(2, "3 requests wait")]


@pytest.mark.parametrize(("requests", "attainment", "proposed"), [(6, 0.5, 2), (6, 0.95, None), (4, 0.5, None)])
def test_missed_slos_need_more_replicas_where_load_is_the_reason(
    requests: int, attainment: float, proposed: int | None
) -> None:
    proposals = Stage().look(GROW_S + 1, requests, attainment=attainment)
    assert [one.replicas for one in proposals] == ([] if proposed is None else [proposed])


def test_replicas_are_given_up_one_by_one_and_late() -> None:
    stage = Stage(replicas=4)
    counts = stage.follow(4 * SHRINK_S, 2)
    assert counts[-1] == 1
    assert [counts.index(number) for number in (3, 2, 1)] == [60, 121, 182]  # with new patience after each


def test_the_longer_a_start_takes_the_later_a_replica_is_given_up() -> None:
    stage, start_s = Stage(replicas=2), 30.0
    assert stage.look(STARTS * start_s, 0, start_s=start_s) == []
    assert [one.replicas for one in stage.look(1, 0, start_s=start_s)] == [1]


def test_a_load_between_the_bounds_keeps_what_it_has() -> None:
    """Whether it came from below or from above: the number of replicas does not swing."""
    for replicas in (2, 3):
        assert Stage(replicas=replicas).look(1000, 13) == []


def test_while_replicas_start_nothing_is_proposed() -> None:
    stage = Stage()
    assert stage.look(600, 100, target=2) == []
    assert stage.look(GROW_S, 100) == []  # and what it did before it started counts no longer
    assert len(stage.look(1, 100)) == 1
