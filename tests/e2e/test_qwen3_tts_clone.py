"""Qwen3-TTS speaks in cloned voices through its graph, as the plain reference does: from recordings, from embeddings,
and from uploaded voices over HTTP.
"""

import asyncio
import base64
import io
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple

import httpx
import numpy as np
import openai
import pytest
import soundfile
import torch

from tests.e2e.engines import MARKS
from tests.engine_threads import engine_threads
from tests.reference.qwen3_tts import Reference, Voice
from tools.reference.qwen3_tts.waves import make_wave
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.entrypoints.cli.serve import parse_serve_args
from vllm_omni.entrypoints.openai.app import build_omni_app
from vllm_omni.errors import InvalidRequest
from vllm_omni.messages.outputs import OmniRequestOutput, collect
from vllm_omni.testing.qwen3_tts import build

pytestmark = [*MARKS, pytest.mark.timeout(600)]

WAVEFORM = 1e-4  # of the maximum
PCM = 1e-4  # of samples that were rounded to 16 bits
NUM_TOKENS = 16
GREEDY = {"talker": {"temperature": 0.0, "max_tokens": NUM_TOKENS}}
WAVE = make_wave(1.5, seed=1)
TEXT, TRANSCRIPT = "Hello there, you.", "One two."


def wav(samples: np.ndarray = WAVE) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, 24000, format="WAV", subtype="FLOAT")
    return file.getvalue()


class Served(NamedTuple):
    omni: AsyncOmni
    reference: Reference

    def voice(self, transcript: str | None, wave: np.ndarray = WAVE) -> Voice:
        return self.reference.voice(torch.from_numpy(wave), transcript)

    def expected(self, voice: Voice, text: str = TEXT, *, streaming: bool = True) -> torch.Tensor:
        """The reference's samples, without the last frame of a speech that the limit ends."""
        return self.reference.speak(text, max_tokens=NUM_TOKENS, voice=voice, streaming=streaming).wave


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path = build(tmp_path_factory.mktemp("clone"), variant="clone", seed=3)
    engine = {"dtype": "float32", "max_model_len": 512, "enforce_eager": True, "kv_cache_memory_bytes": 16 << 20}
    with engine_threads(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_OMNI_VOICES_DIR", str(tmp_path_factory.mktemp("data") / "voices"))
        omni = AsyncOmni(path, stage_overrides=[f"talker.{name}={value}" for name, value in engine.items()])
        yield Served(omni, Reference(path))
        omni.shutdown()


def check(samples: torch.Tensor, expected: torch.Tensor) -> None:
    assert len(samples) >= len(expected) > 0
    atol = WAVEFORM * float(expected.abs().max())
    torch.testing.assert_close(samples[: len(expected)], expected, atol=atol, rtol=0)


async def speak(served: Served, text: str = TEXT, **arguments: Any) -> OmniRequestOutput:
    return await collect(served.omni.speak(text, GREEDY, **arguments))


async def test_cloned_voices_of_a_batch_speak_as_the_reference(served: Served) -> None:
    whole = served.voice(TRANSCRIPT)
    other = make_wave(2.2, seed=2)
    cases: list[tuple[dict[str, Any], torch.Tensor]] = [
        ({"ref_audio": wav(), "ref_text": TRANSCRIPT}, served.expected(whole)),
        (
            {"ref_audio": (WAVE, 24000), "ref_text": TRANSCRIPT, "options": {"non_streaming_mode": True}},
            served.expected(whole, streaming=False),
        ),
        ({"ref_audio": base64.b64encode(wav()).decode()}, served.expected(served.voice(None))),
        ({"speaker_embedding": whole.x_vector.tolist()}, served.expected(served.voice(None))),
        ({"ref_audio": wav(other), "ref_text": "Three."}, served.expected(served.voice("Three.", other))),
    ]
    outputs = await asyncio.gather(*(speak(served, **arguments) for arguments, _ in cases))
    for (_, expected), output in zip(cases, outputs, strict=True):
        check(output.multimodal_output["audio"], expected)


async def test_a_voice_is_uploaded_spoken_with_and_deleted(served: Served, client: openai.AsyncOpenAI) -> None:
    voice = await client.audio.voices.create(
        name="Alice",
        audio_sample=("alice.wav", wav(), "audio/wav"),
        consent="cons_1",
        extra_body={"ref_text": TRANSCRIPT},
    )
    said: dict[str, Any] = {"model": "tiny", "input": TEXT, "response_format": "pcm"}
    more = {"sampling_params_list": GREEDY}
    url = f"data:audio/wav;base64,{base64.b64encode(wav()).decode()}"
    uploaded, named, given = await asyncio.gather(
        client.audio.speech.create(**said, voice=voice.id, extra_body=more),
        client.audio.speech.create(**said, voice={"id": "ALICE"}, extra_body=more),
        client.post(
            "/audio/speech",
            body={**said, **more, "ref_audio": url, "ref_text": TRANSCRIPT},
            cast_to=httpx.Response,
        ),
    )
    expected = served.expected(served.voice(TRANSCRIPT))
    for answer in (uploaded, named, given):
        samples = torch.frombuffer(bytearray(answer.content), dtype=torch.int16) / 32767
        torch.testing.assert_close(samples[: len(expected)], expected, atol=PCM, rtol=0)
    assert (await client.audio.voices.delete(voice.id)).deleted
    with pytest.raises(openai.BadRequestError, match="unknown voice 'alice'"):
        await client.audio.speech.create(**said, voice="alice")


REJECTED: list[tuple[dict[str, Any], str]] = [
    ({}, "no voice: this checkpoint speaks in cloned voices alone: give a recording"),
    ({"voice": "nobody"}, "unknown voice 'nobody'"),
    ({"ref_audio": "%%%"}, "ref_audio: the recording cannot be read"),
    ({"ref_audio": base64.b64encode(wav(WAVE[:2400])).decode()}, "a voice needs at least 0.5 s"),
    ({"ref_text": "x"}, "ref_text: it is the transcript of ref_audio, which is missing"),
    ({"ref_audio": "x", "voice": "alice"}, "ref_audio: cannot be combined with voice"),
    ({"speaker_embedding": [0.5]}, "speaker_embedding has 1 numbers: this model's have 96"),
    ({"ref_adio": "x"}, "did you mean 'ref_audio'?"),
]


@pytest.mark.parametrize("fields, message", REJECTED)
async def test_what_is_no_voice_is_a_400(client: openai.AsyncOpenAI, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError) as rejected:
        await client.post("/audio/speech", body={"input": TEXT, **fields}, cast_to=httpx.Response)
    assert message in str(rejected.value)


async def test_features_of_a_recording_need_no_talker(served: Served) -> None:
    voice = served.voice(TRANSCRIPT)
    assert served.omni.voices is not None
    cloned = await served.omni.voices.clone(ref_audio=(WAVE, 24000), ref_text=TRANSCRIPT)
    assert cloned is not None
    codes = np.frombuffer(cloned.features.codes, np.int16).reshape(cloned.features.num_frames, -1)
    assert codes.tolist() == voice.codes.tolist()
    with pytest.raises(InvalidRequest, match="is empty"):
        await speak(served, " ", ref_audio=wav())


@pytest.fixture
async def client(served: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    parsed = parse_serve_args([served.omni.config.model, "--served-model-name", "tiny", "--dtype", "float32"])
    transport = httpx.ASGITransport(await build_omni_app(served.omni, parsed.args), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, timeout=120) as http:
        yield openai.AsyncOpenAI(base_url="http://server/v1", api_key="none", http_client=http, max_retries=0)
