"""A plan as people read it: text, Mermaid, SVG."""

from collections.abc import Iterable
from html import escape
from typing import NamedTuple

from vllm_omni.flow.dsl import Field
from vllm_omni.flow.frame import ENTRY
from vllm_omni.flow.plan import Edge, StaticPlan


def to_text(plan: StaticPlan) -> str:
    """One paragraph per node, in the order in which a call reaches them."""
    lines = [f"graph {plan.name}", f"  takes {_list(plan.placeholders)}"]
    for node in plan.nodes.values():
        lines.append(f"  {node.name}")
        lines += [f"    {name} <- {_source(edge)}" for name, edges in node.inputs.items() for edge in edges]
        lines += [f"    {name} -> {_describe(spec)}" for name, spec in node.outputs.items()]
    lines += [f"  gives {name} = {edge.source}.{edge.source_field}" for name, edge in plan.outputs.items()]
    return "\n".join(lines) + "\n"


def to_mermaid(plan: StaticPlan) -> str:
    """A flowchart, as Markdown on GitHub and elsewhere shows it."""
    ids = {name: f"n{index}" for index, name in enumerate(plan.nodes)}
    lines = ["flowchart LR"]
    lines += [f'  in_{name}(["{name}"])' for name in plan.placeholders]
    lines += [f'  {ids[name]}["{name}"]' for name in plan.nodes]
    lines += [f'  out_{name}(["{name}"])' for name in plan.outputs]
    for edge in plan.edges:
        source = f"in_{edge.source_field}" if edge.source == ENTRY else ids[edge.source]
        target = f"out_{edge.target_field}" if edge.target == ENTRY else ids[edge.target]
        arrow = "==>" if _is_streamed(plan, edge) else "-->"
        label = _label(edge)
        lines.append(f'  {source} {arrow}|"{label}"| {target}' if label else f"  {source} {arrow} {target}")
    return "\n".join(lines) + "\n"


COLUMN, ROW, WIDTH, HEIGHT, MARGIN = 350, 76, 150, 40, 24  # pixels
STYLE = """text { font: 13px sans-serif; fill: #1d2733 } .label { font-size: 11px; fill: #55606e }
.node { fill: #e8f0fe; stroke: #4a78c2 } .end { fill: #f4f4f2; stroke: #9a9a94 }
path { fill: none; stroke: #55606e } .streamed { stroke-width: 3 }"""


class _Box(NamedTuple):
    title: str
    kind: str  # class of its style
    x: int
    y: int


def to_svg(plan: StaticPlan) -> str:
    """A drawing: a column for each step from the inputs; thick edges are streamed."""
    boxes = _place(plan)
    width = MARGIN + max(box.x for box in boxes.values()) + WIDTH
    height = MARGIN + max(box.y for box in boxes.values()) + HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        f"<title>{escape(plan.name)}</title><style>{STYLE}</style>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="9" markerHeight="9" '
        'markerUnits="userSpaceOnUse" orient="auto"><path d="M0,0 L8,4 L0,8 z" style="fill:#55606e;stroke:none"/>'
        "</marker></defs>",
    ]
    for edge in plan.edges:
        start, end = (
            boxes[_key(edge.source, edge.source_field, "in")],
            boxes[_key(edge.target, edge.target_field, "out")],
        )
        x1, y1, x2, y2 = start.x + WIDTH, start.y + HEIGHT // 2, end.x, end.y + HEIGHT // 2
        middle = (x1 + x2) // 2
        kind = ' class="streamed"' if _is_streamed(plan, edge) else ""
        parts.append(f'<path{kind} d="M{x1},{y1} C{middle},{y1} {middle},{y2} {x2},{y2}" marker-end="url(#tip)"/>')
        if label := _label(edge):
            # On the middle of the curve; beside it where it is steep.
            x, y, anchor = (middle, y1 - 7, "middle") if y1 == y2 else (middle + 12, (y1 + y2) // 2, "start")
            parts.append(f'<text class="label" x="{x}" y="{y}" text-anchor="{anchor}">{escape(label)}</text>')
    for box in boxes.values():
        radius = 6 if box.kind == "node" else HEIGHT // 2
        parts.append(
            f'<rect class="{box.kind}" x="{box.x}" y="{box.y}" width="{WIDTH}" height="{HEIGHT}" rx="{radius}"/>'
            f'<text x="{box.x + WIDTH // 2}" y="{box.y + HEIGHT // 2 + 5}" text-anchor="middle">'
            f"{escape(box.title)}</text>"
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _place(plan: StaticPlan) -> dict[str, _Box]:
    """Columns by the longest way from an input, so that edges go to the right; rows by the rows of what feeds them."""
    depths: dict[str, int] = {_key(ENTRY, name, "in"): 0 for name in plan.placeholders}
    feeds: dict[str, list[str]] = {}
    for edge in plan.edges:
        source, target = _key(edge.source, edge.source_field, "in"), _key(edge.target, edge.target_field, "out")
        feeds.setdefault(target, []).append(source)
    for name in (*plan.nodes, *(_key(ENTRY, name, "out") for name in plan.outputs)):
        depths[name] = 1 + max(depths[source] for source in feeds[name])
    boxes: dict[str, _Box] = {}
    for depth in range(max(depths.values()) + 1):
        column = [name for name in depths if depths[name] == depth]
        column.sort(key=lambda name: _mean(boxes[source].y for source in feeds.get(name, ())))
        for row, name in enumerate(column):
            title, kind = (name, "node") if name in plan.nodes else (name.split()[-1], "end")
            boxes[name] = _Box(title, kind, MARGIN + depth * COLUMN, MARGIN + row * ROW)
    return boxes


def _key(node: str, field: str, end: str) -> str:
    return f"{end} {field}" if node == ENTRY else node


def _mean(values: Iterable[int]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else 0.0


def _is_streamed(plan: StaticPlan, edge: Edge) -> bool:
    return edge.source != ENTRY and plan.nodes[edge.source].outputs[edge.source_field].streamed


def _label(edge: Edge) -> str:
    """The field, unless both ends say it; and the transfer function."""
    field = "" if edge.source == ENTRY else edge.source_field
    if edge.target == ENTRY and edge.source_field == edge.target_field:
        field = ""
    transfer = "" if edge.transfer is None else f"{_name(edge)}()"
    return ": ".join(part for part in (field, transfer) if part)


def _source(edge: Edge) -> str:
    source = edge.source_field if edge.source == ENTRY else f"{edge.source}.{edge.source_field}"
    return source if edge.transfer is None else f"{source} by {_name(edge)}()"


def _name(edge: Edge) -> str:
    name = getattr(edge.transfer, "__name__", None)
    return str(name or type(edge.transfer).__name__)


def _describe(spec: Field) -> str:
    parts = [spec.modality, *([spec.dtype] if spec.dtype else []), *(["streamed"] if spec.streamed else [])]
    return ", ".join(parts)


def _list(names: Iterable[str]) -> str:
    return ", ".join(names) or "nothing"
