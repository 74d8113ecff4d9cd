"""The examples, as a user runs them."""

import subprocess
import sys
from pathlib import Path

import pytest
import soundfile

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(name: str, *arguments: str | Path) -> str:
    """What an example prints."""
    result = subprocess.run([sys.executable, EXAMPLES / name, *arguments], capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
def test_offline(tiny_checkpoint: Path, tmp_path: Path) -> None:
    arguments = ["--model", tiny_checkpoint, "--output-dir", tmp_path, "--max-tokens=8", "--max-codes=20"]
    out = run("offline.py", *arguments)
    assert all(stage in out for stage in ("thinker", "talker", "token2wav", "total"))
    assert str(tmp_path / "answer.wav") in out
    samples, sample_rate = soundfile.read(tmp_path / "answer.wav")
    assert sample_rate == 24000
    assert len(samples) == 20 * 480


@pytest.mark.slow
def test_speech_offline(tiny_checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "speech.wav"
    out = run("speech_offline.py", "--model", tiny_checkpoint, "--output", path, "--max-codes=20")
    assert out.index("first audio after ") < out.index("all 0.40 s of it after ") < out.index(str(path))
    assert soundfile.info(path).frames == 20 * 480
