"""benchmarks/epd.py works, and its sums are right; what it measures here says nothing."""

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from benchmarks.epd import (
    COLUMNS,
    PAPER,
    REST_S,
    RULES,
    SHAPE,
    SHARES,
    STRICT,
    WORKLOADS,
    Answered,
    Asked,
    Bench,
    Cell,
    Mode,
    Options,
    Started,
    attained,
    goals,
    goodput,
    make_requests,
    only,
    percentile,
    run_cell,
    some_of,
)
from tests import zygote
from vllm_omni.messages.slo import Slo
from vllm_omni.testing import llava

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
def test_quick_run_ends_with_a_line_of_json():
    command = [sys.executable, "-m", "benchmarks.epd", "--quick", "--modes", "stock,ours"]
    done = zygote.run(command, cwd=ROOT, timeout=400)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    (workload,) = result["workloads"].values()
    assert workload["slo"]["ttft_ms"] > 0 and workload["slo"]["tpot_ms"] > 0
    assert list(workload["modes"]) == ["stock", "ours"]
    for mode, row in workload["modes"].items():
        assert row.keys() >= set(COLUMNS)
        assert 0 <= row["gap_p50_ms"] <= row["gap_p99_ms"]  # 0: on busy cores tokens come together
        assert 0 < row["ttft_p50_ms"] <= row["ttft_p99_ms"]
        assert row["attainment"] and row["goodput_s"][STRICT] > 0, mode
        assert f"| TextCaps | {mode} |" in done.stdout
    assert done.stdout.count("| reached |") + done.stdout.count("| MISSED |") == 3


def test_unknown_names_are_rejected_with_the_known_ones():
    parse = some_of(RULES)
    assert parse("paper,strict") == ["paper", "strict"]
    with pytest.raises(argparse.ArgumentTypeError, match="unknown lax; known are paper, strict"):
        parse("strict,lax")


def test_goodput_is_between_the_last_rate_that_is_met_and_the_next_one():
    assert goodput({1.0: 1.0, 2.0: 0.95, 4.0: 0.85}) == pytest.approx(3.0)
    assert goodput({1.0: 0.95, 2.0: 0.8, 4.0: 0.95}) == pytest.approx(1 + 1 / 3)  # one lucky rate is no capacity
    assert goodput({1.0: 0.95}) == 1.0
    assert goodput({1.0: 0.5}) == pytest.approx(0.2)  # all are met where none comes


def test_a_percentile_is_one_of_the_values():
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([float(n) for n in range(1, 101)], 0.99) == 99.0
    assert percentile([], 0.99) == 0.0


def test_a_seed_gives_the_same_requests_at_every_rate_but_for_their_times():
    slow, fast = (make_requests(WORKLOADS["TextCaps"], SHAPE, [7], 20, rate) for rate in (1.0, 10.0))
    for one, other in zip(slow, fast, strict=True):
        assert one.at_s == pytest.approx(10 * other.at_s)
        assert (one.prompt, one.num_tokens) == (other.prompt, other.num_tokens)
        assert one.image.tobytes() == other.image.tobytes()
    other_seed = make_requests(WORKLOADS["TextCaps"], SHAPE, [8], 20, 1.0)
    assert [one.at_s for one in slow] != [one.at_s for one in other_seed]
    assert len({one.image.tobytes() for one in slow}) == 20  # no cache answers


