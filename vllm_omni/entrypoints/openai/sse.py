"""Server-sent events, and the bytes of a file in them."""

from __future__ import annotations

import base64
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


class Base64Pieces:
    """Encodes a file piece by piece: each text can be decoded alone, and all of them joined.

    Padding in the middle would end the file there for clients that join the texts, as OpenAI's own does. So a piece
    ends after a multiple of three bytes; the bytes over that start the next.
    """

    def __init__(self) -> None:
        self._rest = b""

    def encode(self, data: bytes, *, is_last: bool = False) -> str:
        """The text of the bytes that can be sent now, empty for fewer than three."""
        data = self._rest + data
        num_bytes = len(data) if is_last else len(data) // 3 * 3
        self._rest = data[num_bytes:]
        return base64.b64encode(data[:num_bytes]).decode()
