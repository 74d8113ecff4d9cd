"""benchmarks/block_copy.py runs; times measured here mean nothing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_omni.ops import native

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = native.DIRECTORY / native.FILE


@pytest.mark.skipif(not LIBRARY.exists(), reason="needs the library: make native")
def test_quick_run_ends_with_a_line_of_json():
    command = [sys.executable, "-m", "benchmarks.block_copy", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=100)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert len(result["us"]) == 2
    assert all({"memcpy", "native", "torch, 1", "torch, 2"} <= set(row) for row in result["us"].values())
