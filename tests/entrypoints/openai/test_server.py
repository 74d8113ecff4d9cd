"""``vllm serve MODEL --omni``, one real process for all tests, asked by the real ``openai`` client."""

import base64
import io
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import openai
import psutil
import pytest
import soundfile

from tests.reference.media import make_audio, make_image, make_video, write_mp4, write_wav

START_TIMEOUT_S = 300.0
END_TIMEOUT_S = 30.0
SAMPLES_PER_CODE = 480
NUM_CODES = 12
MAX_MODEL_LEN = 1024
QUESTION = [{"role": "user", "content": "Hello, who are you?"}]
# The tiny checkpoint never ends by itself, so that the numbers of tokens and codes are those asked for.
STAGES = {"talker": {"temperature": 0.0, "max_tokens": NUM_CODES}, "token2wav": {"seed": 0}}
SHORT = {"model": "tiny", "messages": QUESTION, "temperature": 0.0, "max_tokens": 6}

pytestmark = pytest.mark.slow


class Server(NamedTuple):
    url: str
    process: subprocess.Popen[bytes]

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30)

    def metric(self, name: str) -> float:
        """The value of one line of /metrics, given as a regular expression."""
        (value,) = re.findall(rf"^{name} (\S+)$", self.get("/metrics").text, flags=re.MULTILINE)
        return float(value)

    def holds_nothing(self) -> bool:
        names = ("num_open_calls", "num_running_activations", "num_buffered_frames")
        return not any(self.metric(f"vllm_omni:{name}") for name in names)


def wait_for(what: str, is_true: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.05)


@pytest.fixture(scope="session")
def server(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log"
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    flags = ["--dtype=float32", "--enforce-eager", f"--max-model-len={MAX_MODEL_LEN}", "--skip-mm-profiling"]
    flags += ["--served-model-name=tiny", "--host=127.0.0.1", f"--port={port}", "--stage=thinker.max_num_seqs=16"]
    command = [Path(sys.executable).with_name("vllm"), "serve", tiny_checkpoint, "--omni", *flags]
    with log.open("wb") as output:
        env = os.environ | {"VLLM_OMNI_STAGE_RESTARTS": "1"}
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=env)
    server = Server(f"http://127.0.0.1:{port}", process)
    try:
        wait_for(f"the server's start; its log: {log}", lambda: is_up(server), START_TIMEOUT_S)
        yield server
    finally:
        stages = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.send_signal(signal.SIGTERM)
        process.wait(END_TIMEOUT_S)
        assert not psutil.wait_procs(stages, END_TIMEOUT_S)[1], "a stage outlived its server"


def is_up(server: Server) -> bool:
    assert server.process.poll() is None, "the server ended while it started"
    try:
        return server.get("/health").status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="session")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def ask(client: openai.OpenAI, **more: Any) -> Any:
    return client.chat.completions.create(**{**SHORT, "extra_body": {"sampling_params_list": STAGES}, **more})


@pytest.fixture(scope="session")
def text(client: openai.OpenAI) -> str:
    """What the model says to the question."""
    content: str = ask(client).choices[0].message.content
    assert content
    return content


