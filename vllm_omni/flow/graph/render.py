"""A plan as people read it: text, Mermaid, SVG."""

import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from typing import NamedTuple

from vllm_omni.flow.graph.dsl import Field, Scheduling
from vllm_omni.flow.graph.plan import Edge, GroupPlan, NodePlan, StaticPlan
from vllm_omni.flow.graph.transfer import ENTRY

# ---- text ----


def to_text(plan: StaticPlan) -> str:
    """One paragraph per node, in the order in which a call reaches them; then what the checks found.

    An input that is all its node waits for stands alone; others stand below what they fire together.
    """
    lines = [f"graph {plan.name}", f"  takes {_list(plan.placeholders)}"]
    for node in plan.nodes.values():
        traits = _traits(node)
        lines.append(f"  {node.name} ({', '.join(traits)})" if traits else f"  {node.name}")
        for group in node.groups:
            if not _is_plain(node):
                lines.append(f"    on {_fires(group)}")
            indent = "    " if _is_plain(node) else "      "
            lines += [indent + _input(edge, group) for edge in _edges(node, group)]
        lines += [f"    {name} -> {_describe(spec)}" for name, spec in node.outputs.items()]
    lines += [f"  gives {name} = {edge.source}.{edge.source_field}" for name, edge in plan.outputs.items()]
    for call in plan.graph_calls.values():
        until = "" if call.until == call.outputs else f", until {_list(sorted(call.until))}"
        lines.append(f"  call {call.name} gives {_list(sorted(call.outputs))}{until}")
    for name in plan.parameters:
        roles = dict.fromkeys(node.role for node in plan.nodes.values() if name in node.parameters)
        lines.append(f"  shares {name} in a session: {_list(roles)}")
    lines += [f"  found: {finding}" for finding in plan.findings]
    return "\n".join(lines) + "\n"


def _input(edge: Edge, group: GroupPlan) -> str:
    marks = [
        *(["per frame"] if edge.per_frame else []),
        *(["critical"] if _is_critical(edge, group) else []),
        *([f"loop {group.loop}"] if edge.is_back else []),
    ]
    line = f"{edge.target_field} <- {_source(edge)}"
    return f"{line} ({', '.join(marks)})" if marks else line


# ---- Mermaid ----

CRITICAL = "#c0392b"  # red
NODE_STYLES = {  # what a node is -> how Mermaid shows it
    "join": "fill:#fdf0d0,stroke:#b98a1d",
    "session": "stroke-width:3px",
    "header": "stroke-dasharray:8 5",
}
ENTITIES = {"#": "#35;", "&": "#amp;", '"': "#quot;", "<": "#lt;", ">": "#gt;"}


def to_mermaid(plan: StaticPlan) -> str:
    """A flowchart, as Markdown on GitHub and elsewhere shows it.

    Thick edges are streamed, dotted ones lead back, red ones are critical; what joins is a hexagon.
    """
    ids = {name: f"n{index}" for index, name in enumerate(plan.nodes)}
    lines = ["flowchart LR"]
    lines += [f'  in_{name}(["{name}"])' for name in plan.placeholders]
    for node in plan.nodes.values():
        label = "<br/>".join(map(_quote, (node.name, *_marks(node))))
        lines.append(f"  {ids[node.name]}" + (f'{{{{"{label}"}}}}' if _is_join(node) else f'["{label}"]'))
    lines += [f'  out_{name}(["{name}"])' for name in plan.outputs]
    for edge in plan.edges:
        source = f"in_{edge.source_field}" if edge.source == ENTRY else ids[edge.source]
        target = f"out_{edge.target_field}" if edge.target == ENTRY else ids[edge.target]
        arrow = "-.->" if edge.is_back else "==>" if _is_streamed(plan, edge) else "-->"
        each = "each " if edge.per_frame else ""
        label = _quote(each + _label(plan, edge))
        lines.append(f'  {source} {arrow}|"{label}"| {target}' if label else f"  {source} {arrow} {target}")
    critical = [str(index) for index, edge in enumerate(plan.edges) if _is_critical(edge, _group(plan, edge))]
    if critical:
        lines.append(f"  linkStyle {','.join(critical)} stroke:{CRITICAL}")
    for kind, style in NODE_STYLES.items():
        members = [ids[node.name] for node in plan.nodes.values() if kind in _kinds(node)]
        if members:
            lines += [f"  classDef {kind} {style}", f"  class {','.join(members)} {kind}"]
    lines += [f"  %% found: {finding}" for finding in plan.findings]
    return "\n".join(lines) + "\n"


