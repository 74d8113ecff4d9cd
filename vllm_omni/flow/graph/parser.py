"""From a written graph to a checked plan: whatever is wrong is said before the first request arrives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from vllm_omni.errors import GraphError, PlanError
from vllm_omni.flow.graph.dsl import FieldRef, Graph, Interface, NodeCall, Scheduling, what_exists
from vllm_omni.flow.graph.plan import Edge, GroupPlan, Needed, NodePlan, StaticPlan
from vllm_omni.flow.graph.topology import Cycle, Topology, common_prefix
from vllm_omni.flow.graph.transfer import ENTRY


@dataclass
class _Group:
    """An AND group of a node, while it is being planned."""

    edges: list[Edge]
    loop: int | None = None
    counts: Mapping[str, int | str] | None = None
    root: str | None = None
    root_per_frame: bool = False


class _Node:
    """A node, while it is being planned."""

    def __init__(self, call: NodeCall):
        self.role = call._role
        self.declared: Interface = call._interface
        self.sources: list[tuple[str, FieldRef]] = []  # of all calls, in their order
        self.groups: list[_Group] = []
        self.choice_root: str | None = None
        self.choice_per_frame = False

    @property
    def choices(self) -> list[_Group]:
        return [group for group in self.groups if group.loop is None]


class GraphParser:
    """Checks a graph and compiles it. From: Omni-Flow section 3.3."""

    def __init__(self, graph: Graph):
        self._graph = graph
        self._nodes: dict[str, _Node] = {}
        self._num_loops = 0

    def parse(self) -> StaticPlan:
        """Compile the graph.

        Raises:
            GraphError: the graph is wrong; the message names node and field, what exists and the nearest fix.
            PlanError: the graph is right, but has a loop within a loop, or one that is entered at several nodes.
        """
        graph = self._graph
        if not graph._outputs:
            raise GraphError(f"graph {graph.name!r} has no output; end it with graph.output(name=node.field)")
        self._nodes = {}
        for call in graph._calls:
            node = self._nodes.setdefault(call._name, _Node(call))
            node.sources += call._sources.items()
        for name, source in graph._outputs.items():
            self._check_output(name, source)
        for name, node in self._nodes.items():
            self._check_sources(name, node)
        feeds = {name: [ref.node for _, ref in node.sources] for name, node in self._nodes.items()}
        counting = [name for name, node in self._nodes.items() if node.declared.activate_by_count]
        topology = Topology(feeds, counting)
        for cycle in topology.cycles:
            self._check_cycle(cycle)
        order = topology.order()
        if len(order) < len(self._nodes):
            inner = ", ".join(sorted(set(self._nodes).difference(order)))
            raise PlanError(
                f"graph {graph.name!r}: there is a loop within the loop of {inner}, which cannot be planned; run the "
                "inner loop inside of one node, or unroll it with a second role"
            )
        self._nodes = {name: self._nodes[name] for name in order}
        for name, node in self._nodes.items():
            self._make_groups(name, node, topology)
        chains = topology.dominators()
        for name, node in self._nodes.items():
            self._find_roots(name, node, topology, chains)
        self._check_joins(topology)
        return self._plan(topology)

    # ---- checks on what was written ----

    def _check_output(self, name: str, source: FieldRef) -> None:
        if source.node == ENTRY:
            raise GraphError(f"output {name!r} is the placeholder {source.field!r} itself; name a field of a node")
        if source.transfer is not None:
            raise GraphError(
                f"output {name!r}: {source} has a transfer function, but no node to run it in; drop .via(...) and let "
                f"node {source.node!r} emit what the user should see"
            )

    def _check_sources(self, name: str, node: _Node) -> None:
        connected = {field for field, _ in node.sources}
        groups = [node.declared.input_names] if node.declared.activate_by_count else node.declared.inputs_or
        complete = {field for group in groups if connected.issuperset(group) for field in group}
        for group in groups:
            missing = [field for field in group if field not in connected]
            if missing and (not complete or not connected.intersection(group) <= complete):
                raise GraphError(self._unconnected(name, missing[0], group))
        for field, source in node.sources:
            wanted = node.declared.inputs.get(field)
            if wanted is not None and source.spec is not None and not wanted.accepts(source.spec):
                raise GraphError(
                    f"node {name!r}: input {field!r} wants {wanted}, but {source} is {source.spec}; "
                    "convert it on the edge with .via(transfer_function, yields=...)"
                )

    def _unconnected(self, name: str, field: str, group: Sequence[str]) -> str:
        fields = [f"{made._name}.{each}" for made in self._graph._calls for each in made._interface.outputs]
        known = what_exists(field, [*self._graph._placeholders, *dict.fromkeys(fields)])
        can_never = f", so that its group {list(group)} can never fill" if len(group) > 1 else ""
        return (
            f"node {name!r}: input {field!r} is not connected{can_never}; pass {field}=<a source> to the call; {known}"
        )

    def _check_cycle(self, cycle: Cycle) -> None:
        loop = " -> ".join([*sorted(cycle.nodes), sorted(cycle.nodes)[0]])
        if not cycle.headers:
            raise GraphError(
                f"nothing outside of the loop {loop} feeds it, so that it can never start; connect a placeholder"
            )
        if len(cycle.headers) > 1:
            entries = ", ".join(
                f"{field!r} of {name!r} by {ref}"
                for name in cycle.headers
                for field, ref in self._nodes[name].sources
                if ref.node not in cycle.nodes
            )
            raise PlanError(
                f"the loop {loop} is entered at {len(cycle.headers)} nodes ({entries}), but the loop alone feeds its "
                "turns; let one node of the loop take all of it from outside and pass it on"
            )
        leaves = any(ref.node in cycle.nodes for ref in self._graph._outputs.values()) or any(
            ref.node in cycle.nodes
            for name, node in self._nodes.items()
            if name not in cycle.nodes
            for _, ref in node.sources
        )
        if not leaves:
            raise GraphError(
                f"the loop {loop} has no exit: nothing outside of it reads one of its fields; add "
                f"graph.output(...) with a field of {cycle.headers[0]!r}, or feed a node behind the loop"
            )

    # ---- groups, edges, roots ----

    def _make_groups(self, name: str, node: _Node, topology: Topology) -> None:
        declared = node.declared
        cycle = topology.cycle_of(name)
        if declared.activate_by_count:
            if cycle is not None:
                raise PlanError(
                    f"node {name!r}: activate_by_count fires once in a call, and the loop of "
                    f"{', '.join(sorted(cycle.nodes))} comes by again and again; count behind the loop"
                )
            edges = [self._edge(name, field, ref) for field, ref in node.sources]
            node.groups = [_Group(edges, counts=declared.activate_by_count)]
            return
        backs: list[_Group] = []
        connected = {field for field, _ in node.sources}
        for fields in declared.inputs_or:
            if not connected.issuperset(fields):  # not used in this graph
                continue
            inside = [(f, ref) for f, ref in node.sources if f in fields and topology.is_back(ref.node, name)]
            outside = [(f, ref) for f, ref in node.sources if f in fields and not topology.is_back(ref.node, name)]
            for sources, is_back in ((outside, False), (inside, True)):
                missing = [field for field in fields if field not in {f for f, _ in sources}]
                if len(missing) == len(fields):
                    continue
                if missing:
                    raise GraphError(self._mixed(name, fields, missing[0], is_back, cycle))
                edges = [replace(self._edge(name, f, ref), is_back=is_back) for f, ref in sources]
                if is_back:
                    backs.append(_Group(edges, loop=self._num_loops))
                    self._num_loops += 1
                else:
                    node.groups.append(_Group(edges))
        node.groups += backs

    def _mixed(self, name: str, fields: Sequence[str], missing: str, is_back: bool, cycle: Cycle | None) -> str:
        assert cycle is not None  # otherwise all comes from outside
        where, other = ("inside", "outside") if is_back else ("outside", "inside")
        return (
            f"node {name!r}: the join {list(fields)} can never complete: {missing!r} only comes from {other} of the "
            f"loop of {', '.join(sorted(cycle.nodes))}, the rest from {where}; let the loop pass {missing!r} on, or "
            "declare a group for what starts the loop and another one for its turns"
        )

    def _edge(self, name: str, field: str, ref: FieldRef) -> Edge:
        return Edge(ref.node, ref.field, name, field, ref.transfer)

    def _find_roots(self, name: str, node: _Node, topology: Topology, chains: Mapping[str, Sequence[str]]) -> None:
        choices = node.choices
        if len(choices) > 1:
            edges = [edge for group in choices for edge in group.edges]
            node.choice_root = _nearest_above(edges, chains)
            node.choice_per_frame = self._starts_per_frame(node.choice_root, edges, topology)
        for group in node.groups:
            if group.counts is not None:
                group.root = ENTRY
            elif group.loop is not None:
                group.root = name
            elif node.declared.first_wins and len(choices) > 1:
                group.root, group.root_per_frame = node.choice_root, node.choice_per_frame
            elif len(group.edges) > 1:
                group.root = _nearest_above(group.edges, chains)
                group.root_per_frame = self._starts_per_frame(group.root, group.edges, topology)
            group.edges = [
                replace(
                    edge,
                    root=group.root,
                    root_per_frame=group.root_per_frame,
                    per_frame=self._could_be_per_frame(edge)
                    and (group.root is None or (group.root_per_frame and edge.source == group.root)),
                )
                for edge in group.edges
            ]

    def _starts_per_frame(self, root: str | None, edges: Sequence[Edge], topology: Topology) -> bool:
        """Whether all ways from ``root`` over ``edges`` begin with an edge that is per frame."""
        if root == ENTRY or root is None:
            return False
        for edge in edges:
            if edge.source == root and not self._could_be_per_frame(edge):
                return False
        above = {edge.source for edge in edges}
        for name, node in self._nodes.items():
            if not above.isdisjoint(topology.reaches(name)):
                for group in node.choices:
                    if any(edge.source == root and not edge.per_frame for edge in group.edges):
                        return False
        return True

    def _could_be_per_frame(self, edge: Edge) -> bool:
        if edge.source == ENTRY or edge.is_back:
            return False
        wanted = self._nodes[edge.target].declared.inputs.get(edge.target_field)
        produced = self._nodes[edge.source].declared.outputs[edge.source_field]
        return produced.streamed and wanted is not None and not wanted.streamed

    # ---- checks on what it means ----

    def _check_joins(self, topology: Topology) -> None:
        forks: dict[str, frozenset[str]] = {ENTRY: frozenset()}  # node -> what multiplies its activations
        for name, node in self._nodes.items():
            of_groups: list[frozenset[str]] = []
            for group in node.choices:
                if group.counts is not None:
                    self._check_counts(name, node, forks)
                    of_groups.append(frozenset())
                    continue
                source, per_frame = group.root, group.root_per_frame
                if source is None:
                    (edge,) = group.edges
                    source, per_frame = edge.source, edge.per_frame
                base = forks[source] | ({source} if per_frame else set())
                of_groups.append(base)
                self._check_pairing(name, node, group, {e: forks[e.source] - base for e in group.edges})
            forks[name] = frozenset[str]().union(*of_groups)
            if node.declared.scheduling is Scheduling.SESSION and node.choice_root is not None:
                self._check_ordered(name, node, forks, of_groups)

    def _check_pairing(self, name: str, node: _Node, group: _Group, below: Mapping[Edge, Iterable[str]]) -> None:
        paired = [
            edge
            for edge, forks in below.items()
            if forks
            and edge.target_field in node.declared.inputs
            and not node.declared.inputs[edge.target_field].streamed
        ]
        if len({edge.target_field for edge in paired}) > 1:
            comes = ", ".join(f"{e.target_field!r} for each frame of {_names(sorted(below[e]))}" for e in paired)
            raise GraphError(
                f"node {name!r} joins what has no common fork source: {comes}, so that nothing says which belong "
                "together; let one node yield both, or declare the inputs streamed (or count them with "
                "activate_by_count) to gather all of them"
            )

    def _check_counts(self, name: str, node: _Node, forks: Mapping[str, frozenset[str]]) -> None:
        for field, count in node.declared.activate_by_count.items():
            edges = [edge for group in node.groups for edge in group.edges if edge.target_field == field]
            once = all(not forks[edge.source] and not self._is_streamed(edge) for edge in edges)
            if once and not self._has_loops and isinstance(count, int) and count > len(edges):
                raise GraphError(
                    f"node {name!r}: activate_by_count wants {count} of {field!r}, but no more than {len(edges)} can "
                    f"come, so that it can never complete; declare {edges[0].source}.{edges[0].source_field} streamed, "
                    "or lower the count"
                )

    @property
    def _has_loops(self) -> bool:
        return self._num_loops > 0

    def _is_streamed(self, edge: Edge) -> bool:
        streamed = edge.source != ENTRY and self._nodes[edge.source].declared.outputs[edge.source_field].streamed
        return streamed or edge.transfer is not None

    def _check_ordered(
        self, name: str, node: _Node, forks: Mapping[str, frozenset[str]], of_groups: Sequence[frozenset[str]]
    ) -> None:
        """Each group must have one activation for each frame of what is above all of them."""
        root = node.choice_root
        assert root is not None
        base = forks[root] | ({root} if node.choice_per_frame else set())
        for group, above in zip(node.choices, of_groups, strict=True):
            below = above - base
            if below and not node.declared.first_wins:
                fed = ", ".join(f"{edge.target_field!r} by {edge.source}.{edge.source_field}" for edge in group.edges)
                raise GraphError(
                    f"node {name!r} has scheduling SESSION, but nothing says in which order its groups come: {fed} has "
                    f"several frames for one of what is above all groups ({root}), made by {_names(sorted(below))}; "
                    "let one node yield what feeds all groups, or use another scheduling"
                )

    # ---- the plan ----

    def _plan(self, topology: Topology) -> StaticPlan:
        graph = self._graph
        nodes: dict[str, NodePlan] = {}
        roots = {group.root for node in self._nodes.values() for group in node.groups}
        roots |= {node.choice_root for node in self._nodes.values()}
        spares = {name for name, node in self._nodes.items() if self._has_alternatives(node)}
        for name, node in self._nodes.items():
            tolerates = bool(spares & (topology.reaches(name) - {name}))
            nodes[name] = self._plan_node(name, node, roots, tolerates, topology)
        outputs = {name: Edge(source.node, source.field, ENTRY, name) for name, source in graph._outputs.items()}
        edges = (*(edge for node in nodes.values() for edge in node.slots), *outputs.values())
        plan = StaticPlan(
            name=graph.name,
            nodes=MappingProxyType(nodes),
            edges=edges,
            placeholders=tuple(graph._placeholders),
            outputs=MappingProxyType(outputs),
            needed_by=MappingProxyType({name: _needed(edge, nodes) for name, edge in outputs.items()}),
            graph_calls=MappingProxyType(dict(graph._graph_calls)),
            parameters=MappingProxyType(dict(graph._parameters)),
            findings=tuple(_find(nodes, edges)),
        )
        self._check_all_used(plan)
        return plan

    def _has_alternatives(self, node: _Node) -> bool:
        """Where one of several groups or sources is enough; groups that each fire by themselves are no alternatives."""
        if len(node.choices) > 1 and node.declared.first_wins:
            return True
        return any(len(edges) > 1 for group in node.choices for edges in _by_field(group.edges).values())

    def _plan_node(
        self, name: str, node: _Node, roots: set[str | None], tolerates: bool, topology: Topology
    ) -> NodePlan:
        slots: list[Edge] = []
        groups: list[GroupPlan] = []
        for index, group in enumerate(node.groups):
            fields: dict[str, tuple[int, ...]] = {}
            for edge in group.edges:
                fields[edge.target_field] = (*fields.get(edge.target_field, ()), len(slots))
                slots.append(replace(edge, slot=len(slots), group=index))
            for slots_ in fields.values():
                for slot in slots_[:-1]:
                    slots[slot] = replace(slots[slot], is_last_of_field=False)
            critical = frozenset(slots_[0] for slots_ in fields.values() if len(slots_) == 1)
            groups.append(
                GroupPlan(
                    index,
                    fields,
                    group.root,
                    group.root_per_frame,
                    group.loop,
                    group.counts,
                    critical,
                    tuple(slot for slots_ in fields.values() for slot in slots_),
                    tuple(edge.slot for edge in slots if edge.group == index and edge.per_frame),
                    self._holds_forks_back(name, node, group, topology),
                    group.counts is None
                    and len(critical) == len(group.edges)
                    and all(edge.transfer is None for edge in group.edges),
                )
            )
        declared = node.declared
        return NodePlan(
            name=name,
            role=node.role,
            interface=declared.name,
            slots=tuple(slots),
            groups=tuple(groups),
            outputs=MappingProxyType(declared.outputs),
            scheduling=declared.scheduling,
            first_wins=declared.first_wins and len(node.choices) > 1,
            max_turns=declared.max_turns,
            choice_root=node.choice_root,
            choice_per_frame=node.choice_per_frame,
            is_root=name in roots,
            tolerates=tolerates,
            parameters=tuple(one.name for one in self._graph._roles[node.role]._parameters),
            loops=tuple(group.loop for group in node.groups if group.loop is not None),
            loops_around=self._loops_around(name, topology),
        )

    def _holds_forks_back(self, name: str, node: _Node, group: _Group, topology: Topology) -> bool:
        """Not where an activation may wait for what its fork will yield: behind a node that keeps the order, or if
        it keeps the order itself within a loop.
        """
        if node.declared.scheduling is Scheduling.SESSION and topology.cycle_of(name) is not None:
            return False
        if group.root is None or group.root == ENTRY:
            return True
        sources = {edge.source for edge in group.edges}
        between = topology.reaches(group.root) - {group.root}
        return not any(
            self._nodes[each].declared.scheduling is Scheduling.SESSION
            for each in between
            if not sources.isdisjoint(topology.reaches(each))
        )

    def _loops_around(self, name: str, topology: Topology) -> tuple[int, ...]:
        cycle = topology.cycle_of(name)
        if cycle is None:
            return ()
        (header,) = cycle.headers
        return tuple(group.loop for group in self._nodes[header].groups if group.loop is not None)

    def _check_all_used(self, plan: StaticPlan) -> None:
        used = frozenset[str]().union(*(needed.nodes for needed in plan.needed_by.values()))
        for node in plan.nodes.values():
            if node.name not in used:
                raise GraphError(
                    f"node {node.name!r} leads to no output, so it would never run; add graph.output(...) with one of "
                    f"its fields {_names(node.outputs)}, or remove the call"
                )
        for role in self._graph._roles:
            if role not in plan.roles:
                raise GraphError(f"role {role!r} is never called; call one of its interfaces, or remove it")
        for name in plan.placeholders:
            if not any(edge.source == ENTRY and edge.source_field == name for edge in plan.edges):
                raise GraphError(f"placeholder {name!r} feeds no node; pass it to a call, or remove it")


def parse_graphs(graphs: Iterable[Graph]) -> dict[str, StaticPlan]:
    """Compile graphs that share nodes: roles of one name are one node.

    Raises:
        GraphError: a graph is wrong, two have one name, or two disagree about a role.
        PlanError: see ``GraphParser.parse``.

    From: Omni-Flow section 3.3, cross-graph consistency.
    """
    plans: dict[str, StaticPlan] = {}
    roles: dict[str, tuple[Graph, type]] = {}
    for graph in graphs:
        if graph.name in plans:
            raise GraphError(f"two graphs are named {graph.name!r}; give one of them another name")
        for name, role in graph._roles.items():
            other, declared = roles.setdefault(name, (graph, type(role)))
            if declared is not type(role):
                raise GraphError(
                    f"graphs {other.name!r} and {graph.name!r} disagree about role {name!r}: it is "
                    f"{declared.__name__} in the one and {type(role).__name__} in the other; use graph.role_ref(...) "
                    "of the other's, or another name"
                )
            if (theirs := other._roles[name]._parameters) != role._parameters:
                raise GraphError(
                    f"graphs {other.name!r} and {graph.name!r} disagree about role {name!r}: its parameters are "
                    f"{[one.name for one in theirs]} in the one and {[one.name for one in role._parameters]} in the "
                    "other"
                )
        plans[graph.name] = GraphParser(graph).parse()
    return plans


def _find(nodes: Mapping[str, NodePlan], edges: Sequence[Edge]) -> Iterable[str]:
    used = {(edge.source, edge.source_field) for edge in edges}
    for node in nodes.values():
        for field in node.outputs:
            if (node.name, field) not in used:
                yield f"nobody reads output {field!r} of node {node.name!r}"
        for group in node.groups:
            if group.loop is not None and node.max_turns is None:
                yield f"node {node.name!r} ends its loop by itself: no max_turns is declared"


def _nearest_above(edges: Sequence[Edge], chains: Mapping[str, Sequence[str]]) -> str:
    return common_prefix([chains[edge.source] for edge in edges])[-1]


def _by_field(edges: Iterable[Edge]) -> dict[str, list[Edge]]:
    fields: dict[str, list[Edge]] = {}
    for edge in edges:
        fields.setdefault(edge.target_field, []).append(edge)
    return fields


def _needed(output: Edge, nodes: Mapping[str, NodePlan]) -> Needed:
    found: set[str] = set()
    edges: set[Edge] = set()
    todo = [output]
    while todo:
        edge = todo.pop()
        edges.add(edge)
        if edge.source != ENTRY and edge.source not in found:
            found.add(edge.source)
            todo.extend(nodes[edge.source].slots)
    return Needed(frozenset(found), frozenset(edges))


def _names(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
