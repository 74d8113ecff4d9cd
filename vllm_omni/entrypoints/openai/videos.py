"""``VideoMaker``: generates a video and encodes it, for an answer or for a job."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any, NamedTuple

from fastapi import Request
from starlette.datastructures import UploadFile
from torch import Tensor

from vllm_omni.entrypoints.openai.arrivals import deadline_of
from vllm_omni.entrypoints.openai.diffusion import DiffusionServing, InputImages, as_list, read_mapping
from vllm_omni.entrypoints.openai.diffusion_protocol import VideoRequest, read_body, read_size
from vllm_omni.errors import InvalidRequest
from vllm_omni.media import find_format
from vllm_omni.media.video import DEFAULT_FPS, VIDEO_FORMATS, VideoFormat, encode_video
from vllm_omni.messages.outputs import OmniRequestOutput, collect

Notify = Callable[[OmniRequestOutput], Awaitable[None]]


class VideoOrder(NamedTuple):
    """A request for a video, as far as it can be checked before anything runs."""

    fields: VideoRequest
    images: InputImages
    video_format: VideoFormat

    @property
    def seconds(self) -> float | None:
        """How long the video will last; None: as the pipeline decides."""
        frames = self.fields.num_frames
        return None if frames is None else frames / (self.fields.fps or DEFAULT_FPS)


class MadeVideo(NamedTuple):
    """A video and its file."""

    frames: Tensor  # [T, H, W, 3]
    fps: int
    file: bytes
    media_type: str

    @property
    def size(self) -> str:
        _, height, width, _ = self.frames.shape
        return f"{width}x{height}"

    @property
    def seconds(self) -> float:
        return len(self.frames) / self.fps


class VideoMaker:
    """Makes the videos of one pipeline."""

    def __init__(self, serving: DiffusionServing) -> None:
        self.serving = serving

    def read(self, values: dict[str, Any], body: type[VideoRequest] = VideoRequest) -> VideoOrder:
        """Parse the fields of a request.

        Raises:
            InvalidRequest: names the field.
        """
        self.serving.check("video")
        read_mapping(values, "extra_params")
        given = [one for name in ("input_reference", "image_reference") for one in _references(values, name)]
        fields = read_body(body, values)
        read_size(fields.size)
        if fields.seconds is not None:
            if fields.num_frames is not None:
                raise InvalidRequest("seconds: cannot be combined with num_frames; give one of them", param="seconds")
            fields = fields.model_copy(
                update={"num_frames": max(round(fields.seconds * (fields.fps or DEFAULT_FPS)), 1)}
            )
        video_format = find_format("video", VIDEO_FORMATS, fields.output_format, "output_format")
        return VideoOrder(fields, InputImages(given), video_format)

    async def make(self, order: VideoOrder, raw_request: Request, notify: Notify | None = None) -> MadeVideo:
        """Generate and encode a video; cancelling it aborts what runs.

        Args:
            notify: awaited after each output of the engine.

        Raises:
            InvalidRequest: names the field.
            StageFailed: the stage failed on the request.
        """
        fields = order.fields
        outputs = self.serving.outputs(fields.prompt, fields, order.images, raw_request)
        output = await collect(outputs if notify is None else _notifying(outputs, notify))
        media = output.multimodal_output
        frames, fps = media["frames"][0], output.fps or DEFAULT_FPS
        sound = media["audio"][0] if "audio" in media else None
        args = frames, fps, order.video_format, sound, media.get("sample_rate")
        async with deadline_of(fields.deadline_s, raw_request).limit("the encoding of the video"):
            file = await asyncio.to_thread(encode_video, *args)
        return MadeVideo(frames, fps, file, order.video_format.media_type)


async def _notifying(
    outputs: AsyncGenerator[OmniRequestOutput, None], notify: Notify
) -> AsyncGenerator[OmniRequestOutput, None]:
    async with aclosing(outputs):
        async for output in outputs:
            await notify(output)
            yield output


def _references(values: dict[str, Any], name: str) -> list[tuple[str, Any]]:
    """Take the images of a field out of a body: files (OpenAI's form), URLs, or objects with one.

    Raises:
        InvalidRequest: one is something else.
    """
    if name == "image_reference" or str(values.get(name)).startswith("{"):
        read_mapping(values, name)
    given = []
    for one in as_list(values.pop(name, None)):
        if isinstance(one, Mapping):
            one = one.get("image_url")
            if not isinstance(one, str):
                raise InvalidRequest(f"{name}: must have an image_url", param=name)
        elif name == "image_reference" or not isinstance(one, UploadFile | str):
            raise InvalidRequest(f"{name}: must have an image_url", param=name)
        given.append((name, one))
    return given
