"""The compiled graph: frozen tables, so that the runtime only looks things up. From: Omni-Flow section 3.3."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from vllm_omni.flow.graph.declarations import Field, GlobalParameters, GraphCallEntry, Scheduling
from vllm_omni.flow.graph.transfer import ENTRY, TransferFunction

Reader: TypeAlias = tuple[str, int, str]
"""The receiving end of an edge: a node or ENTRY, its slot, and its input field or the graph output."""


STARTED = ""
"""A field that the header of a loop sends when an activation starts: its readers then read their constants again."""


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
    root: str | None = None  # root of the target's bucket; None: the target needs no bucket
    root_per_frame: bool = False
    is_back: bool = False  # closes a loop
    loop_depth: int = 0  # loops around the header that it leads back to, the one that it closes included
    is_constant: bool = False  # enters a loop: every iteration reads it again. `root`: of the loop and its source
    first_only: bool = False  # a constant that only the first iteration reads
    is_last_of_field: bool = True  # the last edge that is read of its field
    window: int | None = None  # frames that the source may be ahead, unless per frame; None: ``credit.WINDOW``

    @property
    def is_declared(self) -> bool:
        return self.source_field != STARTED

    def __str__(self) -> str:
        return f"{self.source}.{self.source_field} -> {self.target}.{self.target_field}"


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """An AND group of a node as it is connected."""

    index: int
    slots: Mapping[str, tuple[int, ...]]  # input field -> the edges that feed it, read one after the other
    root: str | None  # the nearest node above all of its slots; None: a single edge, which needs no bucket
    root_per_frame: bool  # there is a bucket for each yield of the root, rather than for each of its activations
    loop: int | None  # the loop that these edges close
    counts: Mapping[str, int | str] | None  # activate_by_count
    critical: frozenset[int]  # slots that are the only ones of their field
    all_slots: tuple[int, ...]
    per_frame_slots: tuple[int, ...]
    limits_forks: bool  # unfinished activations hold back the producers of its per-frame edges
    is_plain: bool  # each field has one edge without a transfer function, and none is counted or constant
    constants: tuple[int, ...] = ()  # slots that enter a loop
    entered: tuple[int, ...] = ()  # the numbers of that loop


@dataclass(frozen=True, slots=True)
class NodePlan:
    """One node: an interface of a role."""

    name: str  # "role.interface"
    role: str
    interface: str
    slots: tuple[Edge, ...]
    groups: tuple[GroupPlan, ...]  # those that close a loop come last
    outputs: Mapping[str, Field]
    scheduling: Scheduling = Scheduling.LEAST_OUTSTANDING
    first_wins: bool = False
    max_iterations: int | None = None
    choice_root: str | None = None  # of several groups: the nearest node above all of them
    choice_per_frame: bool = False
    is_root: bool = False  # a bucket or a choice further down has this node as its root
    is_optional: bool = False  # a node further down has an alternative to what depends on this node
    parameters: tuple[str, ...] = ()
    loops: tuple[int, ...] = ()  # loops that this node is the header of
    loops_around: tuple[int, ...] = ()  # the innermost loop that this node is part of
    loop_depth: int = 0  # the number of loops that this node is part of
    graph: str | None = None  # the graph that it calls, by its graph call of the interface's name

    @property
    def num_choices(self) -> int:
        """The number of groups that start no iteration of a loop."""
        return sum(group.loop is None for group in self.groups)


class Needed(NamedTuple):
    """The nodes and edges that one graph output depends on."""

    nodes: frozenset[str]
    edges: frozenset[Edge]


PER_FRAME = ""  # a key that stands for all per-frame edges of a node: they advance together


@dataclass(frozen=True, slots=True, eq=False)
class Outlets:
    """The readers of a node's output fields in a call."""

    whole: Mapping[str, tuple[Edge, ...]]  # field -> edges that carry it as a stream
    per_frame: Mapping[str, tuple[Edge, ...]]
    edges: tuple[Edge, ...]  # all edges
    fields: frozenset[str]  # the keys of both mappings, without STARTED
    nodes: Mapping[str, tuple[str, ...]]  # field -> the nodes that read it, ENTRY for an output of the call
    has_joins: bool  # some whole edge leads into a bucket
    readers: Mapping[str, tuple[Reader, ...]]  # streamed field, or PER_FRAME -> the readers that grant credit
    windows: Mapping[str, int]  # of those that are not ``credit.WINDOW``
    reports_start: bool  # STARTED has readers