def read_audio(data: str, num_codes: int = NUM_CODES) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Samples of a file in base 64, which must be a sound."""
    samples, sample_rate = soundfile.read(io.BytesIO(base64.b64decode(data)))
    assert sample_rate == 24000
    assert samples.shape == (num_codes * SAMPLES_PER_CODE,)
    assert np.isfinite(samples).all()
    assert 0.001 < np.abs(samples).max() <= 1.0
    return samples


# -- whole answers -----------------------------------------------------------------------------------------------------


def test_text_is_the_default(client: openai.OpenAI, text: str) -> None:
    (choice,) = ask(client, modalities=None).choices
    assert choice.message.content == text
    assert choice.message.audio is None
    assert choice.finish_reason == "length"


def test_text_and_audio(client: openai.OpenAI, text: str) -> None:
    answer = ask(client, modalities=["text", "audio"], audio={"voice": "Chelsie", "format": "wav"})
    (choice,) = answer.choices
    assert choice.message.content == choice.message.audio.transcript == text
    assert choice.message.audio.id
    assert choice.message.audio.expires_at >= answer.created
    assert choice.finish_reason == "length"
    assert answer.usage.completion_tokens == SHORT["max_tokens"]
    read_audio(choice.message.audio.data)


def test_audio_alone_has_its_text_as_transcript(client: openai.OpenAI, text: str) -> None:
    (choice,) = ask(client, modalities=["audio"]).choices
    assert choice.message.content is None
    assert choice.message.audio.transcript == text
    read_audio(choice.message.audio.data)


def test_formats_of_one_sound(client: openai.OpenAI) -> None:
    def speak(name: str) -> str:
        data: str = ask(client, modalities=["audio"], audio={"format": name}).choices[0].message.audio.data
        return data

    wav = read_audio(speak("wav"))
    for name in ("pcm16", "pcm"):
        pcm = np.frombuffer(base64.b64decode(speak(name)), dtype="<i2")
        np.testing.assert_array_equal(pcm, np.round(wav * 32768))
    np.testing.assert_array_equal(read_audio(speak("flac")), wav)
    for name in ("mp3", "opus"):
        assert 0.5 < np.std(read_audio(speak(name))) / np.std(wav) < 2, name  # they keep what is heard


def test_parameters_of_stages_by_position(client: openai.OpenAI) -> None:
    by_position = {"sampling_params_list": [None, STAGES["talker"], STAGES["token2wav"]]}
    answers = [ask(client, modalities=["audio"], **more) for more in ({}, {"extra_body": by_position})]
    first, second = (answer.choices[0].message.audio.data for answer in answers)
    assert first == second


def test_parameters_of_the_first_stage_are_over_those_of_the_request(client: openai.OpenAI) -> None:
    answer = ask(client, extra_body={"sampling_params_list": [{"max_tokens": 3}]})
    assert answer.usage.completion_tokens == 3


def test_voices_differ(client: openai.OpenAI) -> None:
    answers = [
        ask(client, modalities=["audio"], audio={"voice": voice, "format": "wav"}) for voice in ("Chelsie", "Ethan")
    ]
    first, second = (read_audio(answer.choices[0].message.audio.data) for answer in answers)
    assert not np.array_equal(first, second)


def test_a_reply_of_one_token_has_audio_of_no_samples(client: openai.OpenAI) -> None:
    audio = ask(client, modalities=["text", "audio"], max_tokens=1).choices[0].message.audio
    samples, sample_rate = soundfile.read(io.BytesIO(base64.b64decode(audio.data)))
    assert samples.shape == (0,)
    assert sample_rate == 24000


def test_vllms_own_parameters_still_work(client: openai.OpenAI, text: str) -> None:
    answer = ask(client, logprobs=True, top_logprobs=2)
    assert "".join(token.token for token in answer.choices[0].logprobs.content) == text
    answer = ask(client, n=3, temperature=1.0, seed=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) > 1
    assert answer.usage.completion_tokens == 3 * SHORT["max_tokens"]
    answer = ask(client, n=2, extra_body={"use_beam_search": True})
    assert len({choice.message.content for choice in answer.choices}) == 2
    (choice,) = ask(client, stop=[text[3]]).choices
    assert choice.message.content == text[: text.index(text[3])]
    assert choice.finish_reason == "stop"


def test_vllms_other_routes_answer_in_text(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="Hello", max_tokens=5, n=2, seed=1)
    assert len(answer.choices) == 2
    response = client.responses.create(model="tiny", input="Hello", max_output_tokens=5, temperature=0)
    assert response.output_text


# -- streams -----------------------------------------------------------------------------------------------------------


def test_stream_of_text(client: openai.OpenAI, text: str) -> None:
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    assert "".join(deltas) == text
    assert sum(map(bool, deltas)) > 1
    assert chunks[-1].usage.completion_tokens == SHORT["max_tokens"]
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"


class Stream(NamedTuple):
    """What a client made of a stream."""

    content: str
    transcript: str
    pieces: list[str]  # of audio, in base 64
    kinds: list[str]  # of the chunks, in order, each once


@pytest.mark.parametrize("format_name", ["wav", "pcm16"])
@pytest.mark.parametrize("modalities", [["text", "audio"], ["audio"]], ids="+".join)
def test_stream_with_audio(client: openai.OpenAI, text: str, modalities: list[str], format_name: str) -> None:
    request = {"modalities": modalities, "audio": {"format": format_name}}
    stream = read_stream(ask(client, **request, stream=True, stream_options={"include_usage": True}))
    whole = ask(client, **request).choices[0].message
    assert stream.content == (whole.content or "")
    assert stream.transcript == whole.audio.transcript == text
    assert b"".join(map(base64.b64decode, stream.pieces)) == base64.b64decode(whole.audio.data)
    said = "content" if "text" in modalities else "transcript"
    assert stream.kinds[0] == said
    assert stream.kinds[-2:] == ["finish_reason", "usage"]
    assert "data" in stream.kinds[1:-2]


def read_stream(chunks: Any) -> Stream:
    stream, ids = Stream("", "", [], []), set()
    for chunk in chunks:
        kind = None if chunk.choices else "usage"
        for choice in chunk.choices:
            audio = choice.delta.audio
            ids |= {audio.id} if audio else set()
            if choice.delta.content:
                kind, stream = "content", stream._replace(content=stream.content + choice.delta.content)
            if audio and audio.transcript:
                kind, stream = "transcript", stream._replace(transcript=stream.transcript + audio.transcript)
            if audio and audio.data:
                kind, stream = "data", stream._replace(pieces=[*stream.pieces, audio.data])
            if choice.finish_reason:
                kind = "finish_reason"
        if kind and kind not in stream.kinds:
            stream.kinds.append(kind)
    assert len(ids) == 1, "the audio of an answer has one id"
    return stream


def test_text_is_streamed_before_the_speech_is_made(client: openai.OpenAI) -> None:
    times = {}
    stages = {**STAGES, "talker": {**STAGES["talker"], "max_tokens": 200}}
    for chunk in ask(client, modalities=["text", "audio"], stream=True, extra_body={"sampling_params_list": stages}):
        delta = chunk.choices[0].delta
        if delta.content or delta.audio:
            times["audio" if delta.audio else "text"] = time.monotonic()
    assert times["audio"] - times["text"] > 0.2  # 200 codes take longer


# -- what the model reads ----------------------------------------------------------------------------------------------


def data_url(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def with_part(part: Mapping[str, Any]) -> list[Any]:
    return [{"role": "user", "content": [part, {"type": "text", "text": "What is it?"}]}]


def image_part(content: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url("image/png", content)}}


def audio_part(content: bytes) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(content).decode(), "format": "wav"}}


def png(width: int = 56, height: int = 84) -> bytes:
    file = io.BytesIO()
    make_image(width, height).save(file, format="PNG")
    return file.getvalue()


def wav(directory: Path, seconds: float) -> bytes:
    return write_wav(directory / "sound.wav", make_audio(seconds)).read_bytes()


@pytest.mark.parametrize("kind", ["image", "audio", "audio_url", "video"])
def test_media_of_every_kind(client: openai.OpenAI, tmp_path: Path, kind: str) -> None:
    if kind == "image":
        part: dict[str, Any] = image_part(png())
    elif kind == "audio":
        part = audio_part(wav(tmp_path, 0.5))
    elif kind == "audio_url":
        part = {"type": "audio_url", "audio_url": {"url": data_url("audio/wav", wav(tmp_path, 0.5))}}
    else:
        video = write_mp4(tmp_path / "film.mp4", make_video(8), fps=2).read_bytes()
        part = {"type": "video_url", "video_url": {"url": data_url("video/mp4", video)}}
    answer = ask(client, messages=with_part(part), modalities=["text", "audio"])
    assert (
        answer.usage.prompt_tokens > ask(client, messages=with_part({"type": "text", "text": ""})).usage.prompt_tokens
    )
    assert answer.choices[0].message.content
    read_audio(answer.choices[0].message.audio.data)


# -- what is refused ---------------------------------------------------------------------------------------------------

Bad = Callable[[Path], dict[str, Any]]
BAD_REQUESTS: dict[str, tuple[Bad, str]] = {
    "unknown modality": (lambda _: {"modalities": ["smell"]}, "unknown modality 'smell': valid: text, audio"),
    "mistyped modality": (lambda _: {"modalities": ["text", "adio"]}, "did you mean 'audio'?"),
    "codes are no modality of a chat": (lambda _: {"modalities": ["codec_ids"]}, "unknown modality 'codec_ids'"),
    "modalities that are no list": (lambda _: {"modalities": "text"}, "valid list"),
    "no modality": (lambda _: {"modalities": []}, "no modality asked for"),
    "unknown speaker": (
        lambda _: {"modalities": ["audio"], "audio": {"voice": "Ethel", "format": "wav"}},
        "unknown speaker 'Ethel': did you mean 'Ethan'?",
    ),
    "unknown format": (
        lambda _: {"modalities": ["audio"], "audio": {"format": "wave"}},
        "unknown audio format 'wave': did you mean 'wav'? valid: wav, pcm16, pcm, flac, mp3, opus",
    ),
    "unknown key of audio": (lambda _: {"audio": {"fromat": "wav"}}, "audio.fromat"),
    "several answers with audio": (lambda _: {"modalities": ["audio"], "n": 2}, "n = 2"),
    "beam search with audio": (
        lambda _: {"modalities": ["audio"], "extra_body": {"use_beam_search": True}},
        "use_beam_search",
    ),
    "parameters that are no list": (lambda _: parameters(5), "sampling_params_list"),
    "parameters of no stage": (lambda _: parameters({"talkr": {}}), "'talkr': did you mean 'talker'?"),
    "parameters of too many stages": (lambda _: parameters([{}] * 4), "4 sets"),
    "unknown parameter": (lambda _: parameters([{}, {"temprature": 1}]), "did you mean 'temperature'?"),
    "parameter of a wrong type": (lambda _: parameters([{}, {"temperature": "hot"}]), "'talker': temperature: Input"),
    "parameter out of range": (lambda _: parameters([{}, {"temperature": -1}]), "temperature must be non-negative"),
    "broken image": (lambda _: {"messages": with_part(image_part(png()[:60]))}, "image file is truncated"),
    "no image": (lambda _: {"messages": with_part(image_part(b"no image at all"))}, "cannot identify image file"),
    "narrow image": (lambda _: {"messages": with_part(image_part(png(1, 1000)))}, "aspect ratio must be smaller"),
    "image that cannot be had": (
        lambda _: {"messages": with_part({"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x.png"}})},
        "Cannot connect",
    ),
    "image of the server": (
        lambda _: {"messages": with_part({"type": "image_url", "image_url": {"url": "file:///etc/hosts"}})},
        "Cannot load local files",
    ),
    "zero-length audio": (lambda path: {"messages": with_part(audio_part(wav(path, 0)))}, "(len=0) is too short"),
    "broken audio": (lambda _: {"messages": with_part(audio_part(b"no sound at all"))}, "corrupted audio"),
    "broken base 64": (
        lambda _: {"messages": with_part({"type": "image_url", "image_url": {"url": "data:image/png;base64,@"}})},
        "the prompt or its media cannot be read: ",
    ),
    "broken video": (
        lambda _: {
            "messages": with_part({"type": "video_url", "video_url": {"url": data_url("video/mp4", b"no film")}})
        },
        "video",
    ),
    "prompt over the limit": (
        lambda _: {"messages": [{"role": "user", "content": "x" * 2 * MAX_MODEL_LEN}]},
        f"maximum context length is {MAX_MODEL_LEN} tokens",
    ),
}


def parameters(value: object) -> dict[str, Any]:
    return {"extra_body": {"sampling_params_list": value}}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_a_bad_request_is_told_why_and_the_next_is_answered(
    client: openai.OpenAI, server: Server, tmp_path: Path, text: str, name: str, stream: bool
) -> None:
    make_request, why = BAD_REQUESTS[name]
    with pytest.raises(openai.BadRequestError) as error:
        ask(client, **make_request(tmp_path), stream=stream)
    assert error.value.status_code == 400
    assert isinstance(error.value.body, dict)
    assert why in error.value.body["message"]
    assert set(error.value.body) == {"message", "type", "param", "code"}
    assert ask(client).choices[0].message.content == text
    assert server.holds_nothing()


# -- the other routes, and clients that leave --------------------------------------------------------------------------


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "tiny"


def test_health(server: Server) -> None:
    response = server.get("/health")
    assert response.status_code == 200
    running = {"state": "running", "reason": None, "num_restarts": 0}
    assert response.json() == {"stages": dict.fromkeys(("thinker", "talker", "token2wav"), running)}


def test_metrics_count_the_tokens_of_each_stage(client: openai.OpenAI, server: Server) -> None:
    def num_tokens(stage: str) -> float:
        return server.metric(rf'vllm:generation_tokens_total\{{[^}}]*stage="{stage}"[^}}]*\}}')

    numbers = {"thinker": 6, "talker": NUM_CODES, "token2wav": 1}
    before = {stage: num_tokens(stage) for stage in numbers}
    ask(client, modalities=["text", "audio"])
    for stage, number in numbers.items():
        wait_for(f"tokens of {stage}", lambda stage=stage, number=number: num_tokens(stage) == before[stage] + number)


@pytest.mark.parametrize("leaves", ["stream of the thinker", "stream of the talker", "whole answer"])
def test_a_client_that_leaves_ends_its_request_in_every_stage(server: Server, leaves: str) -> None:
    num_tokens, num_codes = (8, 700) if leaves == "stream of the talker" else (700, 8)
    body = {
        **SHORT,
        "modalities": ["text", "audio"],
        "max_tokens": num_tokens,
        "stream": leaves != "whole answer",
        "sampling_params_list": {"talker": {"max_tokens": num_codes}},
    }
    url = server.url + "/v1/chat/completions"
    if leaves == "whole answer":
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url, json=body, timeout=httpx.Timeout(10, read=0.5))
    else:
        with httpx.stream("POST", url, json=body, timeout=30) as response:
            lines = filter(None, response.iter_lines())
            assert len(list(islice(lines, 9))) == 9  # the role, then eight tokens
            assert server.metric("vllm_omni:num_open_calls") == 1
    wait_for("every stage has let go of the request", server.holds_nothing, timeout_s=2.0)


def test_statistics_of_work(client: openai.OpenAI, server: Server) -> None:
    chunks = ask(client, modalities=["text", "audio"], stream=True, max_tokens=100)
    next(iter(chunks))
    assert server.metric("vllm_omni:num_running_activations") >= 1
    chunks.close()
    wait_for("the request's end", server.holds_nothing)


def test_example_of_a_client(server: Server, tmp_path: Path) -> None:
    example = Path(__file__).resolve().parents[3] / "examples" / "openai_client.py"
    output = tmp_path / "answer.wav"
    command = [
        sys.executable,
        example,
        "--base-url",
        server.url + "/v1",
        "--output",
        output,
        "--max-tokens=8",
        "--max-codes=20",
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == str(output)
    read_audio(base64.b64encode(output.read_bytes()).decode(), num_codes=20)


def kill(server: Server, stage: str) -> None:
    """Each process of a stage has left a file with its name in the server's directory."""
    for child in psutil.Process(server.process.pid).children():
        if any(Path(tempfile.gettempdir()).glob(f"vllm-omni-*/{stage}.{child.pid}.process")):
            child.kill()
            return
    raise AssertionError(f"no engine core of {stage}")


