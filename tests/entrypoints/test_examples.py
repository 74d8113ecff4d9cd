"""The examples, as a user runs them."""

import subprocess
import sys
from pathlib import Path

import pytest
import soundfile

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.slow
def test_offline(tiny_checkpoint: Path, tmp_path: Path) -> None:
    command = [sys.executable, EXAMPLES / "offline.py", "--model", tiny_checkpoint, "--output-dir", tmp_path]
    result = subprocess.run([*command, "--max-tokens=8", "--max-codes=20"], capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr
    out = result.stdout
    assert all(stage in out for stage in ("thinker", "talker", "token2wav", "total"))
    assert str(tmp_path / "answer.wav") in out
    samples, sample_rate = soundfile.read(tmp_path / "answer.wav")
    assert sample_rate == 24000
    assert len(samples) == 20 * 480
