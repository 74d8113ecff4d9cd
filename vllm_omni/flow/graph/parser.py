"""Compile a declared graph to a plan; every mistake is raised here, before the first request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from vllm_omni.errors import GraphError
from vllm_omni.flow.graph import checks
from vllm_omni.flow.graph.declarations import GlobalParameters, Scheduling
from vllm_omni.flow.graph.draft import GraphDraft, GroupDraft, NodeDraft
from vllm_omni.flow.graph.dsl import Graph, RoleEntry
from vllm_omni.flow.graph.plan import Edge, GroupPlan, Needed, NodePlan, StaticPlan
from vllm_omni.flow.graph.transfer import ENTRY


class GraphParser:
    """Checks a graph and compiles it. From: Omni-Flow section 3.3."""

    def __init__(self, graph: Graph):
        self._graph = graph

    def parse(self) -> StaticPlan:
        """Compile the graph.

        Raises:
            GraphError: the graph is wrong; the message names node and field, valid names and the nearest fix.
        """
        draft = GraphDraft(self._graph)
        checks.check_outputs(draft)
        checks.check_graph_calls(draft)
        checks.check_sources(draft)
        for loop in draft.loops.all:
            checks.check_loop(draft, loop)
        draft.connect()
        checks.check_joins(draft)
        plan = _make_plan(draft)
        checks.check_all_used(draft, plan)
        return plan


def parse_graphs(graphs: Iterable[Graph]) -> dict[str, StaticPlan]:
    """Compile graphs that share nodes: roles of one name are one node. Graphs that they call follow them.

    Raises:
        GraphError: a graph is wrong, two have one name, or two disagree about a role or about parameters.

    From: Omni-Flow section 3.3, cross-graph consistency.
    """
    plans: dict[str, StaticPlan] = {}
    roles: dict[str, tuple[str, RoleEntry]] = {}  # role -> the first graph that has it, its entry there
    parameters: dict[str, tuple[str, GlobalParameters]] = {}  # likewise
    for graph in with_called(graphs):
        if graph.name in plans:
            raise GraphError(f"two graphs are named {graph.name!r}; give one of them another name")
        for name, role in graph.declarations.roles.items():
            other, theirs = roles.setdefault(name, (graph.name, role))
            where = f"graphs {other!r} and {graph.name!r} disagree about role {name!r}"
            if theirs.role_class is not role.role_class:
                raise GraphError(
                    f"{where}: it is {theirs.role_class.__name__} in the one and {role.role_class.__name__} in the "
                    "other; use graph.role_ref(...) of the other's, or another name"
                )
            if theirs.parameters != role.parameters:
                raise GraphError(
                    f"{where}: its parameters are {[one.name for one in theirs.parameters]} in the one and "
                    f"{[one.name for one in role.parameters]} in the other"
                )
        for name, one in graph.declarations.parameters.items():
            other, declared = parameters.setdefault(name, (graph.name, one))
            if declared != one:
                raise GraphError(
                    f"graphs {other!r} and {graph.name!r} have two different parameters named {name!r}, and a session "
                    "shares them: give both graphs the same ones, or one of them another name"
                )
        plans[graph.name] = GraphParser(graph).parse()
    for entry in (entry for plan in plans.values() for entry in plan.entries()):
        if entry.name in plans:
            raise GraphError(f"{entry.name!r} is a graph, and a graph call of another one; give the graph another name")
    return plans


def with_called(graphs: Iterable[Graph]) -> list[Graph]:
    """The graphs, and behind them those that they call."""
    found = list(graphs)
    for graph in found:
        for role in graph.declarations.roles.values():
            if role.graph is not None and role.graph not in found:
                found.append(role.graph)
    return found


def _make_plan(draft: GraphDraft) -> StaticPlan:
    declared = draft.declarations
    groups = [group for node in draft.nodes.values() for group in node.groups]
    roots = {edge.root for group in groups for edge in group.edges} | {group.root for group in groups}
    roots |= {node.choice_root for node in draft.nodes.values()}
    roots |= {edge.target for group in groups for edge in group.edges if edge.is_back}
    nodes = {name: _plan_node(draft, name, node, roots) for name, node in draft.nodes.items()}
    outputs = {
        name: Edge(source.node, source.field, ENTRY, name, window=nodes[source.node].outputs[source.field].window)
        for name, source in declared.outputs.items()
    }
    edges = (*(edge for node in nodes.values() for edge in node.slots), *outputs.values())
    return StaticPlan(
        name=draft.name,
        nodes=MappingProxyType(nodes),
        edges=edges,
        placeholders=tuple(declared.placeholders),
        outputs=MappingProxyType(outputs),
        needed_by=MappingProxyType({name: _needed(edge, nodes) for name, edge in outputs.items()}),
        graph_calls=MappingProxyType(dict(declared.graph_calls)),
        parameters=MappingProxyType(dict(declared.parameters)),
        findings=(*_find(nodes, edges), *_find_starts(draft)),
    )


def _plan_node(draft: GraphDraft, name: str, node: NodeDraft, roots: set[str | None]) -> NodePlan:
    declared, role = node.declared, draft.declarations.roles[node.role]
    slots: list[Edge] = []
    groups = tuple(_plan_group(draft, name, node, index, slots) for index in range(len(node.groups)))
    below = draft.paths.reaches(name) - {name}
    return NodePlan(
        name=name,
        role=node.role,
        interface=declared.name,
        slots=tuple(slots),
        groups=groups,
        outputs=MappingProxyType(declared.outputs),
        scheduling=declared.scheduling,
        first_wins=declared.first_wins and len(node.choices) > 1,
        max_iterations=declared.max_iterations,
        choice_root=node.choice_root,
        choice_per_frame=node.choice_per_frame,
        is_root=name in roots,
        is_optional=any(_has_alternatives(draft.nodes[each]) for each in below),
        parameters=tuple(one.name for one in role.parameters),
        loops=draft.loops_from(name),
        loops_around=_loops_around(draft, name),
        loop_depth=0 if (loop := draft.loops.of(name)) is None else loop.depth,
        graph=None if role.graph is None else role.graph.name,
    )


def _plan_group(draft: GraphDraft, name: str, node: NodeDraft, index: int, slots: list[Edge]) -> GroupPlan:
    """Plan a group, and append its edges to the slots of the node."""
    group = node.groups[index]
    fields: dict[str, tuple[int, ...]] = {}
    first = len(slots)
    for edge in group.edges:
        fields[edge.target_field] = (*fields.get(edge.target_field, ()), len(slots))
        slots.append(replace(edge, slot=len(slots), group=index, window=_window(draft, edge)))
    for indices in fields.values():
        for slot in indices[:-1]:
            slots[slot] = replace(slots[slot], is_last_of_field=False)
    critical = frozenset(indices[0] for indices in fields.values() if len(indices) == 1)
    constants = tuple(edge.slot for edge in slots[first:] if edge.is_constant)
    is_plain = len(critical) == len(group.edges) and all(edge.transfer is None for edge in group.edges)
    return GroupPlan(
        index=index,
        slots=fields,
        root=group.root,
        root_per_frame=group.root_per_frame,
        loop=group.loop,
        counts=group.counts,
        critical=critical,
        all_slots=tuple(slot for indices in fields.values() for slot in indices),
        per_frame_slots=tuple(edge.slot for edge in slots[first:] if edge.per_frame and not edge.is_constant),
        limits_forks=_limits_forks(draft, name, node, group),
        is_plain=is_plain and group.counts is None and not constants,
        constants=constants,
        entered=() if group.start is None else draft.loops_from(group.start),
    )


def _window(draft: GraphDraft, edge: Edge) -> int | None:
    if edge.source == ENTRY or edge.per_frame or not edge.is_declared:
        return None
    return draft.nodes[edge.source].declared.outputs[edge.source_field].window


def _has_alternatives(node: NodeDraft) -> bool:
    """Whether one of several groups or sources is enough; groups that each fire by themselves are no alternatives."""
    if len(node.choices) > 1 and node.declared.first_wins:
        return True
    return any(len({edge.target_field for edge in group.edges}) < len(group.edges) for group in node.choices)


def _limits_forks(draft: GraphDraft, name: str, node: NodeDraft, group: GroupDraft) -> bool:
    """False where an activation may depend on later yields of its fork: behind an ordered node, behind a loop that
    reads them as constants, or if it is itself ordered and within a loop.
    """
    if node.declared.scheduling is Scheduling.SESSION and draft.loops.of(name) is not None:
        return False
    if group.root is None or group.root == ENTRY:
        return True
    between = _between(draft, group.root, {edge.source for edge in group.edges})
    if any(draft.nodes[each].declared.scheduling is Scheduling.SESSION for each in between):
        return False
    constants = _constants_of_loops(draft, between)
    forks = [each for each in draft.forks if group.root in draft.paths.reaches(each)]  # each holds back those above it
    return not any(_reads_ahead(draft, constant, fork) for constant in constants for fork in forks)


def _between(draft: GraphDraft, root: str, sources: set[str]) -> set[str]:
    """The nodes on the paths from a root to the sources of a group, which are among them."""
    below = draft.paths.reaches(root) - {root}
    return {each for each in below if not sources.isdisjoint(draft.paths.reaches(each))}


def _constants_of_loops(draft: GraphDraft, nodes: set[str]) -> list[Edge]:
    """The constants that the loops of these nodes read."""
    iterated = {each for loop in draft.loops.all if not nodes.isdisjoint(loop.nodes) for each in loop.nodes}
    return [edge for each in iterated for one in draft.nodes[each].groups for edge in one.edges if edge.is_constant]


def _reads_ahead(draft: GraphDraft, constant: Edge, fork: str) -> bool:
    """Whether an iteration below a yield of a fork reads a constant that stems from its later yields, too."""
    below = draft.paths.reaches(fork)
    if constant.source not in below:
        return False
    return not constant.root_per_frame if constant.root == fork else constant.root not in below


def _loops_around(draft: GraphDraft, name: str) -> tuple[int, ...]:
    loop = draft.loops.of(name)
    if loop is None or loop.header is None:
        return ()
    return draft.loops_from(loop.header)


def _find(nodes: Mapping[str, NodePlan], edges: Sequence[Edge]) -> Iterable[str]:
    """Declarations that are valid but may be mistakes."""
    used = {(edge.source, edge.source_field) for edge in edges}
    for node in nodes.values():
        for field in node.outputs:
            if (node.name, field) not in used:
                yield f"output {field!r} of node {node.name!r} has no reader"
        for group in node.groups:
            if group.loop is not None and node.max_iterations is None:
                yield f"node {node.name!r} has a loop without a bound: no max_iterations is declared"


def _find_starts(draft: GraphDraft) -> Iterable[str]:
    for loop in draft.loops.all:
        others = [name for name in draft.nodes if name in loop.nodes and draft.can_start(name, loop.nodes)]
        if len(others) > 1:
            others.remove(str(loop.header))
            yield (
                f"the loop of {checks.quoted(sorted(loop.nodes))} starts at {loop.header!r}, which is called first; "
                f"what feeds {checks.quoted(others)} from outside enters the loop in the first iteration"
            )


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
