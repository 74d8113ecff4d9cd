"""``POST /v1/videos/sync`` and ``/v1/audio/generate``: one video or sound, as the bytes of a file."""

from __future__ import annotations

import asyncio
import time

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from vllm_omni.entrypoints.openai.arrivals import deadline_of
from vllm_omni.entrypoints.openai.diffusion import DiffusionServing, InputImages, Values
from vllm_omni.entrypoints.openai.diffusion_protocol import SoundAnswer, SoundRequest, read_body
from vllm_omni.entrypoints.openai.results import Results
from vllm_omni.entrypoints.openai.videos import VideoMaker
from vllm_omni.media import find_format
from vllm_omni.media.audio import AUDIO_FORMATS, encode_audio


class OmniServingFiles:
    """Answers the routes whose answer is a file."""

    def __init__(self, serving: DiffusionServing, results: Results) -> None:
        self._serving = serving
        self._results = results
        self._maker = VideoMaker(serving)

    async def video(self, values: Values, raw_request: Request) -> Response:
        """Generate a video from a text and, where the pipeline accepts one, an image.

        Raises:
            InvalidRequest: names the field.
            StageFailed: the stage failed on the request.
        """
        made = await self._maker.make(self._maker.read(values), raw_request)
        return Response(made.file, media_type=made.media_type)

    async def sound(self, values: Values, raw_request: Request) -> Response:
        """Generate a sound from a text; raises as ``video``, and ``StorageFull``."""
        self._serving.check("audio")
        fields = read_body(SoundRequest, values)
        audio_format = find_format("audio", AUDIO_FORMATS, fields.response_format, "response_format")
        if fields.return_url:
            await self._results.check_room()
        output = await self._serving.answer(fields.input, fields, InputImages(), raw_request)
        media = output.multimodal_output
        async with deadline_of(fields.deadline_s, raw_request).limit("the encoding of the sound"):
            data = await asyncio.to_thread(encode_audio, media["audio"][0], media["sample_rate"], audio_format)
        if fields.return_url:
            kept = await self._results.keep(data, audio_format.media_type, raw_request)
            answer = SoundAnswer(created=int(time.time()), url=kept.url, expires_at=kept.expires_at)
            return JSONResponse(answer.model_dump())
        return Response(data, media_type=audio_format.media_type)
