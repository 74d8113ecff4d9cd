"""``benchmarks.voice_turns`` runs to its end on a tiny checkpoint; times measured here mean nothing."""

import itertools
import json
import re
import sys
from pathlib import Path

import pytest

from benchmarks.voice_turns import goals, make_turns
from tests import zygote

ROOT = Path(__file__).resolve().parents[2]


def test_each_turn_adds_as_many_tokens():
    prompts = make_turns(3, 4, 100)
    for number, prompt in enumerate(prompts, 1):
        assert len(re.sub(r"<\|\w+\|>", " ", prompt)) == 100 * number
    assert all(second.startswith(first) for first, second in itertools.pairwise(prompts))
    assert prompts[0] != make_turns(4, 1, 100)[0]


def test_goals_compare_the_last_turn_with_the_first_and_with_the_baseline():
    kept = [{"audio_s": 1.0}, {"audio_s": 1.5}]
    computed = [{"audio_s": 1.0}, {"audio_s": 3.0}]
    pool = [{"audio_s": 1.0}, {"audio_s": 2.25}]
    found = goals({"kept": kept, "computed": computed, "pool": pool})
    assert [(got, is_reached) for _, _, got, is_reached in found] == [
        (1.5, False),
        (0.5, True),
        (1.0, True),
        (0.75, True),
    ]


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_short_run_ends_with_a_line_of_json():
    command = [sys.executable, "-m", "benchmarks.voice_turns", "--short"]
    done = zygote.run(command, cwd=ROOT, timeout=390)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert [one["num_cached"] for one in result["summary"]["computed"]] == [0, 0]
    assert all(result["summary"][side][1]["num_cached"] > 0 for side in ("kept", "pool"))
