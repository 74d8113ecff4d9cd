"""``/v1/audio/speech/stream``: its messages and limits, with a speech of the test's in place of the engines'."""

import base64
import json
from collections.abc import AsyncGenerator, AsyncIterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from fastapi import FastAPI, WebSocket
from starlette.testclient import TestClient, WebSocketTestSession

from vllm_omni.engine.running import RunningRequests
from vllm_omni.entrypoints.openai.protocol import SpeechRequest
from vllm_omni.entrypoints.openai.speech import SpeechAnswer
from vllm_omni.entrypoints.openai.speech_stream import speak_stream
from vllm_omni.errors import InvalidRequest, StageFailed, StageUnavailable
from vllm_omni.speech.sentences import read_sentences

CONFIG = {"type": "session.config", "voice": "vivian"}
DONE = {"type": "input.done"}


class Speaker:
    """Its sound is the text itself; a sentence that names an error raises it."""

    errors = {
        "Dies.": StageFailed("talker", "its engine died"),
        "Restarts.": StageUnavailable("talker", "is being restarted"),
    }

    def __init__(self) -> None:
        self.requests = RunningRequests()
        self.asked: list[SpeechRequest] = []
        self.num_closed = 0

    async def start(self, request: SpeechRequest, _: WebSocket, text: AsyncIterable[str]) -> SpeechAnswer:
        if request.speaker == "nobody":
            raise InvalidRequest("unknown voice 'nobody'", param="voice")
        self.asked.append(request)
        usage = {"input_tokens": 0, "output_tokens": 0}
        return SpeechAnswer(self._pieces(text, usage), "audio/pcm", usage)

    async def _pieces(self, text: AsyncIterable[str], usage: dict[str, int]) -> AsyncGenerator[bytes, None]:
        try:
            async for sentence in read_sentences(text):
                self.requests.check()  # as the engines do
                if sentence in self.errors:
                    raise self.errors[sentence]
                usage["output_tokens"] += len(sentence)
                yield sentence.encode()
        finally:
            self.num_closed += 1


@pytest.fixture
def speaker() -> Speaker:
    return Speaker()


@contextmanager
def connect(speaker: Speaker) -> Iterator[WebSocketTestSession]:
    app = FastAPI()

    @app.websocket("/stream")
    async def stream(websocket: WebSocket) -> None:
        await speak_stream(websocket, speaker.start, speaker.requests)

    with TestClient(app) as client, client.websocket_connect("/stream") as socket:
        yield socket


def say(piece: str) -> dict[str, str]:
    return {"type": "input.text", "text": piece}


def rest(socket: WebSocketTestSession) -> tuple[list[Any], int]:
    """The messages that follow, and the code of the connection's end."""
    messages: list[Any] = []
    while True:
        message = socket.receive()
        if message["type"] == "websocket.close":
            return messages, message["code"]
        messages.append(json.loads(message["text"]) if message.get("text") is not None else message["bytes"])


def test_a_sentence_is_spoken_before_the_text_has_ended(speaker: Speaker) -> None:
    with connect(speaker) as socket:
        socket.send_json(CONFIG)
        for piece in ("Hel", "lo there", ". How "):
            socket.send_json(say(piece))
        assert socket.receive_bytes() == b"Hello there."
        socket.send_json(say("are you?"))
        socket.send_json(DONE)
        messages, code = rest(socket)
    usage = {"input_tokens": 0, "output_tokens": 24, "total_tokens": 24}
    assert (messages, code) == ([b"How are you?", {"type": "speech.audio.done", "usage": usage}], 1000)
    (request,) = speaker.asked
    assert (request.speaker, request.stream_format) == ("vivian", "audio")
    assert speaker.num_closed == 1


def test_events_have_the_sound_in_base_64(speaker: Speaker) -> None:
    with connect(speaker) as socket:
        socket.send_json({**CONFIG, "stream_format": "sse"})
        socket.send_json(say("One two. Three."))
        socket.send_json(DONE)
        (*deltas, done), code = rest(socket)
    assert b"".join(base64.b64decode(delta["audio"]) for delta in deltas) == b"One two.Three."
    assert ({delta["type"] for delta in deltas}, done["type"], code) == (
        {"speech.audio.delta"},
        "speech.audio.done",
        1000,
    )


