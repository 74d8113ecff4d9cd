"""A plan as indented text."""

from collections.abc import Iterator

from vllm_omni.flow.graph.declarations import Field
from vllm_omni.flow.graph.plan import Edge, GroupPlan, NodePlan, StaticPlan
from vllm_omni.flow.graph.render.labels import drawn, enters, fires, is_critical, is_single_edge, listed, source, traits


def to_text(plan: StaticPlan) -> str:
    """One paragraph per node, in topological order; then what the checks found.

    The input of a node with a single edge stands alone; others stand below the condition under which they fire.
    """
    lines = [f"graph {plan.name}", f"  takes {listed(plan.placeholders)}"]
    for node in plan.nodes.values():
        lines += _node(node)
    lines += [f"  gives {name} = {edge.source}.{edge.source_field}" for name, edge in plan.outputs.items()]
    for call in plan.graph_calls.values():
        until = "" if call.until == call.outputs else f", until {listed(sorted(call.until))}"
        lines.append(f"  call {call.name} gives {listed(sorted(call.outputs))}{until}")
    for name in plan.parameters:
        roles = dict.fromkeys(node.role for node in plan.nodes.values() if name in node.parameters)
        lines.append(f"  shares {name} in a session: {listed(roles)}")
    lines += [f"  found: {finding}" for finding in plan.findings]
    return "\n".join(lines) + "\n"


def _node(node: NodePlan) -> Iterator[str]:
    marks = ", ".join(traits(node))
    yield f"  {node.name}" + (f" ({marks})" if marks else "")
    indent = "    " if is_single_edge(node) else "      "
    for group in node.groups:
        if not is_single_edge(node):
            yield f"    on {fires(group)}"
        yield from (indent + _input(edge, group) for edge in drawn(node.slots[slot] for slot in group.all_slots))
    yield from (f"    {name} -> {_type(spec)}" for name, spec in node.outputs.items())


def _input(edge: Edge, group: GroupPlan) -> str:
    kinds = {"per frame": edge.per_frame, enters(edge): edge.is_constant, "critical": is_critical(edge, group)}
    kinds[f"loop {group.loop}"] = edge.is_back
    marks = ", ".join(kind for kind, holds in kinds.items() if holds)
    return f"{edge.target_field} <- {source(edge)}" + (f" ({marks})" if marks else "")


def _type(spec: Field) -> str:
    return ", ".join([spec.modality, *([spec.dtype] if spec.dtype else []), *(["streamed"] if spec.streamed else [])])