@dataclass(frozen=True, slots=True)
class Route:
    """The plan reduced to the outputs of a call; the remaining nodes are never activated."""

    graph: str
    outputs: frozenset[str]
    nodes: Mapping[str, NodePlan]  # topological order
    placeholders: frozenset[str]
    outlets: Mapping[str, Outlets]  # by node, or ENTRY
    windows: Mapping[str, int | None]  # graph output -> ``Edge.window``


@dataclass(frozen=True, slots=True)
class StaticPlan:
    """All tables of a graph. Made by ``GraphParser``; never changed."""

    name: str
    nodes: Mapping[str, NodePlan]  # topological order
    edges: tuple[Edge, ...]
    placeholders: tuple[str, ...]
    outputs: Mapping[str, Edge]  # graph output -> the edge into ENTRY
    needed_by: Mapping[str, Needed]  # graph output -> nodes and edges that it depends on
    graph_calls: Mapping[str, GraphCallEntry]
    parameters: Mapping[str, GlobalParameters]
    findings: tuple[str, ...] = ()  # valid declarations that may be mistakes
    until: frozenset[str] = frozenset()  # of a graph call: the outputs that complete it

    @property
    def roles(self) -> frozenset[str]:
        """The roles that need a node of their own; another graph does not."""
        return frozenset(node.role for node in self.nodes.values() if node.graph is None)

    def entries(self) -> list[StaticPlan]:
        """The graph calls, each as a plan of its own over the same nodes; its name is that of both: "graph.call"."""
        return [self._entry(call) for call in self.graph_calls.values()]

    def _entry(self, call: GraphCallEntry) -> StaticPlan:
        needed = {name: one for name, one in self.needed_by.items() if name in call.outputs}
        fed = {edge.source_field for one in needed.values() for edge in one.edges if edge.source == ENTRY}
        return replace(
            self,
            name=f"{self.name}.{call.name}",
            placeholders=tuple(name for name in self.placeholders if name in fed),
            outputs=MappingProxyType({name: self.outputs[name] for name in needed}),
            needed_by=MappingProxyType(needed),
            graph_calls=MappingProxyType({}),
            until=call.until,
        )

    def route(self, outputs: Iterable[str]) -> Route:
        """Reduce the plan to ``outputs``, which must exist. Costs a pass over the edges: keep the result."""
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
            windows=MappingProxyType({name: self.outputs[name].window for name in wanted}),
        )


def _make_outlets(edges: Sequence[Edge], node: NodePlan | None) -> Outlets:
    whole: dict[str, tuple[Edge, ...]] = {}
    per_frame: dict[str, tuple[Edge, ...]] = {}
    readers: dict[str, tuple[Reader, ...]] = {}
    windows: dict[str, int] = {}
    for edge in edges:
        fields = per_frame if edge.per_frame else whole
        fields[edge.source_field] = (*fields.get(edge.source_field, ()), edge)
        if node is None or edge.source_field == STARTED or not node.outputs[edge.source_field].streamed:
            continue
        key = PER_FRAME if edge.per_frame else edge.source_field
        readers[key] = (*readers.get(key, ()), (edge.target, edge.slot, edge.target_field))
        if edge.window is not None:
            windows[key] = edge.window
    has_joins = any(edge.root is not None for each in whole.values() for edge in each)
    names = (frozenset(whole) | frozenset(per_frame)) - {STARTED}
    nodes = {name: tuple(dict.fromkeys(edge.target for edge in edges if edge.source_field == name)) for name in names}
    return Outlets(whole, per_frame, tuple(edges), names, nodes, has_joins, readers, windows, STARTED in whole)
