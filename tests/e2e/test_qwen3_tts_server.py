"""``vllm serve --omni`` with a tiny Qwen3-TTS: a real process from its start to Ctrl-C, and what clients do wrong."""

import base64
import io
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import soundfile

from tests.e2e.engines import MARKS
from tests.entrypoints.openai.test_documented_requests import program_of, run_program
from tests.server import END_TIMEOUT_S, Server, serve
from tools.reference.qwen3_tts.waves import make_wave
from vllm_omni.testing.qwen3_tts import build

pytestmark = [*MARKS, pytest.mark.long, pytest.mark.timeout(600)]

FLAGS = ("--dtype=float32", "--enforce-eager", "--max-model-len=512")
SAY = {"input": "Hello there.", "response_format": "wav", "max_new_tokens": 5}


def wav(seconds: float, rate: int = 24000) -> bytes:
    file = io.BytesIO()
    samples = make_wave(seconds, seed=1) if rate == 24000 else np.zeros(round(seconds * rate), np.float32)
    soundfile.write(file, samples, rate, format="WAV")
    return file.getvalue()


def upload(server: Server, name: str, data: bytes) -> httpx.Response:
    files = {"audio_sample": ("a.wav", data, "audio/wav")}
    return httpx.post(server.url + "/v1/audio/voices", data={"name": name}, files=files, timeout=60)


def message_of(answer: httpx.Response, status: int) -> str:
    assert answer.status_code == status, answer.text
    message: str = answer.json()["error"]["message"]
    return message


def check_wrong(server: Server, wrong: list[tuple[dict[str, Any], str]]) -> None:
    for more, why in wrong:
        assert why in message_of(server.post("/v1/audio/speech", {**SAY, **more}), 400), more


def check_end(server: Server) -> None:
    """Ctrl-C ends it, and nothing in its log looks like a failure."""
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(END_TIMEOUT_S) == 0
    log = server.log.read_text()
    assert "Traceback" not in log, log
    assert "Chat template warmup" not in log


@pytest.fixture(scope="module", params=["base", "clone"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp(request.param)
    variables = {
        "VLLM_OMNI_VOICES_DIR": str(directory / "voices"),
        "VLLM_OMNI_MAX_VOICES": "1",
        "VLLM_OMNI_MAX_VOICE_BYTES": "200000",
    }
    model = build(directory / "tiny", variant=request.param)
    with serve(model, directory / "log", *FLAGS, **variables) as server:
        yield server


@pytest.mark.parametrize("server", ["base"], indirect=True)
def test_named_voices_are_served_until_ctrl_c(server: Server) -> None:
    answer = server.post("/v1/audio/speech", {**SAY, "voice": "Ryan"})
    assert (answer.status_code, len(soundfile.read(io.BytesIO(answer.content))[0])) == (200, 5 * 1920)
    batch = server.post("/v1/audio/speech/batch", {**SAY, "input": None, "items": [{"input": "x"}]})
    assert "unknown field 'input'" in message_of(batch, 400)
    shared = {name: value for name, value in SAY.items() if name != "input"}
    batch = server.post("/v1/audio/speech/batch", {**shared, "items": [{"input": "One."}, {"input": ""}]})
    assert (batch.json()["succeeded"], batch.json()["failed"]) == (1, 1)
    wrong = [
        ({"voice": "nobody"}, "unknown voice 'nobody'"),
        ({"language": "Klingon"}, "unknown language 'klingon'"),
        ({"response_format": "mp4"}, "unknown audio format 'mp4'"),
        ({"ref_audio": "x"}, "this model clones no voices"),
        ({"input": " "}, "is empty"),
    ]
    check_wrong(server, wrong)
    message = message_of(server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}), 400)
    assert "speaks a text" in message
    assert upload(server, "alice", wav(1.0)).status_code == 405
    check_end(server)


@pytest.mark.parametrize("server", ["clone"], indirect=True)
def test_cloned_voices_are_served_until_ctrl_c(server: Server, tmp_path: Path) -> None:
    (tmp_path / "alice.wav").write_bytes(wav(1.5))
    run_program(program_of("docs/http.md", "voices.create"), server, tmp_path)
    given, uploaded = (soundfile.info(tmp_path / f"{name}.wav") for name in ("given", "uploaded"))
    assert given.samplerate == uploaded.samplerate == 24000 and min(given.frames, uploaded.frames) >= 1920
    for data, why in (
        (b"", "audio_sample: the file is empty"),
        (b"a text, and no sound", "audio_sample: the recording cannot be read"),
        (wav(600.0, 4000), "audio_sample: the recording lasts 600.0 s: at most 60 s"),
        (wav(6.0), "VLLM_OMNI_MAX_VOICE_BYTES"),
    ):
        assert why in message_of(upload(server, "bob", data), 400)
    assert upload(server, "bob", wav(1.0)).status_code == 200
    assert "there is a voice 'bob'" in message_of(upload(server, "Bob", wav(1.0)), 409)
    assert "1 uploaded voices, which is the limit" in message_of(upload(server, "carol", wav(1.0)), 400)
    check_wrong(
        server,
        [
            ({}, "no voice: this checkpoint speaks in cloned voices alone"),
            ({"voice": "alice"}, "unknown voice 'alice'"),
            ({"voice": "bob", "language": "Klingon"}, "unknown language 'klingon'"),
            ({"ref_audio": base64.b64encode(wav(600.0, 4000)).decode()}, "ref_audio: the recording lasts 600.0 s"),
            ({"ref_audio": "http://127.0.0.1:1/x.wav"}, "ref_audio: the recording cannot be read"),
        ],
    )
    assert httpx.delete(server.url + "/v1/audio/voices/bob").status_code == 200
    assert "no uploaded voice 'bob'" in message_of(httpx.delete(server.url + "/v1/audio/voices/bob"), 404)
    check_end(server)
