"""benchmarks/hosts.py works, and its goals are right; what it measures here says nothing."""

import json
import sys
from typing import Any

import pytest

from benchmarks.host_deployments import HOSTS, ONE, RAY, STAGES
from benchmarks.host_ways import RAY as WAYS_OF_RAY
from benchmarks.host_ways import WAYS, Blocking, measure_rate, measure_trips
from benchmarks.hosts import COMPLETION, FIRST_AUDIO, RATE, goals_of, spread
from tests import machine, zygote


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_short_run_prints_tables_and_a_line_of_json() -> None:
    machine.require("networks")
    command = [sys.executable, "-m", "benchmarks.hosts", "--short"]
    ran = zygote.run(command, timeout=380, forks=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    result = json.loads(ran.stdout.splitlines()[-1])
    assert result["benchmark"] == "hosts"
    for what in (FIRST_AUDIO, COMPLETION, RATE):
        assert list(result["pipeline"][what]) == [ONE, HOSTS]
        assert all(0 < one["least"] <= one["median"] <= one["largest"] for one in result["pipeline"][what].values())
    assert set(result["messages"]) == WAYS.keys() - set(WAYS_OF_RAY)
    assert all(0 < one["p50_us"] <= one["p99_us"] and one["per_s"] > 0 for one in result["messages"].values())
    assert list(result["starts"]["ready after, s"]) == [ONE, HOSTS]
    (fault,) = result["recovery"].values()
    assert 0 < fault["noticed after, s"][""]["median"] < fault["answers after, s"][""]["median"]
    assert {"front end", *(f"engine {stage}" for stage in STAGES)} < result["idle"].keys()
    assert {f"host program of {stage}'s host" for stage in STAGES} < result["idle"].keys()
    assert [goal["what"] for goal in result["goals"]] == [goal.what for goal in goals_of(result)]
    assert "| fault | noticed after, s |" in ran.stdout


def figures(one: float, hosts: float) -> dict[str, Any]:
    return {ONE: spread([one]), HOSTS: spread([hosts])}


def test_goals_compare_with_one_machine() -> None:
    pipeline = {FIRST_AUDIO: figures(1.0, 1.1), COMPLETION: figures(2.0, 2.4), RATE: figures(4.0, 3.9)}
    starts = {"ready after, s": figures(10.0, 12.0) | {RAY: spread([26.0])}}
    goals = goals_of({"pipeline": pipeline, "starts": starts})
    assert [one.got for one in goals] == pytest.approx([1.1, 1.2, 0.975, 16.0])
    assert [one.is_reached for one in goals] == [True, False, True, False]
    del starts["ready after, s"][RAY]
    assert goals_of({"starts": starts}) == []


class Returns:
    """A way that returns each message at once."""

    def __init__(self) -> None:
        self.num_open = self.most_open = self.num_sent = 0

    def send(self) -> None:
        self.num_sent += 1
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)

    def receive(self) -> None:
        self.num_open -= 1


def test_trips_are_one_after_the_other_and_a_rate_is_of_many_on_their_way() -> None:
    way = Returns()
    assert len(measure_trips(Blocking(way.send, way.receive), 20)) == way.num_sent == 20
    assert (way.most_open, way.num_open) == (1, 0)
    rate, cpu_s = measure_rate(Blocking(way.send, way.receive), 0.01)
    assert rate > 0 and cpu_s > 0
    assert (way.most_open, way.num_open) == (64, 0)  # all have come back


def test_no_more_are_on_their_way_than_a_way_takes() -> None:
    way = Returns()
    measure_rate(Blocking(way.send, way.receive, most=2), 0.01)
    assert (way.most_open, way.num_open) == (2, 0)
