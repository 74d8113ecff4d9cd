"""``generate``: what it refuses before a stage starts, and one answer to a prompt with media."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import soundfile
from transformers import AutoTokenizer

from tests.entrypoints.test_cli import refused
from tests.reference.media import make_audio, make_image, make_video, write_mp4, write_png, write_wav
from vllm_omni.entrypoints.cli.main import main

QUESTION = "What is this, and what did you hear?\n"
NUM_IMAGE_TOKENS = 56 // 28 * 84 // 28 + 2  # and where it begins and ends
NUM_AUDIO_TOKENS = 12 + 2  # 25 a second, and likewise
VLLM_OMNI = Path(sys.executable).with_name("vllm-omni")


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("media")
    write_png(directory / "a picture.png", make_image(56, 84, seed=1))
    write_wav(directory / "sound.wav", make_audio(0.5, seed=4))
    write_mp4(directory / "silent.mp4", make_video(4, 56, 56, seed=7), 2)
    (directory / "text.png").write_text("no picture")
    return directory


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ([], "no model: give the directory or hub name of a checkpoint, vllm-omni generate MODEL"),
        (["m"], "no prompt: give --prompt TEXT, --prompt - (stdin) or --prompt-file FILE"),
        (["m", "--prompt", "x", "--prompt-file", "y"], "give one of them"),
        (["m", "--prompt", " "], "--prompt: the prompt is empty"),
        (["m", "--prompt-file", "/nowhere/x"], "--prompt-file /nowhere/x: cannot be read: No such file or directory"),
        (["m", "--promt", "x"], "unknown flag '--promt': did you mean '--prompt'?"),
        (["m", "--prompt", "x", "--max-tokens", "0"], "--max-tokens: 0: valid: at least 1"),
        (["m", "--prompt", "x", "--seed", "-1"], "--seed: -1: valid: 0 to"),
        (["m", "--prompt", "x", "--modalities", "text,,audio"], "must be names with commas between them"),
        (["m", "--prompt", "x", "--modalities", "codec_ids"], "told by --json alone"),
        (["m", "--prompt", "x", "--use-audio-in-video"], "there is no --video"),
        (["m", "--prompt", "x", "--use-audio-in-video", "--video=v", "--audio=a"], "not with --audio"),
        (["m", "--prompt", "x", "--output", "x.wave"], "unknown suffix '.wave': did you mean '.wav'?"),
    ],
)
def test_generate_refuses(capsys: pytest.CaptureFixture[str], args: list[str], why: str) -> None:
    assert why in refused(capsys, "generate", *args)


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["--speaker", "Eathn"], "unknown speaker 'Eathn': did you mean 'Ethan'?"),
        (["--modalities", "txt"], "unknown modality 'txt': did you mean 'text'?"),
        (["--output", "text.png/x/"], "--output text.png/x/answer.wav: {media}/text.png is not a directory"),
        (["--image", "absent.png"], "--image absent.png: No such file or directory"),
        (["--image", "."], "--image .: Is a directory"),
        (["--image", "text.png"], "--image text.png: no image that can be read: Failed to load image: cannot identify"),
        (["--audio", "text.png"], "--audio text.png: no audio that can be read"),
        (["--video", "text.png"], "--video text.png: no video that can be read"),
        (
            ["--image", "a picture.png", "--image", "data:image/png;base64,@"],
            "--image data:image/png;base64,@: no image",
        ),
        (["--image", "http://127.0.0.1:9/x.png"], "--image http://127.0.0.1:9/x.png: Connection refused"),
        (["--video", "silent.mp4", "--use-audio-in-video"], "--video silent.mp4: no sound to be heard"),
        (["--stage", "talker.top_q=1"], "unknown key 'top_q' of stage 'talker'"),
    ],
)
def test_generate_refuses_what_it_can_see_before_a_stage_starts(
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tiny_checkpoint: Path,
    media: Path,
    args: list[str],
    why: str,
) -> None:
    monkeypatch.setenv("VLLM_MEDIA_FETCH_MAX_RETRIES", "1")  # of three, with seconds between
    monkeypatch.chdir(media)
    before = sorted(media.iterdir())
    with pytest.raises(SystemExit) as exit_info:
        main(["generate", str(tiny_checkpoint), "--prompt", "x", *args])
    assert exit_info.value.code == 2
    captured = capfd.readouterr()
    assert why.format(media=media) in captured.err.splitlines()[-1]
    assert captured.out == ""
    assert "starting" not in captured.err
    assert sorted(media.iterdir()) == before


def test_empty_prompt_on_stdin(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    assert "--prompt: the prompt is empty" in refused(capsys, "generate", "m", "--prompt", "-")


# -- an answer ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_prompt_with_media_is_answered_in_text_and_speech(tiny_checkpoint: Path, media: Path, tmp_path: Path) -> None:
    prompt = ["--prompt", "-", "--system", "Be brief.", "--image", "a picture.png", "--audio", "sound.wav"]
    answer = ["--max-tokens=8", "--seed=3", "--speaker=Ethan", f"--output={tmp_path}/new/answer.flac", "--json"]
    small = ["--enforce-eager", "--max-model-len=2048", "--stage=talker.default_sampling_params.max_tokens=20"]
    result = subprocess.run(
        [VLLM_OMNI, "generate", tiny_checkpoint, *prompt, *answer, *small],
        input=QUESTION,
        capture_output=True,
        text=True,
        cwd=media,
        timeout=250,
    )
    assert result.returncode == 0, result.stderr
    (line,) = result.stdout.splitlines()  # whatever the stages and their libraries print
    told = json.loads(line)
    assert told["num_tokens"] == 8
    assert told["finish_reason"] == "length"
    assert told["text"]
    assert list(told["stage_seconds"]) == ["thinker", "talker", "token2wav", "total"]
    assert told["audio"]["path"] == str(tmp_path / "new" / "answer.flac")
    samples, sample_rate = soundfile.read(told["audio"]["path"])
    assert (sample_rate, len(samples)) == (24000, 20 * 480)
    assert told["audio"]["sample_rate"] == sample_rate
    assert told["audio"]["num_samples"] == len(samples)
    assert told["audio"]["seconds"] == 0.4
    assert list((tmp_path / "new").iterdir()) == [tmp_path / "new" / "answer.flac"]
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    words = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    text = tokenizer.apply_chat_template(words, tokenize=False, add_generation_prompt=True)
    num_media_tokens = told["num_prompt_tokens"] - len(tokenizer(text).input_ids)
    assert num_media_tokens == NUM_IMAGE_TOKENS + NUM_AUDIO_TOKENS
