"""The records that a graph consists of: fields, scheduling, what sessions share, named calls."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_omni.errors import GraphError


class Scheduling(enum.Enum):
    """Which instance of a role serves an activation, and whether activations run in order.

    From: Omni-Flow section 3.5.
    """

    ROUND_ROBIN = "round_robin"
    LEAST_OUTSTANDING = "least_outstanding"
    SESSION = "session"  # the instance that holds the session; the activations of a call run one at a time, in order
    BROADCAST = "broadcast"  # every instance


@dataclass(frozen=True, slots=True)
class Field:
    """The type of a field, and whether it is streamed.

    A streamed output may be emitted in many pieces, any other exactly once. A streamed input is read piece by piece in
    one activation. An input declared without ``streamed`` gets one activation per piece of a streamed output, if it is
    alone in its group or is fed by the node above the whole group; otherwise it gathers the pieces that belong
    together. An undeclared input takes the type of the output that feeds it.

    Args:
        window: of a streamed output: pieces that it may be ahead of each reader; None: 64. Fewer for large pieces.
    """

    modality: str
    dtype: str | None = None
    streamed: bool = False
    window: int | None = None

    def __post_init__(self) -> None:
        if self.window is not None and (self.window < 1 or not self.streamed):
            raise GraphError(f"window = {self.window}: must be 1 or more, of a field that is streamed")

    def accepts(self, produced: Field) -> bool:
        """Whether the modalities agree, and the dtypes where both sides declare one."""
        same_dtype = self.dtype is None or produced.dtype is None or self.dtype == produced.dtype
        return self.modality == produced.modality and same_dtype


@dataclass(frozen=True)
class GlobalParameters:
    """State that the calls of a session share across roles (a cache, a history); created by the first call.

    Nodes find it in ``Activation.parameters``. It lives until ``GraphRuntime.end_session``, or as long as the call if
    the call has no session. From: Omni-Flow section 3.1.
    """

    name: str
    make: Callable[[], Any]
    release: Callable[[Any], None] | None = None


@dataclass(frozen=True, slots=True)
class GraphCallEntry:
    """A named way to call a graph."""

    name: str
    outputs: frozenset[str]
    until: frozenset[str]  # the call is over when these outputs have ended
