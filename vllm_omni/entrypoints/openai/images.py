"""``POST /v1/images/generations`` and ``/v1/images/edits``: OpenAI's routes, as one answer or as a stream of events."""

from __future__ import annotations

import asyncio
import base64
import math
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from PIL import Image
from vllm.entrypoints.serve.utils.sse_keep_alive import with_sse_keep_alive

from vllm_omni.entrypoints.deadline import Deadline
from vllm_omni.entrypoints.openai.arrivals import deadline_of
from vllm_omni.entrypoints.openai.diffusion import DiffusionServing, InputImages, Values, as_list, read_mapping
from vllm_omni.entrypoints.openai.diffusion_protocol import ImageAnswer, ImageRequest, ImagesAnswer, read_body
from vllm_omni.entrypoints.openai.errors import end_of_stream
from vllm_omni.entrypoints.openai.results import Results
from vllm_omni.entrypoints.openai.schema import BINARY
from vllm_omni.entrypoints.openai.sse import chain, event
from vllm_omni.errors import InvalidRequest
from vllm_omni.media import find_format
from vllm_omni.media.image import IMAGE_FORMATS, ImageFormat, encode_image
from vllm_omni.messages.outputs import OmniRequestOutput

IMAGE_FIELDS = ("image", "images", "url")
"""Fields in which a request to edit may have its images."""
IMAGE_SCHEMAS = {
    name: {"description": "One or several files or URLs, or objects `{image_url: URL}`.", "anyOf": [BINARY, {}]}
    for name in IMAGE_FIELDS
}


class OmniServingImages:
    """Answers the image routes.

    Args:
        sse_keep_alive_s: send a comment after this many seconds without an event; 0: never.
    """

    def __init__(self, serving: DiffusionServing, results: Results, sse_keep_alive_s: float = 0.0) -> None:
        self._serving = serving
        self._results = results
        self._sse_keep_alive_s = sse_keep_alive_s

    async def generate(self, values: Values, raw_request: Request) -> Response:
        """Generate images from a text. Invalid requests are rejected before the answer starts, streamed or not.

        Raises:
            InvalidRequest: names the field.
            StageFailed: the stage failed before the answer started.
        """
        for name in IMAGE_FIELDS:
            if name in values:
                raise InvalidRequest(f"{name}: images are read by POST /v1/images/edits", param=name)
        return await self._respond(read_body(ImageRequest, values), InputImages(), raw_request, "image_generation")

    async def edit(self, values: Values, raw_request: Request) -> Response:
        """Generate images from a text and images; otherwise as ``generate``."""
        self._serving.check("image")
        if values.pop("mask", None) is not None:
            raise InvalidRequest("mask: not supported; say in the prompt what to change", param="mask")
        given = [(name, one) for name in IMAGE_FIELDS for one in as_list(values.pop(name, None))]
        if not given:
            raise InvalidRequest("image: missing: at least one image is needed", param="image")
        read_mapping(values, "extra_params")
        fields = read_body(ImageRequest, values)
        images = InputImages([(name, _source(one, name)) for name, one in given])
        return await self._respond(fields, images, raw_request, "image_edit")

    async def _respond(self, fields: ImageRequest, images: InputImages, raw_request: Request, kind: str) -> Response:
        self._serving.check("image")
        image_format = find_format("image", IMAGE_FORMATS, fields.output_format, "output_format")
        if not fields.stream and (fields.partial_images or fields.progress):
            name = "partial_images" if fields.partial_images else "progress"
            raise InvalidRequest(f"{name}: only in a stream; set stream, too", param=name)
        by_url = fields.response_format == "url"
        if by_url and fields.stream:
            said = "response_format = 'url': a stream has its images in base64; leave out one of the two"
            raise InvalidRequest(said, param="response_format")
        if by_url:
            await self._results.check_room()
        deadline = deadline_of(fields.deadline_s, raw_request)
        if fields.stream:
            outputs = self._serving.outputs(fields.prompt, fields, images, raw_request)
            outputs = chain(await anext(outputs), outputs)
            events = with_sse_keep_alive(
                self._events(outputs, fields, images, image_format, kind, deadline), self._sse_keep_alive_s
            )
            return StreamingResponse(events, media_type="text/event-stream")
        output = await self._serving.answer(fields.prompt, fields, images, raw_request)
        pictures = output.images
        async with deadline.limit("the encoding of the images"):
            files = await asyncio.to_thread(_encode_all, pictures, image_format, fields.output_compression)
        expires_at = None
        if by_url:
            kept = [await self._results.keep(one, image_format.media_type, raw_request) for one in files]
            data, expires_at = [ImageAnswer(url=one.url) for one in kept], kept[0].expires_at
        else:
            data = [ImageAnswer(b64_json=base64.b64encode(one).decode()) for one in files]
        answer = ImagesAnswer(
            created=int(time.time()),
            data=data,
            output_format=fields.output_format,
            size=_size(pictures[0]),
            usage=usage_of(images, pictures),
            expires_at=expires_at,
        )
        return JSONResponse(answer.model_dump(exclude_none=True))

    @staticmethod
    async def _events(
        outputs: AsyncGenerator[OmniRequestOutput, None],
        fields: ImageRequest,
        given: InputImages,
        image_format: ImageFormat,
        kind: str,
        deadline: Deadline,
    ) -> AsyncGenerator[str, None]:
        num_partial = 0

        async def write(name: str, image: Image.Image, **more: Any) -> str:
            async with deadline.limit("the encoding of an image"):
                (file,) = await asyncio.to_thread(_encode_all, [image], image_format, fields.output_compression)
            about = {"size": _size(image), "quality": "auto", "background": "opaque"}
            encoded = base64.b64encode(file).decode()
            return _event(f"{kind}.{name}", b64_json=encoded, output_format=fields.output_format, **about, **more)

        async with aclosing(outputs):
            try:
                async for output in outputs:
                    if fields.progress and output.progress is not None:
                        yield _event(f"{kind}.progress", **output.progress._asdict())
                    preview = output.preview
                    if preview is not None and num_partial < fields.partial_images:
                        yield await write("partial_image", preview, partial_image_index=num_partial)
                        num_partial += 1
                    for image in output.images:
                        yield await write("completed", image, usage=usage_of(given, [image]))
            except Exception as exc:  # the answer has started, so it ends with the error
                yield event({"type": "error", **end_of_stream(exc, "an image")}, "error")


