"""``benchmarks.speech`` runs to its end on a small checkpoint, and its two sides generate the same frames."""

import json
import sys

import pytest

from benchmarks.speech import goals
from tests import zygote

ROW = {"frames_s": 20.0, "step_ms": 50.0, "predictor_ms": 30.0}
RESULT = {
    "reference": {"frames_s": 10.0, "total_s": 6.0},
    "alone": ROW,
    "together": ROW | {"frames_s": 90.0},
    "audio": {"first_audio_s": 1.2},
    "predictor_floor_ms": {"alone": 30.0, "together": 20.0},
    "decoder": [
        {"num_frames": 1, "together_ms": 2.0, "apart_ms": 8.0, "floor_together_ms": 1.0, "floor_apart_ms": 7.0},
        {"num_frames": 8, "together_ms": 2.0, "apart_ms": 3.0, "floor_together_ms": 1.0, "floor_apart_ms": 2.0},
    ],
}


def test_goals_compare_with_the_baseline_and_the_floors():
    reached = {what: (goal, got, is_reached) for what, goal, got, is_reached in goals(RESULT, 16)}
    assert list(reached.values()) == [
        (1.3, 2.0, True),
        (8.0, 9.0, True),
        (3.0, 4.0, True),
        (2.0, 1.5, False),  # the floor of a decoder bound by arithmetic is below 3
        (0.15, 1.2 / 6.0, False),
        (1.2, 1.0, True),
        (1.2, 1.5, False),
    ]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_short_run_prints_its_tables():
    command = ["-m", "benchmarks.speech", "--short", "--eager", "--variant", "base", "--concurrency", "4"]
    done = zygote.run([sys.executable, *command], timeout=280)
    assert done.returncode == 0, done.stderr
    assert "| talker + predictor | frames/s |" in done.stdout
    result = json.loads(done.stdout.splitlines()[-1])
    assert len(result["goals"]) == 7
    assert result["alone"]["predictor_ms"] < result["alone"]["step_ms"]
