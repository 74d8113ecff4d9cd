"""``Forwarding``: a front end has what concerns the server as a whole answered where the engines are."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from vllm_omni.entrypoints.front_ends.link import EngineLink
from vllm_omni.entrypoints.openai.api_keys import PAGE_FILES
from vllm_omni.entrypoints.openai.arrivals import MODEL_ROUTES

OWN_ROUTES = (*MODEL_ROUTES, PAGE_FILES, "/docs", "/redoc", "/static/", "/openapi.json", "/version", "/load")
"""Prefixes of what each front end answers by itself: requests to the model, documents, and its own load."""

OF_CONNECTIONS = frozenset({"connection", "content-length", "keep-alive", "transfer-encoding"})
"""Headers that concern one connection."""


class Forwarding:
    """Forwards health, metrics, traces, replicas and administration; a path without a route is not forwarded."""

    def __init__(self, app: ASGIApp, routes: list[BaseRoute], link: EngineLink) -> None:
        self.app = app
        self._routes = routes
        self._link = link

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._is_forwarded(scope):
            await self.app(scope, receive, send)
            return
        request = Request(scope, receive)
        url = scope["path"].removeprefix(scope.get("root_path", ""))
        if query := scope["query_string"].decode("latin-1"):
            url = f"{url}?{query}"
        answered = await self._link.forward(request.method, url, request.headers.items(), await request.body())
        response = Response(answered.body, answered.status)
        response.raw_headers = [
            (name.encode("latin-1"), value.encode("latin-1"))
            for name, value in (*answered.headers, ("content-length", str(len(answered.body))))
        ]
        await response(scope, receive, send)

    def _is_forwarded(self, scope: Scope) -> bool:
        if scope["type"] != "http":
            return False
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        return not path.startswith(OWN_ROUTES) and any(
            route.matches(scope)[0] is not Match.NONE for route in self._routes
        )


def forward_the_rest(app: FastAPI, link: EngineLink) -> None:
    """Forward all routes but ``OWN_ROUTES``, inside all other middleware."""
    app.user_middleware.append(Middleware(Forwarding, routes=list(app.router.routes), link=link))