TOKEN_SIDE = 16
"""Pixels along the side of the square that counts as a token: as most denoisers see an image."""


def usage_of(given: InputImages, made: Sequence[Image.Image]) -> dict[str, Any]:
    """Usage in OpenAI's form, in squares of pixels; a diffusion pipeline counts no tokens of text."""
    num_given, num_made = (sum(map(_num_squares, sizes)) for sizes in (given.sizes, [one.size for one in made]))
    return {
        "input_tokens": num_given,
        "input_tokens_details": {"image_tokens": num_given, "text_tokens": 0},
        "output_tokens": num_made,
        "total_tokens": num_given + num_made,
    }


def _num_squares(size: tuple[int, int]) -> int:
    width, height = size
    return math.ceil(width / TOKEN_SIDE) * math.ceil(height / TOKEN_SIDE)


def data_url(image: Image.Image, image_format: ImageFormat) -> str:
    """Encode an image as a data URL."""
    data = base64.b64encode(encode_image(image, image_format)).decode()
    return f"data:{image_format.media_type};base64,{data}"


def _source(given: Any, field: str) -> Any:
    """The file or URL in an entry of ``IMAGE_FIELDS``, which may be OpenAI's object ``{"image_url": URL}``."""
    if not isinstance(given, Mapping):
        return given
    url = given.get("image_url")
    url = url.get("url") if isinstance(url, Mapping) else url
    if not isinstance(url, str):
        raise InvalidRequest(f"{field}: an object must have an image_url", param=field)
    return url


def _encode_all(images: Sequence[Image.Image], image_format: ImageFormat, quality: int | None) -> list[bytes]:
    return [encode_image(image, image_format, quality) for image in images]


def _size(image: Image.Image) -> str:
    return f"{image.width}x{image.height}"


def _event(name: str, **values: Any) -> str:
    return event({"type": name, "created_at": int(time.time()), **values}, name)
