"""``PayloadEdges``: each reader of published tensors sees its own references, and no others."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping
from contextlib import aclosing
from dataclasses import replace

from msgspec import structs

from vllm_omni.engine.graph_checks import whole_fields
from vllm_omni.engine.node import StageNode, closed_at_end
from vllm_omni.engine.stage_edges import stage_edges
from vllm_omni.flow import CallInfo, Chunk, StaticPlan, TransferFunction
from vllm_omni.flow.graph.plan import Edge, NodePlan
from vllm_omni.messages.stage_output import StageOutput
from vllm_omni.model_executor.pipeline import StageSpec


class PayloadEdges:
    """The edges of a server's graphs that carry references to tensors.

    Args:
        specs: the stages, by name.

    Attributes:
        outer_readers: node and its field -> the nodes of other graphs that read it.
        entered: nodes that read tensors of a node of another graph.
    """

    def __init__(self, plans: Collection[StaticPlan], specs: Mapping[str, StageSpec]) -> None:
        self._plans = plans
        self._readers: dict[Edge, set[str]] = {}  # edge -> the nodes to which it leads
        self.outer_readers: dict[tuple[str, str], set[str]] = {}
        self.entered: set[str] = set()
        for one in stage_edges(plans):
            maker, reader = one.maker, one.reader.name
            spec = specs.get(maker.node.role)
            if spec is None or maker.field not in spec.publishing_fields:
                continue
            for edge in one.path:
                self._readers.setdefault(edge, set()).add(reader)
            if len(one.path) > 1 or one.path[0].source != maker.node.name:
                self.outer_readers.setdefault((maker.node.name, maker.field), set()).add(reader)
                self.entered.add(reader)

    def bind(self, node: StageNode) -> None:
        """Let the node of a stage know who reads its outputs, and how."""
        node.whole_fields = whole_fields(node.config.name, self._plans)
        node.outer_readers, node.entered = self.outer_readers, self.entered

    def with_own_payloads(self, plan: StaticPlan) -> StaticPlan:
        """The plan, whose payloads pass ``Payload.of`` on the edges that carry them, before the transfer function."""
        return replace(plan, nodes={name: self._convert(node) for name, node in plan.nodes.items()})

    def _convert(self, node: NodePlan) -> NodePlan:
        slots = tuple(self._narrow(edge) for edge in node.slots)
        if all(new is old for new, old in zip(slots, node.slots, strict=True)):
            return node
        return replace(node, slots=slots, groups=tuple(replace(group, is_plain=False) for group in node.groups))

    def _narrow(self, edge: Edge) -> Edge:
        readers = self._readers.get(edge, set())
        # Several nodes of a called graph: each of them gets its own behind the edge, or with its request.
        return replace(edge, transfer=_OwnPayloads(edge, *readers)) if len(readers) == 1 else edge


class _OwnPayloads:
    """An edge's transfer function, if it has one, behind ``Payload.of``."""

    def __init__(self, edge: Edge, reader: str) -> None:
        self._transfer: TransferFunction | None = edge.transfer
        self._reader = reader
        self.__qualname__ = getattr(edge.transfer, "__qualname__", str(edge))  # for the notes of errors

    async def __call__(self, chunks: AsyncIterator[Chunk], call: CallInfo) -> AsyncGenerator[Chunk, None]:
        own = _own(chunks, self._reader)
        async with (
            aclosing(own),
            closed_at_end(own if self._transfer is None else self._transfer(own, call)) as converted,
        ):
            async for chunk in converted:
                yield chunk


async def _own(chunks: AsyncIterator[Chunk], node: str) -> AsyncGenerator[Chunk, None]:
    async for chunk in chunks:
        output = chunk.payload
        if isinstance(output, StageOutput) and output.payloads:
            own = structs.replace(output, payloads=[payload.of(node) for payload in output.payloads])
            chunk = structs.replace(chunk, payload=own)
        yield chunk
