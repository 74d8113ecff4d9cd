"""The edges between the stages and functions of a server, through the graphs that call one another."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from vllm_omni.flow import ENTRY, StaticPlan
from vllm_omni.flow.graph.plan import Edge, NodePlan
from vllm_omni.flow.run.scope import index_plans

Graphs = Mapping[str, StaticPlan]
"""Plans by graph or graph call, as ``index_plans`` returns them."""


class Maker(NamedTuple):
    """The node that makes a field, and its name there."""

    node: NodePlan
    field: str


class StageEdge(NamedTuple):
    """An output field of a stage or function, and a node that reads it, perhaps in another graph."""

    maker: Maker
    reader: NodePlan
    path: tuple[Edge, ...]  # the edge in the graph of both; behind it, those from the placeholders of called graphs
    sink: str  # what reads it in the maker's own graph: the reader's role, that of a graph, or ENTRY

    @property
    def is_constant(self) -> bool:
        """Whether the reader reads what is made more than once: each iteration of a loop does."""
        return any(edge.is_constant for edge in self.path)

    @property
    def is_within_graph(self) -> bool:
        return self.sink == self.reader.role

    @property
    def roles(self) -> tuple[str, str]:
        return self.maker.node.role, self.reader.role

    def __str__(self) -> str:
        return f"{self.maker.node.name}.{self.maker.field} -> {self.reader.name}.{self.path[-1].target_field}"


def stage_edges(plans: Collection[StaticPlan]) -> list[StageEdge]:
    """All edges between nodes that are no graphs."""
    graphs, _ = index_plans([*plans])
    return [
        StageEdge(maker_of(graphs, plan, edge), reader, path, _sink_of(plan, edge))
        for plan in plans
        for edge in plan.edges
        if edge.is_declared and ENTRY not in (edge.source, edge.target)
        for reader, path in _readers_of(graphs, plan, edge)
    ]


def _sink_of(plan: StaticPlan, edge: Edge) -> str:
    return ENTRY if plan.nodes[edge.source].graph is not None else plan.nodes[edge.target].role


def maker_of(graphs: Graphs, plan: StaticPlan, edge: Edge) -> Maker:
    """Find what makes the field that an edge carries; the edge does not start at a placeholder."""
    node, field = plan.nodes[edge.source], edge.source_field
    while node.graph is not None:
        plan = called_by(graphs, node)
        edge = plan.outputs[field]
        node, field = plan.nodes[edge.source], edge.source_field
    return Maker(node, field)


def called_by(graphs: Graphs, node: NodePlan) -> StaticPlan:
    """The graph call that a node makes."""
    return graphs[f"{node.graph}.{node.interface}"]


def _readers_of(graphs: Graphs, plan: StaticPlan, edge: Edge) -> Iterator[tuple[NodePlan, tuple[Edge, ...]]]:
    node = plan.nodes[edge.target]
    if node.graph is None:
        yield node, (edge,)
        return
    called = called_by(graphs, node)
    needed = frozenset[Edge]().union(*(one.edges for one in called.needed_by.values()))
    for inner in called.edges:
        if inner in needed and inner.source == ENTRY and inner.source_field == edge.target_field:
            for reader, path in _readers_of(graphs, called, inner):
                yield reader, (edge, *path)
