"""Chat over HTTP, in text and speech, and what the server is besides."""

import base64
import io
import json
import math
import re
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import openai
import pytest
import soundfile

from tests.entrypoints.openai.test_schema import check_operations, check_references
from tests.media.test_audio import LOSSLESS, decode
from tests.processes import paused
from tests.reference.media import make_audio, make_image, make_video, write_mp4, write_wav
from tests.server import (
    MAX_MODEL_LEN,
    NUM_CODES,
    SAMPLES_PER_CODE,
    SHORT,
    STAGES,
    Server,
    ask,
    engine_core,
    read_audio,
    run_example,
    silent_host,
    wait_for,
)
from vllm_omni.media.audio import AUDIO_FORMATS

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


def test_stop_ids_of_the_talker_are_codes_that_end_the_speech(client: openai.OpenAI) -> None:
    def speak(stop_ids: list[int], **more: Any) -> Any:
        params = {**STAGES, "talker": {**STAGES["talker"], "stop_token_ids": stop_ids}}
        return ask(client, modalities=["audio"], extra_body={"sampling_params_list": params}, **more)

    answer = speak([*range(256)])  # its first code is one of these
    samples, _ = soundfile.read(io.BytesIO(base64.b64decode(answer.choices[0].message.audio.data)))
    assert len(samples) == 0
    for stream in (False, True):  # rejected before the stream starts
        with pytest.raises(openai.BadRequestError, match=r"'talker': .*\[100000\] in stop_token_ids"):
            speak([100_000], stream=stream)


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
    answer = ask(client, n=2, extra_body={"use_beam_search": True, "deadline_s": 60})
    assert len({choice.message.content for choice in answer.choices}) == 2
    (choice,) = ask(client, stop=[text[3]]).choices
    assert choice.message.content == text[: text.index(text[3])]
    assert choice.finish_reason == "stop"


def test_a_chat_of_invocations_is_that_of_the_chat_route(server: Server, text: str) -> None:
    body = {**SHORT, "modalities": ["text", "audio"], "sampling_params_list": STAGES}
    message = server.post("/invocations", body).json()["choices"][0]["message"]
    assert message["content"] == text
    read_audio(message["audio"]["data"])
    response = server.post("/invocations", {**body, "modalities": ["text", "adio"]})
    assert response.status_code == 400 and "did you mean 'audio'?" in response.json()["error"]["message"]


def test_a_completion_of_invocations_is_that_of_the_completion_route(server: Server) -> None:
    body = {"model": "tiny", "prompt": "Hello", "max_tokens": 5, "temperature": 0.0}
    texts = [server.post(route, body).json()["choices"][0]["text"] for route in ("/v1/completions", "/invocations")]
    assert texts[0] == texts[1]
    for more, message in [
        ({"max_tokes": 5}, "did you mean 'max_tokens'?"),
        ({"slo": {"ttft": 5}}, "slo: unknown 'ttft'"),
        ({"deadline_s": "soon"}, "deadline_s = 'soon': input should be a valid number"),
    ]:
        response = server.post("/invocations", {**body, **more})
        assert response.status_code == 400, more
        assert message in response.json()["error"]["message"]
    with paused(engine_core(server, "thinker").pid):
        assert server.post("/invocations", {**body, "deadline_s": 0.5}).status_code == 504


def test_a_batch_of_chats_is_answered_in_text_and_rejected_with_audio(server: Server, text: str) -> None:
    body = {**SHORT, "messages": [SHORT["messages"]] * 2}
    choices = server.post("/v1/chat/completions/batch", body).json()["choices"]
    assert [choice["message"]["content"] for choice in choices] == [text, text]
    response = server.post("/v1/chat/completions/batch", {**body, "modalities": ["text", "audio"]})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "modalities.1")


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


@pytest.mark.parametrize(
    ("modalities", "format_name"),
    [(["text", "audio"], name) for name in AUDIO_FORMATS] + [(["audio"], name) for name in ("wav", "mp3")],
    ids=lambda value: value if isinstance(value, str) else "+".join(value),
)
def test_stream_with_audio(client: openai.OpenAI, text: str, modalities: list[str], format_name: str) -> None:
    request = {"modalities": modalities, "audio": {"format": format_name}}
    stream = read_stream(ask(client, **request, stream=True, stream_options={"include_usage": True}))
    whole = ask(client, **request).choices[0].message
    assert stream.content == (whole.content or "")
    assert stream.transcript == whole.audio.transcript == text
    streamed, whole_file = b"".join(map(base64.b64decode, stream.pieces)), base64.b64decode(whole.audio.data)
    if format_name in LOSSLESS:
        np.testing.assert_array_equal(decode(format_name, streamed), decode(format_name, whole_file))
    else:
        assert whole_file.endswith(streamed)
    said = "content" if "text" in modalities else "transcript"
    assert stream.kinds[0] == said
    assert stream.kinds[-2:] == ["finish_reason", "usage"]
    assert "data" in stream.kinds[1:-2]