def _quote(text: str) -> str:
    """As Mermaid writes what would otherwise end a label or be markup."""
    return text.translate({ord(char): entity for char, entity in ENTITIES.items()})


# ---- SVG ----

# Pixels. A letter is taken as wide as in the widest of the usual fonts (DejaVu Sans).
MARGIN, TITLE, SMALL = 24, 13, 11
PITCH = 20  # between the ends of two edges, so that a label has room above its edge
BETWEEN = 24  # two boxes of a column
BEND, LANE, CHANNEL = 76, 12, 26  # what an edge needs to get to another row; to go down beside, back below the boxes
RADIUS = 6  # of a corner
TIP = 5  # of an arrow, in front of the end of its line
LETTER = 0.63  # of the font size
BOX_LETTERS = 34  # in a line below the name of a node
STYLE = f"""text {{ font: {TITLE}px sans-serif; fill: #1d2733 }} .label {{ font-size: {SMALL}px; fill: #55606e }}
.node {{ fill: #e8f0fe; stroke: #4a78c2 }} .end {{ fill: #f4f4f2; stroke: #9a9a94 }}
.join {{ fill: #fdf0d0; stroke: #b98a1d }} .session {{ stroke-width: 3 }} .header {{ stroke-dasharray: 8 5 }}
path, line {{ fill: none; stroke: #55606e }} .streamed {{ stroke-width: 3 }} .back {{ stroke-dasharray: 8 5 }}
.each {{ stroke-dasharray: 3 4 }} .critical {{ stroke: {CRITICAL} }}"""
LEGEND = {  # class -> what it says, in this order
    "streamed": "streamed",
    "each": "per frame: each is an activation, or part of a join, of its own",
    "critical": "critical: nothing else can fill this field of a join",
    "back": "loop",
    "header": "where a loop begins its turns",
    "join": "join",
    "session": "session: its activations run one after the other",
}


@dataclass(eq=False)
class _Cell:
    """A place in a column: a box, or (without lines) room for an edge to pass."""

    column: int
    kind: str  # class of its style
    lines: Sequence[str] = ()
    x: float = 0
    y: float = 0
    width: float = 0
    height: float = PITCH
    wires_in: list["_Wire"] = field(default_factory=list)
    wires_out: list["_Wire"] = field(default_factory=list)
    before: list["_Cell"] = field(default_factory=list)
    behind: list["_Cell"] = field(default_factory=list)

    @property
    def middle(self) -> float:
        return self.y + self.height / 2


@dataclass(eq=False)
class _Wire:
    """An edge and the cells it goes through, the first and the last of which are boxes."""

    edge: Edge
    kind: str
    label: str
    cells: list[_Cell]
    y_out: float = 0
    y_in: float = 0


class _Gap(NamedTuple):
    """What lies between two columns: where from left to right it begins. Labels come last."""

    down: float  # edges of a loop that leave
    bend: float
    up: float  # edges of a loop that arrive


