"""A plan as an SVG drawing, with a legend of the marks that occur in it."""

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from html import escape

from vllm_omni.flow.graph.plan import StaticPlan
from vllm_omni.flow.graph.render.labels import CRITICAL, NODE_STYLES
from vllm_omni.flow.graph.render.svg_layout import (
    CHANNEL,
    LANE,
    LETTER,
    MARGIN,
    PITCH,
    SMALL,
    TIP,
    TITLE,
    Cell,
    Layout,
    Wire,
    text_width,
)

RADIUS = 6  # of a corner
KEY = 38  # from a mark in the legend to its meaning
STYLE = f"""text {{ font: {TITLE}px sans-serif; fill: #1d2733 }} .label {{ font-size: {SMALL}px; fill: #55606e }}
.node {{ fill: #e8f0fe; stroke: #4a78c2 }} .end {{ fill: #f4f4f2; stroke: #9a9a94 }}
.join {{ fill: #fdf0d0; stroke: #b98a1d }} .session {{ stroke-width: 3 }} .header {{ stroke-dasharray: 8 5 }}
path, line {{ fill: none; stroke: #55606e }} .streamed {{ stroke-width: 3 }} .back {{ stroke-dasharray: 8 5 }}
.each {{ stroke-dasharray: 3 4 }} .constant {{ stroke-dasharray: 14 3 3 3 }} .critical {{ stroke: {CRITICAL} }}"""
LEGEND = {  # CSS class -> its meaning, in this order
    "streamed": "streamed",
    "each": "per frame: each is an activation, or part of a join, of its own",
    "critical": "critical: nothing else can fill this field of a join",
    "back": "loop",
    "constant": "constant: read again in every iteration of the loop",
    "header": "header: where the iterations of a loop start",
    "join": "join",
    "session": "session: its activations run one after the other",
}


def to_svg(plan: StaticPlan) -> str:
    """A drawing from left to right, with a legend and what the checks found."""
    layout = Layout(plan)
    wires = [line for wire in layout.wires for line in _draw_wire(layout, wire)]
    boxes = [line for box in layout.boxes.values() for line in _draw_box(box)]
    width, height, foot = _draw_foot(layout, plan.findings)
    size = f'viewBox="0 0 {_n(width)} {_n(height)}" width="{_n(width)}" height="{_n(height)}"'
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
        f"<title>{escape(plan.name)}</title><style>{STYLE}</style>",
        f"<defs>{_tip('tip', '#55606e')}{_tip('tip-critical', CRITICAL)}</defs>",
    ]
    return "\n".join([*head, *wires, *boxes, *foot, "</svg>"]) + "\n"


def _tip(name: str, colour: str) -> str:
    return (
        f'<marker id="{name}" viewBox="0 0 8 8" refX="3" refY="4" markerWidth="9" markerHeight="9" '
        f'markerUnits="userSpaceOnUse" orient="auto"><path d="M0,0 L8,4 L0,8 z" style="fill:{colour};stroke:none"/>'
        "</marker>"
    )


def _draw_wire(layout: Layout, wire: Wire) -> Iterator[str]:
    if wire.is_back:
        path, x, y = _back_path(layout, wire)
        anchor = "start"
    else:
        path = _forward_path(layout, wire)
        x, y, anchor = wire.cells[-1].x - 14, wire.y_in - 5, "end"
    tip = "tip-critical" if "critical" in wire.kind.split() else "tip"
    kind = f' class="{wire.kind}"' if wire.kind else ""
    yield f'<path{kind} d="{path}" marker-end="url(#{tip})"/>'
    if wire.label:
        yield f'<text class="label" x="{_n(x)}" y="{_n(y)}" text-anchor="{anchor}">{escape(wire.label)}</text>'


def _forward_path(layout: Layout, wire: Wire) -> str:
    cells, y = wire.cells, wire.y_out
    path = f"M{_point((cells[0].x + cells[0].width, y))}"
    for cell in cells[1:]:
        gap = layout.gaps[cell.column - 1]
        to = wire.y_in if cell is cells[-1] else cell.middle
        middle = (gap.bend + gap.up) / 2
        path += f" L{_point((gap.bend, y))}"
        if y != to:
            path += f" C{_point((middle, y))} {_point((middle, to))} {_point((gap.up, to))}"
        y = to
    return f"{path} L{_point((cells[-1].x - TIP, y))}"


