"""benchmarks/scale.py works, and what it counts is right; the times that it measures here say nothing."""

import json
import math
import sys

import pytest

from benchmarks.scale import (
    Arrival,
    at_random,
    by_group,
    growth_bytes,
    in_order,
    main,
    make_arrivals,
    make_group,
    measure_autoscaling,
    measure_placement,
    of_two,
    simulate,
)
from vllm_omni.config.epd import MAX_INSTANCES


def test_a_change_moves_only_the_replicas_of_the_host_that_is_lost() -> None:
    run = measure_placement(40, 6)
    assert (run.replicas, run.devices_in_use) == (40, 30)
    assert run.moved_by_add == 0
    assert run.moved_with_host == run.lost_with_host > 0


def test_a_group_of_more_replicas_than_a_stage_may_have_uses_them_all() -> None:
    number = MAX_INSTANCES + 3
    choose = by_group(make_group(number, "least_work"))
    assert {choose(Arrival(0.0, 10, 10, str(one)))[0] for one in range(number)} == set(range(number))


def test_arrivals_are_the_same_each_time_and_at_the_utilization_that_is_said() -> None:
    arrivals = make_arrivals(2000, 8)
    assert arrivals == make_arrivals(2000, 8)
    used = sum(one.service for one in arrivals) / (8 * arrivals[-1].at)
    assert math.isclose(used, 0.8, rel_tol=0.05)


def test_a_request_waits_for_those_before_it_on_its_replica() -> None:
    arrivals = [Arrival(float(at), 50, 9, "one") for at in (0, 1, 2)]  # 10 tokens' time each
    waits = simulate(arrivals, 2, in_order(2))  # the third is behind the first
    assert math.isclose(waits.mean, (0 + 0 + 8) / 3 / 10)
    assert waits.longest_queue == 2


def test_by_outstanding_work_requests_wait_less_than_by_chance() -> None:
    arrivals = make_arrivals(3000, 16)
    least, two, chance = (
        simulate(arrivals, 16, choose) for choose in (by_group(make_group(16, "least_work")), of_two(16), at_random(16))
    )
    assert least.mean < two.mean < chance.mean
    assert least.p99 < chance.p99


def test_requests_leave_nothing_behind_in_the_router() -> None:
    assert growth_bytes(8, make_arrivals(4000, 8)) < 2.0  # bytes a request: a table that grew would be 100


def test_a_day_of_load_is_followed_up_and_down() -> None:
    run = measure_autoscaling(num_stages=3, seconds=86400)
    assert run.most > 0.7 * MAX_INSTANCES
    assert run.fewest < 0.5 * MAX_INSTANCES  # one less each ten minutes: ten times as long as a start takes
    assert run.full_share < 0.1


def test_a_short_run_ends_with_a_line_of_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["scale", "--short"])
    main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["benchmark"] == "scale"
    assert set(result["choice_us"]) == {"8", str(MAX_INSTANCES), "80"}
    assert set(result["choice_us"]["8"]) - set(result["waits"]) == {"affinity"}
    assert result["placement"]["replicas"] == 80