class _Drawing:
    """Columns by the longest way from an input, so that edges go to the right; those of a loop go back below.

    Edges bend between the columns only, and come straight to a box, with their label above the last part, so that
    nothing lies upon anything else.
    """

    def __init__(self, plan: StaticPlan):
        self.boxes = _make_boxes(plan)
        self.wires = [self._make_wire(plan, edge) for edge in plan.edges]
        self.columns: list[list[_Cell]] = [[] for _ in range(1 + max(box.column for box in self.boxes.values()))]
        for cell in dict.fromkeys([*self.boxes.values(), *(cell for wire in self.wires for cell in wire.cells)]):
            self.columns[cell.column].append(cell)
        self.back = [wire for wire in self.wires if wire.edge.is_back]
        self._size()
        self._place_rows()
        self._spread_ends()
        self.gaps = self._place_columns()
        self.bottom = max(cell.y + cell.height for cells in self.columns for cell in cells)
        self.height = self.bottom + CHANNEL * len(self.back)
        self.width = self.gaps[-1].up

    def _make_wire(self, plan: StaticPlan, edge: Edge) -> _Wire:
        start = self.boxes[_key(edge.source, edge.source_field, "in")]
        end = self.boxes[_key(edge.target, edge.target_field, "out")]
        label = _label(plan, edge)
        kinds = [
            *(["streamed"] if _is_streamed(plan, edge) else []),
            *(["each"] if edge.per_frame else []),
            *(["back"] if edge.is_back else []),
            *(["critical"] if _is_critical(edge, _group(plan, edge)) else []),
        ]
        cells = [start, *(_Cell(column, "pass") for column in range(start.column + 1, end.column)), end]
        wire = _Wire(edge, " ".join(kinds), label, cells)
        start.wires_out.append(wire)
        end.wires_in.append(wire)
        if not edge.is_back:
            for left, right in pairwise(cells):
                left.behind.append(right)
                right.before.append(left)
        return wire

    def _size(self) -> None:
        for box in self.boxes.values():
            text = TITLE + 16 + (SMALL + 5) * (len(box.lines) - 1)
            box.height = max(text, PITCH * (1 + max(len(box.wires_in), len(box.wires_out))))
            box.width = 24 + max(_width(line, SMALL if row else TITLE) for row, line in enumerate(box.lines))

    def _place_rows(self) -> None:
        """Near what feeds a cell and what it feeds, by a few sweeps over the columns."""
        for column in self.columns:
            _stack(column, lambda cell: 0)
        for _ in range(3):
            for column in self.columns[1:]:
                _stack(column, lambda cell: _mean(near.middle for near in cell.before))
            for column in self.columns[-2::-1]:
                _stack(column, lambda cell: _mean(near.middle for near in cell.behind) if cell.behind else cell.middle)
        top = min(cell.y for column in self.columns for cell in column)
        for column in self.columns:
            for cell in column:
                cell.y += MARGIN - top

    def _spread_ends(self) -> None:
        for box in self.boxes.values():
            outs = sorted(box.wires_out, key=lambda wire: (wire.edge.is_back, wire.cells[1].middle))
            for index, wire in enumerate(outs, 1):
                wire.y_out = box.y + box.height * index / (len(outs) + 1)
        for box in self.boxes.values():
            ins = sorted(
                box.wires_in,
                key=lambda wire: (
                    wire.edge.is_back,
                    wire.cells[-2].middle,
                    wire.y_out,
                ),
            )
            for index, wire in enumerate(ins, 1):
                wire.y_in = box.y + box.height * index / (len(ins) + 1)

    def _place_columns(self) -> list[_Gap]:
        """The gap behind each column; the last one only has room for edges of a loop."""
        gaps: list[_Gap] = []
        x = float(MARGIN)
        for index, column in enumerate(self.columns):
            width = max(cell.width for cell in column)
            for cell in column:
                cell.x, cell.width = x, width
            down = x + width
            bend = down + LANE * sum(wire.cells[0].column == index for wire in self.back)
            if index + 1 == len(self.columns):
                gaps.append(_Gap(down, bend, bend + MARGIN))
                break
            up = bend + BEND
            labels = up + LANE * sum(wire.cells[-1].column == index + 1 for wire in self.back)
            arriving = [wire for wire in self.wires if wire.cells[-1].column == index + 1]
            x = labels + 22 + max((_width(wire.label, SMALL) for wire in arriving), default=0)
            gaps.append(_Gap(down, bend, up))
        return gaps

    def forward_path(self, wire: _Wire) -> str:
        cells = wire.cells
        y = wire.y_out
        path = f"M{_n(cells[0].x + cells[0].width)},{_n(y)}"
        for cell in cells[1:]:
            gap = self.gaps[cell.column - 1]
            to = wire.y_in if cell is cells[-1] else cell.middle
            middle = (gap.bend + gap.up) / 2
            path += f" L{_n(gap.bend)},{_n(y)}"
            if y != to:
                path += f" C{_n(middle)},{_n(y)} {_n(middle)},{_n(to)} {_n(gap.up)},{_n(to)}"
            y = to
        return f"{path} L{_n(cells[-1].x - TIP)},{_n(y)}"

    def back_path(self, wire: _Wire) -> tuple[str, float, float]:
        """And where its label starts."""
        start, end = wire.cells[0], wire.cells[-1]
        level = self.bottom + CHANNEL * (1 + self.back.index(wire))
        leaving = [other for other in self.back if other.cells[0].column == start.column]
        coming = [other for other in self.back if other.cells[-1].column == end.column]
        right = self.gaps[start.column].down + LANE * (leaving.index(wire) + 1)
        left = self.gaps[end.column - 1].up + LANE * (len(coming) - 0.5 - coming.index(wire))
        corners = [(right, wire.y_out), (right, level), (left, level), (left, wire.y_in)]
        path = _rounded([(start.x + start.width, wire.y_out), *corners, (end.x - TIP, wire.y_in)])
        return path, left + LANE, level - 5


