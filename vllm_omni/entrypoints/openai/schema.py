"""The OpenAPI schema for its readers: a title, and the values that a field takes.

``documented`` only describes: what checks the value, with an error of its own, stands where the value is used.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fastapi import FastAPI
from pydantic import Field

from vllm_omni import __version__

DESCRIPTION = """OpenAI's API for models of any modality, and vLLM's other routes. `GET /v1/models` names the model,
`GET /v1/audio/voices` its voices. Errors have OpenAI's shape and name the field, its value and the valid ones."""


def describe_app(app: FastAPI, model: str) -> None:
    """Give the schema, and the pages at ``/docs`` and ``/redoc``, a title and a description."""
    app.title, app.version = f"vllm_omni: {model}", __version__
    app.description = DESCRIPTION


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
