"""Uploaded voices over HTTP, with OpenAI's client; an encoder of the test's in place of the stage."""

import re
from collections.abc import AsyncIterator
from types import SimpleNamespace

import httpx
import numpy as np
import openai
import pytest
from fastapi import FastAPI

from tests.entrypoints.test_voice_cloning import WAVE, Encoder, wav
from vllm_omni.engine.media_budget import MediaBudget
from vllm_omni.entrypoints.openai.errors import add_error_handlers
from vllm_omni.entrypoints.openai.voices import OmniServingVoices, add_voice_routes
from vllm_omni.entrypoints.voice_cloning import RecordingReader, VoiceCloner
from vllm_omni.speech.voices import Quota, VoiceStore

FILE = ("alice.wav", wav(), "audio/wav")


@pytest.fixture
def cloner(tmp_path) -> VoiceCloner:
    config = SimpleNamespace(allowed_local_media_path="", allowed_media_domains=None)
    store = VoiceStore(tmp_path / "voices", Quota(2, 250_000))
    return VoiceCloner(RecordingReader(config, MediaBudget(1 << 30, 8)), Encoder(), 4, store)


@pytest.fixture
async def http(cloner) -> AsyncIterator[httpx.AsyncClient]:
    app = FastAPI()
    app.add_api_route("/v1/audio/voices", lambda: {"voices": []})  # of models that do not clone
    add_voice_routes(app, OmniServingVoices(cloner, lambda: ["vivian", "Ryan"]))
    add_error_handlers(app)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        yield client


async def upload(http, name="alice", file=FILE, **fields) -> httpx.Response:
    return await http.post("/v1/audio/voices", data={"name": name, **fields}, files={"audio_sample": file})


async def test_a_voice_is_uploaded_listed_and_deleted(http, cloner):
    created = (await upload(http, "Alice", ref_text=" Hello. ", consent="cons_1")).json()
    assert created["created_at"] > 1_700_000_000
    assert created | {"created_at": 0} == {
        "id": "alice", "object": "audio.voice", "name": "alice", "type": "audio_sample", "created_at": 0,
        "ref_text": "Hello.", "consent": "cons_1", "seconds": 1.0, "num_bytes": len(wav()),
    }  # fmt: skip
    listed = (await http.get("/v1/audio/voices")).json()
    assert listed == {"voices": ["vivian", "Ryan", "alice"], "uploaded_voices": [created]}
    deleted = (await http.delete("/v1/audio/voices/Alice")).json()
    assert deleted == {"id": "alice", "object": "audio.voice.deleted", "deleted": True}
    assert (await http.get("/v1/audio/voices")).json() == {"voices": ["vivian", "Ryan"], "uploaded_voices": []}


async def test_an_uploaded_voice_is_encoded_before_its_first_request(http, cloner):
    await upload(http, ref_text="Hello.")
    assert (await cloner.clone("alice")).features.codes == b"codes"
    assert len(cloner._encode.calls) == 1


async def test_openais_client_reads_the_answers(http):
    client = openai.AsyncOpenAI(base_url="http://server/v1", api_key="none", http_client=http)
    voice = await client.audio.voices.create(name="alice", audio_sample=FILE, consent="cons_1")
    assert (voice.id, voice.object, voice.type) == ("alice", "audio.voice", "audio_sample")
    assert (await client.audio.voices.delete("alice")).deleted
    with pytest.raises(openai.NotFoundError, match="no uploaded voice 'alice'"):
        await client.audio.voices.delete("alice")


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({"file": ("a.txt", b"a text", "text/plain")}, 400, "audio_sample: the recording cannot be read"),
        ({"file": ("a.wav", b"", "audio/wav")}, 400, "audio_sample: the file is empty"),
        (
            {"file": ("a.wav", wav(np.zeros(600 * 4000, np.float32), 4000), "audio/wav")},
            400,
            "audio_sample: the recording lasts 600.0 s: at most 60 s",
        ),
        ({"file": ("a.wav", bytes((10 << 20) + 1), "audio/wav")}, 400, "the file has 10,485,761 bytes: at most"),
        ({"file": ("a.wav", wav(np.tile(WAVE, 3)), "audio/wav")}, 400, r"MAX_VOICE_BYTES\): send a shorter"),
        ({"name": "../alice"}, 400, "must be 1 to 64 letters.*for example 'alice'"),
        ({"name": "Vivian"}, 409, "'vivian' is a voice of the checkpoint"),
        ({"reftext": "Hello."}, 400, "unknown field 'reftext': did you mean 'ref_text'"),
        ({"type": "prompt"}, 400, "type = 'prompt': input should be 'audio_sample'"),
    ],
)
async def test_what_cannot_be_uploaded_is_rejected_and_leaves_nothing(fields, status, message, http, cloner):
    answer = await upload(http, **fields)
    assert answer.status_code == status, answer.text
    assert re.search(message, answer.json()["error"]["message"])
    assert not cloner.store.voices()


async def test_a_form_without_a_file_is_rejected(http):
    answer = await http.post("/v1/audio/voices", data={"name": "alice"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "audio_sample")


async def test_a_name_is_taken_once_and_the_quota_counts_voices(http):
    assert (await upload(http)).status_code == 200
    assert (await upload(http)).status_code == 409
    small = ("b.wav", wav(WAVE[:12000]), "audio/wav")
    assert (await upload(http, "bob", small)).status_code == 200
    answer = await upload(http, "carol", small)
    assert (answer.status_code, "2 uploaded voices, which is the limit" in answer.text) == (400, True)


@pytest.mark.parametrize("name", ["..%2Falice", "alice%2F..", "bob", ".lock", "%00"])
async def test_deleting_an_unknown_voice_is_a_404(name, http, cloner):
    await upload(http)
    answer = await http.delete(f"/v1/audio/voices/{name}")
    assert answer.status_code == 404
    assert [voice.name for voice in cloner.store.voices()] == ["alice"]
