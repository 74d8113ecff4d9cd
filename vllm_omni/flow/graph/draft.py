"""A graph while it is being compiled: nodes with their groups, edges and roots.

From: Omni-Flow section 3.3 (diamond roots).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from vllm_omni.flow.graph.dsl import Declarations, FieldRef, Graph, Interface
from vllm_omni.flow.graph.plan import STARTED, Edge
from vllm_omni.flow.graph.topology import Loop, Loops, Paths, common_prefix
from vllm_omni.flow.graph.transfer import ENTRY


@dataclass
class GroupDraft:
    """An AND group of a node."""

    edges: list[Edge]
    loop: int | None = None
    counts: Mapping[str, int | str] | None = None
    root: str | None = None
    root_per_frame: bool = False

    @property
    def start(self) -> str | None:
        """The header of the loop that constants of this group enter."""
        return next((edge.source for edge in self.edges if edge.source_field == STARTED), None)


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
    def alternatives(self) -> Sequence[Sequence[str]]:
        """The fields of each declared group; counts gather all groups in one."""
        return [self.declared.input_names] if self.declared.activate_by_count else self.declared.inputs_or

    @property
    def choices(self) -> list[GroupDraft]:
        """The groups that start no iteration of a loop."""
        return [group for group in self.groups if group.loop is None]


class GraphDraft:
    """The nodes of a graph by name; in topological order once ``connect`` has run."""

    def __init__(self, graph: Graph):
        self.name = graph.name
        self.declarations: Declarations = graph.declarations
        self.num_loops = 0
        self.nodes: dict[str, NodeDraft] = {}
        for call in graph.declarations.calls:
            node = self.nodes.setdefault(call.node, NodeDraft(call.role, call.interface))
            node.sources += call.sources.items()
        feeds = {name: [ref.node for _, ref in node.sources] for name, node in self.nodes.items()}
        self.loops = Loops(feeds, self.can_start)
        self.paths = Paths({}, {}, {})

    def can_start(self, name: str, loop: frozenset[str]) -> bool:
        """Whether a group of a node gets all of its fields from outside of a loop."""
        node = self.nodes[name]
        outside = {field for field, ref in node.sources if ref.node not in loop}
        return any(outside.issuperset(fields) for fields in node.alternatives)

    def connect(self) -> None:
        """Make the groups of every node, sort the nodes, and find the roots and the edges that are per frame."""
        for name, node in self.nodes.items():
            node.groups = self._groups(name, node)
        self.paths = Paths(
            {name: _sources(node.choices, is_constant=False) for name, node in self.nodes.items()},
            {name: _sources(node.groups, is_constant=True) for name, node in self.nodes.items()},
            {name: self._counts_below(name) for name, node in self.nodes.items() if node.declared.activate_by_count},
        )
        self.nodes = {name: self.nodes[name] for name in self.paths.order()}
        chains = self.paths.dominators()
        for name, node in self.nodes.items():
            self._find_roots(name, node, chains)

    @property
    def forks(self) -> set[str]:
        """The nodes of which each yield is an activation, or a bucket, of its own."""
        edges = (edge for node in self.nodes.values() for group in node.groups for edge in group.edges)
        return {edge.source for edge in edges if edge.per_frame}

    def could_be_per_frame(self, edge: Edge) -> bool:
        """Whether a streamed output feeds an input that is declared without ``streamed``."""
        if edge.source == ENTRY:
            return False
        wanted = self.nodes[edge.target].declared.inputs.get(edge.target_field)
        return wanted is not None and not wanted.streamed and self.is_streamed(edge)

    def is_streamed(self, edge: Edge) -> bool:
        return edge.source != ENTRY and self.nodes[edge.source].declared.outputs[edge.source_field].streamed

    # ---- groups ----

    def _groups(self, name: str, node: NodeDraft) -> list[GroupDraft]:
        groups: list[GroupDraft] = []
        backs: list[GroupDraft] = []  # groups that start an iteration of a loop come last
        connected = {field for field, _ in node.sources}
        entered = self.loops.entered(name)
        counts = node.declared.activate_by_count or None
        for fields in node.alternatives:
            if not connected.issuperset(fields):  # not used in this graph
                continue
            edges = [_edge(name, field, ref) for field, ref in node.sources if field in fields]
            outside = [edge for edge in edges if not self.loops.is_back(edge.source, name)]
            if {edge.target_field for edge in outside}.issuperset(fields):
                groups.append(GroupDraft(self._mark_constants(outside, entered), counts=counts))
            if len(outside) < len(edges):
                edges.sort(key=lambda edge: fields.index(edge.target_field))
                backs.append(GroupDraft(self._iteration_edges(name, edges), self.num_loops, counts))
                self.num_loops += 1
        return groups + backs

    def _mark_constants(self, edges: list[Edge], entered: Loop | None) -> list[Edge]:
        if entered is None:
            return edges
        fed = {edge.target_field for edge in edges if edge.source in entered.nodes}  # by the loop itself
        marked = [
            replace(edge, is_constant=True, first_only=not fed or edge.target_field in fed)
            if edge.source not in entered.nodes
            else edge
            for edge in edges
        ]
        return _with_start(marked, entered.header)

    def _iteration_edges(self, header: str, edges: list[Edge]) -> list[Edge]:
        """The edges that start an iteration: those that lead back, and constants for the other fields."""
        backs = [edge for edge in edges if self.loops.is_back(edge.source, header)]
        passed = {edge.target_field for edge in backs}
        marked = [
            self._mark_back(edge) if edge in backs else replace(edge, is_constant=True)
            for edge in edges
            if edge in backs or edge.target_field not in passed
        ]
        return [edge if edge.is_declared else self._mark_back(edge) for edge in _with_start(marked, header)]

    def _mark_back(self, edge: Edge) -> Edge:
        loop = self.loops.of(edge.target)
        assert loop is not None
        return replace(edge, is_back=True, loop_depth=loop.depth)

    # ---- roots ----

    def _counts_below(self, name: str) -> str:
        """The node in whose every activation a node counts anew: the header of its loop."""
        entered = self.loops.entered(name)
        return ENTRY if entered is None else str(entered.header)

    def _find_roots(self, name: str, node: NodeDraft, chains: Mapping[str, list[str]]) -> None:
        choices = node.choices
        if len(choices) > 1:
            edges = [edge for group in choices for edge in group.edges]
            node.choice_root = _nearest_above(edges, chains)
            node.choice_per_frame = self._starts_per_frame(node.choice_root, edges)
        for group in node.groups:
            group.root, group.root_per_frame = self._root(name, node, group, chains)
            group.edges = [self._with_root(edge, group, chains) for edge in group.edges]

    def _root(
        self, name: str, node: NodeDraft, group: GroupDraft, chains: Mapping[str, list[str]]
    ) -> tuple[str | None, bool]:
        """The root of a group, and whether it has a bucket for each of the root's yields."""
        if group.loop is not None:
            starts_each = len(group.edges) == 1 and not group.counts and self.could_be_per_frame(group.edges[0])
            return (None if starts_each else name), False
        if group.counts is not None:
            return self._counts_below(name), False
        if node.declared.first_wins and len(node.choices) > 1:
            return node.choice_root, node.choice_per_frame
        if len(group.edges) == 1:
            return None, False
        root = _nearest_above(group.edges, chains)
        return root, self._starts_per_frame(root, group.edges)

    def loops_from(self, header: str) -> tuple[int, ...]:
        """The numbers of the loop of a header: one for each group that leads back."""
        return tuple(group.loop for group in self.nodes[header].groups if group.loop is not None)

    def _with_root(self, edge: Edge, group: GroupDraft, chains: Mapping[str, list[str]]) -> Edge:
        root, root_per_frame = group.root, group.root_per_frame
        if edge.is_constant:  # the same for all iterations of the loops that the root has started
            header = group.start
            assert header is not None
            root = common_prefix([chains[edge.source], chains[header]])[-1]
            root_per_frame = self._starts_per_frame(root, [edge], header)
        per_frame = self.could_be_per_frame(edge) and (root is None or (root_per_frame and edge.source == root))
        return replace(edge, root=root, root_per_frame=root_per_frame, per_frame=per_frame)

    def _starts_per_frame(self, root: str | None, edges: Sequence[Edge], header: str | None = None) -> bool:
        """Whether all paths from ``root`` over ``edges`` start with an edge that is per frame.

        Args:
            header: of a loop that ``edges`` enter as constants; otherwise constants are no paths.
        """
        if root == ENTRY or root is None:
            return False
        counted = [edge for edge in edges if header is not None or not edge.is_constant]
        if any(edge.source == root and not self.could_be_per_frame(edge) for edge in counted):
            return False
        groups = self._choices_above({edge.source for edge in counted} | ({header} if header is not None else set()))
        if any(group.counts is not None and group.root == root for group in groups):
            return False
        above = [edge for group in groups for edge in group.edges if not edge.is_constant]
        return all(edge.per_frame for edge in above if edge.source == root)

    def _choices_above(self, names: set[str]) -> list[GroupDraft]:
        """The choices of all nodes from which there is a path to one of these, which are among them."""
        above = [
            node
            for name, node in self.nodes.items()
            if not names.isdisjoint(self.paths.reaches(name, with_constants=False))
        ]
        return [group for node in above for group in node.choices]


def _edge(node: str, field: str, ref: FieldRef) -> Edge:
    return Edge(ref.node, ref.field, node, field, ref.transfer)


def _with_start(edges: list[Edge], header: str | None) -> list[Edge]:
    """Add the edge by which a header makes constants available to each of its activations."""
    if header is None or not any(edge.is_constant for edge in edges):
        return edges
    target = edges[0].target
    return [*edges, Edge(header, STARTED, target, STARTED)]


def _sources(groups: Iterable[GroupDraft], *, is_constant: bool) -> tuple[str, ...]:
    edges = [edge for group in groups for edge in group.edges if edge.is_constant == is_constant]
    return tuple(dict.fromkeys(edge.source for edge in edges))


def _nearest_above(edges: Iterable[Edge], chains: Mapping[str, list[str]]) -> str:
    return common_prefix([chains[edge.source] for edge in edges if not edge.is_constant])[-1]
