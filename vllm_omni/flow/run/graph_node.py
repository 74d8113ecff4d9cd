"""``GraphNode``: a graph as a node of another one.

From: Omni-Flow section 3.1, subgraph invocation.
"""

from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from vllm_omni.errors import GraphError, StageFailed
from vllm_omni.flow.run.call import GraphCall
from vllm_omni.flow.run.frame import Emission
from vllm_omni.flow.run.node import Activation


class GraphNode:
    """Runs each activation as a call of the other graph, within the call of this one.

    The inner call starts when its inputs are there, and ends with the activation: an abort, a deadline or an error of
    the outer call ends it. It gets the outer one's context and session. What it emits is read as fast as the outer
    graph reads it.

    Args:
        open_call: opens the inner call of an activation with these inputs.
    """

    def __init__(self, name: str, open_call: Callable[[Activation, Mapping[str, Any]], GraphCall]) -> None:
        self._name = name
        self._open = open_call

    async def forward(self, activation: Activation) -> AsyncIterator[Emission]:
        """See ``Node``. An input that ends without a value yields nothing.

        Raises:
            GraphError: an input has several values.
            StageFailed: a stage of the inner call failed, which the error names with its path.
        """
        inputs: dict[str, Any] = {}
        for field, chunks in activation.inputs.items():
            values = [chunk.payload async for chunk in chunks if chunk.payload is not None]
            if not values:
                return
            if len(values) > 1:
                raise GraphError(
                    f"node {self._name!r}: input {field!r} has {len(values)} values, and a placeholder takes one; make "
                    "one of them with .via(transfer_function)"
                )
            inputs[field] = values[0]
        try:
            async with self._open(activation, inputs) as call:
                async for frame in call:
                    if frame.payload is not None:
                        yield Emission(frame.field, frame.payload, last=frame.last)
        except StageFailed as exc:
            raise exc.within(self._name) from exc
