"""``generate``: errors before a stage starts, and one answer to a prompt with media."""

import argparse
import io
import json
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch
from transformers import AutoTokenizer
from vllm.outputs import CompletionOutput, RequestOutput

from tests import zygote
from tests.e2e.graphs.pipelines import GraphsPipeline
from tests.entrypoints.test_cli import rejected
from tests.reference.media import make_audio, make_image, make_video, write_mp4, write_png, write_wav
from vllm_omni.config import OmniConfig, StageConfig, load_config
from vllm_omni.engine.orchestrator import Orchestrator
from vllm_omni.entrypoints.cli import generate
from vllm_omni.entrypoints.cli.generate import write_answer
from vllm_omni.entrypoints.cli.main import main
from vllm_omni.errors import ConfigError, OmniError
from vllm_omni.flow import Activation, Emission, Field, Graph, Role, interface
from vllm_omni.messages.outputs import OmniRequestOutput
from vllm_omni.model_executor.models.diffusers.pipeline import diffusers_stage
from vllm_omni.model_executor.pipeline import FunctionSpec
from vllm_omni.testing import qwen3_tts as tiny_qwen3_tts

QUESTION = "What is this, and what did you hear?\n"
NUM_IMAGE_TOKENS = 56 // 28 * 84 // 28 + 2  # and a token before and behind it
NUM_AUDIO_TOKENS = 12 + 2  # 25 a second, likewise
VLLM_OMNI = Path(sys.executable).with_name("vllm-omni")


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("media")
    write_png(directory / "a picture.png", make_image(56, 84, seed=1))
    write_wav(directory / "sound.wav", make_audio(0.5, seed=4))
    write_mp4(directory / "silent.mp4", make_video(4, 56, 56, seed=7), 2)
    (directory / "text.png").write_text("no picture")
    return directory


# -- errors ------------------------------------------------------------------------------------------------------------


def test_wrong_flags_are_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    for args, why in [
        ([], "no model: give the directory or hub name of a checkpoint, vllm-omni generate MODEL"),
        (["m"], "no prompt: give --prompt TEXT, --prompt - (stdin) or --prompt-file FILE"),
        (["m", "--prompt", "x", "--prompt-file", "y"], "give one of them"),
        (["m", "--prompt", " "], "--prompt: the prompt is empty"),
        (["m", "--prompt-file", "/nowhere/x"], "--prompt-file /nowhere/x: cannot be read: No such file or directory"),
        (["m", "--promt", "x"], "unknown flag '--promt': did you mean '--prompt'?"),
        (["m", "--prompt", "x", "--max-tokens", "0"], "--max-tokens: 0: valid: at least 1"),
        (["m", "--prompt", "x", "--seed", "-1"], "--seed: -1: valid: 0 to"),
        (["m", "--prompt", "x", "--modalities", "text,,audio"], "must be names separated by commas"),
        (["m", "--prompt", "x", "--modalities", "codec_ids"], "--modalities codec_ids: only with --json"),
        (["m", "--prompt", "x", "--use-audio-in-video"], "there is no --video"),
        (["m", "--prompt", "x", "--use-audio-in-video", "--video=v", "--audio=a"], "not with --audio"),
        (
            ["m", "--prompt", "x", "--ref-text", "y"],
            "--ref-text: it is the transcript of --ref-audio, which is missing",
        ),
        (["m", "--prompt", "x", "--ref-audio=y", "--speaker=z"], "--ref-audio and --speaker are alternatives"),
        (["m", "--prompt", "x", "--output", "x.wave"], "unknown suffix '.wave': did you mean '.wav'?"),
    ]:
        assert why in rejected(capsys, "generate", *args), args


