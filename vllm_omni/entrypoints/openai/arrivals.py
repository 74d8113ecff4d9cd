"""``Arrivals``: a server that shuts down finishes requests that have arrived; deadlines count from their arrival."""

from __future__ import annotations

import asyncio
import time

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from starlette.middleware import Middleware
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm.entrypoints.generate.base.serving import PRIORITY_HEADER

from vllm_omni.engine.running import STOPPING, RunningRequests
from vllm_omni.entrypoints.deadline import Deadline
from vllm_omni.entrypoints.openai.errors import body_of
from vllm_omni.entrypoints.openai.protocol import MAX_DEADLINE_S, MAX_PRIORITY, MIN_PRIORITY
from vllm_omni.errors import InvalidRequest, ShuttingDown

MODEL_ROUTES = ("/v1/", "/v2/", "/cohere/", "/inference/", "/invocations", "/tokenize", "/detokenize")
"""Prefixes of the routes that run a model. Probes answer during a shutdown, and so do administrative routes: requests
that wait for ``/resume`` can still end."""


ARRIVED_AT = "arrived_at"
DEADLINE_HEADER = "X-Deadline-S"
"""Seconds that a request has, for gateways that do not write bodies; the body's ``deadline_s`` wins."""


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
    """The deadline of a request whose body has this field; without it, that of the header ``DEADLINE_HEADER``.

    Args:
        raw_request: None: it has arrived now.

    Raises:
        InvalidRequest: it is not a number above 0.
    """
    if deadline_s is None and raw_request is not None and (given := raw_request.headers.get(DEADLINE_HEADER)):
        try:
            deadline_s = float(given)
        except ValueError:
            deadline_s = 0.0
        if not 0.0 < deadline_s <= MAX_DEADLINE_S:
            said = f"header {DEADLINE_HEADER}: {given!r}: must be seconds, above 0 and at most {MAX_DEADLINE_S:g}"
            raise InvalidRequest(said, param=DEADLINE_HEADER)
    return Deadline(deadline_s, None if raw_request is None else raw_request.scope.get("state", {}).get(ARRIVED_AT))


def priority_of(priority: int, raw_request: HTTPConnection) -> int:
    """The priority of a request whose body has this field: as for texts, vLLM's header wins, for gateways.

    Raises:
        InvalidRequest: the header is no 64-bit integer.
    """
    given = raw_request.headers.get(PRIORITY_HEADER)
    if given is None:
        return priority
    try:
        priority = int(given)
    except ValueError:
        priority = MAX_PRIORITY + 1
    if not MIN_PRIORITY <= priority <= MAX_PRIORITY:
        said = f"header {PRIORITY_HEADER}: {given[:80]!r}: must be an integer from -2**63 to 2**63 - 1"
        raise InvalidRequest(said, param=PRIORITY_HEADER)
    return priority
