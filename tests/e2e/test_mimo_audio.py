"""MiMo-Audio served through its graph, held against the plain reference on the same weights.

Tokens and codes are equal; waveforms to 1e-4 of their maximum, against the reference's decode of the whole speech.
"""

import asyncio
import base64
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any, NamedTuple

import httpx
import numpy as np
import openai
import pytest
import torch

from tests import machine
from tests.e2e.engines import MARKS
from tests.engine_threads import BATCHES, engine_threads, num_preemptions, thread_of
from tests.media.test_audio import decode
from tests.model_executor.models.mimo_audio.test_language_model import Case, make_cases
from tests.reference.mimo_audio import AudioTokenizer, Groups, LanguageModel
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.entrypoints.cli.serve import parse_serve_args
from vllm_omni.entrypoints.openai.app import build_omni_app
from vllm_omni.errors import InvalidRequest, StageFailed
from vllm_omni.media import find_format
from vllm_omni.media.audio import AUDIO_FORMATS, AudioEncoder
from vllm_omni.messages.outputs import OmniRequestOutput, collect
from vllm_omni.process.status import StageState
from vllm_omni.testing.mimo_audio import build

pytestmark = [
    *MARKS,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:max_tokens is deprecated:DeprecationWarning"),  # vLLM's handler reads it
]

WAVEFORM = 1e-4  # of the maximum
ROUNDING = 1 / 32768  # of the samples in a file
NUM_GROUPS = 20
SAMPLES_PER_FRAME = 960
GREEDY = {"temperature": 0.0, "max_tokens": NUM_GROUPS, "extra_args": {"code_temperature": 0}}
PARAMS = {"language_model": GREEDY}
BOTH = ("text", "audio", "codec_ids")
U, A, E = "<|im_start|>user\n", "<|im_start|>assistant\n", "<|im_end|>\n"

# Of each checkpoint, settings of its stages. In "narrow" a prompt needs several steps, and there is room for a few
# requests only, which are preempted.
DEPLOYMENTS: dict[str, list[str]] = {
    "base": [],
    "narrow": [
        "language_model.block_size=32",
        "language_model.max_model_len=256",
        "language_model.num_gpu_blocks_override=10",
        "language_model.max_num_batched_tokens=64",
        "language_model.enforce_eager=false",  # as in the default deployment
    ],
    "asr": ["language_model.max_num_batched_tokens=70", "decoder.max_num_seqs=2"],
}


class Served(NamedTuple):
    name: str
    omni: AsyncOmni
    model: LanguageModel
    codec: AudioTokenizer

    def codes_of(self, wave: np.ndarray) -> torch.Tensor:
        return self.codec.encode(torch.from_numpy(wave))[:8]

    def prompt(self, *pieces: str | np.ndarray | tuple[str, np.ndarray]) -> Groups:
        """The reference's prompt: texts, sounds that are heard, and spoken replies with their texts."""
        made = self.model.text("x")[:0]
        for piece in pieces:
            if isinstance(piece, str):
                made += self.model.text(piece)
            elif isinstance(piece, tuple):
                made += self.model.spoken(piece[0], self.codes_of(piece[1]))
            else:
                made += self.model.heard(self.codes_of(piece))
        return made

    @property
    def stop(self) -> list[int]:
        return [self.model.token_id(token) for token in ("<|im_end|>", "<|endoftext|>", "<|eostm|>")]


