"""A plan as a Mermaid flowchart."""

from vllm_omni.flow.graph.plan import StaticPlan
from vllm_omni.flow.graph.render.labels import (
    CRITICAL,
    NODE_STYLES,
    edge_label,
    group_of,
    is_critical,
    is_join,
    is_streamed,
    node_kinds,
    node_marks,
)
from vllm_omni.flow.graph.transfer import ENTRY

ENTITIES = {"#": "#35;", "&": "#amp;", '"': "#quot;", "<": "#lt;", ">": "#gt;"}


def to_mermaid(plan: StaticPlan) -> str:
    """A flowchart, as Markdown on GitHub and elsewhere shows it.

    Thick edges are streamed, dotted ones lead back, red ones are critical; joins are hexagons.
    """
    ids = {name: f"n{index}" for index, name in enumerate(plan.nodes)}
    lines = ["flowchart LR"]
    lines += [f'  in_{name}(["{name}"])' for name in plan.placeholders]
    for node in plan.nodes.values():
        label = "<br/>".join(map(_quote, (node.name, *node_marks(node))))
        lines.append(f"  {ids[node.name]}" + (f'{{{{"{label}"}}}}' if is_join(node) else f'["{label}"]'))
    lines += [f'  out_{name}(["{name}"])' for name in plan.outputs]
    for edge in plan.edges:
        source = f"in_{edge.source_field}" if edge.source == ENTRY else ids[edge.source]
        target = f"out_{edge.target_field}" if edge.target == ENTRY else ids[edge.target]
        arrow = "-.->" if edge.is_back else "==>" if is_streamed(plan, edge) else "-->"
        label = _quote(("each " if edge.per_frame else "") + edge_label(plan, edge))
        lines.append(f'  {source} {arrow}|"{label}"| {target}' if label else f"  {source} {arrow} {target}")
    critical = [str(index) for index, edge in enumerate(plan.edges) if is_critical(edge, group_of(plan, edge))]
    if critical:
        lines.append(f"  linkStyle {','.join(critical)} stroke:{CRITICAL}")
    for kind, style in NODE_STYLES.items():
        members = [ids[node.name] for node in plan.nodes.values() if kind in node_kinds(node)]
        if members:
            lines += [f"  classDef {kind} {style}", f"  class {','.join(members)} {kind}"]
    lines += [f"  %% found: {finding}" for finding in plan.findings]
    return "\n".join(lines) + "\n"


def _quote(text: str) -> str:
    """Escape characters that would end a label or start markup."""
    return text.translate({ord(char): entity for char, entity in ENTITIES.items()})
