"""``FairKeys``: requests of different API keys take turns, however many one of them has sent.

Start-time fair queueing (Goyal, Vin and Cheng, 1996), with a request as the unit of work: each request gets a tag, and
engines run the lowest tag first. The tags of a key follow one another, so a burst of it stands behind what others send
later; a key that has been idle starts at the tag that is at work now, and gains nothing from its idleness. No request
waits forever: the tags of later ones are larger.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import TypeAlias

from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send
from vllm.entrypoints.generate.base.serving import PRIORITY_HEADER

from vllm_omni.entrypoints.openai.arrivals import MODEL_ROUTES


class FairShare:
    """Tags of requests. It holds nothing of keys that have no open request and no tag in advance of the others."""

    def __init__(self) -> None:
        self._now = 0  # the tag at work when the last open request ended
        self._next: dict[str, int] = {}  # key -> the tag of its next request
        self._open: dict[int, int] = {}  # tag -> number of open requests, the tags in any order

    @contextmanager
    def tag(self, key: str) -> Iterator[int]:
        """The tag of a request of a key, which is open inside the block."""
        self._now = now = min(self._open, default=self._now)
        for one in [one for one, tag in self._next.items() if tag <= now]:
            del self._next[one]
        tag = self._next.get(key, now)
        self._next[key] = tag + 1
        self._open[tag] = self._open.get(tag, 0) + 1
        try:
            yield tag
        finally:
            self._open[tag] -= 1
            if not self._open[tag]:
                del self._open[tag]
            if not self._open:
                self._now = max([self._now, *self._next.values()])
                self._next.clear()


Turns: TypeAlias = Callable[[str], AbstractAsyncContextManager[int]]
"""Gives the priority of a request of a key, which is open inside the block."""


def take_turns(share: FairShare) -> Turns:
    @asynccontextmanager
    async def turn(key: str) -> AsyncIterator[int]:
        with share.tag(key) as tag:
            yield tag

    return turn


class FairKeys:
    """Gives each request to a model the priority of its key's next tag, instead of one that it asks for."""

    def __init__(self, app: ASGIApp, turn: Turns) -> None:
        self.app = app
        self._turn = turn

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        is_request = scope.get("method") == "POST" or scope["type"] == "websocket"
        if not is_request or not path.startswith(MODEL_ROUTES):
            await self.app(scope, receive, send)
            return
        key = Headers(scope=scope).get("Authorization", "")
        async with self._turn(hashlib.sha256(key.encode()).hexdigest()) as tag:
            scope = {**scope, "headers": list(scope["headers"])}
            MutableHeaders(scope=scope)[PRIORITY_HEADER] = str(tag)
            await self.app(scope, receive, send)


def share_fairly(app: FastAPI, turn: Turns) -> None:
    """Do so inside all other middleware: of requests whose key has been checked."""
    app.user_middleware.append(Middleware(FairKeys, turn=turn))
