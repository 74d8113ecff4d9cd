"""A graph while it is being compiled: nodes with their groups, edges and roots.

From: Omni-Flow section 3.3 (diamond roots).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from vllm_omni.errors import GraphError, PlanError
from vllm_omni.flow.graph.dsl import Declarations, FieldRef, Graph, Interface
from vllm_omni.flow.graph.plan import Edge
from vllm_omni.flow.graph.topology import Cycle, Topology, common_prefix
from vllm_omni.flow.graph.transfer import ENTRY


@dataclass
class GroupDraft:
    """An AND group of a node."""

    edges: list[Edge]
    loop: int | None = None
    counts: Mapping[str, int | str] | None = None
    root: str | None = None
    root_per_frame: bool = False


@dataclass
class NodeDraft:
    """A node with the sources of all its calls."""

    role: str
    declared: Interface
    sources: list[tuple[str, FieldRef]] = field(default_factory=list)  # input field, source
    groups: list[GroupDraft] = field(default_factory=list)
    choice_root: str | None = None  # of several groups: the nearest node above all of them
    choice_per_frame: bool = False

    @property
    def choices(self) -> list[GroupDraft]:
        """The groups that start no iteration of a loop."""
        return [group for group in self.groups if group.loop is None]


class GraphDraft:
    """The nodes of a graph by name; in topological order once ``sort`` has run."""

    def __init__(self, graph: Graph):
        self.name = graph.name
        self.declarations: Declarations = graph.declarations
        self.num_loops = 0
        self.nodes: dict[str, NodeDraft] = {}
        for call in graph.declarations.calls:
            node = self.nodes.setdefault(call.node, NodeDraft(call.role, call.interface))
            node.sources += call.sources.items()
        feeds = {name: [ref.node for _, ref in node.sources] for name, node in self.nodes.items()}
        self.topology = Topology(feeds, [name for name, node in self.nodes.items() if node.declared.activate_by_count])

    def sort(self) -> None:
        """Put the nodes into topological order.

        Raises:
            PlanError: there is a loop within a loop.
        """
        order = self.topology.order()
        if len(order) < len(self.nodes):
            inner = ", ".join(sorted(set(self.nodes).difference(order)))
            raise PlanError(
                f"graph {self.name!r}: there is a loop within the loop of {inner}, which is not supported; run the "
                "inner loop inside of one node, or unroll it with a second role"
            )
        self.nodes = {name: self.nodes[name] for name in order}

    def connect(self) -> None:
        """Make the groups of every node, then find their roots and the edges that are per frame.

        Raises:
            GraphError: a join gets some of its fields only from inside a loop and others only from outside.
            PlanError: a node counts frames within a loop.
        """
        for name, node in self.nodes.items():
            if node.declared.activate_by_count:
                node.groups = [self._counting_group(name, node)]
            else:
                node.groups = self._groups(name, node)
        chains = self.topology.dominators()
        for name, node in self.nodes.items():
            self._find_roots(name, node, chains)

    def could_be_per_frame(self, edge: Edge) -> bool:
        """Whether a streamed output feeds an input that is declared without ``streamed``."""
        if edge.source == ENTRY or edge.is_back:
            return False
        wanted = self.nodes[edge.target].declared.inputs.get(edge.target_field)
        return self.is_streamed(edge) and wanted is not None and not wanted.streamed

    def is_streamed(self, edge: Edge) -> bool:
        return edge.source != ENTRY and self.nodes[edge.source].declared.outputs[edge.source_field].streamed

    # ---- groups ----

    def _counting_group(self, name: str, node: NodeDraft) -> GroupDraft:
        cycle = self.topology.cycle_of(name)
        if cycle is not None:
            raise PlanError(
                f"node {name!r}: activate_by_count fires once in a call, and the loop of "
                f"{', '.join(sorted(cycle.nodes))} would reach it in every iteration; count behind the loop"
            )
        edges = [_edge(name, field, ref) for field, ref in node.sources]
        return GroupDraft(edges, counts=node.declared.activate_by_count)

    def _groups(self, name: str, node: NodeDraft) -> list[GroupDraft]:
        groups: list[GroupDraft] = []
        backs: list[GroupDraft] = []  # groups that start an iteration of a loop come last
        connected = {field for field, _ in node.sources}
        for fields in node.declared.inputs_or:
            if not connected.issuperset(fields):  # not used in this graph
                continue
            if edges := self._edges(name, node, fields, is_back=False):
                groups.append(GroupDraft(edges))
            if edges := self._edges(name, node, fields, is_back=True):
                backs.append(GroupDraft(edges, loop=self.num_loops))
                self.num_loops += 1
        return groups + backs

    def _edges(self, name: str, node: NodeDraft, fields: Sequence[str], *, is_back: bool) -> list[Edge]:
        """The edges of a group that lead back, or those that do not; none if the group has only the others."""
        sources = [
            (field, ref)
            for field, ref in node.sources
            if field in fields and self.topology.is_back(ref.node, name) == is_back
        ]
        present = {field for field, _ in sources}
        missing = [field for field in fields if field not in present]
        if sources and missing:
            raise GraphError(_mixed(name, fields, missing[0], is_back, self.topology.cycle_of(name)))
        return [replace(_edge(name, field, ref), is_back=is_back) for field, ref in sources]

    # ---- roots ----

    def _find_roots(self, name: str, node: NodeDraft, chains: Mapping[str, list[str]]) -> None:
        choices = node.choices
        if len(choices) > 1:
            edges = [edge for group in choices for edge in group.edges]
            node.choice_root = _nearest_above(edges, chains)
            node.choice_per_frame = self._starts_per_frame(node.choice_root, edges)
        for group in node.groups:
            group.root, group.root_per_frame = self._root(name, node, group, chains)
            group.edges = [
                replace(
                    edge,
                    root=group.root,
                    root_per_frame=group.root_per_frame,
                    per_frame=self.could_be_per_frame(edge)
                    and (group.root is None or (group.root_per_frame and edge.source == group.root)),
                )
                for edge in group.edges
            ]

    def _root(
        self, name: str, node: NodeDraft, group: GroupDraft, chains: Mapping[str, list[str]]
    ) -> tuple[str | None, bool]:
        """The root of a group, and whether it has a bucket for each of the root's yields."""
        if group.counts is not None:
            return ENTRY, False
        if group.loop is not None:
            return name, False
        if node.declared.first_wins and len(node.choices) > 1:
            return node.choice_root, node.choice_per_frame
        if len(group.edges) == 1:
            return None, False
        root = _nearest_above(group.edges, chains)
        return root, self._starts_per_frame(root, group.edges)

    def _starts_per_frame(self, root: str | None, edges: Sequence[Edge]) -> bool:
        """Whether all ways from ``root`` over ``edges`` start with an edge that is per frame."""
        if root == ENTRY or root is None:
            return False
        if any(edge.source == root and not self.could_be_per_frame(edge) for edge in edges):
            return False
        above = {edge.source for edge in edges}
        return not any(
            edge.source == root and not edge.per_frame
            for name, node in self.nodes.items()
            if not above.isdisjoint(self.topology.reaches(name))
            for group in node.choices
            for edge in group.edges
        )


def _edge(node: str, field: str, ref: FieldRef) -> Edge:
    return Edge(ref.node, ref.field, node, field, ref.transfer)


def _nearest_above(edges: Iterable[Edge], chains: Mapping[str, list[str]]) -> str:
    return common_prefix([chains[edge.source] for edge in edges])[-1]


def _mixed(name: str, fields: Sequence[str], missing: str, is_back: bool, cycle: Cycle | None) -> str:
    assert cycle is not None  # without a loop every edge comes from outside
    where, other = ("inside", "outside") if is_back else ("outside", "inside")
    return (
        f"node {name!r}: the join {list(fields)} can never complete: {missing!r} only comes from {other} of the "
        f"loop of {', '.join(sorted(cycle.nodes))}, the rest from {where}; let the loop pass {missing!r} on, or "
        "declare a group that starts the loop and another one for its iterations"
    )
