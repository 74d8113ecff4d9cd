"""benchmarks/serve.py works; what it measures here says nothing."""

import json
import sys

import pytest

from benchmarks.serve import CLIENTS, STREAMING
from tests import zygote


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_short_run_prints_tables_and_a_line_of_json() -> None:
    command = [sys.executable, "-m", "benchmarks.serve", "--short"]
    ran = zygote.run(command, timeout=880, forks=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    result = json.loads(ran.stdout.splitlines()[-1])
    assert result["benchmark"] == "serve"
    for name in ("stock", "omni"):
        assert list(result["chunk_us"][name]) == [str(number) for number in STREAMING]
        assert list(result["rate"][name]) == [str(number) for number in CLIENTS]
        assert all(value > 0 for kind in ("chunk_us", "rate") for value in result[kind][name].values())
    for kind in ("text", "image"):
        assert list(result["front_ends"][kind]) == ["1", "2"]
        assert all(value > 0 for value in result["front_ends"][kind].values())
    starts = {"stock", "one stage", "three forked"}  # the fourth differs by a variable (tests/e2e/test_lifecycle.py)
    assert result["ready_s"].keys() == result["memory_gb"].keys() == starts
    assert "| omni / stock |" in ran.stdout
