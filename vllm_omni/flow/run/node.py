"""The interface between the runtime and a node."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import msgspec

from vllm_omni.flow.graph.plan import Edge
from vllm_omni.flow.graph.transfer import Chunk
from vllm_omni.flow.run.frame import Emission, Path
from vllm_omni.flow.run.sequence import StreamTimes


class Activation(msgspec.Struct, frozen=True):
    """One run of a node for one call."""

    call_id: str
    node: str
    interface: str
    activation_id: int
    inputs: Mapping[str, AsyncIterator[Chunk]]  # of the group that fired: field -> chunks, after transfer functions
    wanted: frozenset[str]  # output fields that are read in this call; other emissions are dropped
    context: Any  # as passed to GraphRuntime.open
    session: str | None = None  # as passed to GraphRuntime.open
    path: Path = ()  # its place in the order of the node's activations
    parameters: Mapping[str, Any] = {}  # session state, see GlobalParameters
    iteration: int = 0  # of the loop that the node is part of; the first one is 0
    # Whether an error raised by ``inputs`` is that of a producer, whose stream broke off; else a transfer function's.
    is_of_producer: Callable[[Exception], bool] = lambda error: True
    # Sends something to the ``on_report`` of GraphRuntime.open, at any time until the activation is over. It arrives
    # before what is yielded next.
    report: Callable[[Any], None] = lambda payload: None
    # When the edges that it reads carried something, so far.
    edge_times: Callable[[], Sequence[tuple[Edge, StreamTimes]]] = lambda: ()
    held_s: Callable[[], float] = lambda: 0.0  # that it has waited for credit of its readers, so far
    readers: Mapping[str, Sequence[str]] = {}  # field of ``wanted`` -> the nodes that read it, ENTRY for an output


Yield: TypeAlias = Emission | Sequence[Emission]


class Node(Protocol):
    """The implementation of a role."""

    def forward(self, activation: Activation) -> AsyncIterator[Yield]:
        """Serve one activation: an async generator of emissions, or of lists of emissions that belong together.

        It is cancelled, at most once, when its call is aborted or fails, or when its outputs have no reader left:
        ``CancelledError`` at its current await (possibly in its ``finally``), or ``GeneratorExit`` at a yield where a
        slow reader holds it back. The call waits for the end of its clean-up, for at most ``CANCEL_TIMEOUT_S``
        (``controller.py``). An exception fails the call, unless a node further down has another source for the missing
        input (several edges into one field, or groups of which the first one wins).
        """
