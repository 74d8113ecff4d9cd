"""The compiled graph: frozen tables, so that the runtime only looks things up. From: Omni-Flow section 3.3."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from vllm_omni.flow.dsl import Field
from vllm_omni.flow.frame import ENTRY, TransferFunction


@dataclass(frozen=True, slots=True)
class Edge:
    """One output field feeding one input field (or one graph output, where ``target`` is ENTRY)."""

    source: str
    source_field: str
    target: str
    target_field: str
    transfer: TransferFunction | None = field(default=None, compare=False)  # runs in the target's activation

    def __str__(self) -> str:
        return f"{self.source}.{self.source_field} -> {self.target}.{self.target_field}"


@dataclass(frozen=True, slots=True)
class NodePlan:
    """One node: an interface of a role."""

    name: str  # "role.interface"
    role: str
    interface: str
    inputs: Mapping[str, Edge]  # input field -> the edge that feeds it; all edges come from one node, or from ENTRY
    outputs: Mapping[str, Field]


class Needed(NamedTuple):
    """What one graph output depends on."""

    nodes: frozenset[str]
    edges: frozenset[Edge]


@dataclass(frozen=True, slots=True)
class Route:
    """The plan cut down to the outputs of a call: the rest is unreachable for that call, and so never activated."""

    outputs: frozenset[str]
    nodes: tuple[str, ...]  # topological order
    placeholders: frozenset[str]
    outbound: Mapping[str, Mapping[str, tuple[Edge, ...]]]  # node or ENTRY -> output field -> where its frames go


@dataclass(frozen=True, slots=True)
class StaticPlan:
    """Everything the runtime looks up. Made by ``GraphParser``; never changed."""

    name: str
    nodes: Mapping[str, NodePlan]  # topological order
    edges: tuple[Edge, ...]
    placeholders: tuple[str, ...]
    outputs: Mapping[str, Edge]  # graph output -> the edge into ENTRY
    needed_by: Mapping[str, Needed]  # graph output -> nodes and edges without which it cannot be made

    @property
    def roles(self) -> frozenset[str]:
        return frozenset(node.role for node in self.nodes.values())

    def route(self, outputs: Iterable[str]) -> Route:
        """Cut the plan down to ``outputs``, which must exist. Costs a pass over the edges: keep the result."""
        wanted = frozenset(outputs)
        nodes = frozenset[str]().union(*(self.needed_by[name].nodes for name in wanted))
        edges = frozenset[Edge]().union(*(self.needed_by[name].edges for name in wanted))
        outbound: dict[str, dict[str, tuple[Edge, ...]]] = {}
        for edge in self.edges:
            if edge in edges:
                fields = outbound.setdefault(edge.source, {})
                fields[edge.source_field] = (*fields.get(edge.source_field, ()), edge)
        return Route(
            outputs=wanted,
            nodes=tuple(name for name in self.nodes if name in nodes),
            placeholders=frozenset(outbound[ENTRY]),
            outbound=MappingProxyType(outbound),
        )