WRONG: list[tuple[list[Any], str]] = [
    ([say("Hello.")], "the first message has type 'input.text': must be 'session.config'"),
    ([{"voice": "vivian"}], "must be a JSON object with a type"),
    (["Hello"], "must be a JSON object with a type"),
    ([{**CONFIG, "input": "Hello."}], "input: the text follows"),
    ([{**CONFIG, "speed": 7}], "speed = 7: input should be less than or equal to 4"),
    ([{**CONFIG, "voice": "nobody"}], "unknown voice 'nobody'"),
    ([CONFIG, {"type": "input.txt"}], "did you mean 'input.text'?"),
    ([CONFIG, {"type": "input.text", "text": 5}], "text: must be a string, not int"),
    ([CONFIG, {"type": "input.text", "txet": "x"}], "text: must be a string, not NoneType"),
    ([CONFIG, {"type": "input.text", "text": "x", "more": 1}], "unknown field 'more'"),
    ([CONFIG, say("x" * 30), say("x" * 11)], "longer than 40 characters (VLLM_OMNI_MAX_STREAMED_CHARACTERS)"),
]


@pytest.mark.parametrize("messages, why", WRONG)
def test_a_wrong_message_is_answered_with_its_error_and_the_end(
    speaker: Speaker, monkeypatch: pytest.MonkeyPatch, messages: list[Any], why: str
) -> None:
    monkeypatch.setenv("VLLM_OMNI_MAX_STREAMED_CHARACTERS", "40")
    with connect(speaker) as socket:
        for message in messages:
            socket.send_json(message)
        (error,), code = rest(socket)
    assert (error["type"], error["error"]["code"], code) == ("speech.audio.error", 400, 1008)
    assert why in error["error"]["message"]
    assert speaker.num_closed == 0 or len(messages) > 1


@pytest.mark.parametrize("data", [{"text": "{"}, {"bytes": b"sound"}])
def test_what_is_no_json_is_rejected(speaker: Speaker, data: dict[str, Any]) -> None:
    with connect(speaker) as socket:
        socket.send({"type": "websocket.receive", **data})
        (error,), code = rest(socket)
    assert (error["error"]["code"], code) == (400, 1008)


@pytest.mark.parametrize("text, status, code", [("Dies. Now", 500, 1011), ("Restarts. Now", 503, 1013)])
def test_a_failure_ends_the_speech_with_its_error(speaker: Speaker, text: str, status: int, code: int) -> None:
    with connect(speaker) as socket:
        socket.send_json(CONFIG)
        socket.send_json(say("Hello there. " + text))
        messages, ended = rest(socket)
    assert messages[0] == b"Hello there."
    assert "talker" in messages[1]["error"]["message"]
    assert (messages[1]["error"]["code"], ended) == (status, code)


@pytest.mark.parametrize("messages", [[], [CONFIG], [CONFIG, say("Hel")]])
def test_a_silent_client_is_disconnected(
    speaker: Speaker, monkeypatch: pytest.MonkeyPatch, messages: list[Any]
) -> None:
    monkeypatch.setenv("VLLM_OMNI_SPEECH_STREAM_IDLE_S", "0.05")
    with connect(speaker) as socket:
        for message in messages:
            socket.send_json(message)
        (error,), code = rest(socket)
    assert (error["error"]["code"], code) == (504, 1011)
    assert "VLLM_OMNI_SPEECH_STREAM_IDLE_S" in error["error"]["message"]


def test_a_client_that_leaves_ends_its_speech(speaker: Speaker) -> None:
    with connect(speaker) as socket:
        socket.send_json(CONFIG)
        socket.send_json(say("Hello there. How"))
        assert socket.receive_bytes() == b"Hello there."
        socket.close()
    assert speaker.num_closed == 1


def test_a_server_that_shuts_down_speaks_no_new_text(speaker: Speaker) -> None:
    speaker.requests.drain()
    with connect(speaker) as socket:
        (error,), code = rest(socket)
    assert (error["error"]["code"], code) == (503, 1013)


def test_the_server_counts_a_speech_until_its_end(speaker: Speaker) -> None:
    with connect(speaker) as socket:
        socket.send_json(CONFIG)
        socket.send_json(say("Hello there. How"))
        socket.receive_bytes()
        speaker.requests.drain()  # what has started ends
        socket.send_json(DONE)
        messages, code = rest(socket)
    assert (messages[0], code) == (b"How", 1000)
