"""Requests to the routes of media, in the form of vLLM's table of backends; ``bench load`` calls them, too."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import aiohttp
from tqdm import tqdm
from vllm.benchmarks.lib.endpoint_request_func import RequestFuncInput, RequestFuncOutput, _get_headers

from vllm_omni.entrypoints.bench.playback import Playback, WavStream

POLL_S = 0.05
DELETE_TIMEOUT_S = 5.0
JOB_ENDED = ("completed", "failed")


@dataclass
class MediaOutput(RequestFuncOutput):
    """What vLLM measures of a request, and the media of its answer."""

    playback: Playback = field(default_factory=Playback)
    num_images: int = 0
    num_videos: int = 0


Send = Callable[[RequestFuncInput, aiohttp.ClientSession, MediaOutput], Awaitable[None]]


class RequestRejected(Exception):
    """The server answered with an error."""


def measured(
    send: Send, outputs: list[MediaOutput], timeout_s: float | None = None
) -> Callable[..., Coroutine[Any, Any, RequestFuncOutput]]:
    """vLLM's interface over a function that fills in an output, and raises where the request fails.

    Args:
        outputs: receives those of all requests in the order of their starts.
        timeout_s: a request without an end by then has failed; None: vLLM's session has a limit.
    """

    async def request(
        request_func_input: RequestFuncInput, session: aiohttp.ClientSession, pbar: tqdm | None = None
    ) -> RequestFuncOutput:
        output = MediaOutput(prompt_len=request_func_input.prompt_len, start_time=time.perf_counter())
        outputs.append(output)
        try:
            async with asyncio.timeout(timeout_s):
                await send(request_func_input, session, output)
            output.success = True
        except TimeoutError:
            output.error = f"no end within {timeout_s:g} s" if timeout_s is not None else "the session timed out"
        except (aiohttp.ClientError, RequestRejected, ValueError, TypeError, LookupError) as exc:
            output.error = str(exc) or repr(exc)
        output.latency = time.perf_counter() - output.start_time
        first_at = output.playback.first_at
        output.ttft = output.ttft or (output.latency if first_at is None else first_at - output.start_time)
        if pbar is not None:
            pbar.update(1)
        return output

    return request


# -- what is sent ------------------------------------------------------------------------------------------------------


async def chat_with_speech(given: RequestFuncInput, session: aiohttp.ClientSession, output: MediaOutput) -> None:
    """``POST /v1/chat/completions``, streamed: text and speech."""
    body = {
        "messages": given.chat_messages or [{"role": "user", "content": given.prompt}],
        "modalities": ["text", "audio"],
        "audio": {"format": "wav"},
        **({"max_tokens": given.output_len} if given.output_len else {}),
        "ignore_eos": given.ignore_eos,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    sound, last_at = WavStream(), output.start_time
    async with Posted(session, given, body) as response:
        async for event in _events(response):
            now = time.perf_counter()
            if usage := event.get("usage"):
                output.output_tokens = usage.get("completion_tokens", 0)
            for choice in event.get("choices", ()):
                delta = choice.get("delta", {})
                if data := (delta.get("audio") or {}).get("data"):
                    output.playback.add(sound.add(base64.b64decode(data)), now)
                if text := delta.get("content"):
                    output.generated_text += text
                    if output.ttft:
                        output.itl.append(now - last_at)
                    else:
                        output.ttft = now - output.start_time
                    last_at = now


async def speech(given: RequestFuncInput, session: aiohttp.ClientSession, output: MediaOutput) -> None:
    """``POST /v1/audio/speech``, streamed; the first token is the first sound."""
    body = {"input": given.prompt, "response_format": "wav", "stream_format": "audio"}
    sound = WavStream()
    async with Posted(session, given, body) as response:
        async for data in response.content.iter_any():
            output.playback.add(sound.add(data), time.perf_counter())
    if output.playback.first_at is None:
        raise RequestRejected("the answer has no sound")
    output.output_tokens = 1


async def images(given: RequestFuncInput, session: aiohttp.ClientSession, output: MediaOutput) -> None:
    """``POST /v1/images/generations``, whole."""
    async with Posted(session, given, {"prompt": given.prompt}) as response:
        output.num_images = len((await response.json())["data"])
    output.output_tokens = output.num_images


async def videos(given: RequestFuncInput, session: aiohttp.ClientSession, output: MediaOutput) -> None:
    """``POST /v1/videos``, a job, until its video is complete; a job that is no longer awaited is deleted."""
    async with Posted(session, given, {"prompt": given.prompt}) as response:
        job = await response.json()
    url, headers = f"{given.api_url}/{job['id']}", _get_headers() | (given.extra_headers or {})
    try:
        while job["status"] not in JOB_ENDED:
            await asyncio.sleep(POLL_S)
            async with session.get(url, headers=headers) as response:
                await _check(response)
                job = await response.json()
    except BaseException:
        with suppress(aiohttp.ClientError, TimeoutError):
            async with asyncio.timeout(DELETE_TIMEOUT_S), session.delete(url, headers=headers):
                pass
        raise
    if job["status"] == "failed":
        raise RequestRejected(str(job["error"]))
    output.num_videos = output.output_tokens = 1


BACKENDS: dict[str, tuple[str, Send]] = {
    "omni-chat": ("/v1/chat/completions", chat_with_speech),
    "omni-speech": ("/v1/audio/speech", speech),
    "omni-images": ("/v1/images/generations", images),
    "omni-videos": ("/v1/videos", videos),
}
"""Backend -> its route, and what asks it."""


# -- how it is sent ----------------------------------------------------------------------------------------------------


class Posted:
    """A request to a route; entering it gives the response, or raises ``RequestRejected``."""

    def __init__(self, session: aiohttp.ClientSession, given: RequestFuncInput, body: dict[str, Any]) -> None:
        model = given.model_name or given.model
        headers = _get_headers("application/json") | (given.extra_headers or {})
        self._request = session.post(
            given.api_url, json={"model": model, **body, **(given.extra_body or {})}, headers=headers
        )

    async def __aenter__(self) -> aiohttp.ClientResponse:
        response = await self._request.__aenter__()
        await _check(response)
        return response

    async def __aexit__(self, *error: Any) -> None:
        await self._request.__aexit__(*error)


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status >= HTTPStatus.BAD_REQUEST:
        raise RequestRejected(f"HTTP {response.status}: {(await response.text())[:500]}")


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The events of a stream.

    Raises:
        RequestRejected: one of them is an error.
    """
    pending = b""
    async for data in response.content.iter_any():
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            text = line.removeprefix(b"data:").strip()
            if not line.startswith(b"data:") or text == b"[DONE]":
                continue
            event = json.loads(text)
            if "error" in event:
                raise RequestRejected(str(event["error"]))
            yield event
