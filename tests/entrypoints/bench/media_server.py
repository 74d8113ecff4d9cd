"""A small HTTP server whose answers have the shapes of the real one, made with its own classes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from aiohttp import web

from vllm_omni.entrypoints.openai.chat_stream import ChatStreamWriter
from vllm_omni.entrypoints.openai.diffusion_protocol import ImageAnswer, ImagesAnswer
from vllm_omni.entrypoints.openai.video_protocol import Video
from vllm_omni.media.audio import AUDIO_FORMATS, AudioEncoder

SAMPLE_RATE = 24_000
PIECE_S = 0.5
NUM_PIECES = 4
START_S = 10.0
HEAD = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "tiny"}


@dataclass
class MediaServer:
    """What it does, and what it was asked.

    Attributes:
        fails: whether the request of this number, from 0, is answered with an error.
        num_awaited: answers wait until so many requests have arrived.
        ends_videos: False: jobs remain in progress.
        requests: route and body of each.
        num_polls: how often a video's status was asked for.
    """

    url: str = ""
    fails: set[int] = field(default_factory=set)
    num_awaited: int = 0
    ends_videos: bool = True
    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    num_polls: int = 0
    _all_here: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [body for _, body in self.requests]

    def make_app(self) -> web.Application:
        @web.middleware
        async def receive(request: web.Request, handler: Any) -> web.StreamResponse:
            return await self._receive(request, handler)

        app = web.Application(middlewares=[receive])
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/audio/speech", self._speech)
        app.router.add_post("/v1/images/generations", self._images)
        app.router.add_post("/v1/videos", self._video)
        app.router.add_get("/v1/videos/{id}", self._status)
        app.router.add_delete("/v1/videos/{id}", self._delete)
        return app

    async def _receive(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.method != "POST":
            return await handler(request)
        number = len(self.requests)
        self.requests.append((request.path, await request.json()))
        self.headers.append(dict(request.headers))
        if len(self.requests) >= self.num_awaited:
            self._all_here.set()
        await self._all_here.wait()
        if number in self.fails:
            error = {"message": "too many requests", "type": "TooManyRequests", "param": None, "code": 429}
            return web.json_response({"error": error}, status=429)
        return await handler(request)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "tiny", "object": "model"}]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        writer = ChatStreamWriter("audio-1", wants_text=True)
        writer._head = HEAD
        for word in ("Hello", " there"):
            await response.write(writer.delta({"content": word}).encode())
        encoder = AudioEncoder(AUDIO_FORMATS["wav"], SAMPLE_RATE, is_stream=True)
        for _ in range(NUM_PIECES):
            if line := writer.audio(encoder.encode(silence())):
                await response.write(line.encode())
        await response.write(writer.end_of_audio(encoder.finish()).encode())
        await response.write(writer.delta({}, "stop").encode() + b"data: [DONE]\n\n")
        return response

    async def _speech(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "audio/wav"})
        await response.prepare(request)
        encoder = AudioEncoder(AUDIO_FORMATS["wav"], SAMPLE_RATE, is_stream=True)
        for _ in range(NUM_PIECES):
            await response.write(encoder.encode(silence()))
        await response.write(encoder.finish())
        return response

    async def _images(self, request: web.Request) -> web.Response:
        number = self.requests[-1][1].get("n", 1)
        data = [ImageAnswer(b64_json="iVBORw0KGgo=")] * number
        answer = ImagesAnswer(created=1, data=data, output_format="png", size="64x64", usage={})
        return web.json_response(answer.model_dump())

    async def _video(self, request: web.Request) -> web.Response:
        return web.json_response(_video("queued"))

    async def _status(self, request: web.Request) -> web.Response:
        self.num_polls += 1
        return web.json_response(_video("completed" if self.ends_videos else "in_progress"))

    async def _delete(self, request: web.Request) -> web.Response:
        self.deleted.append(request.match_info["id"])
        return web.json_response({"id": self.deleted[-1], "object": "video.deleted", "deleted": True})


def silence() -> torch.Tensor:
    return torch.zeros(int(PIECE_S * SAMPLE_RATE))


def _video(status: Any) -> dict[str, Any]:
    return Video(id="video_1", status=status, model="tiny", prompt="A cat.", created_at=1).model_dump()


@contextmanager
def serve_media() -> Iterator[MediaServer]:
    """Serve in a thread of its own, as the client has an event loop of its own."""
    server, is_up = MediaServer(), threading.Event()
    loop = asyncio.new_event_loop()

    async def run() -> None:
        runner = web.AppRunner(server.make_app(), handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        server.url = f"http://{host}:{port}"
        is_up.set()
        try:
            await stopped.wait()
        finally:
            await runner.cleanup()

    stopped = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(run()))
    thread.start()
    try:
        assert is_up.wait(START_S)
        yield server
    finally:
        loop.call_soon_threadsafe(stopped.set)
        thread.join(START_S)
        assert not thread.is_alive()
        loop.close()


def wait_for(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_S
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.01)