def test_errors_come_before_a_stage_starts(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Path, media: Path
) -> None:
    monkeypatch.setenv("VLLM_MEDIA_FETCH_MAX_RETRIES", "1")  # instead of 3, with seconds between them
    monkeypatch.chdir(media)
    before = sorted(media.iterdir())
    for args, why in [
        (["--speaker", "Eathn"], "unknown speaker 'Eathn': did you mean 'Ethan'?"),
        (["--modalities", "txt"], "unknown modality 'txt': did you mean 'text'?"),
        (["--output", "text.png/x/"], "--output text.png/x/answer.wav: {media}/text.png is not a directory"),
        (["--image", "absent.png"], "--image absent.png: No such file or directory"),
        (["--image", "."], "--image .: Is a directory"),
        (["--image", "text.png"], "--image text.png: not a readable image: Failed to load image: cannot identify"),
        (["--audio", "text.png"], "--audio text.png: not a readable audio"),
        (["--video", "text.png"], "--video text.png: not a readable video"),
        (
            ["--image", "a picture.png", "--image", "data:image/png;base64,@"],
            "--image data:image/png;base64,@: not a readable image",
        ),
        (["--image", "http://127.0.0.1:9/x.png"], "--image http://127.0.0.1:9/x.png: Connection refused"),
        (["--video", "silent.mp4", "--use-audio-in-video"], "--video silent.mp4: no readable sound"),
        (["--ref-audio", "sound.wav"], "--ref-audio: this model clones no voices: leave it out"),
        (["--stage", "talker.top_q=1"], "unknown key 'top_q' of stage 'talker'"),
    ]:
        with pytest.raises(SystemExit) as exit_info:
            main(["generate", str(tiny_checkpoint), "--prompt", "x", *args])
        assert exit_info.value.code == 2, args
        captured = capfd.readouterr()
        assert why.format(media=media) in captured.err.splitlines()[-1], args
        assert captured.out == ""
        assert "starting" not in captured.err
        assert sorted(media.iterdir()) == before


def test_a_voice_that_cannot_be_cloned_is_rejected_before_a_stage_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, media: Path, tmp_path: Path
) -> None:
    monkeypatch.chdir(media)
    model = str(tiny_qwen3_tts.build(tmp_path / "tiny", variant="clone"))
    for args, why in [
        ([], "no voice: this checkpoint speaks in cloned voices alone"),
        (["--ref-audio", "absent.wav"], "--ref-audio absent.wav: No such file or directory"),
        (["--ref-audio", "text.png"], "--ref-audio text.png: not a readable audio"),
    ]:
        assert why in rejected(capsys, "generate", model, "--prompt", "x", *args), args


