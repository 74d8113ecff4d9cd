"""``POST /v1/videos/sync`` and ``/v1/audio/generate``: one video or sound, as the bytes of a file."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from fastapi import Request
from fastapi.responses import Response

from vllm_omni.entrypoints.openai.arrivals import deadline_of
from vllm_omni.entrypoints.openai.diffusion import DiffusionServing, InputImages, Values, as_list, read_mapping
from vllm_omni.entrypoints.openai.diffusion_protocol import SoundRequest, VideoRequest, read_body
from vllm_omni.errors import InvalidRequest
from vllm_omni.media import find_format
from vllm_omni.media.audio import AUDIO_FORMATS, encode_audio
from vllm_omni.media.video import DEFAULT_FPS, VIDEO_FORMATS, encode_video


class OmniServingFiles:
    """Answers the routes whose answer is a file."""

    def __init__(self, serving: DiffusionServing) -> None:
        self._serving = serving

    async def video(self, values: Values, raw_request: Request) -> Response:
        """Generate a video from a text and, where the pipeline accepts one, an image.

        Raises:
            InvalidRequest: names the field.
            StageFailed: the stage failed on the request.
        """
        self._serving.check("video")
        for name in ("extra_params", "image_reference"):
            read_mapping(values, name)
        # OpenAI's form has a file, vLLM-Omni's JSON a URL.
        given = [("input_reference", one) for one in as_list(values.pop("input_reference", None))]
        for reference in as_list(values.pop("image_reference", None)):
            if not isinstance(reference, Mapping) or not isinstance(reference.get("image_url"), str):
                raise InvalidRequest("image_reference: must have an image_url", param="image_reference")
            given.append(("image_reference", reference["image_url"]))
        fields = read_body(VideoRequest, values)
        if fields.seconds is not None:
            if fields.num_frames is not None:
                raise InvalidRequest("seconds: cannot be combined with num_frames; give one of them", param="seconds")
            fields = fields.model_copy(
                update={"num_frames": max(round(fields.seconds * (fields.fps or DEFAULT_FPS)), 1)}
            )
        video_format = find_format("video", VIDEO_FORMATS, fields.output_format, "output_format")
        output = await self._serving.answer(fields.prompt, fields, InputImages(given), raw_request)
        media = output.multimodal_output
        sound = media["audio"][0] if "audio" in media else None
        args = media["frames"][0], output.fps or DEFAULT_FPS, video_format, sound, media.get("sample_rate")
        async with deadline_of(fields.deadline_s, raw_request).limit("the encoding of the video"):
            data = await asyncio.to_thread(encode_video, *args)
        return Response(data, media_type=video_format.media_type)

    async def sound(self, values: Values, raw_request: Request) -> Response:
        """Generate a sound from a text; raises as ``video``."""
        self._serving.check("audio")
        fields = read_body(SoundRequest, values)
        audio_format = find_format("audio", AUDIO_FORMATS, fields.response_format, "response_format")
        output = await self._serving.answer(fields.input, fields, InputImages(), raw_request)
        media = output.multimodal_output
        async with deadline_of(fields.deadline_s, raw_request).limit("the encoding of the sound"):
            data = await asyncio.to_thread(encode_audio, media["audio"][0], media["sample_rate"], audio_format)
        return Response(data, media_type=audio_format.media_type)
