"""``generate`` with diffusion pipelines: errors before one starts, the answer as it is written, and one run."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch
from PIL import Image
from vllm.outputs import RequestOutput

from tests.entrypoints.test_cli import rejected
from tests.media.test_image import decode, make_pixels
from tests.media.test_video import decode as decode_video
from vllm_omni.config import OmniConfig, StageConfig
from vllm_omni.entrypoints.cli.generate_media import write_answer
from vllm_omni.entrypoints.cli.main import main
from vllm_omni.messages.outputs import OmniRequestOutput
from vllm_omni.testing import diffusion as tiny


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Working directory of each test: with tiny pipelines, and a picture."""
    directory = tmp_path_factory.mktemp("media")
    for name in ("qwen-image", "wan2.2-i2v"):
        tiny.build(directory / name, name)
    Image.linear_gradient("L").resize((64, 64)).save(directory / "picture.png")
    (directory / "text.png").write_text("no picture")
    return directory


def test_errors_come_before_the_start(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, directory: Path
) -> None:
    monkeypatch.chdir(directory)
    for args, why in [
        (["--size", "64"], "--size: '64': must be WIDTHxHEIGHT"),
        (["--size", "0x64"], "width = 0: must be at least 1 pixel"),
        (["--steps", "0"], "num_inference_steps = 0: must be at least 1"),
        (["--steps", "two"], "--steps: invalid int value: 'two'"),
        (["-n", "0"], "num_outputs_per_prompt = 0: must be at least 1"),
        (["-n", "17"], "num_outputs_per_prompt = 17: at most 16 outputs here"),
        (["--guidance-scale", "nan"], "guidance_scale = nan: must be a finite number"),
        (["--extra-args", "{"], "--extra-args: not JSON"),
        (["--extra-args", "[1]"], "--extra-args: must be a JSON object"),
        (["--extra-args", '{"height": 64}'], "extra_args: 'height' is a field of its own"),
        (["--image", "absent.png"], "--image absent.png: No such file or directory"),
        (["--image", "text.png"], "--image text.png: not a readable image"),
        (["--audio", "x.wav"], "--audio: a diffusion pipeline reads images alone"),
        (["--speaker", "Ethan"], "--speaker: not for a diffusion pipeline"),
        (["--max-tokens", "3"], "--max-tokens: not for a diffusion pipeline"),
        (["--modalities", "text"], "--modalities text: this model answers in image"),
        (["-o", "x.mp4"], "--output x.mp4: this model answers in image: valid: .png"),
        (["-o", "x.pgn"], "unknown suffix '.pgn': did you mean '.png'?"),
        (["-o", "text.png/x/"], "text.png is not a directory"),
    ]:
        assert why in rejected(capsys, "generate", "qwen-image", "--prompt", "a cat", *args), args
        assert not (directory / "answer.png").exists()


def test_a_model_that_speaks_rejects_diffusion_options(
    capsys: pytest.CaptureFixture[str], tiny_checkpoint: Path
) -> None:
    for flag in ("--size=64x64", "--steps=3", "--num-outputs=2", "--fps=3", "--negative-prompt=x"):
        line = rejected(capsys, "generate", str(tiny_checkpoint), "--prompt", "a cat", flag)
        assert f"{flag.partition('=')[0]}: this model is not a diffusion pipeline" in line


# -- the answer --------------------------------------------------------------------------------------------------------


def written(path: Path, modality: str, *, as_json: bool = False, **media: Any) -> str:
    output = OmniRequestOutput.of(RequestOutput("r", None, None, None, [], finished=True))
    output.multimodal_output, output.stage_durations = media, {"diffusion": 1.5}
    config = OmniConfig(
        model="m", model_type="diffusers", stages=(StageConfig(stage_id=0, name="diffusion", model="m"),)
    )
    stdout = io.StringIO()
    write_answer(output, config, modality, path, as_json=as_json, stdout=stdout)
    return stdout.getvalue()


def test_images_go_to_files_and_their_paths_to_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = torch.stack([make_pixels(), 255 - make_pixels()])
    out = written(tmp_path / "new" / "cat.webp", "image", images=images)
    paths = [tmp_path / "new" / f"cat-{index}.webp" for index in range(2)]
    assert out.splitlines() == [str(path) for path in paths]
    assert capsys.readouterr().err == "time    diffusion 1.50 s\n"
    assert [decode(path.read_bytes()).shape for path in paths] == [tuple(images.shape[1:])] * 2
    assert sorted((tmp_path / "new").iterdir()) == paths


def test_json_has_the_channels_and_rate_of_a_sound(tmp_path: Path) -> None:
    path = tmp_path / "rain.wav"
    answer = json.loads(written(path, "audio", as_json=True, audio=torch.zeros(1, 2, 441), sample_rate=44100))
    assert answer["audio"] == [{"path": str(path), "num_channels": 2, "num_samples": 441, "sample_rate": 44100}]
    samples, sample_rate = soundfile.read(path)
    assert (samples.shape, sample_rate) == ((441, 2), 44100)


# -- a video of an image (images: test_documented_commands.py) ---------------------------------------------------------


@pytest.mark.long
def test_a_video_of_an_image(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, directory: Path, tmp_path: Path
) -> None:
    """In this process; long tests of ``test_generate.py`` and ``test_documented_commands.py`` start the program."""
    monkeypatch.chdir(directory)
    args = ["wan2.2-i2v", "--prompt=a tram", "--image=picture.png", "--size=32x32", "--num-frames=5", "--fps=8"]
    main(["generate", *args, "--seed=1", "--steps=2", "-o", str(tmp_path), "--json"])
    (line,) = capfd.readouterr().out.splitlines()  # nothing that stages and libraries print
    answer: dict[str, Any] = json.loads(line)
    path = tmp_path / "answer.mp4"
    assert answer["video"] == [{"path": str(path), "num_frames": 5, "height": 32, "width": 32, "fps": 8}]
    assert answer["stage_seconds"].keys() == {"diffusion", "total"}
    frames, times = decode_video(path.read_bytes())
    assert frames.shape == (5, 32, 32, 3)
    assert times[-1] == pytest.approx(4 / 8)
