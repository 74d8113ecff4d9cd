"""Errors in OpenAI's shape, whether a request's handler, pydantic or the web framework raised them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from inspect import isclass
from reprlib import Repr
from typing import Any, get_args

from fastapi import FastAPI, Request
from fastapi.exceptions import HTTPException, RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException as RoutingError
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.exception_handling.handlers.validation import clean_loc_for_param
from vllm.exceptions import RetryableRequestError

from vllm_omni.errors import DeadlineExceeded, InvalidRequest, OmniError, Unavailable, UnknownModel
from vllm_omni.names import suggest

logger = logging.getLogger(__name__)

MAX_REPORTED = 3  # of the mistakes in one body
STATUS = {
    UnknownModel: HTTPStatus.NOT_FOUND,
    ValueError: HTTPStatus.BAD_REQUEST,  # the request is at fault
    Unavailable: HTTPStatus.SERVICE_UNAVAILABLE,  # it may be tried again
    DeadlineExceeded: HTTPStatus.GATEWAY_TIMEOUT,
}
"""Class of an error -> its status, the first that fits; of others, 500."""
TAGS = ("role", "type")  # fields that say of which class an object is


def add_error_handlers(app: FastAPI) -> None:
    """Answer these errors here; vLLM's own handlers answer its own."""
    app.exception_handler(OmniError)(_on_omni_error)
    app.exception_handler(RequestValidationError)(_on_validation_error)
    for error in (HTTPException, RoutingError):
        app.exception_handler(error)(_on_http_error)
    app.exception_handler(RecursionError)(_on_recursion_error)
    app.middleware_stack = None  # already built, without these handlers: have it built anew


def error_body(message: str, status: HTTPStatus, param: str | None = None) -> dict[str, Any]:
    kind = f"{status.phrase.replace(' ', '')}{'' if status.phrase.endswith('Error') else 'Error'}"
    body: dict[str, Any] = create_error_response(message, kind, status, param).model_dump()
    return body


def invalid_body(errors: Sequence[Mapping[str, Any]], body: Any) -> InvalidRequest:
    """The error for a body that pydantic rejected; ``body`` is its type."""
    errors = _of_the_meant_class(errors)
    errors = sorted(errors, key=lambda error: error["type"] != "extra_forbidden")  # a misspelt field, then the missing
    said = list(dict.fromkeys(_mistake(error, body) for error in errors))
    more = f"; and {len(said) - MAX_REPORTED} more" if len(said) > MAX_REPORTED else ""
    return InvalidRequest("; ".join(said[:MAX_REPORTED]) + more, param=_param(errors[0]))


def check_fields(request: BaseModel, ignored: Iterable[str] = ()) -> None:
    """Raise ``InvalidRequest`` for a field that the body's class does not have; ``ignored`` are accepted, too."""
    for name in request.model_extra or ():
        if name not in ignored:
            fields = type(request).model_fields
            raise InvalidRequest(f"unknown field {name!r}: {suggest(name, fields)}", param=name)


def shorten(value: object) -> str:
    """``repr``, without writing out what is long or nested."""
    short = Repr()
    short.maxstring = short.maxother = 80
    return short.repr(value)


def _of_the_meant_class(errors: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Of an object that may be of several classes, pydantic reports each; leave out those of another role or type."""
    others = [error["loc"][:-1] for error in errors if error["type"] == "literal_error" and error["loc"][-1] in TAGS]
    return [one for one in errors if not any(one["loc"][: len(other)] == other for other in others)] or errors


def _param(error: Mapping[str, Any]) -> str:
    path = tuple(part for part in error["loc"] if not str(part)[:1].isupper())  # without names of classes
    return clean_loc_for_param(path).removeprefix("body.")


def _mistake(error: Mapping[str, Any], body: Any) -> str:
    param = _param(error)
    if error["type"] == "extra_forbidden":
        *path, name = (part for part in error["loc"] if part != "body")
        return f"unknown field {param!r}: {suggest(name, _fields_at(body, path))}"
    if error["type"] == "missing":
        return f"{param}: is missing"
    if error["type"] == "json_invalid":
        return f"the body is not valid JSON: {error['ctx']['error']}"
    if error["type"] == "value_error":  # of a validator, which says it all
        return str(error["msg"].removeprefix("Value error, "))
    return f"{param} = {shorten(error['input'])}: {error['msg'][0].lower()}{error['msg'][1:]}"


def _fields_at(body: Any, path: Iterable[str | int]) -> Iterable[str]:
    """The names of the fields of the object at a path within a body."""
    models = _models(body)
    for part in path:
        fields = [one.model_fields[str(part)] for one in models if part in one.model_fields]
        models = [model for field in fields for model in _models(field.annotation)]
    return [name for one in models for name in one.model_fields]


def _models(annotation: Any) -> list[type[BaseModel]]:
    return [one for one in (annotation, *get_args(annotation)) if isclass(one) and issubclass(one, BaseModel)]


def body_of(exc: Exception) -> dict[str, Any]:
    """The body for an error, vLLM's or ours."""
    if not isinstance(exc, OmniError):
        body: dict[str, Any] = create_error_response(exc).model_dump()
        return body
    status = next((status for cls, status in STATUS.items() if isinstance(exc, cls)), HTTPStatus.INTERNAL_SERVER_ERROR)
    return error_body(str(exc), status, exc.param if isinstance(exc, InvalidRequest) else None)


def end_of_stream(exc: Exception, what: str) -> dict[str, Any]:
    """Log an error of a reply that has started, which then ends with this body."""
    if isinstance(exc, Unavailable | DeadlineExceeded | RetryableRequestError):
        logger.warning("%s: %s", what, exc)
    else:
        logger.error("%s failed while it was streamed", what, exc_info=exc)
    return body_of(exc)


async def _on_omni_error(_: Request, exc: Exception) -> JSONResponse:
    body = body_of(exc)
    return JSONResponse(body, body["error"]["code"])


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
    status, said = HTTPStatus(exc.status_code), exc.detail
    path = raw_request.url.path
    if said == HTTPStatus.NOT_FOUND.phrase:
        paths = sorted({route.path for route in raw_request.app.routes if hasattr(route, "path")})
        said = f"there is no route {path}: {suggest(path, paths)}"
    elif status is HTTPStatus.METHOD_NOT_ALLOWED:
        said = f"{raw_request.method} {path}: the method must be {(exc.headers or {}).get('Allow')}"
    return JSONResponse(error_body(said, status), status, exc.headers)


async def _on_recursion_error(raw_request: Request, exc: Exception) -> JSONResponse:
    return await _on_omni_error(raw_request, InvalidRequest("the body is nested too deeply, or refers to itself"))
