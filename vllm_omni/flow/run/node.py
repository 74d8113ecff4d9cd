"""What a role brings to the graph, and what it is given."""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import msgspec

from vllm_omni.flow.graph.transfer import Chunk
from vllm_omni.flow.run.frame import Emission, Path


class Activation(msgspec.Struct, frozen=True):
    """One run of a node for one call."""

    call_id: str
    node: str
    interface: str
    activation_id: int
    inputs: Mapping[
        str, AsyncIterator[Chunk]
    ]  # of the group that fired: field -> chunks, behind the transfer functions
    wanted: frozenset[str]  # output fields that somebody needs in this call; others may be emitted and go nowhere
    context: Any  # as passed to GraphRuntime.open
    session: str | None = None  # likewise
    path: Path = ()  # its place in the order of the node's activations
    parameters: Mapping[str, Any] = {}  # what the session shares, see GlobalParameters
    turn: int = 0  # how often the loop that the node is part of has come round


Yield: TypeAlias = Emission | Sequence[Emission]


class Node(Protocol):
    """What a role brings to the graph."""

    def forward(self, activation: Activation) -> AsyncIterator[Yield]:
        """Serve one activation: an async generator of emissions, or of lists of those that belong together.

        It is cancelled, at most once, when its call is aborted or fails, or when nobody can see its output any more:
        ``CancelledError`` at whichever await it stands, be it in its ``finally``, or ``GeneratorExit`` at a yield where
        it is held back by a slow reader. The end of its clean-up is the acknowledgement that the call waits for. What
        it raises fails that call, unless a node further down has another source for what it did not get (several edges
        into one field, or groups of which the first one wins).
        """
