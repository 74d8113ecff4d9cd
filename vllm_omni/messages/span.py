"""``Span``: an interval of a request's time: a stage's run, a function's, an edge, or a part of one of them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from random import getrandbits
from typing import TypeAlias

import msgspec

Attribute: TypeAlias = str | int | float | bool


class SpanKind(StrEnum):
    REQUEST = "request"
    STAGE = "stage"  # one run on an engine
    FUNCTION = "function"
    EDGE = "edge"  # from the first chunk that arrived to the last that was read
    PART = "part"  # of a run: what the engine did


class Span(msgspec.Struct, frozen=True, omit_defaults=True):
    """Times are seconds of ``time.time``, as those of ``Timeline``.

    Attributes:
        name: "talker"; of an edge "thinker.generate.rows -> talker.generate".
        track: where it ran, "talker/0"; of an edge its name.
        id: 64 bits, of OpenTelemetry.
        parent: the id of another span of the request; 0: the request itself.
        error: why it failed; "": it did not.
    """

    name: str
    kind: SpanKind
    began_at: float
    ended_at: float
    track: str
    id: int
    parent: int = 0
    attributes: Mapping[str, Attribute] = {}
    error: str = ""


def new_span_id() -> int:
    """A random id; 0 is none."""
    return getrandbits(64) or 1
