"""What is sent, and when."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vllm_omni.entrypoints.bench.workload import (
    Arrival,
    at_rate,
    make_arrivals,
    rate_of,
    read_prompts,
    read_trace,
)
from vllm_omni.errors import ConfigError


def poisson(num_requests: int, seed: int = 0) -> list[Arrival]:
    return make_arrivals(num_requests, ["one", "two"], np.random.default_rng(seed))


def times(arrivals: list[Arrival]) -> list[float]:
    return [one.at_s for one in arrivals]


def test_poisson_arrivals_have_exactly_the_rate_and_gaps_of_an_exponential_distribution() -> None:
    arrivals = at_rate(poisson(2001), 4.0)
    assert rate_of(arrivals) == pytest.approx(4.0)
    gaps = np.diff(times(arrivals))
    assert gaps.mean() == pytest.approx(0.25) and gaps.min() > 0.0
    assert gaps.std() == pytest.approx(0.25, rel=0.1)  # equal to the mean in an exponential distribution alone
    assert np.mean(gaps > 0.25) == pytest.approx(math.exp(-1), abs=0.05)


def test_each_rate_has_the_same_pattern_and_each_seed_another() -> None:
    slow, fast = (at_rate(poisson(10), rate) for rate in (1.0, 8.0))
    assert times(slow) == pytest.approx([8 * at for at in times(fast)])
    assert times(poisson(10, seed=1)) != times(poisson(10))
    assert times(poisson(10)) == times(poisson(10))


def test_prompts_are_sent_in_turn() -> None:
    assert [one.prompt for one in poisson(3)] == ["one", "two", "one"]


def test_one_request_is_sent_at_once() -> None:
    assert times(at_rate(poisson(1), 2.0)) == [0.0]


def write(path: Path, *records: Any) -> Path:
    path.write_text("\n".join(one if isinstance(one, str) else json.dumps(one) for one in records) + "\n")
    return path


def test_a_trace_is_replayed_from_its_first_time_with_sizes(tmp_path: Path) -> None:
    path = write(
        tmp_path / "trace.jsonl",
        {"timestamp": 1002.5, "prompt": "Second.", "body": {"size": "64x64"}},
        "",
        {"timestamp": 1000.0, "input_length": 30, "output_length": 7},
    )
    first, second = read_trace(path, "s", has_lengths=True)
    assert (first.at_s, first.output_length, len(first.prompt.split())) == (0.0, 7, 30)
    assert second == Arrival(2.5, "Second.", None, {"size": "64x64"})


def test_a_trace_in_milliseconds_has_its_own_rate_or_another(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", *({"timestamp": at, "prompt": "Hi."} for at in (0, 250, 1000)))
    arrivals = read_trace(path, "ms", has_lengths=False)
    assert times(arrivals) == [0.0, 0.25, 1.0] and rate_of(arrivals) == 2.0
    assert times(at_rate(arrivals, 4.0)) == pytest.approx([0.0, 0.125, 0.5])


def test_a_burst_has_no_rate_to_scale(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", *[{"timestamp": 3, "prompt": "Hi."}] * 2)
    arrivals = read_trace(path, "s", has_lengths=False)
    assert rate_of(arrivals) == math.inf
    with pytest.raises(ConfigError, match="at the same time"):
        at_rate(arrivals, 2.0)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("[1]", r":2: is no JSON object"),
        ("{", r":2: is no JSON object"),
        ({"timestamp": 1, "prompts": "Hi."}, "prompts: did you mean 'prompt'"),
        ({"timestamp": 1}, "needs either prompt or input_length"),
        ({"timestamp": 1, "prompt": "Hi.", "input_length": 3}, "needs either prompt or input_length"),
        ({"prompt": "Hi."}, "timestamp = None: must be a number"),
        ({"timestamp": True, "prompt": "Hi."}, "timestamp = True: must be a number"),
        ('{"timestamp": NaN, "prompt": "Hi."}', "timestamp = nan: must be a number"),
        ({"timestamp": 1, "prompt": ""}, "prompt = '': must be a text"),
        ({"timestamp": 1, "input_length": 0}, "input_length = 0: must be an integer above 0"),
        ({"timestamp": 1, "prompt": "Hi.", "body": [1]}, r"body = \[1\]: must be an object"),
        ({"timestamp": 1, "prompt": "Hi.", "output_length": 5}, "only omni-chat answers in tokens"),
    ],
)
def test_a_wrong_line_of_a_trace_is_named_with_its_reason(record: Any, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", {"timestamp": 0, "prompt": "Hi."}, record)
    with pytest.raises(ConfigError, match=message):
        read_trace(path, "s", has_lengths=False)


def test_prompts_are_the_lines_of_a_file(tmp_path: Path) -> None:
    assert read_prompts(write(tmp_path / "prompts.txt", "One.", " ", "Two.")) == ["One.", "Two."]
    with pytest.raises(ConfigError, match="has no prompt"):
        read_prompts(write(tmp_path / "empty.txt", ""))
    with pytest.raises(ConfigError, match="No such file"):
        read_prompts(tmp_path / "none.txt")


def test_an_empty_trace_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no request"):
        read_trace(write(tmp_path / "trace.jsonl", ""), "s", has_lengths=False)