def read_stream(chunks: Any) -> Stream:
    stream, ids = Stream("", "", [], []), list[str]()
    for chunk in chunks:
        kind = None if chunk.choices else "usage"
        for choice in chunk.choices:
            audio = choice.delta.audio
            ids += [audio.id] if audio and audio.id else []
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
    assert len(ids) == 1, "the audio of an answer has one id, in its first delta"
    return stream


def test_openais_own_helper_puts_the_stream_together(client: openai.OpenAI, text: str) -> None:
    request = {**SHORT, "modalities": ["text", "audio"], "extra_body": {"sampling_params_list": STAGES}}
    with client.chat.completions.stream(**request, audio={"voice": "Chelsie", "format": "wav"}) as stream:
        stream.until_done()
        message = stream.current_completion_snapshot.choices[0].message
    assert message.content == message.audio.transcript == text
    assert message.audio.id.startswith("audio-chatcmpl-")
    assert len(decode("wav", base64.b64decode(message.audio.data, validate=True))) == NUM_CODES * SAMPLES_PER_CODE


def test_text_is_streamed_before_the_speech_is_made(client: openai.OpenAI, server: Server, text: str) -> None:
    with paused(engine_core(server, "talker").pid):
        chunks = ask(client, modalities=["text", "audio"], stream=True)
        said = ""
        while said != text:
            said += next(chunks).choices[0].delta.content or ""
    assert any(choice.delta.audio for chunk in chunks for choice in chunk.choices)


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


def test_pictures_that_trickle_do_not_delay_others(client: openai.OpenAI, server: Server) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=64) as host:  # accepts, and never sends anything
        url = f"http://127.0.0.1:{host.getsockname()[1]}/x.png"
        body = {**SHORT, "messages": with_part({"type": "image_url", "image_url": {"url": url}})}
        with ExitStack() as stack:
            for _ in range(20):
                chat = stack.enter_context(socket.create_connection(("127.0.0.1", httpx.URL(server.url).port)))
                data = json.dumps(body).encode()
                head = "POST /v1/chat/completions HTTP/1.1\r\nhost: server\r\ncontent-type: application/json\r\n"
                chat.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
            held = [stack.enter_context(host.accept()[0]) for _ in range(20)]
            assert ask(client, messages=with_part(image_part(png()))).choices[0].message.content
            assert len(held) == 20
    wait_for("the end of the chats", server.holds_nothing)


def test_media_of_a_rejected_chat_can_be_sent_afterwards(client: openai.OpenAI) -> None:
    """What vLLM rejects after it has processed them."""
    long = {"role": "user", "content": "x" * (MAX_MODEL_LEN - 300)}
    cases: list[tuple[list[Any], dict[str, Any], str]] = [
        ([], {"extra_body": {"allowed_token_ids": [10**6]}}, "allowed_token_ids"),
        ([long], {}, "Input length"),  # with the 200 tokens of the picture
    ]
    for number, (before, more, why) in enumerate(cases):
        messages = with_part(image_part(png(280, 560 + number)))
        with pytest.raises(openai.BadRequestError, match=why):
            ask(client, messages=[*before, *messages], **more)
        assert ask(client, messages=messages).choices[0].message.content


def test_a_film_is_heard_with_its_own_sound_whatever_sound_the_same_pictures_had_before(
    client: openai.OpenAI, tmp_path: Path
) -> None:
    num_tokens = []
    for seconds in (3.0, 1.0, 4.0):
        film = write_mp4(tmp_path / f"{seconds:g}.mp4", make_video(8), fps=2, audio=make_audio(seconds)).read_bytes()
        part = {"type": "video_url", "video_url": {"url": data_url("video/mp4", film)}}
        kwargs = {"mm_processor_kwargs": {"use_audio_in_video": True}}
        num_tokens.append(ask(client, messages=with_part(part), extra_body=kwargs).usage.prompt_tokens)
    assert num_tokens[2] > num_tokens[0] > num_tokens[1]


