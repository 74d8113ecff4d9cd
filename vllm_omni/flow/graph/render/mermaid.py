"""A plan as a Mermaid flowchart."""

from collections.abc import Iterator, Mapping

from vllm_omni.flow.graph.plan import Edge, NodePlan, StaticPlan
from vllm_omni.flow.graph.render import labels
from vllm_omni.flow.graph.transfer import ENTRY

ENTITIES = {"#": "#35;", "&": "#amp;", '"': "#quot;", "<": "#lt;", ">": "#gt;"}


def to_mermaid(plan: StaticPlan) -> str:
    """A flowchart, as Markdown on GitHub and elsewhere shows it.

    Thick edges are streamed, dotted ones lead back, red ones are critical; joins are hexagons.
    """
    ids = {name: f"n{index}" for index, name in enumerate(plan.nodes)}
    lines = [
        "flowchart LR",
        *(f'in_{name}(["{name}"])' for name in plan.placeholders),
        *(ids[name] + _box(node) for name, node in plan.nodes.items()),
        *(f'out_{name}(["{name}"])' for name in plan.outputs),
        *(_arrow(plan, edge, ids) for edge in labels.drawn(plan.edges)),
        *_styles(plan, ids),
        *(f"%% found: {finding}" for finding in plan.findings),
    ]
    return "\n  ".join(lines) + "\n"


def _box(node: NodePlan) -> str:
    label = "<br/>".join(map(_quote, (node.name, *labels.node_marks(node))))
    return f'{{{{"{label}"}}}}' if labels.is_join(node) else f'["{label}"]'


def _arrow(plan: StaticPlan, edge: Edge, ids: Mapping[str, str]) -> str:
    source = f"in_{edge.source_field}" if edge.source == ENTRY else ids[edge.source]
    target = f"out_{edge.target_field}" if edge.target == ENTRY else ids[edge.target]
    arrow = "-.->" if edge.is_back else "==>" if labels.is_streamed(plan, edge) else "-->"
    label = _quote(("each " if edge.per_frame else "") + labels.edge_label(plan, edge))
    return f'{source} {arrow}|"{label}"| {target}' if label else f"{source} {arrow} {target}"


def _styles(plan: StaticPlan, ids: Mapping[str, str]) -> Iterator[str]:
    edges = enumerate(labels.drawn(plan.edges))
    critical = [str(index) for index, edge in edges if labels.is_critical(edge, labels.group_of(plan, edge))]
    if critical:
        yield f"linkStyle {','.join(critical)} stroke:{labels.CRITICAL}"
    for kind, style in labels.NODE_STYLES.items():
        members = [ids[node.name] for node in plan.nodes.values() if kind in labels.node_kinds(node)]
        if members:
            yield f"classDef {kind} {style}"
            yield f"class {','.join(members)} {kind}"


def _quote(text: str) -> str:
    """Escape characters that would end a label or start markup."""
    return text.translate({ord(char): entity for char, entity in ENTITIES.items()})
