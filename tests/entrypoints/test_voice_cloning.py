"""The voice of a request: where it comes from, what is rejected, and what is encoded again."""

import base64
import io
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile

from tools.reference.qwen3_tts.waves import make_wave
from vllm_omni.engine.media_budget import MediaBudget
from vllm_omni.entrypoints.voice_cloning import RecordingReader, VoiceCloner, VoiceFeatures
from vllm_omni.errors import InvalidRequest
from vllm_omni.speech.voices import Quota, VoiceStore

WAVE = make_wave(1.0, seed=1)


def wav(samples: np.ndarray = WAVE, rate: int = 24000) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format="WAV", subtype="FLOAT")
    return file.getvalue()


def data_url(data: bytes) -> str:
    return f"data:audio/wav;base64,{base64.b64encode(data).decode()}"


class Encoder:
    """In place of the stage: counts, and answers with what it was asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[np.ndarray, bool]] = []

    async def __call__(self, samples: np.ndarray, with_codes: bool) -> VoiceFeatures:
        self.calls.append((samples, with_codes))
        return VoiceFeatures(b"vector", b"codes" if with_codes else b"", 13 if with_codes else 0)


@pytest.fixture
def encoder() -> Encoder:
    return Encoder()


@pytest.fixture
def cloner(tmp_path, encoder) -> VoiceCloner:
    config = SimpleNamespace(allowed_local_media_path="", allowed_media_domains=["voices.example"])
    reader = RecordingReader(config, MediaBudget(1 << 30, 8))
    return VoiceCloner(reader, encoder, 4, VoiceStore(tmp_path / "voices", Quota(8, 1 << 20)))


@pytest.mark.parametrize(
    "given",
    [data_url(wav()), base64.b64encode(wav()).decode(), wav(), (WAVE, 24000)],
    ids=["data-url", "base64", "bytes", "samples"],
)
async def test_a_recording_is_read_from_any_form(given, cloner, encoder):
    voice = await cloner.clone(ref_audio=given, ref_text="Hello.")
    assert (voice.transcript, voice.features.codes) == ("Hello.", b"codes")
    ((samples, with_codes),) = encoder.calls
    assert with_codes
    assert np.array_equal(samples, WAVE)


async def test_a_recording_without_a_transcript_gives_the_timbre_alone(cloner, encoder):
    voice = await cloner.clone(ref_audio=data_url(wav()))
    assert (voice.transcript, voice.features) == ("", VoiceFeatures(b"vector"))
    assert not encoder.calls[0][1]


async def test_the_same_recording_is_encoded_once_for_each_need(cloner, encoder):
    for text in (None, None, "Hello.", "Other.", None):
        await cloner.clone(ref_audio=data_url(wav()), ref_text=text)
    assert [with_codes for _, with_codes in encoder.calls] == [False, True]
    await cloner.clone(ref_audio=data_url(wav(WAVE / 2)))
    assert len(encoder.calls) == 3


async def test_an_uploaded_voice_is_found_by_its_name_and_encoded_once(cloner, encoder):
    cloner.store.add("alice", wav(), seconds=1, transcript="Hello.")
    for name in ("alice", "Alice"):
        voice = await cloner.clone(name)
        assert voice.transcript == "Hello."
    assert len(encoder.calls) == 1
    assert await cloner.clone("bob") is None


async def test_an_embedding_is_a_voice(cloner, encoder):
    voice = await cloner.clone(speaker_embedding=[1, 2.5, 0, -1])
    assert np.frombuffer(voice.features.x_vector, np.float32).tolist() == [1, 2.5, 0, -1]
    assert not encoder.calls


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ref_audio": wav(), "speaker_embedding": [0] * 4}, "speaker_embedding: cannot be combined with ref_audio"),
        ({"name": "alice", "ref_audio": wav()}, "ref_audio: cannot be combined with voice"),
        ({"ref_text": "Hello."}, "ref_text: it is the transcript of ref_audio, which is missing"),
        ({"speaker_embedding": [0.0] * 3}, "speaker_embedding has 3 numbers: this model's have 4"),
        ({"speaker_embedding": [0.0, 0.0, 0.0, float("nan")]}, "speaker_embedding: must be finite numbers"),
        ({"ref_audio": b""}, "ref_audio: the recording cannot be read"),
        ({"ref_audio": b"no sound at all, but a text"}, "ref_audio: the recording cannot be read"),
        ({"ref_audio": "%%%"}, "ref_audio: the recording cannot be read"),
        ({"ref_audio": "http://127.0.0.1:1/x.wav"}, "ref_audio: the recording cannot be read.*voices.example"),
        ({"ref_audio": "file:///etc/passwd"}, "ref_audio: the recording cannot be read"),
        ({"ref_audio": wav(np.zeros((4800, 1), np.float32))}, "lasts 0.20 s: a voice needs at least 0.5 s"),
        ({"ref_audio": wav(np.zeros(61 * 8000, np.float32), 8000)}, "lasts 61.0 s: at most 60 s are read"),
    ],
)
async def test_what_is_no_voice_is_rejected(given, message, cloner, encoder):
    with pytest.raises(InvalidRequest, match=message):
        await cloner.clone(given.pop("name", None), **given)
    assert not encoder.calls


async def test_an_unknown_voice_is_rejected_with_the_nearest_of_all(cloner):
    await cloner.check_known("alise", [])  # where none was uploaded, the model says what it needs
    cloner.store.add("alice", b"", seconds=1)
    await cloner.check_known("vivian", ["vivian"])
    with pytest.raises(InvalidRequest, match=r"did you mean 'alice'\? valid: vivian, alice"):
        await cloner.check_known("alise", ["vivian"])