# -- rejected requests ------------------------------------------------------------------------------------------------

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
        "unknown audio format 'wave': did you mean 'wav'? valid: wav, pcm16, pcm, flac, mp3, opus, aac",
    ),
    "unknown key of audio": (lambda _: {"audio": {"fromat": "wav"}}, "audio.fromat"),
    "several answers with audio": (lambda _: {"modalities": ["audio"], "n": 2}, "n = 2"),
    "beam search with audio": (
        lambda _: {"modalities": ["audio"], "extra_body": {"use_beam_search": True}},
        "use_beam_search",
    ),
    "misspelt field": (lambda _: {"extra_body": {"modalites": ["text"]}}, "did you mean 'modalities'?"),
    "transfer parameters that are no object": (
        lambda _: {"extra_body": {"vllm_xargs": {"kv_transfer_params": "x"}}},
        "kv_transfer_params = 'x': must be an object",
    ),
    "a deadline among extra arguments": (
        lambda _: {"extra_body": {"vllm_xargs": {"deadline_s": "x"}}},
        "deadline_s: a field of the request itself",
    ),
    "another number of tokens of the vocoder": (
        lambda _: parameters({"token2wav": {"max_tokens": 5}}),
        "'token2wav': max_tokens = 5: the model of this stage needs max_tokens = 1",
    ),
    "parameters that are no list": (lambda _: parameters(5), "sampling_params_list"),
    "parameters of no stage": (lambda _: parameters({"talkr": {}}), "'talkr': did you mean 'talker'?"),
    "parameters of too many stages": (lambda _: parameters([{}] * 4), "4 sets"),
    "unknown parameter": (lambda _: parameters([{}, {"temprature": 1}]), "did you mean 'temperature'?"),
    "parameter of a wrong type": (
        lambda _: parameters([{}, {"temperature": "hot"}]),
        "temperature = 'hot': must be a number",
    ),
    "parameter out of range": (lambda _: parameters([{}, {"temperature": -1}]), "temperature must be non-negative"),
    "broken image": (lambda _: {"messages": with_part(image_part(png()[:60]))}, "image file is truncated"),
    "no image": (lambda _: {"messages": with_part(image_part(b"no image at all"))}, "cannot identify image file"),
    "narrow image": (lambda _: {"messages": with_part(image_part(png(1, 1000)))}, "aspect ratio must be smaller"),
    "image that cannot be fetched": (
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


def schema(value: object) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": value}}}


def parameters(value: object) -> dict[str, Any]:
    return {"extra_body": {"sampling_params_list": value}}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_bad_requests_are_rejected_with_their_reason(
    client: openai.OpenAI, server: Server, tmp_path: Path, text: str, stream: bool
) -> None:
    for name, (make_request, why) in BAD_REQUESTS.items():
        response = None
        try:
            response = ask(client, **make_request(tmp_path), stream=stream)
        except openai.BadRequestError as exc:
            assert isinstance(exc.body, dict), name
            assert why in exc.body["message"], name
            assert set(exc.body) == {"message", "type", "param", "code"}, name
        assert response is None, f"{name}: not rejected"
        assert server.holds_nothing(), name
        assert ask(client).choices[0].message.content == text, f"after {name}"


def test_a_schema_that_allows_no_token_is_the_requests_fault(client: openai.OpenAI, server: Server) -> None:
    endless = schema({"$ref": "#"})
    with pytest.raises(openai.BadRequestError, match="no token is allowed by the schema or grammar") as rejected:
        ask(client, **endless)
    assert rejected.value.param == "structured_outputs"
    with pytest.raises(openai.APIError, match="no token is allowed by the schema or grammar"):
        list(ask(client, **endless, stream=True))  # it has started when the engine finds out
    assert server.holds_nothing()


# -- the other routes, and clients that leave --------------------------------------------------------------------------


def test_every_route_of_ours_is_described(server: Server) -> None:
    schema = server.get("/openapi.json").json()
    routes = ["POST /v1/chat/completions", "POST /v1/chat/completions/batch", "POST /v1/completions"]
    routes += ["POST /v1/audio/speech", "POST /v1/audio/speech/batch", "GET /v1/audio/voices"]
    check_operations(
        schema, [*routes, "GET /health", "GET /replicas", "POST /drain", "POST /undrain", "GET /scale", "POST /scale"]
    )
    check_operations(schema, ["GET /omni/model", "GET /omni/state"])
    check_references(schema)


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "tiny"


def test_health(server: Server) -> None:
    response = server.get("/health")
    assert response.status_code == 200
    running = {"state": "running", "reason": None, "num_restarts": 0}
    assert response.json() == {"stages": dict.fromkeys(("thinker", "talker", "token2wav"), running)}


def test_a_running_server_is_ready(server: Server) -> None:
    response = server.get("/ready")
    assert (response.status_code, response.json()) == (200, {"ready": True})


@pytest.mark.parametrize(
    "route, body, message",
    [
        (
            "/drain",
            {"name": "talker"},
            "engine 'talker' cannot be drained: no other engine of its stage gets requests",
        ),
        ("/drain", {"name": "talker", "timeout": 1}, "unknown field 'timeout': did you mean 'timeout_s'?"),
        ("/undrain", {"name": "talkr"}, "no engine 'talkr': did you mean 'talker'?"),
    ],
)
def test_an_engine_without_replicas_cannot_be_drained(server: Server, route: str, body: Any, message: str) -> None:
    response = server.post(route, body)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(message)
    assert server.get("/health").status_code == 200


def test_a_start_logs_little_and_each_line_and_process_has_its_stage(server: Server) -> None:
    start, found, _ = server.log.read_text().partition("Application startup complete")
    lines = start.splitlines()
    assert found and len(lines) < 40, start
    assert not [line for line in lines if "EngineCore" in line or "custom scheduler" in line or "raw prompt" in line]
    for stage in ("thinker", "talker", "token2wav"):
        core = engine_core(server, stage)
        assert core.cmdline()[0] == f"VLLM::{stage}::EngineCore"
        assert any(line.startswith(f"({stage} pid={core.pid}) ") for line in lines), stage
        assert any(f"stage {stage}: ready after" in line for line in lines)


def test_metrics_count_the_tokens_of_each_stage(client: openai.OpenAI, server: Server) -> None:
    numbers = {"thinker": 6, "talker": NUM_CODES, "token2wav": 1}
    before = {stage: server.num_tokens(stage) for stage in numbers}
    ask(client, modalities=["text", "audio"])
    for stage, number in numbers.items():
        wait_for(f"tokens of {stage}", lambda s=stage, n=number: server.num_tokens(s) == before[s] + n)


def test_the_dashboard_shows_metrics_that_are_there(client: openai.OpenAI, server: Server) -> None:
    ask(client, modalities=["text", "audio"])
    metrics = server.get("/metrics").text
    dashboard = Path(__file__).parents[3] / "examples" / "grafana.json"
    names = set(re.findall(r"vllm(?:_omni)?:\w+", dashboard.read_text()))
    assert len(names) == 20
    assert {name for name in names if not re.search(rf"^{name}[{{ ]", metrics, flags=re.MULTILINE)} == set()


def test_metrics_of_edges_tell_what_flowed(client: openai.OpenAI, server: Server) -> None:
    edge = r'vllm_omni:edge_chunks_total\{edge="talker\.generate\.codes -> token2wav\.decode"\}'
    ask(client, modalities=["text", "audio"])
    before = server.metric(edge)
    ask(client, modalities=["text", "audio"])
    assert server.metric(edge) > before
    assert server.metric(r'vllm_omni:published_bytes_total\{stage="thinker"\}') > 0
    wait_for("the leases end", lambda: server.metric(r'vllm_omni:leased_bytes\{stage="thinker"\}') == 0)


def test_a_trace_has_every_stage_its_parts_and_the_edges(client: openai.OpenAI, server: Server) -> None:
    answer = ask(client, modalities=["text", "audio"])
    events = server.get(f"/traces/{answer.id}").json()["traceEvents"]
    spans = {kind: [one for one in events if one.get("cat") == kind] for kind in ("request", "stage", "part", "edge")}
    (request,) = spans["request"]
    assert {one["name"] for one in spans["stage"]} == {"thinker", "talker", "token2wav"}
    assert {one["name"].partition(".")[0] for one in spans["edge"]} == {"thinker", "talker"}
    assert {"prefill execution", "decode execution"} <= {one["name"] for one in spans["part"]}
    (thinker,) = [one for one in spans["stage"] if one["name"] == "thinker"]
    assert thinker["args"]["output_tokens"] == 6
    for one in (*spans["stage"], *spans["part"], *spans["edge"]):
        assert request["ts"] <= one["ts"] + 1 and one["ts"] + one["dur"] <= request["ts"] + request["dur"] + 1


def test_the_latest_requests_are_listed(client: openai.OpenAI, server: Server) -> None:
    answer = ask(client)
    (listed,) = [one for one in server.get("/traces").json()["requests"] if one["id"] == answer.id]
    assert listed["error"] is None
    assert list(listed["stages"]) == ["thinker"]


def test_an_unknown_trace_is_not_found(client: openai.OpenAI, server: Server) -> None:
    answer = ask(client)
    response = server.get(f"/traces/{answer.id[:-1]}")
    assert response.status_code == 404
    assert f"did you mean '{answer.id}'?" in response.json()["error"]["message"]


def test_a_collector_gets_the_trace_below_that_of_the_client(client: openai.OpenAI, server: Server) -> None:
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    headers = {"traceparent": f"00-{trace_id}-00f067aa0ba902b7-01"}
    ask(client, modalities=["text", "audio"], extra_headers=headers)
    assert server.collector is not None
    service = server.collector
    expected = {"request", "thinker", "talker", "token2wav", "llm_request"}  # the last is vLLM's
    wait_for("the spans", lambda: expected <= {span.name for span in service.spans(trace_id)})
    spans = {span.name: span for span in service.spans(trace_id)}
    assert spans["request"].parent_span_id.hex() == "00f067aa0ba902b7"
    assert spans["thinker"].parent_span_id == spans["request"].span_id
    of_engines = {span.parent_span_id for span in service.spans(trace_id) if span.name == "llm_request"}
    assert spans["thinker"].span_id in of_engines


@pytest.mark.parametrize("route", ["chat/completions", "completions"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_an_slo_is_reported_and_a_wrong_one_rejected(server: Server, route: str, stream: bool) -> None:
    def ask_within(slo: Any) -> httpx.Response:
        body = {**SHORT, "prompt": "Hello", "stream": stream, "slo": slo}
        del body["prompt" if route == "chat/completions" else "messages"]
        return httpx.post(f"{server.url}/v1/{route}", json=body, timeout=60)

    def count(name: str) -> float:
        found = re.findall(rf'^vllm_omni:slo_{name}_total{{stage="thinker"}} (\S+)$', server.get("/metrics").text, re.M)
        return float(found[0]) if found else 0.0

    requests, met, missed = count("requests"), count("met"), count("missed_ttft")
    assert ask_within({"ttft_ms": 60_000, "tpot_ms": 60_000}).status_code == 200
    assert ask_within({"ttft_ms": 0.001}).status_code == 200
    wait_for("two more with an SLO", lambda: count("requests") == requests + 2)
    assert (count("met"), count("missed_ttft")) == (met + 1, missed + 1)
    for slo in ({"tpot_ms": -1}, "fast", {"tpot": 30}):
        rejected = ask_within(slo)
        assert rejected.status_code == 400, rejected.text
        assert "slo" in rejected.json()["error"]["message"]
    assert count("requests") == requests + 2


SPEECH = {"input": "Hello", "max_new_tokens": 8}
TIMED = {
    "chat": ("/v1/chat/completions", {**SHORT, "modalities": ["text", "audio"]}),
    "completion": ("/v1/completions", {"prompt": "Hello", "max_tokens": 8}),
    "speech": ("/v1/audio/speech", SPEECH),
}


def test_a_request_past_its_deadline_ends_in_every_stage(server: Server) -> None:
    cores = [engine_core(server, stage) for stage in ("thinker", "talker")]
    for route, body in TIMED.values():
        with paused(cores[route != "/v1/completions"].pid):
            response = httpx.post(server.url + route, json={**body, "deadline_s": 0.5}, timeout=30)
        assert response.status_code == 504, route
        error = response.json()["error"]
        assert error["type"] == "GatewayTimeoutError", route
        assert re.search("not done at its deadline, 0[.].* s after .*; nodes still running: t", error["message"]), route
    wait_for("every stage has released the requests", server.holds_nothing)


STREAMED = {
    "text": ("/v1/chat/completions", SHORT),
    "text and speech": TIMED["chat"],
    "completion": TIMED["completion"],
    "beams": ("/v1/completions", {**TIMED["completion"][1], "use_beam_search": True, "n": 2, "stream": False}),
}


@pytest.mark.parametrize("name", STREAMED)
def test_a_stream_past_its_deadline_ends_with_it(server: Server, name: str) -> None:
    route, body = STREAMED[name]
    logged = server.log.stat().st_size
    with paused(engine_core(server, "talker" if "speech" in name else "thinker").pid):
        answer = httpx.post(server.url + route, json={"stream": True, **body, "deadline_s": 0.5}, timeout=30).text
    *_, last = [line for line in answer.splitlines() if line and "[DONE]" not in line]
    error = json.loads(last.removeprefix("data: "))["error"]
    assert (error["code"], error["type"]) == (504, "GatewayTimeoutError")
    assert "not done at its deadline" in error["message"]
    wait_for("every stage has released the request", server.holds_nothing)
    assert "Traceback" not in server.log.read_text()[logged:]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("modalities", [["text"], ["text", "audio"]], ids="+".join)
def test_the_reading_of_media_ends_at_the_deadline(server: Server, modalities: list[str], stream: bool) -> None:
    with silent_host() as host:
        body = {
            **SHORT,
            "messages": with_part({"type": "image_url", "image_url": {"url": f"{host}/x.png"}}),
            "modalities": modalities,
            "stream": stream,
            "deadline_s": 0.5,
        }
        started = time.monotonic()
        response = server.post("/v1/chat/completions", body)
    assert time.monotonic() - started < 4  # a fetch may take 5 s and more
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (504, "GatewayTimeoutError")
    assert error["message"] == "deadline_s = 0.5 has passed during the reading of the prompt and its media"


def test_a_deadline_counts_from_the_head_of_the_request(server: Server) -> None:
    route, body = TIMED["speech"]
    data = json.dumps({**body, "deadline_s": 0.5}).encode()
    with socket.create_connection(("127.0.0.1", httpx.URL(server.url).port)) as connection:
        head = f"POST {route} HTTP/1.1\r\nhost: server\r\ncontent-type: application/json\r\nconnection: close\r\n"
        connection.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode())
        time.sleep(0.6)
        connection.sendall(data)
        answer = b"".join(iter(lambda: connection.recv(4096), b"")).decode()
    assert answer.startswith("HTTP/1.1 504 "), answer
    assert "has passed during the reading of the text" in answer


def test_a_header_gives_the_deadline_where_the_body_has_none(server: Server) -> None:
    route, body = TIMED["chat"]

    def status(given: str, **more: Any) -> int:
        headers = {"X-Deadline-S": given}
        return httpx.post(server.url + route, json={**body, **more}, headers=headers, timeout=60).status_code

    assert [status(given) for given in ("soon", "0", "nan", "1e9", "1e-6")] == [400, 400, 400, 400, 504]
    assert status("1e-6", deadline_s=60) == 200


@pytest.mark.parametrize("name", TIMED)
def test_a_deadline_that_cannot_be_honoured_is_rejected(server: Server, name: str) -> None:
    route, body = TIMED[name]
    for deadline_s in (0, -1, "soon", 1e9, [1]):
        response = httpx.post(server.url + route, json={**body, "deadline_s": deadline_s}, timeout=30)
        assert response.status_code == 400, deadline_s
        assert "deadline_s" in response.json()["error"]["message"]
    text = json.dumps({**body, "deadline_s": math.nan})
    headers = {"Content-Type": "application/json"}
    assert httpx.post(server.url + route, content=text, headers=headers, timeout=30).status_code == 400
    assert httpx.post(server.url + route, json={**body, "deadline_s": 60}, timeout=60).status_code == 200


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
    stage = "talker" if leaves == "stream of the talker" else "thinker"
    before = server.num_tokens(stage)
    if leaves == "whole answer":
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url, json=body, timeout=httpx.Timeout(10, read=0.5))
    else:
        with httpx.stream("POST", url, json=body, timeout=30) as response:
            lines = filter(None, response.iter_lines())
            said = ""  # a letter a token; one line may have several
            while len(said) < 8:
                said += json.loads(next(lines).removeprefix("data: "))["choices"][0]["delta"].get("content") or ""
            assert server.metric("vllm_omni:num_open_calls") == 1
    wait_for("every stage has released the request", server.holds_nothing)
    assert server.num_tokens(stage) - before < 700, "the request was not aborted"


def test_statistics_of_work(client: openai.OpenAI, server: Server) -> None:
    with paused(engine_core(server, "talker").pid):
        chunks = ask(client, modalities=["text", "audio"], stream=True)
        wait_for("a stage's work", lambda: server.metric("vllm_omni:num_running_activations") >= 1)
        chunks.close()
    wait_for("the request's end", server.holds_nothing)


def test_example_of_a_client(server: Server, tmp_path: Path) -> None:
    output = tmp_path / "answer.wav"
    lines = run_example("openai_client.py", server, "--output", output, "--max-tokens=8", "--max-codes=20")
    assert lines[-1] == str(output)
    read_audio(base64.b64encode(output.read_bytes()).decode(), num_codes=20)
