"""``WebSocket /v1/audio/speech/stream``: speak a text that arrives in pieces; docs/http.md describes the messages."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from http import HTTPStatus
from typing import Any, TypeAlias

from fastapi import WebSocket, WebSocketDisconnect
from pydantic import ValidationError

from vllm_omni import envs
from vllm_omni.engine.running import RunningRequests
from vllm_omni.entrypoints.openai.errors import end_of_stream
from vllm_omni.entrypoints.openai.mistakes import invalid_body
from vllm_omni.entrypoints.openai.protocol import SpeechRequest
from vllm_omni.entrypoints.openai.speech import SpeechAnswer, as_events
from vllm_omni.errors import DeadlineExceeded, InvalidRequest
from vllm_omni.names import suggest

CONFIG, TEXT, END = "session.config", "input.text", "input.done"

NORMAL, REJECTED, FAILED, LATER = 1000, 1008, 1011, 1013
"""Codes of a connection's end: done, a client's mistake, a server's failure, to be tried again."""

Start: TypeAlias = Callable[[SpeechRequest, WebSocket, AsyncIterable[str]], Awaitable[SpeechAnswer]]
"""Checks a request, whose text follows."""


async def speak_stream(websocket: WebSocket, start: Start, requests: RunningRequests) -> None:
    """Serve one connection: one speech, and its end or its error as the last message."""
    await websocket.accept()
    with suppress(WebSocketDisconnect):  # the client has left
        try:
            with requests.arrive():
                await _speak(websocket, start)
        except WebSocketDisconnect:
            raise
        except Exception as exc:
            body = end_of_stream(exc, "streamed speech")
            await websocket.send_text(json.dumps({"type": "speech.audio.error", **body}))
            await websocket.close(close_code(body["error"]["code"]))
        else:
            await websocket.close(NORMAL)


def close_code(status: int) -> int:
    """The code of a connection's end after an error with an HTTP status."""
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        return LATER
    return REJECTED if status < HTTPStatus.INTERNAL_SERVER_ERROR else FAILED


async def _speak(websocket: WebSocket, start: Start) -> None:
    """Read text and send sound at the same time; the one's error ends the other.

    Raises:
        WebSocketDisconnect: the client has left.
        InvalidRequest: a message is wrong, or the text too long.
        DeadlineExceeded: no message came for too long, or the request's deadline has passed.
        StageFailed: a stage failed the speech.
    """
    text = StreamedText(websocket, envs.VLLM_OMNI_SPEECH_STREAM_IDLE_S, envs.VLLM_OMNI_MAX_STREAMED_CHARACTERS)
    request = await text.read_config()
    answer = await start(request, websocket, text.pieces())
    tasks = [asyncio.create_task(_send(websocket, answer, is_binary=request.stream_format == "audio"))]
    tasks.append(asyncio.create_task(text.read()))
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # the engines have released the request
        await answer.pieces.aclose()
    for task in tasks:
        if task in done:
            return task.result()


async def _send(websocket: WebSocket, answer: SpeechAnswer, *, is_binary: bool) -> None:
    if is_binary:
        async with aclosing(answer.pieces) as pieces:
            async for piece in pieces:
                await websocket.send_bytes(piece)
    async with aclosing(as_events(answer.pieces, answer.usage)) as events:  # of sound that was sent, the end alone
        async for event in events:
            await websocket.send_text(json.dumps(event))


class StreamedText:
    """The text in a client's messages.

    Args:
        idle_s: the longest time between two messages, up to the end of the text.
        max_characters: of the whole text, and so of what waits to be spoken.
    """

    def __init__(self, websocket: WebSocket, idle_s: float, max_characters: int) -> None:
        self._websocket = websocket
        self._idle_s = idle_s
        self._max_characters = max_characters
        self._num_characters = 0
        self._waiting = ""
        self._is_over = False
        self._changed = asyncio.Event()

    async def read_config(self) -> SpeechRequest:
        """The request, whose text follows."""
        message = await self._message()
        kind = message.pop("type")
        if kind != CONFIG:
            raise InvalidRequest(f"the first message has type {kind!r}: must be {CONFIG!r}", param="type")
        if "input" in message:
            raise InvalidRequest(f"input: the text follows, in messages of type {TEXT!r}; leave it out", param="input")
        try:
            return SpeechRequest.model_validate({"stream_format": "audio", **message, "input": ""})
        except ValidationError as exc:
            raise invalid_body(exc.errors(include_url=False), SpeechRequest) from None

    async def read(self) -> None:
        """Read the text, and then wait until the client leaves."""
        while not self._is_over:
            message = await self._message()
            kind = message.pop("type")
            if kind == TEXT:
                self._add(message.pop("text", None))
            elif kind == END:
                self._is_over = True
            else:
                raise InvalidRequest(f"a message has type {kind!r}: {suggest(str(kind), (TEXT, END))}", param="type")
            for name in message:
                raise InvalidRequest(f"a message of type {kind!r} has an unknown field {name!r}", param=name)
            self._changed.set()
        await self._receive()
        raise InvalidRequest(f"a message after {END!r}: each connection speaks one text; open another")

    async def pieces(self) -> AsyncIterator[str]:
        """The text as it comes; what has come meanwhile, at once."""
        while self._waiting or not self._is_over:
            piece, self._waiting = self._waiting, ""
            if piece:
                yield piece
            else:
                self._changed.clear()
                await self._changed.wait()

    def _add(self, piece: object) -> None:
        if not isinstance(piece, str):
            raise InvalidRequest(f"text: must be a string, not {type(piece).__name__}", param="text")
        self._num_characters += len(piece)
        if self._num_characters > self._max_characters:
            raise InvalidRequest(
                f"the text is longer than {self._max_characters} characters (VLLM_OMNI_MAX_STREAMED_CHARACTERS): "
                "open another connection for the rest",
                param="text",
            )
        self._waiting += piece

    async def _message(self) -> dict[str, Any]:
        """The next message, which has a type."""
        try:
            async with asyncio.timeout(self._idle_s):
                data = await self._receive()
        except TimeoutError as exc:
            said = f"no message for {self._idle_s:g} s (VLLM_OMNI_SPEECH_STREAM_IDLE_S)"
            raise DeadlineExceeded(f"{said}: end a text with a message of type {END!r}") from exc
        try:
            message = json.loads(data)
        except (ValueError, RecursionError) as exc:
            raise InvalidRequest(f"a message is not valid JSON: {exc}") from exc
        if not isinstance(message, dict) or "type" not in message:
            raise InvalidRequest("a message must be a JSON object with a type", param="type")
        return message

    async def _receive(self) -> str:
        message = await self._websocket.receive()
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message.get("code", NORMAL))
        text = message.get("text")
        if text is None:
            raise InvalidRequest("a message is binary: all of a client's are JSON")
        return str(text)
