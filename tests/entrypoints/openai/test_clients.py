"""What clients that people have make of the server's answers: OpenAI's helpers, litellm, schemathesis."""

import asyncio
import base64
import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.fuzz import num_cases
from tests.server import NUM_CODES, QUESTION, SAMPLES_PER_CODE, SHORT, STAGES, Server

SPOKEN: dict[str, Any] = {**SHORT, "modalities": ["text", "audio"], "extra_body": {"sampling_params_list": STAGES}}
NUM_SAMPLES = NUM_CODES * SAMPLES_PER_CODE
SAMPLE_RATE = 24_000
PADDING = 2400  # of formats that are compressed with loss, at most


def num_samples(data: bytes, file_format: str) -> int:
    """At the model's rate: Opus is decoded at 48 kHz."""
    if file_format == "pcm16":
        return len(data) // 2
    with av.open(io.BytesIO(data)) as container:
        return sum(frame.samples * SAMPLE_RATE // frame.sample_rate for frame in container.decode(audio=0))


@pytest.fixture
def until(text: str) -> dict[str, Any]:
    """Fields of a chat that ends in a word: the client's helpers reject one that was cut off."""
    ends = [place for place in range(1, len(text)) if text[place] not in text[:place]]
    return {"stop": [text[ends[-1]]]}


# -- the client of OpenAI ----------------------------------------------------------------------------------------------


def test_the_chat_helper_joins_the_text_of_a_stream(client: OpenAI, text: str, until: dict[str, Any]) -> None:
    with client.chat.completions.stream(**SHORT, **until) as stream:
        kinds = [event.type for event in stream]
        answer = stream.get_final_completion().choices[0]
    assert answer.message.content == text[: text.index(until["stop"][0])]
    assert answer.finish_reason == "stop"
    assert kinds.count("content.done") == 1


@pytest.mark.parametrize("file_format", ["wav", "pcm16", "flac", "mp3", "opus", "aac"])
def test_the_chat_helper_joins_a_file_of_the_speech(client: OpenAI, until: dict[str, Any], file_format: str) -> None:
    audio: Any = {"voice": "Ethan", "format": file_format}
    with client.chat.completions.stream(**SPOKEN, **until, audio=audio) as stream:
        for _ in stream:
            pass
        message = stream.get_final_completion().choices[0].message
    assert message.audio is not None
    assert message.audio.transcript == message.content != ""
    number = num_samples(base64.b64decode(message.audio.data), file_format)
    assert NUM_SAMPLES <= number <= NUM_SAMPLES + (0 if file_format in ("wav", "pcm16", "flac") else PADDING)


def test_the_chat_helper_joins_the_speech_of_an_empty_text(client: OpenAI, text: str) -> None:
    audio: Any = {"voice": "Ethan", "format": "pcm16"}
    with client.chat.completions.stream(**SPOKEN, stop=[text[0]], audio=audio) as stream:
        for _ in stream:
            pass
        message = stream.get_final_completion().choices[0].message
    assert message.audio is not None
    assert (message.content, message.audio.data, message.audio.transcript) == ("", "", "")


async def test_the_helpers_of_the_asynchronous_client_do_the_same(server: Server, until: dict[str, Any]) -> None:
    audio: Any = {"voice": "Ethan", "format": "wav"}
    async with (
        AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60) as client,
        client.chat.completions.stream(**SPOKEN, **until, audio=audio) as stream,
    ):
        async for _ in stream:
            pass
        message = (await stream.get_final_completion()).choices[0].message
    assert message.audio is not None
    assert num_samples(base64.b64decode(message.audio.data), "wav") == NUM_SAMPLES


def test_the_response_helper_joins_what_is_answered_whole(client: OpenAI) -> None:
    request: Any = {"model": "tiny", "input": "Hello", "max_output_tokens": 8, "temperature": 0.0}
    with client.responses.stream(**request) as stream:
        kinds = [event.type for event in stream]
        joined = stream.get_final_response().output_text
    assert joined == client.responses.create(**request).output_text != ""
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")


