"""Check a graph as a whole; errors (``GraphError``) name node, field and the nearest fix."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from vllm_omni.errors import GraphError
from vllm_omni.flow.graph.draft import GraphDraft, GroupDraft, NodeDraft
from vllm_omni.flow.graph.plan import Edge, StaticPlan
from vllm_omni.flow.graph.topology import Loop
from vllm_omni.flow.graph.transfer import ENTRY
from vllm_omni.names import suggest

Forks = frozenset[str]
"""The nodes of which a path to a node is per frame: each of their yields is an activation of its own there."""


def check_outputs(draft: GraphDraft) -> None:
    outputs = draft.declarations.outputs
    if not outputs:
        raise GraphError(f"graph {draft.name!r} has no output; end it with graph.output(name=node.field)")
    for name, source in outputs.items():
        if source.node == ENTRY:
            raise GraphError(f"output {name!r} is the placeholder {source.field!r} itself; name a field of a node")
        if source.transfer is not None:
            raise GraphError(
                f"output {name!r}: {source} has a transfer function, but no node to run it in; drop .via(...) and let "
                f"node {source.node!r} emit the payload for the user"
            )


def check_graph_calls(draft: GraphDraft) -> None:
    outputs = draft.declarations.outputs
    for call in draft.declarations.graph_calls.values():
        for name in sorted(call.outputs - set(outputs)):
            raise GraphError(
                f"graph {draft.name!r}, graph call {call.name!r}: no output {name!r}; {suggest(name, outputs)}"
            )


def check_sources(draft: GraphDraft) -> None:
    """Every group is connected as a whole or not at all, and types agree."""
    for name, node in draft.nodes.items():
        _check_connected(draft, name, node)
        for field, source in node.sources:
            wanted = node.declared.inputs.get(field)
            if wanted is not None and source.spec is not None and not wanted.accepts(source.spec):
                raise GraphError(
                    f"node {name!r}: input {field!r} wants {wanted}, but {source} is {source.spec}; "
                    "convert it on the edge with .via(transfer_function, yields=...)"
                )
            is_streamed = source.spec is not None and source.spec.streamed and source.transfer is None
            if is_streamed and wanted is None and draft.declarations.roles[node.role].graph is not None:
                raise GraphError(
                    f"node {name!r}: input {field!r} is a placeholder of another graph, which takes one value, and "
                    f"{source} is streamed: make one of it with .via(transfer_function), or declare the placeholder's "
                    "Field, so that each piece starts a call"
                )


def _check_connected(draft: GraphDraft, name: str, node: NodeDraft) -> None:
    connected = {field for field, _ in node.sources}
    groups = [node.declared.input_names] if node.declared.activate_by_count else node.declared.inputs_or
    complete = {field for group in groups if connected.issuperset(group) for field in group}
    for group in groups:
        missing = [field for field in group if field not in connected]
        if missing and (not complete or not connected.intersection(group) <= complete):
            outputs = [f"{call.node}.{each}" for call in draft.declarations.calls for each in call.interface.outputs]
            known = suggest(missing[0], [*draft.declarations.placeholders, *outputs])
            can_never = f", so its group {list(group)} can never fill" if len(group) > 1 else ""
            raise GraphError(
                f"node {name!r}: input {missing[0]!r} is not connected{can_never}; pass {missing[0]}=<a source> to the "
                f"call; {known}"
            )


def check_loop(draft: GraphDraft, loop: Loop) -> None:
    """A loop can start, and has an exit."""
    where = " -> ".join([*sorted(loop.nodes), min(loop.nodes)])
    if loop.header is None:
        raise GraphError(_no_start(draft, loop, where))
    readers = [ref.node for name, node in draft.nodes.items() if name not in loop.nodes for _, ref in node.sources]
    if loop.nodes.isdisjoint([*readers, *(ref.node for ref in draft.declarations.outputs.values())]):
        raise GraphError(
            f"the loop {where} has no exit: nothing outside of it reads one of its fields; add "
            f"graph.output(...) with a field of {loop.header!r}, or feed a node behind the loop"
        )


def _no_start(draft: GraphDraft, loop: Loop, where: str) -> str:
    fed = [
        f"{field!r} of {name!r} by {ref}"
        for name, node in draft.nodes.items()
        if name in loop.nodes
        for field, ref in node.sources
        if ref.node not in loop.nodes
    ]
    if not fed:
        return f"nothing outside of the loop {where} feeds it, so it can never start; connect a placeholder"
    return (
        f"the loop {where} can never start: from outside it only gets {', '.join(fed)}, which completes no group of "
        "inputs; feed all fields of one of its nodes from outside, or declare a group that starts it"
    )


def check_joins(draft: GraphDraft) -> None:
    """The frames that meet in a join correspond to one another."""
    forks: dict[str, Forks] = {ENTRY: frozenset()}
    for name, node in draft.nodes.items():
        bases = [_check_group(draft, name, node, group, forks) for group in node.choices]
        forks[name] = frozenset[str]().union(*bases)


def _check_group(draft: GraphDraft, name: str, node: NodeDraft, group: GroupDraft, forks: Mapping[str, Forks]) -> Forks:
    """The forks that multiply the activations of a node by this group."""
    if group.counts is not None:
        _check_counts(draft, name, node, forks)
        return _below(forks, group.root, False)
    source, per_frame = group.root, group.root_per_frame
    if source is None:
        (edge,) = group.edges
        source, per_frame = edge.source, edge.per_frame
    base = _below(forks, source, per_frame)
    constant = {edge: _below(forks, edge.root, edge.root_per_frame) for edge in group.edges if edge.is_constant}
    _check_pairing(name, node, {edge: forks[edge.source] - constant.get(edge, base) for edge in group.edges})
    return base


def _below(forks: Mapping[str, Forks], root: str | None, per_frame: bool) -> Forks:
    assert root is not None
    return forks[root] | ({root} if per_frame else set())


def _check_pairing(name: str, node: NodeDraft, below: Mapping[Edge, Forks]) -> None:
    paired = [
        edge
        for edge, forks in below.items()
        if forks and edge.target_field in node.declared.inputs and not node.declared.inputs[edge.target_field].streamed
    ]
    if len({edge.target_field for edge in paired}) > 1:
        frames = ", ".join(f"{e.target_field!r} for each frame of {quoted(sorted(below[e]))}" for e in paired)
        raise GraphError(
            f"node {name!r} joins fields without a common fork source: {frames}, so it is undefined which frames "
            "belong together; let one node yield both, or declare the inputs streamed (or count them with "
            "activate_by_count) to gather all of them"
        )


def _check_counts(draft: GraphDraft, name: str, node: NodeDraft, forks: Mapping[str, Forks]) -> None:
    if draft.num_loops:
        return
    for field, count in node.declared.activate_by_count.items():
        edges = [edge for group in node.groups for edge in group.edges if edge.target_field == field]
        is_once = not any(forks[edge.source] or draft.is_streamed(edge) or edge.transfer for edge in edges)
        if is_once and isinstance(count, int) and count > len(edges):
            raise GraphError(
                f"node {name!r}: activate_by_count wants {count} of {field!r}, but at most {len(edges)} can arrive, so "
                f"it can never complete; declare {edges[0].source}.{edges[0].source_field} streamed, or lower the count"
            )


def check_all_used(draft: GraphDraft, plan: StaticPlan) -> None:
    """Every node leads to an output, every role is called, every placeholder feeds a node."""
    used = frozenset[str]().union(*(needed.nodes for needed in plan.needed_by.values()))
    for node in plan.nodes.values():
        if node.name not in used:
            raise GraphError(
                f"node {node.name!r} leads to no output, so it would never run; add graph.output(...) with one of "
                f"its fields {quoted(node.outputs)}, or remove the call"
            )
    for role in draft.declarations.roles:
        if all(node.role != role for node in plan.nodes.values()):
            raise GraphError(f"role {role!r} is never called; call one of its interfaces, or remove it")
    for name in plan.placeholders:
        if not any(edge.source == ENTRY and edge.source_field == name for edge in plan.edges):
            raise GraphError(f"placeholder {name!r} feeds no node; pass it to a call, or remove it")


def quoted(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