@pytest.fixture(
    scope="module", params=["base", *(pytest.param(name, marks=pytest.mark.long) for name in ("narrow", "asr"))]
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    if request.param == "narrow":
        machine.require("g++")  # torch.compile
    path = build(tmp_path_factory.mktemp(request.param), variant=request.param)
    engine = {"dtype": "float32", "max_model_len": 512, "enforce_eager": True, "kv_cache_memory_bytes": 16 << 20}
    overrides = [*(f"language_model.{name}={value}" for name, value in engine.items()), *DEPLOYMENTS[request.param]]
    with engine_threads():
        omni = AsyncOmni(path, stage_overrides=overrides)
        yield Served(request.param, omni, LanguageModel(path), AudioTokenizer(path / "audio_tokenizer"))
        omni.shutdown()


def wave_of(seconds: float, hertz: float = 220.0) -> np.ndarray:
    time = np.arange(int(seconds * 24000)) / 24000
    noise = np.random.default_rng(int(hertz)).standard_normal(len(time))
    return (0.3 * np.sin(2 * np.pi * hertz * time * (1 + time)) + 0.05 * noise).astype(np.float32)


def reply(served: Served, case: Case, params: Any = PARAMS, **more: Any) -> AsyncIterator[OmniRequestOutput]:
    return served.omni.generate(case.prompt, params, modalities=more.pop("modalities", BOTH), **more)


def check(served: Served, prompt: Groups, output: OmniRequestOutput, num_groups: int = NUM_GROUPS) -> None:
    """Assert that tokens, codes and sound are those of the reference."""
    expected = served.model.generate(prompt, num_groups, served.stop).groups
    assert output.prompt_token_ids == prompt.tokens.tolist()
    if output.outputs:
        assert list(output.outputs[0].token_ids) == expected.tokens.tolist()
        assert "<|" not in output.outputs[0].text
    is_sound = expected.tokens == served.model.token_id("<|empty|>")
    assert output.multimodal_output["codec_ids"] == expected.codes[is_sound].flatten(0, 1).tolist()
    check_sound(served, expected, output.multimodal_output["audio"])


def speech_codes(served: Served, groups: Groups) -> torch.Tensor:
    """The codes of a reply's speech, [frames, channels]: those behind its first ``<|sostm|>``."""
    tokens = groups.tokens.tolist()
    start = served.model.token_id("<|sostm|>")
    spoken = groups[tokens.index(start) if start in tokens else 0 :]
    return spoken.codes[spoken.tokens == served.model.token_id("<|empty|>")].flatten(0, 1)


def check_sound(served: Served, groups: Groups, audio: torch.Tensor, rounding: float = 0.0) -> None:
    codes = speech_codes(served, groups)
    assert len(audio) == SAMPLES_PER_FRAME * len(codes)
    if len(codes):
        wave = served.codec.decode(codes.T).wave
        torch.testing.assert_close(audio, wave, atol=WAVEFORM * float(wave.abs().max()) + rounding, rtol=0)


async def until_idle(served: Served) -> None:
    for name in served.omni.config.stage_names:
        for _ in range(2000):
            if not served.omni.orchestrator.front(name).num_requests:
                break
            await asyncio.sleep(0.01)
        else:
            raise TimeoutError(f"{name} still has requests")


async def test_a_batch_of_eight_replies_as_the_reference(served: Served) -> None:
    cases = make_cases(seed=5)
    for _ in range(BATCHES):
        outputs = await asyncio.gather(*(collect(reply(served, case)) for case in cases))
        for case, output in zip(cases, outputs, strict=True):
            check(served, case.groups(served.model, served.codec), output)
        assert any(len(output.multimodal_output["audio"]) for output in outputs)
        if served.name != "narrow" or num_preemptions(served.omni.orchestrator.front("language_model")):
            return
    raise AssertionError("no request was preempted")


async def test_an_abort_of_a_third_leaves_nothing_and_the_others_end(served: Served) -> None:
    cases = make_cases(seed=6)[:6]

    async def leave(case: Case) -> None:
        async with aclosing(reply(served, case)) as outputs:
            await anext(outputs)

    tasks = [leave(case) if index % 3 == 0 else collect(reply(served, case)) for index, case in enumerate(cases)]
    outputs = await asyncio.gather(*tasks)
    for case, output in zip(cases, outputs, strict=True):
        if output is not None:
            check(served, case.groups(served.model, served.codec), output)
    await until_idle(served)


async def test_each_piece_of_a_long_reply_is_decoded_when_it_is_complete(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the original decodes each minute alone; here a piece is two groups."""
    pipeline = served.omni.orchestrator.pipeline
    monkeypatch.setattr(pipeline, "codes_per_piece", 2 * 4 * 8)
    case = make_cases(seed=5)[0]
    expected = served.model.generate(case.groups(served.model, served.codec), NUM_GROUPS, served.stop).groups
    async with aclosing(reply(served, case)) as outputs:
        pieces = [one.multimodal_output["audio"] async for one in outputs if "audio" in one.multimodal_output]
    waves = [served.codec.decode(piece.T).wave for piece in speech_codes(served, expected).split(8)]
    assert len(waves) > 1
    made = [piece for piece in pieces if len(piece)]
    assert [len(piece) for piece in made] == [len(wave) for wave in waves]
    for piece, wave in zip(made, waves, strict=True):
        torch.testing.assert_close(piece, wave, atol=WAVEFORM * float(wave.abs().max()), rtol=0)


@pytest.mark.parametrize("stage", ["language_model", "decoder"])
async def test_requests_fail_with_a_stage_and_later_ones_are_answered(served: Served, stage: str) -> None:
    case, engine = make_cases(seed=5)[0], served.omni.orchestrator.front(stage)
    outputs = reply(served, case)
    await anext(outputs)
    thread_of(engine).kill()
    with pytest.raises(StageFailed, match=stage):
        await collect(outputs)
    for _ in range(2000):
        if engine.current_status().state is StageState.RUNNING:
            break
        await asyncio.sleep(0.01)
    check(served, case.groups(served.model, served.codec), await collect(reply(served, case)))


@pytest.mark.long
@pytest.mark.parametrize("served", ["base"], indirect=True)
async def test_a_speech_of_more_than_two_hundred_frames_equals_the_reference(served: Served) -> None:
    params, longest = {"language_model": {**GREEDY, "max_tokens": 80}}, 0
    cases = make_cases(seed=5)
    outputs = await asyncio.gather(*(collect(reply(served, case, params)) for case in cases))
    for case, output in zip(cases, outputs, strict=True):
        check(served, case.groups(served.model, served.codec), output, num_groups=80)
        longest = max(longest, len(output.multimodal_output["audio"]) // SAMPLES_PER_FRAME)
    assert longest > 200


async def test_a_seed_repeats_text_and_sound(served: Served) -> None:
    case = make_cases(seed=5)[1]
    sampled = {"language_model": {"seed": 7, "temperature": 0.6, "max_tokens": 12}}
    one, again, other = await asyncio.gather(
        *(collect(reply(served, case, params)) for params in (sampled, sampled, {"language_model": {"max_tokens": 12}}))
    )
    assert again.outputs[0].token_ids == one.outputs[0].token_ids != other.outputs[0].token_ids
    assert again.multimodal_output["codec_ids"] == one.multimodal_output["codec_ids"]


async def test_a_text_is_spoken_plainly_by_instructions_and_in_a_voice(served: Served) -> None:
    voice = wave_of(0.9)
    speech = [
        await collect(served.omni.speak("hello there", PARAMS, modalities=("audio", "codec_ids"), **more))
        for more in ({}, {"instructions": "slowly"}, {"instructions": "slowly", "ref_audio": (voice, 24000)})
    ]
    before = f"{U}Please convert this text to speech: Hello there"
    system = "<|im_start|>system\n你需要根据指定的风格指令和文本内容来生成"
    styled = [f"{before}(slowly){E}", f"{A}<think>\n"]
    prompts = [
        served.prompt(f"{before}{E}", f"{A}<|sostm|>"),
        served.prompt(f"{system}语音。{E}", *styled),
        served.prompt(f"{system}和语音prompt具有相同音色的语音。你的音色应该是：", voice, E, *styled),
    ]
    for prompt, output in zip(prompts, speech, strict=True):
        check(served, prompt, output)


REJECTED = [
    ({"speaker": "defualt"}, "unknown voice 'defualt': did you mean 'default'?"),
    ({"text": " "}, "the text to speak is empty"),
    ({"text": "a b" * 400}, "the model has room for"),
    ({"text": "a<|empty|>"}, None),
    ({"ref_audio": (wave_of(0.9), 24000)}, "instructions on how to speak"),
    ({"ref_text": "hello"}, "ref_text: this model hears a voice in its recording alone"),
    ({"options": {"language": "english"}}, "unknown option 'language'"),
    ({"params": {"language_model": {"extra_args": {"code_top_p": 2}}}}, "code_top_p = 2"),
    ({"params": {"language_model": {"n": 2}}}, "the next stage reads one answer"),
]


@pytest.mark.parametrize("served", ["base"], indirect=True)
async def test_what_cannot_be_spoken_is_rejected(served: Served) -> None:
    for arguments, message in REJECTED:
        given = dict(arguments)
        text, params = given.pop("text", "Hello."), given.pop("params", {"language_model": {"max_tokens": 2}})
        speech = served.omni.speak(text, params, **given)
        if message is None:  # control tokens are spoken as text
            await collect(speech)
            continue
        with pytest.raises(InvalidRequest) as rejected:
            await collect(speech)
        assert message in str(rejected.value)


# -- the server -------------------------------------------------------------------------------------------------------


@pytest.fixture
async def client(served: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    parsed = parse_serve_args([served.omni.config.model, "--served-model-name", "tiny", "--dtype", "float32"])
    transport = httpx.ASGITransport(await build_omni_app(served.omni, parsed.args), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, timeout=120) as http:
        yield openai.AsyncOpenAI(base_url="http://server/v1", api_key="none", http_client=http, max_retries=0)


def sound(wave: np.ndarray) -> dict[str, Any]:
    encoder = AudioEncoder(find_format("audio", AUDIO_FORMATS, "wav"), 24000, is_stream=False, num_channels=1)
    data = encoder.encode(torch.from_numpy(wave)) + encoder.finish()
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": "wav"}}


def heard(wave: np.ndarray) -> np.ndarray:
    """What a file of 16-bit samples has of it."""
    return (np.round(wave * 32768).clip(-32768, 32767) / 32768).astype(np.float32)


@pytest.mark.parametrize("served", ["base"], indirect=True)
async def test_the_openai_client_chats_in_text_and_speech(served: Served, client: openai.AsyncOpenAI) -> None:
    question, answer = wave_of(0.7), wave_of(0.5, 330.0)
    user = {"role": "user", "content": [sound(question)]}
    earlier = {"role": "assistant", "content": [{"type": "text", "text": "I can see."}, sound(answer)]}
    asked = [sound(question), {"type": "text", "text": "What is that"}]
    tasks: dict[str, tuple[list[Any], list[str], dict[str, Any], list[Any]]] = {
        "speech to text": (
            [{"role": "user", "content": asked}],
            ["text"],
            {},
            [U, question, f"What is that{E}{A}<think>\n\n</think>\n"],
        ),
        "thinking": (
            [{"role": "user", "content": asked}],
            ["text"],
            {"enable_thinking": True},
            [U, question, f"What is that{E}{A}<think>\n"],
        ),
        "spoken dialogue": (
            [{"role": "system", "content": "Be brief"}, user, earlier, user],
            ["text", "audio"],
            {},
            [f"{U}Be brief\n\n", question, f"{E}{A}", ("I can see.", answer), f"{E}{U}", question, f"{E}{A}<|sostm|>"],
        ),
        "in context": (
            [{"role": "system", "content": "Convert the voice"}, user, earlier, user],
            ["text", "audio"],
            {"in_context": True},
            ["[Int]:Convert the voice\n", question, "\n", ("I can see.", answer), " \n\n", question, "\n<|sostm|>"],
        ),
    }

    async def ask(messages: list[Any], modalities: list[str], variables: dict[str, Any]) -> Any:
        return await client.chat.completions.create(
            model="tiny",
            messages=messages,
            modalities=modalities,
            audio={"voice": "default", "format": "wav"},
            extra_body={
                "return_token_ids": True,
                "sampling_params_list": PARAMS,
                "chat_template_kwargs": variables,
            },
        )

    answers = await asyncio.gather(*(ask(*task[:3]) for task in tasks.values()))
    for (name, (_, modalities, _, pieces)), response in zip(tasks.items(), answers, strict=True):
        pieces = [
            (one[0], heard(one[1])) if isinstance(one, tuple) else one if isinstance(one, str) else heard(one)
            for one in pieces
        ]
        prompt = served.prompt(*pieces)
        groups = served.model.generate(prompt, NUM_GROUPS, served.stop).groups
        assert response.prompt_token_ids == prompt.tokens.tolist(), name
        assert response.choices[0].token_ids == groups.tokens.tolist(), name
        message = response.choices[0].message
        assert (message.content is not None) == ("text" in modalities), name
        assert (message.audio is not None) == ("audio" in modalities), name
        if message.audio is not None:
            samples = decode("wav", base64.b64decode(message.audio.data))
            check_sound(served, groups, torch.from_numpy(samples.copy()).float(), ROUNDING)


@pytest.mark.parametrize("served", ["base"], indirect=True)
async def test_the_openai_client_gets_speech_whole_and_as_a_stream(served: Served, client: openai.AsyncOpenAI) -> None:
    said: dict[str, Any] = {"model": "tiny", "input": "Hello there", "voice": "default"}
    more = {"sampling_params_list": PARAMS}
    whole = await client.audio.speech.create(**said, response_format="wav", extra_body=more)
    expected = torch.from_numpy(decode("wav", whole.content).copy()).float()
    prompt = served.prompt(f"{U}Please convert this text to speech: Hello there{E}", f"{A}<|sostm|>")
    groups = served.model.generate(prompt, NUM_GROUPS, served.stop).groups
    check_sound(served, groups, expected, ROUNDING)
    create = client.audio.speech.with_streaming_response.create
    async with create(**said, response_format="pcm", extra_body={**more, "stream_format": "audio"}) as streamed:
        data = b"".join([piece async for piece in streamed.iter_bytes()])
    samples = torch.frombuffer(bytearray(data), dtype=torch.int16) / 32768
    torch.testing.assert_close(samples, expected, atol=ROUNDING, rtol=0)
    async with create(**said, response_format="pcm", extra_body={**more, "stream_format": "sse"}) as streamed:
        events = [line async for line in streamed.iter_lines() if line.startswith("data:")]
    done, num_frames = events[-1].replace(" ", ""), len(expected) // SAMPLES_PER_FRAME
    assert f'"input_tokens":{len(prompt)},' in done and f'"output_tokens":{num_frames},' in done


@pytest.mark.parametrize("served", ["base"], indirect=True)
async def test_the_server_rejects_what_the_model_cannot_do(served: Served, client: openai.AsyncOpenAI) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    short = sound(wave_of(0.001))
    for content, message in (
        ([picture], "image"),
        ([short], "the audio has"),
        ([{"type": "text", "text": "a<|empty|>"}, sound(wave_of(0.5))], "2 places for audio"),
    ):
        with pytest.raises(openai.BadRequestError) as rejected:
            await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": content}])
        assert message in str(rejected.value)
    two = {"role": "assistant", "content": [sound(wave_of(0.5)), sound(wave_of(0.5))]}
    with pytest.raises(openai.BadRequestError, match="2 sounds"):
        await client.chat.completions.create(model="tiny", messages=[two, {"role": "user", "content": "x"}])
    with pytest.raises(openai.BadRequestError, match="unknown voice"):
        await client.audio.speech.create(model="tiny", input="Hello", voice="alloy")
