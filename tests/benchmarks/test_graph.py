"""benchmarks/graph.py works; what it measures here says nothing."""

import json
import sys

import pytest

from tests import zygote


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_quick_run_prints_a_table_and_a_line_of_json() -> None:
    command = [sys.executable, "-m", "benchmarks.graph", "--quick"]
    ran = zygote.run(command, timeout=280)
    assert ran.returncode == 0, ran.stderr
    result = json.loads(ran.stdout.splitlines()[-1])
    assert result["benchmark"] == "graph"
    assert [(row["graph"], row["calls"]) for row in result["rows"]] == [
        (graph, calls) for graph in ("join", "function", "loop") for calls in (1, 4)
    ]
    assert all(row["ratio"] > 0 for row in result["rows"])
    assert "| goal | at most | measured | |" in ran.stdout