def states(server: Server) -> dict[str, str]:
    return {name: stage["state"] for name, stage in server.get("/health").json()["stages"].items()}


def test_zy_a_dead_vocoder_fails_speech_alone_and_comes_back(client: openai.OpenAI, server: Server, text: str) -> None:
    kill(server, "token2wav")
    wait_for("/health sees it", lambda: server.get("/health").status_code == 503)
    response = server.get("/health")
    message = "stage 'token2wav': restarting: its engine has died: killed by SIGKILL"
    assert response.json()["error"]["message"] == message
    assert states(server) == {"thinker": "running", "talker": "running", "token2wav": "restarting"}
    assert server.metric(r'vllm_omni:stage_up\{stage="token2wav"\}') == 0
    with pytest.raises(openai.InternalServerError) as error:  # the client's name for all from 500
        ask(client, modalities=["text", "audio"])
    assert error.value.status_code == 503
    assert message in str(error.value)
    assert ask(client).choices[0].message.content == text
    wait_for("the stage is back", lambda: server.get("/health").status_code == 200, START_TIMEOUT_S)
    assert server.metric(r'vllm_omni:stage_restarts_total\{stage="token2wav"\}') == 1
    answer = ask(client, modalities=["text", "audio"], audio={"voice": "Chelsie", "format": "wav"})
    read_audio(answer.choices[0].message.audio.data)
    assert server.holds_nothing()


def test_zz_a_dead_first_stage_comes_back_and_ends_the_server_when_it_dies_too_often(
    client: openai.OpenAI, server: Server, text: str
) -> None:
    """The last test of this server."""
    picture = [image_part(png()), {"type": "text", "text": "What is it?"}]
    messages = [{"role": "user", "content": picture}]
    seen = ask(client, messages=messages).choices[0].message.content
    kill(server, "thinker")
    wait_for("/health sees it", lambda: server.get("/health").status_code == 503)
    with pytest.raises(openai.InternalServerError) as error:
        ask(client)
    assert error.value.status_code == 503
    wait_for("the stage is back", lambda: server.get("/health").status_code == 200, START_TIMEOUT_S)
    assert ask(client).choices[0].message.content == text
    # The front end had cached the picture, and does not send what it believes the engine to have.
    assert ask(client, messages=messages).choices[0].message.content == seen
    kill(server, "thinker")
    assert server.process.wait(END_TIMEOUT_S) == 1
