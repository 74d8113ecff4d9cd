"""``POST /v1/chat/completions`` of a diffusion pipeline: the last message is the prompt, the answer an image or sound.

An image is a content part ``image_url`` with a data URL, as from vLLM-Omni's server. No chat template and
no tokenizer are needed.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.utils import random_uuid

from vllm_omni.entrypoints.openai.arrivals import deadline_of
from vllm_omni.entrypoints.openai.diffusion import ROUTES, DiffusionServing, InputImages, Values
from vllm_omni.entrypoints.openai.diffusion_protocol import ImageChatRequest, read_body
from vllm_omni.entrypoints.openai.images import data_url, usage_of
from vllm_omni.entrypoints.openai.mistakes import check_fields
from vllm_omni.entrypoints.openai.protocol import IGNORED_FIELDS, AudioOutput
from vllm_omni.entrypoints.openai.sse import DONE, event
from vllm_omni.errors import InvalidRequest
from vllm_omni.media import find_format
from vllm_omni.media.audio import AUDIO_FORMATS, AudioFormat, encode_audio
from vllm_omni.media.image import IMAGE_FORMATS
from vllm_omni.messages.outputs import OmniRequestOutput


class OmniServingImageChat:
    """Answers the chat route with images or a sound."""

    def __init__(self, serving: DiffusionServing) -> None:
        self._serving = serving

    async def complete(self, values: Values, raw_request: Request) -> Response:
        """Raises:
        InvalidRequest: names the field.
        StageFailed: the stage failed on the request.
        """
        modality = self._serving.modality
        if modality == "video":
            raise InvalidRequest(f"video output is not available in chat: POST {ROUTES['video']}", param="model")
        fields = read_body(ImageChatRequest, values)
        check_fields(fields, {*ChatCompletionRequest.model_fields, *IGNORED_FIELDS})
        for wanted in fields.modalities or ():
            if wanted not in (modality, "text"):
                raise InvalidRequest(
                    f"modalities: {wanted!r}: the output of this model is {modality}", param="modalities"
                )
        if fields.modalities == ["text"]:
            raise InvalidRequest(f"modalities: the output of this model is {modality}, not text", param="modalities")
        audio_format = self._audio_format(fields)
        prompt, images = _read_messages(fields.messages)
        output = await self._serving.answer(prompt, fields, images, raw_request)
        async with deadline_of(fields.deadline_s, raw_request).limit("the encoding of the answer"):
            message = await asyncio.to_thread(_message, output, audio_format)
        head = {
            "id": f"chatcmpl-{random_uuid()}",
            "created": int(time.time()),
            "model": self._serving.model_name(fields),
        }
        if fields.stream:
            return StreamingResponse(_stream(head, message, modality), media_type="text/event-stream")
        tokens = usage_of(images, output.images if modality == "image" else [])
        usage = {
            "prompt_tokens": tokens["input_tokens"],
            "completion_tokens": tokens["output_tokens"],
            "total_tokens": tokens["total_tokens"],
        }
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
        return JSONResponse({**head, "object": "chat.completion", "choices": [choice], "usage": usage})

    def _audio_format(self, fields: ImageChatRequest) -> AudioFormat | None:
        """The format of the answer's sound; None: the answer is an image."""
        if self._serving.modality != "audio":
            if fields.audio is not None:
                said = f"audio: the output of this model is {self._serving.modality}; leave it out"
                raise InvalidRequest(said, param="audio")
            return None
        audio = fields.audio or AudioOutput()
        if audio.voice is not None:
            raise InvalidRequest(
                "audio.voice: the sounds of this model have no voices; leave it out", param="audio.voice"
            )
        return find_format("audio", AUDIO_FORMATS, audio.format, "audio.format")


def _read_messages(messages: Sequence[Mapping[str, Any]]) -> tuple[str, InputImages]:
    """Find text and images of the user's last message; earlier messages are ignored."""
    said = [message for message in messages if message.get("role") == "user"]
    if not said:
        raise InvalidRequest("messages: there is no message of the user", param="messages")
    content = said[-1].get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise InvalidRequest("messages: content must be a text or a list of parts", param="messages")
    texts, images = [], []
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif kind == "image_url":
            url = part.get("image_url")
            images.append(("messages", url.get("url") if isinstance(url, Mapping) else url))
        else:
            raise InvalidRequest(f"messages: a part of type {kind!r}: must be text or image_url", param="messages")
    return "\n".join(texts), InputImages(images)


def _message(output: OmniRequestOutput, audio_format: AudioFormat | None) -> dict[str, Any]:
    if audio_format is None:
        urls = [data_url(image, IMAGE_FORMATS["png"]) for image in output.images]
        content = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        return {"role": "assistant", "content": content}
    media = output.multimodal_output
    data = encode_audio(media["audio"][0], media["sample_rate"], audio_format)
    audio = {"id": f"audio-{random_uuid()}", "data": base64.b64encode(data).decode(), "transcript": ""}
    return {"role": "assistant", "content": None, "audio": audio | {"expires_at": int(time.time())}}


async def _stream(head: Mapping[str, Any], message: Mapping[str, Any], modality: str) -> AsyncGenerator[str, None]:
    """Stream the message as one chunk, then the end."""
    for delta, reason in ((message, None), ({}, "stop")):
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        yield event({**head, "object": "chat.completion.chunk", "choices": [choice], "modality": modality})
    yield DONE
