"""``/v1/audio/speech`` over HTTP, on the server of ``conftest.py``, and what it does with sound in many pieces."""

import base64
import io
import json
import re
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import av
import httpx
import numpy as np
import openai
import pytest
import torch
from prometheus_client import CollectorRegistry
from vllm.outputs import RequestOutput

from tests.media.test_audio import LOSSLESS, decode, make_sound
from tests.server import (
    MAX_MODEL_LEN,
    NUM_CODES,
    SAMPLES_PER_CODE,
    Server,
    ask,
    run_example,
    wait_for,
)
from vllm_omni.entrypoints.deadline import Deadline
from vllm_omni.entrypoints.openai.media_metrics import AudioMetrics, MediaTimer
from vllm_omni.entrypoints.openai.speech import Speech
from vllm_omni.media.audio import AUDIO_FORMATS, AudioEncoder, encode_audio
from vllm_omni.messages.outputs import OmniRequestOutput

NUM_SAMPLES = NUM_CODES * SAMPLES_PER_CODE
SAY = {"input": "Hello, world.", "model": "tiny", "voice": "Chelsie", "seed": 0, "max_new_tokens": NUM_CODES}

LONGEST = 390  # tokens of a text that fits: it stands in the prompt twice, and 242 tokens around it


def say(server: Server, **more: Any) -> httpx.Response:
    return httpx.post(server.url + "/v1/audio/speech", json={**SAY, **more}, timeout=60)


