"""Server-sent events."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

T = TypeVar("T")

DONE = "data: [DONE]\n\n"


def event(values: Mapping[str, Any], name: str | None = None) -> str:
    """One event; OpenAI's clients read the name of some from their data, of others from a line of its own."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {json.dumps(values, ensure_ascii=False, separators=(',', ':'))}\n\n"


async def chain(first: T, rest: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """Put back the first item, which was awaited before the response started so that an error has an HTTP status."""
    async with aclosing(rest):
        yield first
        async for one in rest:
            yield one
