"""The OpenAPI schema for its readers: a title, and the values that a field takes.

``documented`` only describes: what checks the value, with an error of its own, stands where the value is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, Field
from vllm.entrypoints.serve.engine.protocol import ErrorResponse

from vllm_omni import __version__

SCHEMAS = "#/components/schemas/{model}"
BINARY = {"type": "string", "format": "binary"}
DESCRIPTION = """OpenAI's API for models of any modality, and vLLM's other routes. `GET /v1/models` names the model,
`GET /v1/audio/voices` its voices. Errors have OpenAI's shape and name the field, its value and the valid ones."""

BODY_ERRORS = (HTTPStatus.REQUEST_ENTITY_TOO_LARGE,)
MODEL_ERRORS = (
    HTTPStatus.NOT_FOUND,
    HTTPStatus.TOO_MANY_REQUESTS,
    HTTPStatus.SERVICE_UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT,
)
"""Of a request to a model: no such model, a full stage, one that restarts, a deadline."""


def describe_app(app: FastAPI, model: str) -> None:
    """Give the schema, and the pages at ``/docs`` and ``/redoc``, a title and a description, and correct it."""
    app.title, app.version = f"vllm_omni: {model}", __version__
    app.description = DESCRIPTION
    upstream: Callable[[], dict[str, Any]] = app.openapi

    def openapi() -> dict[str, Any]:
        return _correct(upstream())

    app.openapi = openapi  # type: ignore[method-assign]


def _correct(schema: dict[str, Any]) -> dict[str, Any]:
    """Put the classes of bodies that routes read themselves where references look for them, and name the errors that
    every request of a model may get. Correcting a schema twice changes nothing.
    """
    components = schema.setdefault("components", {}).setdefault("schemas", {})
    error = {"schema": {"$ref": SCHEMAS.format(model=ErrorResponse.__name__)}}
    for path, operation in _operations(schema):
        for content in _contents(operation):
            for name, definition in content.get("schema", {}).pop("$defs", {}).items():
                components.setdefault(name, definition)
        responses = operation.get("responses", {})
        is_invalid = responses.pop("422", None) is not None
        statuses = [HTTPStatus.BAD_REQUEST] if is_invalid else []
        statuses += BODY_ERRORS if "requestBody" in operation else []
        statuses += MODEL_ERRORS if "requestBody" in operation and path.startswith("/v1/") else []
        statuses += [HTTPStatus.NOT_FOUND] if "{" in path else []
        for status in statuses:
            responses.setdefault(
                str(status.value), {"description": status.phrase, "content": {"application/json": error}}
            )
    return schema


def _operations(schema: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in schema["paths"].items():
        yield from ((path, one) for one in methods.values() if isinstance(one, dict))


def _contents(operation: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for one in (operation.get("requestBody", {}), *operation.get("responses", {}).values()):
        yield from one.get("content", {}).values()


def describe(
    body: type[BaseModel], kinds: Sequence[str], files: Mapping[str, Any] | None = None, required: Iterable[str] = ()
) -> dict[str, Any]:
    """OpenAPI entry of a route that reads its body itself.

    Args:
        kinds: media types of the body.
        files: schemas of the fields that the class does not have, by name.
        required: those of them that are.
    """
    schema = body.model_json_schema(ref_template=SCHEMAS)
    schema["properties"].update(files or {})
    if needed := [*schema.get("required", ()), *required]:
        schema["required"] = needed
    return {"requestBody": {"required": True, "content": {kind: {"schema": schema} for kind in kinds}}}


def describe_query(query: type[BaseModel]) -> dict[str, Any]:
    """OpenAPI entry of a route that reads its query itself."""
    schema = query.model_json_schema()
    required = schema.get("required", ())
    parameters = [
        {"name": name, "in": "query", "required": name in required, "schema": one}
        for name, one in schema["properties"].items()
    ]
    return {"parameters": parameters}


def answers(
    *media_types: str, model: type[BaseModel] | None = None, errors: Iterable[HTTPStatus] = ()
) -> dict[int | str, dict[str, Any]]:
    """Responses of a route for the OpenAPI schema.

    Args:
        media_types: of answers, beside JSON.
        model: of the answer in JSON.
        errors: beside those that every route has.
    """
    statuses = (HTTPStatus.BAD_REQUEST, HTTPStatus.NOT_FOUND, HTTPStatus.INTERNAL_SERVER_ERROR, *errors)
    ok: dict[str, Any] = {"content": {media_type: {} for media_type in media_types}}
    if model is not None:
        ok["model"] = model
    return {HTTPStatus.OK.value: ok, **{status.value: {"model": ErrorResponse} for status in statuses}}


def file_answers(
    media_type: str, model: type[BaseModel] | None = None, errors: Iterable[HTTPStatus] = ()
) -> dict[int | str, dict[str, Any]]:
    """The same of a route that answers with a file, or with JSON where there is a ``model``."""
    responses = answers(media_type, model=model, errors=errors)
    responses[HTTPStatus.OK.value]["content"] = {media_type: {"schema": BINARY}}
    return responses


def documented(
    description: str,
    *,
    default: Any = None,
    values: Iterable[str] = (),
    at_least: float | None = None,
    at_most: float | None = None,
) -> Any:
    """A field of a body, described by its valid values or bounds."""
    bounds: dict[str, Any] = {"minimum": at_least, "maximum": at_most, "enum": list(values) or None}
    schema = {name: bound for name, bound in bounds.items() if bound is not None}
    return Field(default=default, description=description, json_schema_extra=schema)
