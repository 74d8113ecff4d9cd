"""Qwen3-TTS served through its graph, held against the plain reference on the same weights.

All codes are equal; waveforms to 1e-4 of their maximum.
"""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any, NamedTuple

import httpx
import openai
import pytest
import torch
import uvicorn
from websockets.asyncio.client import ClientConnection, connect

from tests import machine
from tests.e2e.engines import MARKS
from tests.engine_threads import BATCHES, engine_threads, num_preemptions, thread_of
from tests.media.test_audio import decode
from tests.reference.qwen3_tts import SAMPLES_PER_FRAME, Reference
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.entrypoints.cli.serve import parse_serve_args
from vllm_omni.entrypoints.openai.app import build_omni_app
from vllm_omni.errors import DeadlineExceeded, InvalidRequest, StageFailed
from vllm_omni.messages.outputs import OmniRequestOutput, collect
from vllm_omni.process.status import StageState
from vllm_omni.testing.qwen3_tts import build

pytestmark = [*MARKS, pytest.mark.timeout(600)]

WAVEFORM = 1e-4  # of the maximum
NUM_TOKENS = 40
GREEDY = {"talker": {"temperature": 0.0, "max_tokens": NUM_TOKENS}}
FEW = {"talker": {"temperature": 0.0, "max_tokens": 5}}
TEXTS = ("Hello there.", "A longer sentence, that is spoken.", "x", "Numbers: 1, 2, 3!")
BOTH = ("audio", "codec_ids")
LOSSLESS = ("wav", "flac", "pcm")

# Checkpoint -> seed, and the deployment's settings. In "small" there is room for a few requests only, which are
# preempted; "design" decodes when the talker has ended.
DEPLOYMENTS: dict[str, tuple[int, list[str], dict[str, Any]]] = {
    "base": (0, ["talker.max_num_batched_tokens=32", "codec.max_num_seqs=3"], {}),
    "small": (
        1,
        [
            "talker.block_size=32",
            "talker.max_model_len=256",
            "talker.num_gpu_blocks_override=10",
            "talker.max_num_batched_tokens=512",
            "talker.enforce_eager=false",  # as in the default deployment
        ],
        {"chunks": {"size": 7}},
    ),
    "design": (2, [], {"stream": False}),
}


class Served(NamedTuple):
    variant: str
    omni: AsyncOmni
    reference: Reference

    @property
    def num_open(self) -> int:
        """Streams of the codec that have a state."""
        core = thread_of(self.omni.orchestrator.front("codec")).core
        assert core is not None
        return core.model_executor.model.streams.num_open


