"""``POST /v1/audio/speech/batch``: several texts to speech in one request; an error ends the item that has it."""

from __future__ import annotations

import asyncio
import base64
import logging
from typing import Any
from uuid import uuid4

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from pydantic import ValidationError

from vllm_omni.entrypoints.openai.errors import end_of_stream
from vllm_omni.entrypoints.openai.mistakes import invalid_body
from vllm_omni.entrypoints.openai.protocol import SpeechBatchRequest, SpeechRequest
from vllm_omni.entrypoints.openai.speech import OmniServingSpeech
from vllm_omni.errors import InvalidRequest
from vllm_omni.names import suggest

logger = logging.getLogger(__name__)

OF_THE_BODY = ("model", "deadline_s")
"""Fields that an item cannot have: they are about the whole request."""


async def create_batch(serving: OmniServingSpeech, batch: SpeechBatchRequest, raw_request: Request) -> Response:
    """Answer all items at once, in their order.

    Raises:
        InvalidRequest: a field beside the items is wrong.
    """
    shared = {"model": batch.model, "deadline_s": batch.deadline_s, **(batch.model_extra or {})}
    for name in shared:
        if name not in SpeechRequest.model_fields or name in ("input", "stream_format"):
            valid = [one for one in SpeechRequest.model_fields if one not in ("input", "stream_format")]
            raise InvalidRequest(f"unknown field {name!r}: {suggest(name, ['items', *valid])}", param=name)
    if (unknown_model := await serving.check_model(SpeechRequest(input="", model=batch.model))) is not None:
        return unknown_model
    requests = enumerate(batch.items)
    results = await asyncio.gather(*(_result(serving, shared, item, index, raw_request) for index, item in requests))
    num_failed = sum(result["error"] is not None for result in results)
    return JSONResponse(
        {
            "id": f"speech-batch-{uuid4().hex}",
            "results": results,
            "total": len(results),
            "succeeded": len(results) - num_failed,
            "failed": num_failed,
        }
    )


async def _result(
    serving: OmniServingSpeech, shared: dict[str, Any], item: dict[str, Any], index: int, raw_request: Request
) -> dict[str, Any]:
    result: dict[str, Any] = {
        "index": index,
        "status": "success",
        "audio_data": None,
        "media_type": None,
        "usage": None,
    }
    try:
        answer = await serving.start(_read_item(shared, item), raw_request, f"-{index}")
        data = await answer.read()
        audio = await asyncio.to_thread(lambda: base64.b64encode(data).decode())
    except Exception as exc:  # of this item alone
        return {**result, "status": "error", "error": end_of_stream(exc, f"item {index} of a batch of speech")["error"]}
    usage = {**answer.usage, "total_tokens": sum(answer.usage.values())}
    return {**result, "audio_data": audio, "media_type": answer.media_type, "usage": usage, "error": None}


def _read_item(shared: dict[str, Any], item: dict[str, Any]) -> SpeechRequest:
    for name in OF_THE_BODY:
        if name in item:
            raise InvalidRequest(f"{name}: give it beside the items, for all of them", param=name)
    if item.get("stream_format") is not None:
        raise InvalidRequest("stream_format: a batch is answered at once; leave it out", param="stream_format")
    try:
        return SpeechRequest.model_validate({**shared, **item})
    except ValidationError as exc:
        raise invalid_body(exc.errors(include_url=False), SpeechRequest) from None