def _back_path(layout: Layout, wire: Wire) -> tuple[str, float, float]:
    """The path of a loop edge, and the start of its label."""
    start, end = wire.cells[0], wire.cells[-1]
    level = layout.bottom + CHANNEL * (1 + layout.back.index(wire))
    leaving = [other for other in layout.back if other.cells[0].column == start.column]
    coming = [other for other in layout.back if other.cells[-1].column == end.column]
    right = layout.gaps[start.column].down + LANE * (leaving.index(wire) + 1)
    left = layout.gaps[end.column - 1].up + LANE * (len(coming) - 0.5 - coming.index(wire))
    corners = [(right, wire.y_out), (right, level), (left, level), (left, wire.y_in)]
    path = _rounded([(start.x + start.width, wire.y_out), *corners, (end.x - TIP, wire.y_in)])
    return path, left + LANE, level - 5


def _draw_box(box: Cell) -> Iterator[str]:
    radius = PITCH if box.kind == "end" else 6
    yield (
        f'<rect class="{box.kind}" x="{_n(box.x)}" y="{_n(box.y)}" width="{_n(box.width)}" height="{_n(box.height)}" '
        f'rx="{_n(radius)}"/>'
    )
    y = box.middle + 5 - (SMALL + 5) * (len(box.lines) - 1) / 2
    for row, line in enumerate(box.lines):
        small = ' class="label"' if row else ""
        yield f'<text{small} x="{_n(box.x + box.width / 2)}" y="{_n(y)}" text-anchor="middle">{escape(line)}</text>'
        y += SMALL + 5


# ---- legend and findings ----


def _draw_foot(layout: Layout, findings: Iterable[str]) -> tuple[float, float, list[str]]:
    """The width and height of the whole drawing, and the lines below the graph."""
    drawn = [*(wire.kind for wire in layout.wires), *(box.kind for box in layout.boxes.values())]
    kinds = set(" ".join(drawn).split())
    legend = [kind for kind in LEGEND if kind in kinds]
    width = max(layout.width, *(2 * MARGIN + KEY + text_width(LEGEND[kind], SMALL) for kind in legend), 0)
    y: float = layout.height + MARGIN
    parts = ['<g class="legend">']
    for kind in legend:
        parts += _draw_key(kind, y + 8)
        y += PITCH
    parts.append("</g>")
    for finding in findings:
        for line in textwrap.wrap(f"found: {finding}", int((width - 2 * MARGIN) / (SMALL * LETTER))):
            parts.append(f'<text class="label finding" x="{MARGIN}" y="{_n(y + 12)}">{escape(line)}</text>')
            y += PITCH
    return width, y + (MARGIN / 2 if legend or findings else 0), parts


def _draw_key(kind: str, y: float) -> Iterator[str]:
    if kind in NODE_STYLES:
        yield f'<rect class="node {kind}" x="{MARGIN}" y="{_n(y - 6)}" width="30" height="12" rx="3"/>'
    else:
        kinds = f"streamed {kind}" if kind == "each" else kind
        yield f'<line class="{kinds}" x1="{MARGIN}" y1="{_n(y)}" x2="{MARGIN + 30}" y2="{_n(y)}"/>'
    yield f'<text class="label" x="{MARGIN + KEY}" y="{_n(y + 4)}">{escape(LEGEND[kind])}</text>'


# ---- paths ----


def _rounded(points: Sequence[tuple[float, float]]) -> str:
    """A path with rounded corners through points at right angles to one another."""
    path = f"M{_point(points[0])}"
    for before, corner, after in zip(points, points[1:], points[2:], strict=False):
        path += f" L{_point(_toward(before, corner))} Q{_point(corner)} {_point(_toward(after, corner))}"
    return f"{path} L{_point(points[-1])}"


def _toward(far: tuple[float, float], corner: tuple[float, float]) -> tuple[float, float]:
    """The end of the bend around a corner."""
    (x, y), (to_x, to_y) = corner, far
    part = min(1, RADIUS / max(abs(to_x - x) + abs(to_y - y), 1))
    return x + (to_x - x) * part, y + (to_y - y) * part


def _point(point: tuple[float, float]) -> str:
    return f"{_n(point[0])},{_n(point[1])}"


def _n(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")