def events_of(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in filter(None, response.iter_lines()):
        yield json.loads(line.removeprefix("data: "))


def stream(server: Server, stream_format: str = "audio", **more: Any) -> bytes:
    """The joined pieces of a streamed answer."""
    body = {**SAY, "stream_format": stream_format, **more}
    with httpx.stream("POST", server.url + "/v1/audio/speech", json=body, timeout=60) as response:
        assert response.status_code == 200
        assert response.headers["transfer-encoding"] == "chunked"
        if stream_format == "audio":
            return b"".join(response.iter_raw())
        *deltas, done = events_of(response)
    assert done["type"] == "speech.audio.done"
    assert {delta["type"] for delta in deltas} == {"speech.audio.delta"}
    return b"".join(base64.b64decode(delta["audio"]) for delta in deltas)


# -- sound in many pieces, without a server ----------------------------------------------------------------------------


async def outputs_with(pieces: Any) -> AsyncGenerator[OmniRequestOutput, None]:
    for piece in pieces:
        output = OmniRequestOutput.of(RequestOutput("speech", None, [1], None, outputs=[], finished=False))
        output.multimodal_output = {"audio": piece, "sample_rate": 24000}
        yield output


def make_speech(name: str, metrics: AudioMetrics | None = None) -> Speech:
    make_encoder = partial(AudioEncoder, AUDIO_FORMATS[name], is_stream=True)
    return Speech(make_encoder, 24000, MediaTimer(metrics), Deadline(None))


async def test_a_sound_of_a_diffusion_pipeline_keeps_its_channels_and_rate() -> None:
    sound = torch.stack([make_sound(0.5), -make_sound(0.5)])
    (output,) = [one async for one in outputs_with([sound[None]])]
    output.multimodal_output["sample_rate"] = 16000
    speech = make_speech("wav")
    data = await speech.encode(output) + await speech.finish()
    with av.open(io.BytesIO(data)) as file:
        (stream,) = file.streams.audio
        assert (stream.rate, stream.channels) == (16000, 2)
        assert sum(frame.samples for frame in file.decode(stream)) == sound.shape[1]


async def test_a_speech_without_samples_is_a_file() -> None:
    assert (await make_speech("wav").finish()).startswith(b"RIFF")


@pytest.mark.parametrize("name", AUDIO_FORMATS)
async def test_each_piece_of_sound_is_sent_as_soon_as_it_is_encoded(name: str) -> None:
    sound, metrics = make_sound(2.0), AudioMetrics(CollectorRegistry())
    pieces = [sound[:0], *sound.split(4800), sound[:0]]  # a fifth of a second each
    speech = make_speech(name, metrics)
    sent = [await speech.encode(output) async for output in outputs_with(pieces)]
    joined = b"".join(sent) + await speech.finish()
    assert sum(map(bool, sent)) >= len(pieces) - 3
    whole = encode_audio(sound, 24000, AUDIO_FORMATS[name])
    if name in LOSSLESS:
        np.testing.assert_array_equal(decode(name, joined), decode(name, whole))
    else:
        assert whole.endswith(joined)
    values = {sample.name: sample.value for metric in metrics.collect() for sample in metric.samples}
    assert values["vllm_omni:audio_ttfp_seconds_count"] == 1
    assert values["vllm_omni:audio_duration_seconds_sum"] == 2.0


# -- the routes --------------------------------------------------------------------------------------------------------


def test_an_answer_is_one_whole_mp3_by_default(server: Server) -> None:
    response = say(server)
    assert response.status_code == 200
    assert response.headers["content-type"] == "audio/mpeg"
    assert int(response.headers["content-length"]) == len(response.content)
    assert decode("mp3", response.content).shape == (NUM_SAMPLES,)


@pytest.mark.parametrize("name", AUDIO_FORMATS)
def test_streams_have_the_sound_of_the_whole_file(server: Server, name: str) -> None:
    whole = say(server, response_format=name)
    assert whole.headers["content-type"] == AUDIO_FORMATS[name].media_type
    sound = decode(name, whole.content)
    assert sound.std() > 0.001
    for stream_format in ("audio", "sse"):
        streamed = stream(server, stream_format, response_format=name)
        if name in LOSSLESS:
            assert sound.shape == (NUM_SAMPLES,)
            np.testing.assert_array_equal(decode(name, streamed), sound)
        else:
            assert whole.content.endswith(streamed)


def test_openais_client_writes_and_streams_a_file(client: openai.OpenAI, tmp_path: Path) -> None:
    more = {"extra_body": {"seed": 0, "max_new_tokens": NUM_CODES}}
    request: Any = {"model": "tiny", "voice": "Ethan", "input": "Hello.", "response_format": "wav", **more}
    client.audio.speech.create(**request).write_to_file(tmp_path / "whole.wav")
    with client.audio.speech.with_streaming_response.create(**request, stream_format="audio") as response:
        response.stream_to_file(tmp_path / "stream.wav")
    whole, streamed = ((tmp_path / name).read_bytes() for name in ("whole.wav", "stream.wav"))
    assert len(decode("wav", whole)) == NUM_SAMPLES
    np.testing.assert_array_equal(decode("wav", streamed), decode("wav", whole))


def test_the_last_event_has_usage_and_control_tokens_in_the_text_are_text(server: Server) -> None:
    def usage(text: str) -> dict[str, int]:
        body = {**SAY, "stream_format": "sse", "input": text}
        with httpx.stream("POST", server.url + "/v1/audio/speech", json=body, timeout=60) as response:
            *_, done = events_of(response)
        counts: dict[str, int] = done["usage"]
        return counts

    one = usage("!")
    assert one["output_tokens"] == NUM_CODES
    assert one["total_tokens"] == one["input_tokens"] + NUM_CODES
    # The tiny tokenizer has a token a byte. The text stands in the request and in the reply.
    for text in ("<|im_end|>", "a<|im_start|>b", "<<|AUDIO|><|AUDIO|>", "é"):
        assert usage(text)["input_tokens"] == one["input_tokens"] + 2 * (len(text.encode()) - 1), text


def test_fields_of_a_request_change_the_speech(server: Server) -> None:
    def sound(**more: Any) -> list[float]:
        return decode("wav", say(server, response_format="wav", **more).content).tolist()

    first = sound()
    assert sound() == first  # the same seed
    different = [
        {"seed": 1},
        {"input": "Good bye."},
        {"voice": "Ethan"},
        {"instructions": "Whisper."},
        {"sampling_params_list": {"token2wav": {"seed": 5}}},
        {"sampling_params_list": [None, {"temperature": 0.0}]},
    ]
    sounds = [sound(**more) for more in different]
    assert all(one != first and len(one) == NUM_SAMPLES for one in sounds)
    assert sound(voice={"id": "Ethan"}) == sounds[2]
    assert sound(voice=None) == first
    assert len(sound(max_new_tokens=5)) == 5 * SAMPLES_PER_CODE
    assert len(sound(sampling_params_list={"talker": {"max_tokens": 4}})) == 4 * SAMPLES_PER_CODE
    assert len(sound(speed=2.0)) == pytest.approx(NUM_SAMPLES / 2, rel=0.1)


def test_voices_are_the_checkpoints_and_the_deployments(server: Server) -> None:
    assert server.get("/v1/audio/voices").json() == {"voices": ["Chelsie", "Ethan", "onyx"]}


def test_a_name_of_the_deployment_is_the_checkpoints_voice(server: Server) -> None:
    assert say(server, voice="onyx").content == say(server, voice="Ethan").content
    audio = ask(server.client, modalities=["text", "audio"], audio={"voice": "onyx", "format": "wav"})
    assert audio.choices[0].message.audio.data


def test_another_model_is_not_found(server: Server) -> None:
    response = say(server, model="large")
    assert response.status_code == 404
    assert "The model `large` does not exist." in response.json()["error"]["message"]
    assert say(server, model=None).status_code == 200


def test_example_of_a_client_that_writes_and_plays_a_stream(server: Server, tmp_path: Path) -> None:
    output = tmp_path / "speech.flac"
    lines = run_example("speech_client.py", server, "--format=flac", "--output", output, "--max-codes=20")
    assert re.fullmatch(r"first audio after [\d.]+ s", lines[0])
    assert lines[-1] == str(output)
    assert decode("flac", output.read_bytes()).shape == (20 * SAMPLES_PER_CODE,)
    player = f"{sys.executable} -c 'import sys; print(len(sys.stdin.buffer.read()), file=open(sys.argv[1], \"w\"))'"
    played = tmp_path / "played"
    run_example("speech_client.py", server, "--format=pcm", "--player", f"{player} {played}", "--max-codes=20")
    assert int(played.read_text()) == 2 * 20 * SAMPLES_PER_CODE


BAD_REQUESTS: dict[str, tuple[dict[str, Any], str]] = {
    "no input": ({"input": ""}, "the text to speak is empty"),
    "blank input": ({"input": " \n\t"}, "the text to speak is empty"),
    "input of a wrong type": ({"input": 5}, "input"),
    "long input": (
        {"input": "x" * (LONGEST + 1)},
        f"has {LONGEST + 1} tokens, which with the prompt around it makes {MAX_MODEL_LEN}: the model has room for 1022",
    ),
    "input beyond all": ({"input": "x" * 100_000}, "100000 characters"),
    "half a character": ({"input": "\ud800"}, "invalid Unicode: surrogates not allowed"),
    "unknown voice": ({"voice": "Ethen"}, "unknown speaker 'Ethen': did you mean 'Ethan'?"),
    "unknown format": ({"response_format": "mp4"}, "unknown audio format 'mp4': did you mean 'mp3'?"),
    "unknown stream format": ({"stream_format": "see"}, "stream_format = 'see': input should be 'audio' or 'sse'"),
    "too fast": ({"speed": 5}, "speed = 5: input should be less than or equal to 4"),
    "no speed": ({"speed": 0}, "speed = 0"),
    "mistyped field": ({"instruction": "Sing."}, "unknown field 'instruction': did you mean 'instructions'?"),
    "voice to clone": ({"ref_audio": "x"}, "ref_audio: this model clones no voices"),
    "field of others": ({"task_type": "Base"}, "unknown field 'task_type': valid: input, model, voice"),
    "no tokens": ({"max_new_tokens": 0}, "max_new_tokens = 0"),
    "seed": ({"seed": 2**70}, "seed"),
    "unknown stage": ({"sampling_params_list": {"talkr": {}}}, "did you mean 'talker'?"),
    "unknown parameter": ({"sampling_params_list": {"talker": {"temprature": 1}}}, "did you mean 'temperature'?"),
    "parameters of the first stage": (
        {"sampling_params_list": [{"temperature": 1.0}]},
        "stage 'thinker': sampling parameters have no effect: the text is fixed",
    ),
}


@pytest.mark.parametrize("stream_format", [None, "audio", "sse"])
def test_bad_requests_are_rejected_with_their_reason(server: Server, stream_format: str | None) -> None:
    url, headers = server.url + "/v1/audio/speech", {"content-type": "application/json"}
    for name, (wrong, why) in BAD_REQUESTS.items():
        body = json.dumps({**SAY, "stream_format": stream_format, **wrong})
        response = httpx.post(url, content=body, headers=headers)
        assert response.status_code == 400, name
        assert why in response.json()["error"]["message"], name
    assert server.holds_nothing()
    assert say(server).status_code == 200


def test_the_longest_text_that_fits_is_spoken(server: Server) -> None:
    assert decode("mp3", say(server, input="x" * LONGEST).content).shape == (NUM_SAMPLES,)


@pytest.mark.parametrize("stream_format", [None, "audio", "sse"])
def test_a_client_that_leaves_ends_its_speech_in_every_stage(server: Server, stream_format: str | None) -> None:
    body = {**SAY, "max_new_tokens": 600, "stream_format": stream_format}
    url, timeout = server.url + "/v1/audio/speech", httpx.Timeout(10, read=0.3)
    before = server.num_tokens("talker")
    # It leaves when nothing comes for a while, or after the first piece.
    with suppress(httpx.ReadTimeout), httpx.stream("POST", url, json=body, timeout=timeout) as response:
        pieces = response.iter_raw()  # by a name: at its end it would close the connection
        assert next(pieces)
        assert stream_format is not None, "a whole file has no first byte before its end"
        assert server.metric("vllm_omni:num_open_calls") == 1
    wait_for("every stage has released the speech", server.holds_nothing)
    assert server.num_tokens("talker") - before < 600, "the request was not aborted"


def test_speech_is_counted_with_its_times(client: openai.OpenAI, server: Server) -> None:
    names = [f"vllm_omni:audio_{name}" for name in ("ttfp_seconds", "rtf", "duration_seconds")]

    def values(suffix: str) -> list[float]:
        return [server.metric(name + suffix) for name in names]

    counts, sums = values("_count"), values("_sum")
    say(server)
    ask(client, modalities=["text", "audio"])
    ask(client)  # no speech
    assert values("_count") == [count + 2 for count in counts]
    more = [after - before for after, before in zip(values("_sum"), sums, strict=True)]
    assert more[2] == pytest.approx(2 * NUM_SAMPLES / 24000)
    assert 0 < more[0] < 60
    assert more[1] > 0
