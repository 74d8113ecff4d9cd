"""benchmarks/shared_weights.py runs; times measured here mean nothing."""

import json
import sys
from pathlib import Path

import pytest

from tests import zygote

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
@pytest.mark.timeout(400)
def test_short_run_ends_with_a_line_of_json():
    command = [sys.executable, "-m", "benchmarks.shared_weights", "--short"]
    done = zygote.run(command, cwd=ROOT, timeout=390)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert list(result["loaders"]) == ["default", "omni_shared"]
    assert not any(result["loaders"]["default"]["mapped"]) and all(result["loaders"]["omni_shared"]["mapped"])
