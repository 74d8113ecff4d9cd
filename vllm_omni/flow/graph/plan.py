"""The compiled graph: frozen tables, so that the runtime only looks things up. From: Omni-Flow section 3.3."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from vllm_omni.flow.graph.dsl import Field, GlobalParameters, GraphCallEntry, Scheduling
from vllm_omni.flow.graph.transfer import ENTRY, TransferFunction

Reader: TypeAlias = tuple[str, int, str]  # a node, or ENTRY, its slot, and its input field or the graph output


@dataclass(frozen=True, slots=True)
class Edge:
    """One output field feeding one input field (or one graph output, where ``target`` is ENTRY)."""

    source: str
    source_field: str
    target: str
    target_field: str
    transfer: TransferFunction | None = field(default=None, compare=False)  # runs in the target's activation
    slot: int = 0  # index in NodePlan.slots of the target
    group: int = 0  # index in NodePlan.groups of the target
    per_frame: bool = False  # every yield is an activation, or a bucket, of its own
    root: str | None = None  # of the target's bucket; None: the target has none
    root_per_frame: bool = False
    is_back: bool = False  # closes a loop
    is_last_of_field: bool = True  # no other edge is read behind it

    def __str__(self) -> str:
        return f"{self.source}.{self.source_field} -> {self.target}.{self.target_field}"


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """An AND group of a node as it is connected: what fires it."""

    index: int
    slots: Mapping[str, tuple[int, ...]]  # input field -> the edges that feed it, read one after the other
    root: str | None  # the nearest node that is above all of its slots; None: one edge, no bucket
    root_per_frame: bool  # a bucket for each yield of the root, rather than for each of its activations
    loop: int | None  # what leads back to this node: which loop it closes
    counts: Mapping[str, int | str] | None  # activate_by_count
    critical: frozenset[int]  # slots that are the only ones of their field
    all_slots: tuple[int, ...]
    per_frame_slots: tuple[int, ...]
    holds_forks_back: bool  # who yields on edges that are per frame may be made to wait for its activations
    reads_plainly: bool  # one edge for each field, and no transfer function


@dataclass(frozen=True, slots=True)
class NodePlan:
    """One node: an interface of a role."""

    name: str  # "role.interface"
    role: str
    interface: str
    slots: tuple[Edge, ...]
    groups: tuple[GroupPlan, ...]  # those that lead back come last
    outputs: Mapping[str, Field]
    scheduling: Scheduling = Scheduling.ROUND_ROBIN
    first_wins: bool = False
    max_turns: int | None = None
    choice_root: str | None = None  # of several groups: the nearest node above all of them
    choice_per_frame: bool = False
    is_root: bool = False  # of a bucket or a choice further down
    tolerates: bool = False  # somebody further down can do without this node
    parameters: tuple[str, ...] = ()
    loops: tuple[int, ...] = ()  # that lead back to it
    loops_around: tuple[int, ...] = ()  # that it is part of

    @property
    def inputs(self) -> Mapping[str, tuple[Edge, ...]]:
        """Input field -> the edges that feed it."""
        fields: dict[str, tuple[Edge, ...]] = {}
        for edge in self.slots:
            fields[edge.target_field] = (*fields.get(edge.target_field, ()), edge)
        return fields

    @property
    def num_choices(self) -> int:
        """Groups that are not turns of a loop."""
        return sum(group.loop is None for group in self.groups)


class Needed(NamedTuple):
    """What one graph output depends on."""

    nodes: frozenset[str]
    edges: frozenset[Edge]


PER_FRAME = ""  # stands for all edges of a node that are per frame: they are in step


@dataclass(frozen=True, slots=True, eq=False)
class Outlets:
    """Where the output fields of a node go in a call."""

    whole: Mapping[str, tuple[Edge, ...]]  # field -> edges that carry it as a stream
    per_frame: Mapping[str, tuple[Edge, ...]]
    edges: tuple[Edge, ...]  # all of them
    fields: frozenset[str]  # of both
    has_joins: bool  # some whole edge leads into a bucket
    readers: Mapping[str, tuple[Reader, ...]]  # streamed field, or PER_FRAME -> who gives credit


@dataclass(frozen=True, slots=True)
class Route:
    """The plan cut down to the outputs of a call: the rest is unreachable for that call, and so never activated."""

    graph: str
    outputs: frozenset[str]
    nodes: Mapping[str, NodePlan]  # topological order
    placeholders: frozenset[str]
    outlets: Mapping[str, Outlets]  # of a node, or of ENTRY


@dataclass(frozen=True, slots=True)
class StaticPlan:
    """Everything the runtime looks up. Made by ``GraphParser``; never changed."""

    name: str
    nodes: Mapping[str, NodePlan]  # topological order
    edges: tuple[Edge, ...]
    placeholders: tuple[str, ...]
    outputs: Mapping[str, Edge]  # graph output -> the edge into ENTRY
    needed_by: Mapping[str, Needed]  # graph output -> nodes and edges without which it cannot be made
    graph_calls: Mapping[str, GraphCallEntry]
    parameters: Mapping[str, GlobalParameters]
    findings: tuple[str, ...] = ()  # what is not wrong, but may not be meant

    @property
    def roles(self) -> frozenset[str]:
        return frozenset(node.role for node in self.nodes.values())

    def route(self, outputs: Iterable[str]) -> Route:
        """Cut the plan down to ``outputs``, which must exist. Costs a pass over the edges: keep the result."""
        wanted = frozenset(outputs)
        nodes = frozenset[str]().union(*(self.needed_by[name].nodes for name in wanted))
        edges = frozenset[Edge]().union(*(self.needed_by[name].edges for name in wanted))
        outgoing: dict[str, list[Edge]] = {name: [] for name in (ENTRY, *nodes)}
        for edge in self.edges:
            if edge in edges:
                outgoing[edge.source].append(edge)
        outlets = {name: _make_outlets(each, self.nodes.get(name)) for name, each in outgoing.items()}
        return Route(
            graph=self.name,
            outputs=wanted,
            nodes=MappingProxyType({name: node for name, node in self.nodes.items() if name in nodes}),
            placeholders=outlets[ENTRY].fields,
            outlets=MappingProxyType(outlets),
        )


def _make_outlets(edges: Sequence[Edge], node: NodePlan | None) -> Outlets:
    whole: dict[str, tuple[Edge, ...]] = {}
    per_frame: dict[str, tuple[Edge, ...]] = {}
    readers: dict[str, tuple[Reader, ...]] = {}
    for edge in edges:
        fields = per_frame if edge.per_frame else whole
        fields[edge.source_field] = (*fields.get(edge.source_field, ()), edge)
        if node is None or not node.outputs[edge.source_field].streamed:
            continue
        key = PER_FRAME if edge.per_frame else edge.source_field
        readers[key] = (*readers.get(key, ()), (edge.target, edge.slot, edge.target_field))
    has_joins = any(edge.root is not None for each in whole.values() for edge in each)
    return Outlets(whole, per_frame, tuple(edges), frozenset(whole) | frozenset(per_frame), has_joins, readers)
