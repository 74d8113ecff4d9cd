"""Stand-ins for the models of the examples: nodes that answer with the names of their inputs."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from vllm_omni.flow import Activation, Emission, Graph, GraphParser, GraphRuntime, Node


class FunctionNode:
    """One result of all inputs, ``delay`` iterations of the event loop later.

    Args:
        function: payloads of all inputs, one after the other -> payload of ``field``.
    """

    def __init__(self, field: str, function: Callable[..., Any], delay: int = 0):
        self._field, self._function, self._delay = field, function, delay

    async def forward(self, activation: Activation):
        payloads = [chunk.payload for name in activation.inputs async for chunk in activation.inputs[name]]
        for _ in range(self._delay):
            await asyncio.sleep(0)
        yield Emission(self._field, self._function(*payloads))


class StreamNode(FunctionNode):
    """As ``FunctionNode``, but the function returns the pieces of a stream, each ``delay`` iterations apart."""

    async def forward(self, activation: Activation):
        payloads = [chunk.payload for name in activation.inputs async for chunk in activation.inputs[name]]
        for piece in self._function(*payloads):
            for _ in range(self._delay):
                await asyncio.sleep(0)
            yield Emission(self._field, piece)


async def run(
    graph: Graph, nodes: Mapping[str, Node], inputs: Mapping[str, Any], outputs: Iterable[str]
) -> dict[str, list[Any]]:
    """One call: output -> its payloads."""
    runtime = GraphRuntime(GraphParser(graph).parse(), nodes)
    got: dict[str, list[Any]] = {name: [] for name in outputs}
    async for frame in runtime.open("call", inputs, got, deadline_s=60):
        if frame.payload is not None:
            got[frame.field].append(frame.payload)
    return got


def show(graph: Graph, nodes: Mapping[str, Node], inputs: Mapping[str, Any], outputs: Iterable[str]) -> None:
    for name, payloads in asyncio.run(run(graph, nodes, inputs, outputs)).items():
        print(f"{name}: {' '.join(map(str, payloads))}")
