"""What a transfer function on an edge reads, yields and receives about its call."""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

ENTRY = "entry"  # the pseudo-node that injects placeholders and receives graph outputs; node names contain a dot


class Chunk(msgspec.Struct, frozen=True):
    """A piece of an input as a node or transfer function reads it; a full result is one chunk with ``last=True``.

    The iterator also ends when its producer stops without marking a last frame, so flush after the loop instead of
    testing ``last``. A transfer function leaves ``seq`` at its default: the controller numbers the yielded chunks.
    """

    payload: Any
    seq: int = 0
    last: bool = False


@dataclass(frozen=True, slots=True)
class CallInfo:
    """The call on whose behalf a transfer function runs."""

    call_id: str
    context: Any  # as passed to GraphRuntime.open
    source: str  # producing node, or ENTRY
    target: str  # consuming node, in whose activation the transfer function runs


TransferFunction: TypeAlias = Callable[[AsyncIterator[Chunk], CallInfo], AsyncIterator[Chunk]]


def printable_transfer(name: str) -> TransferFunction:
    """A transfer function with a name, for a graph that is printed and never run."""

    def transfer(chunks: AsyncIterator[Chunk], call: CallInfo) -> AsyncIterator[Chunk]:
        raise NotImplementedError(f"{name}: this graph is for printing")

    transfer.__name__ = name
    return transfer
