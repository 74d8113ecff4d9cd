"""benchmarks/relay.py runs, its tensors arrive, and it ends without leftovers; times measured here mean nothing."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.relay import SHM_PREFIX
from tests import machine

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "benchmarks.relay", "--quick"]
CASES = ["4 KB", "64 KB", "1 MB", "thinker2talker", "talker2vocoder"]
WAYS = {
    "socket": {"memcpy", "empty", "zero copy", "one copy", "two copies", "shared_memory", "torch"},
    "link": {"empty", "zero copy", "one copy"},
}


@pytest.mark.long
def test_quick_run_ends_with_a_line_of_json():
    done = subprocess.run(COMMAND, capture_output=True, text=True, cwd=ROOT, timeout=200)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    for regime, ways in WAYS.items():
        assert list(result[regime]) == CASES
        for case, rows in result[regime].items():
            assert ways <= set(rows)
            for name, row in rows.items():
                assert 0 < row["p50_us"] <= row["p99_us"], f"{case}, {name}"
                assert 0 < row["to_view_us"] <= row["p99_us"], f"{case}, {name}"
                assert name == "empty" or (row["gb_s"] > 0 and row["cpu_s_per_gb"] > 0), f"{case}, {name}"
                assert f"| {case} | {name} |" in done.stdout
    for name, reason in result["left_out"].items():
        assert f"left out: {name}: {reason}" in done.stderr
        assert name in machine.NEEDS and machine.why_not(name), f"{name} is left out, and can be loaded"
    assert len(result["messages"]) == 4
    assert all(row["messages_s"] > 0 and row["backlog"] <= 16_384 for row in result["messages"].values())
    assert done.stdout.count("| reached") + done.stdout.count("| MISSED") == len(result["goals"])
    assert set(result["paper_ms"]) == {"thinker2talker", "talker2vocoder"}


@pytest.fixture
def receives_sigint() -> Iterator[None]:
    """Let child processes receive SIGINT: a process that a shell starts in the background ignores it, and its
    children inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.long
@pytest.mark.usefixtures("receives_sigint")
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_interrupted_it_leaves_nothing_behind(number):
    command = [*COMMAND[:-1], "--sizes", "16777216", "--rounds", "1000"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        # Libraries may print something before.
        assert any("round 1" in line for line in iter(process.stderr.readline, ""))
        process.send_signal(number)
        process.communicate(timeout=30)  # keeps reading: a process that writes into a full pipe does not end
    deadline = time.monotonic() + 30  # multiprocessing's tracker removes what a killed process had open
    while left := [name for name in os.listdir("/dev/shm") if name.startswith(f"{SHM_PREFIX}{process.pid}-")]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