def test_a_spoken_file_is_streamed_to_disk(client: OpenAI, tmp_path: Path) -> None:
    request: Any = {"model": "tiny", "input": "Hi there", "voice": "Ethan", "response_format": "wav"}
    options = {"sampling_params_list": STAGES}
    with client.audio.speech.with_streaming_response.create(**request, extra_body=options) as response:
        response.stream_to_file(tmp_path / "speech.wav")
    assert num_samples((tmp_path / "speech.wav").read_bytes(), "wav") == NUM_SAMPLES


def test_models_are_listed_and_retrieved(client: OpenAI) -> None:
    (listed,) = client.models.list()
    assert client.models.retrieve("tiny").root == listed.root
    with pytest.raises(openai.NotFoundError, match="no model 'tina': did you mean 'tiny'"):
        client.models.retrieve("tina")


def test_a_resource_of_other_models_is_not_found(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="there is no route /v1/embeddings"):
        client.embeddings.create(model="tiny", input="x")
    with pytest.raises(openai.NotFoundError, match="there is no route /v1/images/generations"):
        client.images.generate(model="tiny", prompt="x")


# -- other clients -----------------------------------------------------------------------------------------------------


@pytest.fixture
def proxied(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # nothing is fetched
    import litellm

    monkeypatch.setattr(litellm, "suppress_debug_info", True)
    yield {"api_base": server.url + "/v1", "api_key": "none", "model": "openai/tiny"}


async def by_litellm(**request: Any) -> Any:
    """The answer; the chunks of a stream. In a thread without an event loop: one that it makes here stays open."""
    import litellm

    def complete() -> Any:
        answer = litellm.completion(**request)
        return list(answer) if request.get("stream") else answer

    return await asyncio.to_thread(complete)


@pytest.mark.long
async def test_litellm_joins_the_text_and_the_speech_of_a_stream(proxied: dict[str, Any], text: str) -> None:
    import litellm

    request = {**SPOKEN, **proxied, "audio": {"voice": "Ethan", "format": "pcm16"}}
    whole = (await by_litellm(**request)).choices[0].message
    chunks = await by_litellm(**request, stream=True)
    joined = litellm.stream_chunk_builder(chunks, messages=QUESTION).choices[0].message
    assert whole.content == joined.content == text
    assert num_samples(base64.b64decode(whole.audio.data), "pcm16") == NUM_SAMPLES
    assert base64.b64decode(joined.audio.data) == base64.b64decode(whole.audio.data)
    assert joined.audio.transcript == text


@pytest.mark.long
async def test_litellm_knows_the_servers_errors(proxied: dict[str, Any]) -> None:
    import litellm

    with pytest.raises(litellm.NotFoundError, match="The model `nope` does not exist"):
        await by_litellm(**{**SHORT, **proxied, "model": "openai/nope"})
    with pytest.raises(litellm.BadRequestError, match="temperature must be non-negative"):
        await by_litellm(**{**SHORT, **proxied, "temperature": -1.0})


CHECKS = ("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance")
UNTRIED = r"/traces|/pause|/resume|/drain|/undrain|/scale"
"""Routes that change what other tests find, or that answer about requests which do not exist."""


@pytest.mark.long
@pytest.mark.timeout(400)
def test_what_schemathesis_makes_up_is_answered_as_the_schema_says(server: Server, tmp_path: Path) -> None:
    """Errors of the server's own are two: 501 for what a model cannot do, 504 for deadlines that have passed."""
    expected = 'not_a_server_error.expected-statuses = ["2xx", "4xx", 501, 504]'
    (tmp_path / "schemathesis.toml").write_text(f"[checks]\n{expected}\n")
    command = [Path(sys.executable).with_name("schemathesis"), "--config-file", tmp_path / "schemathesis.toml"]
    command += ["run", server.url + "/openapi.json", "--phases=fuzzing", f"--max-examples={num_cases(10)}", "--seed=1"]
    command += [f"--checks={','.join(CHECKS)}", "--request-timeout=30", "--max-time=45", "--no-color"]
    command += [f"--exclude-path-regex={UNTRIED}"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=350, check=False)
    assert ran.returncode == 0, ran.stdout[-5000:] + ran.stderr[-2000:]
    assert server.get("/health").status_code == 200