def to_svg(plan: StaticPlan) -> str:
    """A drawing, with a legend of the marks that occur in it, and what the checks found."""
    drawing = _Drawing(plan)
    body: list[str] = []
    for wire in drawing.wires:
        tip = "tip-critical" if "critical" in wire.kind.split() else "tip"
        if wire.edge.is_back:
            path, x, y = drawing.back_path(wire)
            anchor = "start"
        else:
            path = drawing.forward_path(wire)
            x, y, anchor = wire.cells[-1].x - 14, wire.y_in - 5, "end"
        kind = f' class="{wire.kind}"' if wire.kind else ""
        body.append(f'<path{kind} d="{path}" marker-end="url(#{tip})"/>')
        if wire.label:
            body.append(
                f'<text class="label" x="{_n(x)}" y="{_n(y)}" text-anchor="{anchor}">{escape(wire.label)}</text>'
            )
    for box in drawing.boxes.values():
        body += _draw_box(box)
    width, height, foot = _draw_foot(drawing, plan.findings)
    size = f'viewBox="0 0 {_n(width)} {_n(height)}" width="{_n(width)}" height="{_n(height)}"'
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
        f"<title>{escape(plan.name)}</title><style>{STYLE}</style>",
        f"<defs>{_tip('tip', '#55606e')}{_tip('tip-critical', CRITICAL)}</defs>",
    ]
    return "\n".join([*head, *body, *foot, "</svg>"]) + "\n"


def _draw_foot(drawing: _Drawing, findings: Iterable[str]) -> tuple[float, float, list[str]]:
    """Legend and findings; and the size of the whole."""
    drawn = [*(wire.kind for wire in drawing.wires), *(box.kind for box in drawing.boxes.values())]
    kinds = set(" ".join(drawn).split())
    legend = [kind for kind in LEGEND if kind in kinds]
    width = max(drawing.width, 2 * MARGIN + max((_key_width(kind) for kind in legend), default=0))
    y: float = drawing.height + MARGIN
    parts = ['<g class="legend">']
    for row in _wrap_legend(legend, width - 2 * MARGIN):
        x = float(MARGIN)
        for kind in row:
            parts += _draw_key(kind, x, y + 8)
            x += _key_width(kind)
        y += PITCH
    parts.append("</g>")
    for finding in findings:
        for line in textwrap.wrap(f"found: {finding}", int((width - 2 * MARGIN) / (SMALL * LETTER))):
            parts.append(f'<text class="label finding" x="{MARGIN}" y="{_n(y + 12)}">{escape(line)}</text>')
            y += PITCH
    return width, y + (MARGIN / 2 if legend or findings else 0), parts


