"""``Arrivals``: a server that shuts down finishes requests that have arrived; deadlines count from their arrival."""

from __future__ import annotations

import asyncio
import time

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from starlette.middleware import Middleware
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_omni.engine.running import STOPPING, RunningRequests
from vllm_omni.entrypoints.deadline import Deadline
from vllm_omni.entrypoints.openai.errors import body_of
from vllm_omni.errors import ShuttingDown

MODEL_ROUTES = ("/v1/", "/v2/", "/cohere/", "/inference/", "/invocations", "/tokenize", "/detokenize")
"""Prefixes of the routes that run a model. Probes answer during a shutdown, and so do administrative routes: requests
that wait for ``/resume`` can still end."""


ARRIVED_AT = "arrived_at"


class Arrivals:
    """Counts requests to the model until their replies have been sent; answers 503 to those that are rejected.

    Their state has the time of their arrival, before the body, for ``deadline_of``.
    """

    def __init__(self, app: ASGIApp, requests: RunningRequests) -> None:
        self.app = app
        self._requests = requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope.get("method") != "POST" or not path.startswith(MODEL_ROUTES):
            await self.app(scope, receive, send)
            return
        scope.setdefault("state", {})[ARRIVED_AT] = time.monotonic()
        is_answered = False

        async def note(message: Message) -> None:
            nonlocal is_answered
            is_answered = True
            await send(message)

        try:
            with self._requests.arrive():
                await self.app(scope, receive, note)
                return
        except (ShuttingDown, asyncio.CancelledError):
            # The latter is the web server's, at its end: the request was still being read.
            if is_answered or not self._requests.is_draining:
                raise
        body = body_of(ShuttingDown(STOPPING))
        await JSONResponse(body, body["error"]["code"])(scope, receive, send)


def count_arrivals(app: FastAPI, requests: RunningRequests) -> None:
    """Count requests inside all other middleware, so that a rejection has the headers that these add."""
    app.user_middleware.append(Middleware(Arrivals, requests=requests))


def deadline_of(deadline_s: float | None, raw_request: HTTPConnection | None) -> Deadline:
    """The deadline of a request whose body has this field; without ``raw_request``, it has arrived now."""
    return Deadline(deadline_s, None if raw_request is None else raw_request.scope.get("state", {}).get(ARRIVED_AT))
