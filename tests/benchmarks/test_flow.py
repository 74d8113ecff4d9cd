"""benchmarks/flow.py works and its answers are right; what it measures here says nothing."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
needs_langgraph = pytest.mark.skipif(
    importlib.util.find_spec("langgraph") is None, reason="needs the baseline, langgraph: pip install -e '.[bench]'"
)


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.flow", *flags]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=200)


@pytest.mark.long
@pytest.mark.parametrize(
    ("flags", "sides"),
    [
        pytest.param(
            ["--without-langgraph"], {"queues", "standing", "flow"}, id="without LangGraph", marks=pytest.mark.long
        ),
        pytest.param([], {"queues", "standing", "flow", "langgraph"}, id="all sides", marks=needs_langgraph),
    ],
)
def test_quick_run_ends_with_a_line_of_json(flags, sides):
    done = run("--quick", *flags)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    regimes = [f"{name}, {calls}" for calls in ("alone", "20 at once") for name in ("chain", "fan-out", "stream")]
    assert list(result["us"]) == regimes
    assert all(sides - {"standing"} <= set(row) for row in result["us"].values())
    assert sides <= set(result["us"]["chain, alone"])
    assert set(result["growth"]) == sides - {"standing"} | {"flow, no collector"}
    assert set(result["growth"]["flow"]) == {"1", "10", "100"}
    assert done.stdout.count("| reached |") + done.stdout.count("| MISSED |") == len(result["goals"])


def test_without_the_baseline_it_says_how_to_get_it(tmp_path, monkeypatch):
    (tmp_path / "langgraph.py").write_text("raise ImportError('not here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = run("--quick")
    assert done.returncode == 1
    assert "pip install -e '.[bench]'" in done.stderr
    assert "--without-langgraph" in done.stderr