class Answers:
    """An engine that writes down what it is asked, and has the answer there."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, bytes]] = []

    async def generate(self, prompt, params, request_id):
        image = prompt.get("multi_modal_data", {}).get("image")
        self.asked.append((prompt["prompt"], image.tobytes() if image else b""))
        await asyncio.sleep(0)
        yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * params.max_tokens)])


@pytest.mark.long
def test_no_engine_is_asked_twice_and_modes_that_are_compared_are_asked_the_same():
    one, another, third = Answers(), Answers(), Answers()
    engines = {"stock": [one], "ours": [third], "2 stock": [one, another]}
    modes = {name: Mode(name, [Started(one, []) for one in engines[name]], tells_slo=False) for name in engines}
    options = Options(
        llava.TINY, 6, 2, num_at_once=4, num_warm=4, num_unloaded=3, rules=(STRICT, PAPER), shares=SHARES[8:]
    )
    for workload in ("TextCaps", "MME"):
        asyncio.run(Bench(WORKLOADS[workload], modes, options, say=lambda line: None).run())
    for engine in (one, another, third):
        assert len(engine.asked) > 20 and len(set(engine.asked)) == len(engine.asked)
    assert len(set(one.asked) & set(third.asked)) >= 2 * (4 + 6)  # all at once, and at the equal rate
    assert not set(one.asked) & set(another.asked)


def test_the_engines_of_other_modes_stand_still():
    with contextlib.ExitStack() as stack:
        one, another = (stack.enter_context(subprocess.Popen(["sleep", "60"])) for _ in range(2))
        stack.callback(lambda: [process.kill() for process in (one, another)])
        engines = [Started(Answers(), [psutil.Process(process.pid)]) for process in (one, another)]
        modes = [Mode("first", engines[:1], tells_slo=False), Mode("both", engines, tells_slo=False)]

        def are_stopped(*expected):
            deadline = time.monotonic() + 10  # a signal is not there at once
            while time.monotonic() < deadline:
                if tuple(_is_stopped(process.pid) for process in (one, another)) == expected:
                    return True
            return False

        with only(modes[0], modes):
            assert are_stopped(False, True)
        with only(modes[1], modes):
            assert are_stopped(False, False)
        with pytest.raises(KeyboardInterrupt), only(modes[0], modes):
            assert are_stopped(False, True)
            raise KeyboardInterrupt
        assert are_stopped(False, False)


def _is_stopped(pid):
    return psutil.Process(pid).status() == psutil.STATUS_STOPPED


def test_both_rules_are_applied_to_each_request():
    slo, strict = (Slo(ttft_ms=100, tpot_ms=10, tpot_share=RULES[rule]) for rule in (PAPER, STRICT))
    smooth = Answered([0.05 + 0.008 * n for n in range(20)])
    stalled = Answered([0.05 + 0.005 * n + (0.05 if n > 10 else 0) for n in range(20)])
    late = Answered([0.2 + 0.008 * n for n in range(20)])
    point = [Cell([smooth, stalled], slo, 1.0, 0.0), Cell([late, smooth], slo, 1.0, 0.0)]
    assert attained(point) == 0.75
    assert attained([replace(cell, slo=strict) for cell in point]) == 0.5
    strange = Cell([smooth], Slo(ttft_ms=10, tpot_ms=10), 1.0, 0.0)
    assert attained([*point, strange]) == 0.6  # each turn by its own SLO


def test_only_time_without_requests_is_cut():
    class Takes:
        def __init__(self) -> None:
            self.dues, self.busy = [], 0

        async def answer(self, one, due, slo):
            self.dues.append(due)
            self.busy += 1
            await asyncio.sleep(0.3)
            self.busy -= 1
            return Answered([time.perf_counter() - due])

    def asked(*times):
        return [Asked(at_s, "", None, 1) for at_s in times]

    mode = Takes()
    cell = asyncio.run(run_cell(mode, asked(0.0, 0.2, 100.0, 100.1), None))
    first, second, third, fourth = mode.dues
    assert second - first == pytest.approx(0.2) and fourth - third == pytest.approx(0.1)
    assert third - second >= 0.3 + REST_S  # it has been quiet
    assert cell.seconds < 50 and [len(answer.token_s) for answer in cell.answers] == [1] * 4


def test_goals_compare_with_the_baseline_of_as_many_engines():
    row = {"gap_p99_ms": 10.0, "all_at_once_s": 9.0, "goodput_s": {STRICT: 3.0}}
    modes = {
        "stock": {"gap_p99_ms": 60.0, "all_at_once_s": 10.0, "goodput_s": {STRICT: 1.0}},
        "ours": row,
        "2 stock": {**row, "goodput_s": {STRICT: 1.5}},
        "2 EPD": {**row, "goodput_s": {STRICT: 2.0}},
        "E+PD": row,
    }
    got = {
        goal.what: (goal.at_least, goal.got) for goal in goals({"MME": {"modes": modes}, "VizWiz": {"modes": modes}})
    }
    assert got["VizWiz: gap p99, stock over ours"] == (3.0, 6.0)
    assert got["VizWiz: goodput, strict, ours over stock"] == (1.3, 3.0)
    assert got["MME: goodput, strict, ours over stock"] == (0.95, 3.0)
    assert got["VizWiz: goodput, strict, E+PD over 2 stock"] == (1.5, 2.0)
    assert got["VizWiz: all at once, ours over stock"] == (0.9, 0.9)
    assert got["VizWiz: goodput, full over no hybrid"] == (1.0, 1.5)
