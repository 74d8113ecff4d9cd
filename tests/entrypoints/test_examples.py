"""The examples, as a user runs them; ``offline.py`` is what ``make demo`` runs (``test_documented_commands.py``)."""

import sys
from pathlib import Path

import pytest
import soundfile
from PIL import Image

from tests import zygote
from tests.media.test_image import decode as decode_image
from tests.media.test_video import decode
from vllm_omni.testing import diffusion as tiny
from vllm_omni.testing import llava as llava

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(name: str, *arguments: str | Path) -> str:
    """What an example prints."""
    result = zygote.run([sys.executable, EXAMPLES / name, *arguments], timeout=200)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.long
def test_speech_offline(tiny_checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "speech.wav"
    out = run("speech_offline.py", "--model", tiny_checkpoint, "--output", path, "--max-codes=20")
    assert out.index("first audio after ") < out.index("all 0.40 s of it after ") < out.index(str(path))
    assert soundfile.info(path).frames == 20 * 480


@pytest.mark.long
def test_epd_offline(tmp_path: Path) -> None:
    model = llava.build(tmp_path / "model")
    paths = []
    for name, color in (("red", (200, 10, 10)), ("blue", (10, 10, 200))):
        paths += ["--image", tmp_path / f"{name}.png"]
        Image.new("RGB", (64, 64), color).save(paths[-1])
    prompt = ["--prompt", "<s> w1 <image> w2", "--max-tokens=4"]
    out = run("epd_offline.py", "--model", model, "--epd", "E:1,PD:1", *paths, *prompt)
    assert "red.png: '" in out and "blue.png: '" in out
    assert "language: 2 images encoded, 0 KV caches migrated\n" in out
    assert "language/E0 had 2 tasks" in out and "language/PD0 had 2 tasks" in out


@pytest.mark.long
def test_images_offline(tmp_path: Path) -> None:
    model = tiny.build(tmp_path / "model", "qwen-image")
    prompts = ["--prompt", "a cat", "--prompt", "a dog"]
    out = run(
        "images_offline.py", "--model", model, *prompts, "--size=64", "--steps=2", "--output-dir", tmp_path / "new"
    )
    paths = [tmp_path / "new" / f"picture-{index}.png" for index in range(2)]
    assert out.index(str(paths[0])) < out.index(str(paths[1]))
    assert [decode_image(path.read_bytes()).shape for path in paths] == [(64, 64, 3)] * 2


@pytest.mark.long
def test_video_offline(tmp_path: Path) -> None:
    model = tiny.build(tmp_path / "model", "wan2.2-t2v")
    size = ["--height=32", "--width=32", "--num-frames=5", "--fps=8", "--steps=4", "--preview-every=2"]
    out = run("video_offline.py", "--model", model, *size, "--output", tmp_path / "tram.webm")
    assert str(tmp_path / "tram.webm") in out
    assert "step 4 of 4\n" in out  # outputs of earlier steps may have been merged with later ones
    assert decode((tmp_path / "tram.webm").read_bytes())[0].shape == (5, 32, 32, 3)
    assert decode_image((tmp_path / "tram.preview.png").read_bytes()).shape == (32, 32, 3)
