"""``BodyLimits``: bodies of requests are counted while they arrive, and not read beyond their limits."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from fastapi import FastAPI, Request
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_omni.engine.received import ReceivedBytes, ReceivedShare

RECEIVED = "received"


class BodyLimits:
    """Counts what a request has sent from its first byte until its reply has been sent: the framework keeps the body.

    Of a form, files of more than a megabyte lie on disk meanwhile, without a name, and count the same. A handler that
    reads the body gets the error, so that it is answered as any other; a body that no handler reads costs nothing.
    """

    def __init__(self, app: ASGIApp, received: ReceivedBytes) -> None:
        self.app = app
        self._received = received

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "")
        share = self._received.body()
        with share.held():
            scope.setdefault("state", {})[RECEIVED] = share

            async def count() -> Message:
                if declared.isdecimal():
                    share.check(int(declared))
                message = await receive()
                if body := message.get("body"):
                    share.add(len(body))
                return message

            await self.app(scope, count, send)


def limit_bodies(app: FastAPI, received: ReceivedBytes) -> None:
    """Limit the bodies of all requests, inside all other middleware: one that these reject is not read."""
    app.user_middleware.append(Middleware(BodyLimits, received=received))


def body_held(raw_request: Request) -> AbstractContextManager[None]:
    """Count the body of a request during the block, also beyond the reply: of a job, which has parts of it."""
    share: ReceivedShare | None = raw_request.scope.get("state", {}).get(RECEIVED)
    return nullcontext() if share is None else share.held()
