"""``--api-key``: vLLM checks it on /v1 and a few other prefixes; here, on every route but those that only report."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Awaitable
from http import HTTPStatus

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send
from vllm import envs
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

from vllm_omni.entrypoints.openai.errors import error_body

SIGNED_ROUTES = "/v1/files/"
"""Without a key, too: the address has a signature, which the route checks."""
PAGE_FILES = "/omni/static/"
OPEN_ROUTES = (
    *("/health", "/ready", "/ping", "/metrics", "/version", "/load"),
    *("/docs", "/redoc", "/openapi.json", "/omni"),
)
"""Without a key: what probes, monitoring and readers of the documentation ask, and the page, which asks for it. None
of them runs a model."""
REJECTED = "the header Authorization: Bearer KEY is missing, or its key is not one of the server's (--api-key)"


class ApiKeys(AuthenticationMiddleware):
    """vLLM's check of the key, on all routes but open and signed ones, with errors in OpenAI's shape."""

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        is_request = scope["type"] in ("http", "websocket") and scope.get("method") != "OPTIONS"
        if not is_request or self._is_open(scope) or self.verify_token(Headers(scope=scope)):
            return self.app(scope, receive, send)
        status = HTTPStatus.UNAUTHORIZED
        return JSONResponse(error_body(REJECTED, status), status, {"WWW-Authenticate": "Bearer"})(scope, receive, send)

    @staticmethod
    def _is_open(scope: Scope) -> bool:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        return path.rstrip("/") in OPEN_ROUTES or path.startswith(("/docs/", "/static/", PAGE_FILES, SIGNED_ROUTES))


def require_api_keys(app: FastAPI, args: Namespace) -> bool:
    """Ask for the keys of ``--api-key`` or ``VLLM_API_KEY``; whether there are any.

    In place of vLLM's own check, which knows no signed addresses.
    """
    app.user_middleware[:] = [one for one in app.user_middleware if one.cls is not AuthenticationMiddleware]
    tokens = [key for key in (args.api_key or [envs.VLLM_API_KEY]) if key]
    if tokens:
        app.add_middleware(ApiKeys, tokens=tokens)
    return bool(tokens)