def _tip(name: str, colour: str) -> str:
    return (
        f'<marker id="{name}" viewBox="0 0 8 8" refX="3" refY="4" markerWidth="9" markerHeight="9" '
        f'markerUnits="userSpaceOnUse" orient="auto"><path d="M0,0 L8,4 L0,8 z" style="fill:{colour};stroke:none"/>'
        "</marker>"
    )


def _make_boxes(plan: StaticPlan) -> dict[str, _Cell]:
    boxes = {_key(ENTRY, name, "in"): _Cell(0, "end", [name]) for name in plan.placeholders}
    for name, node in plan.nodes.items():
        feeds = [boxes[_key(edge.source, edge.source_field, "in")] for edge in node.slots if not edge.is_back]
        column = 1 + max(box.column for box in feeds)
        boxes[name] = _Cell(column, " ".join(["node", *_kinds(node)]), [name, *_marks(node)])
    for name, edge in plan.outputs.items():
        boxes[_key(ENTRY, name, "out")] = _Cell(1 + boxes[edge.source].column, "end", [name])
    return boxes


def _stack(column: list[_Cell], wanted: Callable[[_Cell], float]) -> None:
    """Put the cells below one another, as near to where their middles are wanted as their heights let them."""
    middles = {cell: wanted(cell) for cell in column}
    column.sort(key=middles.__getitem__)
    bottom = float("-inf")
    for cell in column:
        cell.y = max(middles[cell] - cell.height / 2, bottom)
        bottom = cell.y + cell.height + BETWEEN
    shift = _mean(cell.middle - middles[cell] for cell in column)
    for cell in column:
        cell.y -= shift


def _draw_box(box: _Cell) -> Iterator[str]:
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


def _draw_key(kind: str, x: float, y: float) -> Iterator[str]:
    if kind in NODE_STYLES:  # of boxes
        yield f'<rect class="node {kind}" x="{_n(x)}" y="{_n(y - 6)}" width="30" height="12" rx="3"/>'
    else:
        kinds = f"streamed {kind}" if kind == "each" else kind
        yield f'<line class="{kinds}" x1="{_n(x)}" y1="{_n(y)}" x2="{_n(x + 30)}" y2="{_n(y)}"/>'
    yield f'<text class="label" x="{_n(x + 38)}" y="{_n(y + 4)}">{escape(LEGEND[kind])}</text>'


def _key_width(kind: str) -> float:
    return 38 + _width(LEGEND[kind], SMALL) + 16


def _wrap_legend(kinds: Sequence[str], width: float) -> Iterator[list[str]]:
    row: list[str] = []
    for kind in kinds:
        if row and sum(map(_key_width, [*row, kind])) > width:
            yield row
            row = []
        row.append(kind)
    if row:
        yield row


def _width(text: str, size: float) -> float:
    return len(text) * size * LETTER


