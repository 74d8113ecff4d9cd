"""``generate`` of diffusion pipelines: what is refused before one starts, and one run of each kind."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import soundfile
from PIL import Image

from tests.entrypoints.test_cli import refused
from tests.test_image_format import decode
from tests.test_video_format import decode as decode_video
from vllm_omni.model_executor.models.diffusers import tiny

VLLM_OMNI = Path(sys.executable).with_name("vllm-omni")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where each test works: with tiny pipelines, and a picture."""
    directory = tmp_path_factory.mktemp("draw")
    for name in ("qwen-image", "wan2.2-i2v", "stable-audio"):
        tiny.build(directory / name, name)
    Image.linear_gradient("L").resize((64, 64)).save(directory / "picture.png")
    (directory / "text.png").write_text("no picture")
    return directory


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["--size", "64"], "--size: '64': must be WIDTHxHEIGHT"),
        (["--size", "0x64"], "width = 0: must be at least 1 pixel"),
        (["--steps", "0"], "num_inference_steps = 0: must be at least 1"),
        (["--steps", "two"], "--steps: invalid int value: 'two'"),
        (["-n", "0"], "num_outputs_per_prompt = 0: must be at least 1"),
        (["-n", "17"], "num_outputs_per_prompt = 17: at most 16 here"),
        (["--guidance-scale", "nan"], "guidance_scale = nan: must be a finite number"),
        (["--extra-args", "{"], "--extra-args: not JSON"),
        (["--extra-args", "[1]"], "--extra-args: must be a JSON object"),
        (["--extra-args", '{"height": 64}'], "extra_args: 'height' is a field of its own"),
        (["--image", "absent.png"], "--image absent.png: No such file or directory"),
        (["--image", "text.png"], "--image text.png: no image that can be read"),
        (["--audio", "x.wav"], "--audio: a diffusion pipeline reads images alone"),
        (["--speaker", "Ethan"], "--speaker: this model is a diffusion pipeline"),
        (["--max-tokens", "3"], "--max-tokens: this model is a diffusion pipeline"),
        (["--modalities", "text"], "--modalities text: this model answers in image"),
        (["-o", "x.mp4"], "--output x.mp4: this model answers in image: valid: .png"),
        (["-o", "x.pgn"], "unknown suffix '.pgn': did you mean '.png'?"),
        (["-o", "text.png/x/"], "text.png is not a directory"),
    ],
)
def test_what_is_wrong_is_refused_before_the_start(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    directory: Path,
    args: list[str],
    why: str,
) -> None:
    monkeypatch.chdir(directory)
    assert why in refused(capsys, "generate", "qwen-image", "--prompt", "a cat", *args)
    assert not (directory / "answer.png").exists()


@pytest.mark.parametrize("args", [["--size=64x64"], ["--steps=3"], ["-n", "2"], ["--fps=3"], ["--negative-prompt=x"]])
def test_a_model_that_speaks_refuses_what_concerns_drawing(
    capsys: pytest.CaptureFixture[str], tiny_checkpoint: Path, args: list[str]
) -> None:
    said = refused(capsys, "generate", str(tiny_checkpoint), "--prompt", "a cat", *args)
    assert "this model is no diffusion pipeline" in said


def run(directory: Path, *args: str) -> tuple[str, str]:
    """stdout and stderr."""
    command = [VLLM_OMNI, "generate", *args, "--seed=1", "--steps=2"]
    result = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr
    return result.stdout, result.stderr


@pytest.mark.slow
def test_images_go_to_files_and_their_paths_to_stdout(directory: Path, tmp_path: Path) -> None:
    out, err = run(directory, "qwen-image", "--prompt=a cat", "--size=64x48", "-n2", "-o", f"{tmp_path}/new/cat.webp")
    paths = [tmp_path / "new" / f"cat-{index}.webp" for index in range(2)]
    assert out.splitlines() == [str(path) for path in paths]
    assert "time    diffusion " in err
    assert [decode(path.read_bytes()).shape for path in paths] == [(48, 64, 3)] * 2
    assert sorted((tmp_path / "new").iterdir()) == paths


@pytest.mark.slow
def test_a_video_of_an_image(directory: Path, tmp_path: Path) -> None:
    out, _ = run(
        directory,
        *("wan2.2-i2v", "--prompt=a tram", "--image=picture.png", "--size=32x32", "--num-frames=5", "--fps=8"),
        *("-o", str(tmp_path), "--json"),
    )
    answer: dict[str, Any] = json.loads(out)
    path = tmp_path / "answer.mp4"
    assert answer["video"] == [{"path": str(path), "num_frames": 5, "height": 32, "width": 32, "fps": 8}]
    assert answer["stage_seconds"].keys() == {"diffusion", "total"}
    frames, times = decode_video(path.read_bytes())
    assert frames.shape == (5, 32, 32, 3)
    assert times[-1] == pytest.approx(4 / 8)


@pytest.mark.slow
def test_a_sound(directory: Path, tmp_path: Path) -> None:
    run(
        directory,
        *("stable-audio", "--prompt=rain", "--extra-args", '{"audio_end_in_s": 0.01}'),
        *("-o", f"{tmp_path}/rain.wav"),
    )
    samples, sample_rate = soundfile.read(tmp_path / "rain.wav")
    assert (samples.shape, sample_rate) == ((441, 2), 44100)