@pytest.fixture(
    scope="module", params=["base", *(pytest.param(name, marks=pytest.mark.long) for name in ("small", "design"))]
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    if request.param == "small":
        machine.require("g++")  # torch.compile
    seed, stage_overrides, edge = DEPLOYMENTS[request.param]
    path = build(tmp_path_factory.mktemp(request.param), variant=request.param, seed=seed)
    engine = {"dtype": "float32", "max_model_len": 512, "enforce_eager": True, "kv_cache_memory_bytes": 16 << 20}
    with engine_threads():
        omni = AsyncOmni(
            path,
            stage_overrides=[*(f"talker.{name}={value}" for name, value in engine.items()), *stage_overrides],
            overrides={"edges": {"talker->codec": edge}},
        )
        yield Served(request.param, omni, Reference(path))
        omni.shutdown()


def requests_of(served: Served) -> list[dict[str, Any]]:
    """Several texts, each with the text whole and streamed, and what the checkpoint lets one choose."""
    config = served.reference.config
    speakers = list(config["talker_config"]["spk_id"]) or [None]
    follows = config["tts_model_size"] != "0b6"
    return [
        {
            "text": text,
            "language": ("auto", "english", "chinese")[index % 3],
            "speaker": speakers[index % len(speakers)],
            "instruct": "Slowly." if index % 2 and follows else None,
            "streaming": streaming,
        }
        for index, text in enumerate(TEXTS)
        for streaming in (True, False)
    ]


def speak(served: Served, request: dict[str, Any], params: Any = GREEDY) -> AsyncIterator[OmniRequestOutput]:
    options = {"language": request["language"], "non_streaming_mode": not request["streaming"]}
    return served.omni.speak(
        request["text"],
        params,
        modalities=BOTH,
        speaker=request["speaker"],
        instructions=request["instruct"],
        options=options,
    )


def check(
    served: Served,
    request: dict[str, Any],
    output: OmniRequestOutput,
    *,
    max_tokens: int = NUM_TOKENS,
    min_tokens: int = 2,
) -> None:
    expected = served.reference.speak(max_tokens=max_tokens, min_tokens=min_tokens, **request)
    frames, audio = output.multimodal_output["codec_ids"], output.multimodal_output["audio"]
    # At the limit, the last sampled code begins a frame that the reference does not complete.
    compared = frames if expected.finished else frames[:-1]
    assert compared == expected.codes.tolist(), (request, float(expected.margins.min()))
    whole = served.reference.decode(torch.tensor(frames))
    torch.testing.assert_close(audio, whole, atol=WAVEFORM * float(whole.abs().max()), rtol=0)
    length = len(compared) * SAMPLES_PER_FRAME
    torch.testing.assert_close(audio[:length], expected.wave, atol=WAVEFORM * float(whole.abs().max()), rtol=0)


async def until_idle(served: Served) -> None:
    """The codec is notified of ends with its next step."""
    for _ in range(2000):
        if not served.num_open and not served.omni.orchestrator.front("codec").num_requests:
            return
        await asyncio.sleep(0.01)
    raise TimeoutError(f"{served.num_open} streams are still open")


async def test_a_batch_of_eight_speaks_as_the_reference(served: Served) -> None:
    requests = requests_of(served)
    for _ in range(BATCHES):
        outputs = await asyncio.gather(*(collect(speak(served, one)) for one in requests))
        for request, output in zip(requests, outputs, strict=True):
            check(served, request, output)
        await until_idle(served)
        if served.variant != "small" or num_preemptions(served.omni.orchestrator.front("talker")):
            return
    raise AssertionError("no request was preempted")


@pytest.mark.long
@pytest.mark.parametrize("served", ["base"], indirect=True)
async def test_more_than_two_hundred_frames_equal_the_reference(served: Served) -> None:
    request, end = requests_of(served)[0], served.reference.talker_config["codec_eos_token_id"]
    params = {"temperature": 0.0, "max_tokens": 211, "logit_bias": {end: -100.0}}
    output = await collect(speak(served, request, {"talker": params}))
    assert len(output.multimodal_output["codec_ids"]) == 211
    check(served, request, output, max_tokens=211, min_tokens=211)


async def test_the_first_sound_comes_before_the_last_frame(served: Served) -> None:
    if served.variant == "design":
        pytest.skip("its deployment streams nothing")
    request, end = requests_of(served)[0], served.reference.talker_config["codec_eos_token_id"]
    params = {**GREEDY["talker"], "logit_bias": {end: -100.0}}  # many frames: the codec may start late
    async with aclosing(speak(served, request, {"talker": params})) as outputs:
        pieces = [one.multimodal_output async for one in outputs]
    kinds = [name for piece in pieces for name in BOTH if name in piece]
    assert kinds.index("audio") < len(kinds) - 1 - kinds[::-1].index("codec_ids")
    sizes = [len(piece["audio"]) // SAMPLES_PER_FRAME for piece in pieces if "audio" in piece]
    assert sum(sizes) == NUM_TOKENS and sizes[0] == 1


async def test_an_abort_of_a_third_frees_their_states_and_the_others_end(served: Served) -> None:
    requests = requests_of(served)[:6]

    async def leave(request: dict[str, Any]) -> None:
        async with aclosing(speak(served, request)) as outputs:
            async for one in outputs:
                if one.multimodal_output:
                    return

    tasks = [leave(one) if index % 3 == 0 else collect(speak(served, one)) for index, one in enumerate(requests)]
    outputs = await asyncio.gather(*tasks)
    for request, output in zip(requests, outputs, strict=True):
        if output is not None:
            check(served, request, output)
    await until_idle(served)


async def test_requests_fail_with_their_codec_and_later_ones_speak(served: Served) -> None:
    request, codec = requests_of(served)[2], served.omni.orchestrator.front("codec")
    outputs = speak(served, request)
    await anext(outputs)
    thread_of(codec).kill()
    with pytest.raises(StageFailed, match="codec"):
        await collect(outputs)
    for _ in range(2000):
        if codec.current_status().state is StageState.RUNNING:
            break
        await asyncio.sleep(0.01)
    check(served, request, await collect(speak(served, request)))
    await until_idle(served)


async def test_a_seed_repeats_the_speech_whatever_else_runs(served: Served) -> None:
    request = requests_of(served)[0]
    params = {"talker": {"seed": 7, "max_tokens": 10}}
    alone = await collect(speak(served, request, params))
    again, other = await asyncio.gather(
        collect(speak(served, request, params)), collect(speak(served, requests_of(served)[2], {"talker": {"seed": 8}}))
    )
    frames = alone.multimodal_output["codec_ids"]
    assert again.multimodal_output["codec_ids"] == frames != other.multimodal_output["codec_ids"]
    greedy = {"talker": {**params["talker"], "extra_args": {"subtalker_temperature": 0}}}
    assert (await collect(speak(served, request, greedy))).multimodal_output["codec_ids"] != frames


async def pieces_of(text: str, size: int) -> AsyncIterator[str]:
    for start in range(0, len(text), size):
        yield text[start : start + size]


async def test_a_text_in_pieces_sounds_as_its_sentences(served: Served) -> None:
    request, options = requests_of(served)[0], {"language": "auto", "non_streaming_mode": False}
    texts, sounds, num_ids = ("Hello there.", "How are you?"), [], 0
    for text in texts:
        whole = await collect(speak(served, {**request, "text": text}, FEW))
        sounds.append(whole.multimodal_output["audio"])
        num_ids += len(whole.prompt_token_ids or ())
    spoken = served.omni.speak(
        pieces_of(" ".join(texts), 5), FEW, "streamed", modalities=BOTH, speaker=request["speaker"], options=options
    )
    outputs = [one async for one in spoken]
    assert [one.finished for one in outputs] == [False] * (len(outputs) - 1) + [True]
    assert {one.request_id for one in outputs} == {"streamed"}
    assert len(outputs[-1].prompt_token_ids or ()) == num_ids
    expected = torch.cat(sounds)
    sound = torch.cat([one.multimodal_output["audio"] for one in outputs if "audio" in one.multimodal_output])
    torch.testing.assert_close(sound, expected, atol=WAVEFORM * float(expected.abs().max()), rtol=0)


@pytest.mark.parametrize("served", ["base"], indirect=True)
async def test_a_text_in_pieces_has_a_deadline_and_needs_words(served: Served) -> None:
    with pytest.raises(InvalidRequest, match="the text to speak is empty"):
        await collect(served.omni.speak(pieces_of(" ... ", 1)))

    async def endless() -> AsyncIterator[str]:
        yield "Hel"
        await asyncio.sleep(60)

    with pytest.raises(DeadlineExceeded, match="the wait for text"):
        await collect(served.omni.speak(endless(), deadline_s=0.05))
    await until_idle(served)


REJECTED = [
    ({"speaker": "vivien"}, {}, "unknown voice 'vivien': did you mean 'vivian'?"),
    ({}, {"language": "germn"}, "unknown language 'germn': did you mean 'german'?"),
    ({}, {"language": "sichuan_dialect"}, "unknown language 'sichuan_dialect'"),
    ({}, {"langauge": "german"}, "unknown option 'langauge': did you mean 'language'?"),
    ({}, {"cloned_voice": object()}, "this checkpoint clones no voices"),
    ({"text": "   "}, {}, "the text to speak is empty"),
    ({"text": "ab" * 100_000}, {}, "the text to speak has 200000 characters"),
    ({"text": "a b" * 300}, {}, "longer than"),
    ({"params": {"talker": {"extra_args": {"subtalker_top_p": 2}}}}, {}, "subtalker_top_p = 2: must be in (0, 1]"),
    ({"params": {"talker": {"min_tokens": 5}}}, {}, "the model of this stage needs min_tokens = 2"),
]


@pytest.mark.parametrize("served", ["base"], indirect=True)
@pytest.mark.parametrize("arguments, options, message", REJECTED)
async def test_what_cannot_be_spoken_is_rejected(
    served: Served, arguments: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    text, params = arguments.get("text", "Hello."), arguments.get("params")
    with pytest.raises(InvalidRequest) as rejected:
        await collect(served.omni.speak(text, params, speaker=arguments.get("speaker"), options=options))
    assert message in str(rejected.value)


# -- the server -------------------------------------------------------------------------------------------------------


@pytest.fixture
async def client(served: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    parsed = parse_serve_args([served.omni.config.model, "--served-model-name", "tiny", "--dtype", "float32"])
    transport = httpx.ASGITransport(await build_omni_app(served.omni, parsed.args), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, timeout=120) as http:
        yield openai.AsyncOpenAI(base_url="http://server/v1", api_key="none", http_client=http, max_retries=0)


@pytest.mark.parametrize("served", ["base"], indirect=True)
async def test_the_openai_client_gets_speech_in_each_format_and_as_a_stream(
    served: Served, client: openai.AsyncOpenAI
) -> None:
    said: dict[str, Any] = {"model": "tiny", "input": "Hello there.", "voice": "Ryan", "instructions": "Slowly."}
    more = {"language": "English", "sampling_params_list": FEW}
    request = {"text": said["input"], "speaker": "ryan", "instruct": "Slowly.", "language": "english"}
    output = await collect(speak(served, {**request, "streaming": False}, FEW))
    expected = output.multimodal_output["audio"]
    for name in ("wav", "flac", "pcm", "mp3", "opus", "aac"):
        answer = await client.audio.speech.create(**said, response_format=name, extra_body=more)
        samples = torch.from_numpy(decode(name, answer.content).copy()).float()
        assert abs(len(samples) - len(expected)) <= (0 if name in LOSSLESS else 4096), name
        if name in LOSSLESS:
            torch.testing.assert_close(samples, expected, atol=1e-4, rtol=0)
    create = client.audio.speech.with_streaming_response.create
    async with create(**said, response_format="pcm", extra_body={**more, "stream_format": "audio"}) as streamed:
        data = b"".join([piece async for piece in streamed.iter_bytes()])
    torch.testing.assert_close(
        torch.frombuffer(bytearray(data), dtype=torch.int16) / 32768, expected, atol=1e-4, rtol=0
    )
    async with create(**said, response_format="pcm", extra_body={**more, "stream_format": "sse"}) as streamed:
        events = [line async for line in streamed.iter_lines() if line.startswith("data:")]
    num_frames = len(output.multimodal_output["codec_ids"])
    assert f'"output_tokens":{num_frames},' in events[-1].replace(" ", "") and "speech.audio.done" in events[-1]


@pytest.mark.parametrize("served", ["base"], indirect=True)
async def test_the_server_says_which_voice_or_language_was_meant(served: Served, client: openai.AsyncOpenAI) -> None:
    voices = await client.get("/audio/voices", cast_to=httpx.Response)
    assert voices.json()["voices"][:3] == ["vivian", "ryan", "eric"]
    for more, message in (
        ({"voice": "vivien"}, "did you mean 'vivian'?"),
        ({"extra_body": {"language": "englsh"}}, "did you mean 'english'?"),
        ({"input": ""}, "is empty"),
        ({"extra_body": {"langage": "english"}}, "did you mean 'language'?"),
    ):
        with pytest.raises(openai.BadRequestError) as rejected:
            await client.audio.speech.create(**{"model": "tiny", "input": "Hello.", "voice": "ryan", **more})
        assert message in str(rejected.value)
    with pytest.raises(openai.BadRequestError):  # it has no text to answer with
        await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hello"}])


@pytest.fixture
async def address(served: Served) -> AsyncIterator[str]:
    """Of a real server: the client in memory has no WebSockets."""
    parsed = parse_serve_args([served.omni.config.model, "--served-model-name", "tiny", "--dtype", "float32"])
    app = await build_omni_app(served.omni, parsed.args)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        task = asyncio.create_task(server.serve([listener]))
        while not server.started:  # noqa: ASYNC110 - it has no event for it
            await asyncio.sleep(0.01)
        yield f"ws://127.0.0.1:{listener.getsockname()[1]}/v1/audio/speech/stream"
        server.should_exit = True
        await task


CONFIG = {"type": "session.config", "voice": "Ryan", "language": "English", "response_format": "pcm"}


async def send(connection: ClientConnection, *messages: dict[str, Any]) -> None:
    for message in messages:
        await connection.send(json.dumps(message))


@pytest.mark.parametrize("served", ["base"], indirect=True)
async def test_a_text_is_streamed_in_and_its_sound_out(served: Served, address: str) -> None:
    request = {"text": "Hello there.", "speaker": "ryan", "instruct": None, "language": "english", "streaming": False}
    sound = (await collect(speak(served, request, FEW))).multimodal_output["audio"]
    text = [{"type": "input.text", "text": piece} for piece in ("Hello th", "ere. ")]
    async with connect(address) as connection:
        await send(connection, {**CONFIG, "sampling_params_list": FEW}, *text)
        data = b""
        while len(data) < 2 * len(sound):  # the first sentence, before the text is over
            data += await connection.recv(decode=False)
        await send(connection, *text, {"type": "input.done"})
        *pieces, done = [message async for message in connection]
    data += b"".join(pieces)
    spoken = torch.frombuffer(bytearray(data), dtype=torch.int16) / 32768
    torch.testing.assert_close(spoken, torch.cat([sound, sound]), atol=1e-4, rtol=0)
    done = json.loads(done)
    assert (done["type"], done["usage"]["output_tokens"]) == ("speech.audio.done", 10)
    assert done["usage"]["input_tokens"] > 0 and connection.close_code == 1000
    await until_idle(served)


@pytest.mark.parametrize("served", ["base"], indirect=True)
@pytest.mark.parametrize(
    ("messages", "code", "why"),
    [
        ([{**CONFIG, "voice": "ryam"}, {"type": "input.text", "text": "Hi. "}], 1008, "did you mean 'ryan'?"),
        ([{**CONFIG, "model": "other"}], 1008, "does not exist"),
        ([{**CONFIG, "deadline_s": 0.05}], 1011, "the wait for text"),
    ],
)
async def test_an_error_is_the_last_message_of_a_stream(
    served: Served, address: str, messages: list[dict[str, Any]], code: int, why: str
) -> None:
    async with connect(address) as connection:
        await send(connection, *messages)
        error = json.loads(await connection.recv())
        await connection.wait_closed()
    assert error["type"] == "speech.audio.error" and why in error["error"]["message"]
    assert connection.close_code == code


@pytest.mark.parametrize("served", ["base"], indirect=True)
async def test_a_client_that_leaves_a_stream_frees_its_speech(served: Served, address: str) -> None:
    async with connect(address) as connection:
        await send(connection, CONFIG, {"type": "input.text", "text": "A longer sentence, that is spoken. "})
        assert len(await connection.recv(decode=False))
        assert served.num_open == 1
    await until_idle(served)
