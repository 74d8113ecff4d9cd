"""Errors in OpenAI's shape, whether a request's handler, pydantic or the web framework raised them."""

from __future__ import annotations

import json
import logging
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import HTTPException, RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException as RoutingError
from starlette.requests import ClientDisconnect
from starlette.routing import Match, Route
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import GenerationError

from vllm_omni.entrypoints.openai.mistakes import invalid_body
from vllm_omni.errors import (
    DeadlineExceeded,
    FileExpired,
    InvalidRequest,
    NotReady,
    OmniError,
    Overloaded,
    RequestTooLarge,
    Unavailable,
    UnknownFile,
    UnknownModel,
    UnknownRequest,
    UnknownVoice,
    VoiceExists,
    WrongSignature,
)
from vllm_omni.names import suggest

logger = logging.getLogger(__name__)

STATUS = {
    RequestTooLarge: HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    UnknownModel: HTTPStatus.NOT_FOUND,
    UnknownRequest: HTTPStatus.NOT_FOUND,
    UnknownVoice: HTTPStatus.NOT_FOUND,
    VoiceExists: HTTPStatus.CONFLICT,
    UnknownFile: HTTPStatus.NOT_FOUND,
    NotReady: HTTPStatus.CONFLICT,
    FileExpired: HTTPStatus.GONE,
    WrongSignature: HTTPStatus.FORBIDDEN,
    ValueError: HTTPStatus.BAD_REQUEST,  # the request is at fault
    Overloaded: HTTPStatus.TOO_MANY_REQUESTS,
    Unavailable: HTTPStatus.SERVICE_UNAVAILABLE,  # it may be tried again
    DeadlineExceeded: HTTPStatus.GATEWAY_TIMEOUT,
}
"""Class of an error -> its status, the first that fits; of others, 500."""


def add_error_handlers(app: FastAPI) -> None:
    """Answer these errors here; vLLM's own handlers answer its own."""
    app.exception_handler(OmniError)(_on_omni_error)
    app.exception_handler(RequestValidationError)(_on_validation_error)
    for error in (HTTPException, RoutingError):
        app.exception_handler(error)(_on_http_error)
    app.exception_handler(RecursionError)(_on_recursion_error)
    app.exception_handler(ClientDisconnect)(_on_disconnect)
    app.middleware_stack = None  # already built, without these handlers: have it built anew


def error_body(message: str, status: HTTPStatus, param: str | None = None) -> dict[str, Any]:
    kind = f"{status.phrase.replace(' ', '')}{'' if status.phrase.endswith('Error') else 'Error'}"
    body: dict[str, Any] = create_error_response(message, kind, status, param).model_dump()
    return body


def body_of(exc: Exception) -> dict[str, Any]:
    """The body for an error, vLLM's or ours."""
    if not isinstance(exc, OmniError):
        body: dict[str, Any] = create_error_response(exc).model_dump()
        return body
    status = next((status for cls, status in STATUS.items() if isinstance(exc, cls)), HTTPStatus.INTERNAL_SERVER_ERROR)
    return error_body(str(exc), status, exc.param if isinstance(exc, InvalidRequest) else None)


def end_of_stream(exc: Exception, what: str) -> dict[str, Any]:
    """Log an error of a reply that has started, which then ends with this body."""
    if isinstance(exc, GenerationError) and isinstance(exc.__cause__, OmniError):
        exc = exc.__cause__  # vLLM's class hides it from vLLM's handlers
    if isinstance(exc, InvalidRequest | Unavailable | DeadlineExceeded):
        logger.warning("%s: %s", what, exc)
    else:
        logger.error("%s failed while it was streamed", what, exc_info=exc)
    return body_of(exc)


def write_end_of_stream(exc: Exception, what: str) -> str:
    """The same in JSON."""
    return json.dumps(end_of_stream(exc, what))


async def _on_omni_error(_: Request, exc: Exception) -> JSONResponse:
    body = body_of(exc)
    headers = {"Retry-After": str(exc.retry_after_s)} if isinstance(exc, Overloaded) else None
    return JSONResponse(body, body["error"]["code"], headers)


async def _on_validation_error(raw_request: Request, exc: Exception) -> JSONResponse:
    assert isinstance(exc, RequestValidationError)
    route = raw_request.scope.get("route")
    field = route.body_field if isinstance(route, APIRoute) else None
    return await _on_omni_error(raw_request, invalid_body(exc.errors(), field and field.field_info.annotation))


async def _on_http_error(raw_request: Request, exc: Exception) -> JSONResponse:
    """Errors of the framework; the router's own say neither what exists nor what is allowed."""
    assert isinstance(exc, RoutingError)
    if isinstance(exc.__cause__, RecursionError):  # FastAPI's, while it read the body
        return await _on_recursion_error(raw_request, exc)
    if isinstance(exc.__cause__, OmniError):  # of a body that is too large
        return await _on_omni_error(raw_request, exc.__cause__)
    status, said, headers = HTTPStatus(exc.status_code), exc.detail, exc.headers
    path = raw_request.url.path
    if said == HTTPStatus.NOT_FOUND.phrase:
        paths = sorted({route.path for route in raw_request.app.routes if hasattr(route, "path")})
        said = f"there is no route {path}: {suggest(path, paths)}"
    elif status is HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = ", ".join(_methods_of(raw_request))  # the router's are those of the first route of the path alone
        said, headers = f"{raw_request.method} {path}: the method must be one of {allowed}", {"Allow": allowed}
    return JSONResponse(error_body(said, status), status, headers)


def _methods_of(raw_request: Request) -> list[str]:
    """The methods of all routes that have the path of a request."""
    routes = [route for route in raw_request.app.routes if isinstance(route, Route | APIRoute)]
    matching = [route for route in routes if route.matches(raw_request.scope)[0] is not Match.NONE]
    return sorted({method for route in matching for method in route.methods or ()})


async def _on_recursion_error(raw_request: Request, exc: Exception) -> JSONResponse:
    return await _on_omni_error(raw_request, InvalidRequest("the body is nested too deeply, or refers to itself"))


async def _on_disconnect(_: Request, __: Exception) -> Response:
    """The client disconnected before it had sent its whole body. Nobody reads this response."""
    return Response(status_code=HTTPStatus.BAD_REQUEST)