def _n(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")


def _key(node: str, name: str, end: str) -> str:
    return f"{end} {name}" if node == ENTRY else node


def _rounded(points: Sequence[tuple[float, float]]) -> str:
    """A path through points at right angles to one another."""
    path = f"M{_point(points[0])}"
    for before, corner, after in zip(points, points[1:], points[2:], strict=False):
        path += f" L{_point(_toward(before, corner))} Q{_point(corner)} {_point(_toward(after, corner))}"
    return f"{path} L{_point(points[-1])}"


def _toward(far: tuple[float, float], corner: tuple[float, float]) -> tuple[float, float]:
    """Where the bend around a corner begins or ends."""
    (x, y), (to_x, to_y) = corner, far
    part = min(1, RADIUS / max(abs(to_x - x) + abs(to_y - y), 1))
    return x + (to_x - x) * part, y + (to_y - y) * part


def _point(point: tuple[float, float]) -> str:
    return f"{_n(point[0])},{_n(point[1])}"


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else 0.0


# ---- the words for what is in a plan ----


def _traits(node: NodePlan) -> list[str]:
    """What is special about a node as a whole."""
    traits: list[str] = []
    if node.scheduling is not Scheduling.ROUND_ROBIN:
        traits.append(node.scheduling.value.replace("_", " "))
    if node.first_wins:
        traits.append("first wins")
    elif node.choice_root is not None and node.choice_root != ENTRY:
        traits.append(f"ordered {_per(node.choice_root, node.choice_per_frame)}")
    if node.max_turns is not None and node.loops:
        traits.append(f"at most {node.max_turns} turns")
    return traits


def _marks(node: NodePlan) -> list[str]:
    """What stands in a box below the name."""
    marks = [] if _is_plain(node) else [f"on {_fires(group)}" for group in node.groups]
    return [line for mark in [*marks, *_traits(node)] for line in _fold(mark)]


def _fold(mark: str) -> list[str]:
    """In lines that a box has room for, behind the colon if that will do."""
    head, colon, tail = mark.partition(": ")
    parts = [head + ":", tail] if colon and len(mark) > BOX_LETTERS else [mark]
    return [line for part in parts for line in textwrap.wrap(part, BOX_LETTERS)]


def _fires(group: GroupPlan) -> str:
    """The fields that belong together, and how often they are gathered."""
    counts = group.counts or {}
    fields = " + ".join(f"{name} x {counts[name]}" if name in counts else name for name in group.slots)
    if group.loop is not None:
        return f"{fields}: a turn of loop {group.loop}"
    if group.root is None:
        return f"{fields}: direct"
    return f"{fields}: {'by count, ' if counts else ''}{_per(group.root, group.root_per_frame)}"


def _per(root: str, per_frame: bool) -> str:
    if root == ENTRY:
        return "once a call"
    return f"per {'frame' if per_frame else 'activation'} of {root}"


def _is_plain(node: NodePlan) -> bool:
    """Whether one edge is all that fires it: then there is nothing to tell about its groups."""
    return len(node.groups) == 1 and node.groups[0].root is None


def _is_join(node: NodePlan) -> bool:
    return any(len(group.all_slots) > 1 or group.counts is not None for group in node.groups)


def _is_critical(edge: Edge, group: GroupPlan | None) -> bool:
    """Whether a bucket can only be filled by this edge."""
    return group is not None and group.root is not None and edge.slot in group.critical


def _kinds(node: NodePlan) -> list[str]:
    return [
        *(["join"] if _is_join(node) else []),
        *(["session"] if node.scheduling is Scheduling.SESSION else []),
        *(["header"] if node.loops else []),
    ]


def _group(plan: StaticPlan, edge: Edge) -> GroupPlan | None:
    return None if edge.target == ENTRY else plan.nodes[edge.target].groups[edge.group]


def _edges(node: NodePlan, group: GroupPlan) -> list[Edge]:
    return [node.slots[slot] for slot in group.all_slots]


def _is_streamed(plan: StaticPlan, edge: Edge) -> bool:
    return edge.source != ENTRY and plan.nodes[edge.source].outputs[edge.source_field].streamed


def _label(plan: StaticPlan, edge: Edge) -> str:
    """The field, unless both ends say it; what it is to a node that has several; the transfer function; the loop."""
    name = "" if edge.source == ENTRY else edge.source_field
    if edge.target == ENTRY and edge.source_field == edge.target_field:
        name = ""
    if edge.target != ENTRY and edge.source_field != edge.target_field and len(plan.nodes[edge.target].slots) > 1:
        name = f"{name} as {edge.target_field}".strip()
    transfer = "" if edge.transfer is None else f"{_name(edge)}()"
    group = _group(plan, edge)
    loop = f"loop {group.loop}" if group is not None and group.loop is not None else ""
    return ": ".join(part for part in (loop, name, transfer) if part)


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
