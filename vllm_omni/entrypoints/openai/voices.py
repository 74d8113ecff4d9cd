"""``/v1/audio/voices``: the names of voices, and uploaded ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field
from starlette.datastructures import UploadFile

from vllm_omni.entrypoints.openai.diffusion import Values
from vllm_omni.entrypoints.openai.diffusion_protocol import read_body
from vllm_omni.entrypoints.openai.schema import BINARY, answers, describe
from vllm_omni.entrypoints.voice_cloning import VoiceCloner
from vllm_omni.errors import InvalidRequest, VoiceExists
from vllm_omni.speech.voices import StoredVoice, check_name

ROUTE = "/v1/audio/voices"
MAX_FILE_BYTES = 10 << 20  # OpenAI's limit
FORM = ("multipart/form-data",)


class VoiceUpload(BaseModel):
    """OpenAI's form for a voice, and the recording's transcript."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(description="Letters, digits, - and _; `voice` of a request names it.")
    ref_text: str = Field(
        default="", description="What the recording says. Without it, the timbre alone is cloned, less closely."
    )
    consent: str | None = Field(default=None, description="Kept with the voice: where its owner has consented.")
    type: Literal["audio_sample"] = "audio_sample"


class OmniServingVoices:
    """Answers the routes of uploaded voices.

    Args:
        names: of the other voices: the checkpoint's, and the deployment's.
    """

    def __init__(self, cloner: VoiceCloner, names: Callable[[], Iterable[str]]) -> None:
        self._cloner = cloner
        self._store = cloner.store
        self._names = names

    async def list(self) -> dict[str, Any]:
        """The names of voices, and what is known of those that were uploaded."""
        uploaded = [describe_voice(voice) for voice in await asyncio.to_thread(self._store.voices)]
        return {"voices": [*self._names(), *(one["name"] for one in uploaded)], "uploaded_voices": uploaded}

    async def create(self, values: Values) -> dict[str, Any]:
        """Store a voice: its name, a recording (audio_sample) and what it says (ref_text)."""
        file = values.pop("audio_sample", None)
        fields = read_body(VoiceUpload, values)
        name = check_name(fields.name)
        if name in {one.lower() for one in self._names()}:
            raise VoiceExists(f"name: {name!r} is a voice of the checkpoint: choose another name", param="name")
        recording = await _read_file(file)
        samples = await self._cloner.reader.read(recording, "audio_sample")
        transcript = fields.ref_text.strip()
        await self._cloner.encode(recording, samples, transcript)  # the first request then need not
        voice = await asyncio.to_thread(
            lambda: self._store.add(
                name,
                recording,
                seconds=self._cloner.seconds(samples),
                transcript=transcript,
                consent=fields.consent,
            )
        )
        return describe_voice(voice)

    async def delete(self, name: str) -> dict[str, Any]:
        """Delete an uploaded voice; requests that have started with it end as they would have."""
        voice = await asyncio.to_thread(self._store.delete, name)
        return {"id": voice.name, "object": "audio.voice.deleted", "deleted": True}


async def _read_file(file: Any) -> bytes:
    param = "audio_sample"
    if not isinstance(file, UploadFile):
        raise InvalidRequest(f"{param}: must be one file, with a recording of the voice", param=param)
    if (file.size or 0) > MAX_FILE_BYTES:
        raise InvalidRequest(f"{param}: the file has {file.size:,} bytes: at most {MAX_FILE_BYTES:,}", param=param)
    data = await file.read()
    if not data:
        raise InvalidRequest(f"{param}: the file is empty", param=param)
    return data


def describe_voice(voice: StoredVoice) -> dict[str, Any]:
    """A voice as OpenAI's API describes it, and what else is known of it."""
    return {
        "id": voice.name,
        "object": "audio.voice",
        "name": voice.name,
        "type": "audio_sample",
        "created_at": voice.created_at,
        "ref_text": voice.transcript,
        "consent": voice.consent,
        "seconds": round(voice.seconds, 3),
        "num_bytes": voice.num_bytes,
    }


def add_voice_routes(app: FastAPI, serving: OmniServingVoices) -> None:
    """Add the routes in front of those that list the voices of other models."""
    before = list(app.router.routes)
    app.add_api_route(ROUTE, serving.list, methods=["GET"], response_model=None)
    about = describe(VoiceUpload, FORM, {"audio_sample": BINARY}, required=["audio_sample"])
    said: dict[str, Any] = {"response_model": None, "responses": answers(errors=[HTTPStatus.CONFLICT])}
    app.add_api_route(ROUTE, serving.create, methods=["POST"], openapi_extra=about, **said)
    said["responses"] = answers()
    app.add_api_route(f"{ROUTE}/{{name}}", serving.delete, methods=["DELETE"], **said)
    ours = [route for route in app.router.routes if route not in before]
    app.router.routes[:] = [*ours, *before]