def test_empty_prompt_on_stdin(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    assert "--prompt: the prompt is empty" in rejected(capsys, "generate", "m", "--prompt", "-")


# -- the answer --------------------------------------------------------------------------------------------------------


def test_the_first_of_several_graphs_answers(tiny_checkpoint: Path) -> None:
    config = load_config(str(tiny_checkpoint), pipeline=GraphsPipeline)  # other graphs make images and comments
    options = argparse.Namespace(modalities=None, speaker=None, ref_audio=None)
    assert list(generate._check_request(config, options)) == ["text"]


async def name_picture(activation: Activation) -> AsyncIterator[Emission]:
    yield Emission("title", "a cat")


class TitledPipeline(GraphsPipeline):
    """A diffusion stage, and a function that names its picture."""

    modalities: Mapping[str, str] = {"title": "title", "image": "image"}
    deployment = {"stages": {"painter": {"engine_type": "diffusion"}}}

    def __init__(self, *args: Any) -> None:
        class Painter(Role):
            paint = interface([["prompt"]], {"image": Field("image", streamed=True)})

        class Titler(Role):
            name = interface([["image"]], {"title": Field("text")})

        self.graph = Graph("titled")
        painted = self.graph.role(Painter, "painter").paint(prompt=self.graph.placeholder("prompt"))
        titled = self.graph.role(Titler, "titler").name(image=painted.image)
        outputs = {"image": painted.image, "title": titled.title}
        self.graph.output(**{name: outputs[name] for name in self.modalities})
        self.further_graphs, self.stages = (), (diffusers_stage("painter", "image"),)
        self.functions = (FunctionSpec("titler", name_picture),)


def test_a_diffusion_stage_that_others_follow_makes_its_medium(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(str(tiny_checkpoint), pipeline=TitledPipeline)
    assert Orchestrator(config).medium() == "image"
    monkeypatch.setattr(TitledPipeline, "modalities", {"title": "title"})
    with pytest.raises(ConfigError, match="generates title, and no image, video or sound"):
        Orchestrator(config).medium()


def make_output(num_samples: int) -> OmniRequestOutput:
    text = CompletionOutput(0, "Hello.", [1, 2], None, None, "stop")
    output = OmniRequestOutput.of(RequestOutput("r", None, [1, 2, 3], None, [text], finished=True))
    output.multimodal_output = {"audio": torch.zeros(num_samples), "sample_rate": 24000}
    output.stage_durations = {"thinker": 0.5, "total": 1.0}
    return output


def written(
    output: OmniRequestOutput, path: Path, modalities: Sequence[str] = ("text", "audio"), *, as_json: bool = False
) -> str:
    stage = StageConfig(stage_id=0, name="thinker", model="m")
    config = OmniConfig(model="m", model_type="qwen2_5_omni", stages=(stage,))
    stdout = io.StringIO()
    try:
        write_answer(output, config, modalities, path, as_json=as_json, stdout=stdout)
    except OmniError as exc:
        return f"{stdout.getvalue()}error: {exc}"
    return stdout.getvalue()


def test_text_goes_to_stdout_and_the_rest_to_stderr(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert written(make_output(12000), tmp_path / "new" / "a.mp3") == "Hello.\n"
    path = tmp_path / "new" / "a.mp3"
    assert capsys.readouterr().err == f"speech  {path} (0.5 s, 24000 Hz)\ntime    thinker 0.50 s, total 1.00 s\n"
    assert soundfile.info(path).samplerate == 24000


def test_answer_too_short_for_speech_writes_no_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert written(make_output(0), tmp_path / "a.flac") == "Hello.\n"
    assert "speech  none: the text is too short for speech" in capsys.readouterr().err
    assert json.loads(written(make_output(0), tmp_path / "a.flac", as_json=True))["audio"] is None
    assert list(tmp_path.iterdir()) == []


def test_speech_of_a_given_text_is_described_without_tokens(tmp_path: Path) -> None:
    output = make_output(12000)
    output.outputs = []
    answered = json.loads(written(output, tmp_path / "a.wav", ["audio"], as_json=True))
    assert (answered["audio"]["num_samples"], answered["num_prompt_tokens"]) == (12000, 3)
    assert not answered.keys() & {"text", "num_tokens"}


def test_the_texts_of_further_stages_are_written_under_their_names(tmp_path: Path) -> None:
    output = make_output(0)
    output.multimodal_output["critique"] = "so-so"
    assert written(output, tmp_path / "a.flac").splitlines()[1:] == ["critique: so-so"]
    assert json.loads(written(output, tmp_path / "a.flac", as_json=True))["critique"] == "so-so"


def test_text_is_printed_if_the_speech_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "a.wav").mkdir()
    assert written(make_output(10), tmp_path / "a.wav") == (
        f"Hello.\nerror: the speech cannot be written to {tmp_path}/a.wav: Is a directory"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["a.wav"]


# -- an answer ---------------------------------------------------------------------------------------------------------


@pytest.mark.long  # quick: this command in test_generate_media.py, such prompts in test_omni_llm.py
def test_prompt_with_media_is_answered_in_text_and_speech(tiny_checkpoint: Path, media: Path, tmp_path: Path) -> None:
    prompt = ["--prompt", "-", "--system", "Be brief.", "--image", "a picture.png", "--audio", "sound.wav"]
    answer = ["--max-tokens=8", "--seed=3", "--speaker=Ethan", f"--output={tmp_path}/new/answer.flac", "--json"]
    small = ["--enforce-eager", "--max-model-len=2048", "--stage=talker.default_sampling_params.max_tokens=20"]
    command = [VLLM_OMNI, "generate", tiny_checkpoint, *prompt, *answer, *small]
    result = zygote.run(command, input=QUESTION, cwd=media, timeout=250)
    assert result.returncode == 0, result.stderr
    (line,) = result.stdout.splitlines()  # nothing that stages and libraries print
    answered = json.loads(line)
    assert answered["num_tokens"] == 8
    assert answered["finish_reason"] == "length"
    assert answered["text"]
    assert list(answered["stage_seconds"]) == ["thinker", "talker", "token2wav", "total"]
    assert answered["audio"]["path"] == str(tmp_path / "new" / "answer.flac")
    samples, sample_rate = soundfile.read(answered["audio"]["path"])
    assert (sample_rate, len(samples)) == (24000, 20 * 480)
    assert answered["audio"]["sample_rate"] == sample_rate
    assert answered["audio"]["num_samples"] == len(samples)
    assert answered["audio"]["seconds"] == 0.4
    assert list((tmp_path / "new").iterdir()) == [tmp_path / "new" / "answer.flac"]
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    words = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    text = tokenizer.apply_chat_template(words, tokenize=False, add_generation_prompt=True)
    num_media_tokens = answered["num_prompt_tokens"] - len(tokenizer(text).input_ids)
    assert num_media_tokens == NUM_IMAGE_TOKENS + NUM_AUDIO_TOKENS
