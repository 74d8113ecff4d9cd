"""The positions of boxes and edges in the drawing of a plan, in pixels."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from vllm_omni.flow.graph.plan import Edge, StaticPlan
from vllm_omni.flow.graph.render.labels import (
    drawn,
    edge_label,
    group_of,
    is_critical,
    is_streamed,
    node_kinds,
    node_marks,
)
from vllm_omni.flow.graph.transfer import ENTRY

MARGIN, TITLE, SMALL = 24, 13, 11  # around the drawing; font sizes
PITCH = 20  # between the ends of two edges, so that a label fits above its edge
BETWEEN = 24  # between two boxes of a column
BEND, LANE, CHANNEL = 76, 12, 26  # room for an edge to change rows; to go down beside, and back below the boxes
TIP = 5  # the arrow extends this far behind the end of its line
LETTER = 0.63  # width of a letter by font size, in the widest usual font (DejaVu Sans)


@dataclass(eq=False)
class Cell:
    """A place in a column: a box, or (without lines) room for an edge to pass."""

    column: int
    kind: str  # CSS classes
    lines: Sequence[str] = ()
    x: float = 0
    y: float = 0
    width: float = 0
    height: float = PITCH
    wires_in: list["Wire"] = field(default_factory=list)
    wires_out: list["Wire"] = field(default_factory=list)
    before: list["Cell"] = field(default_factory=list)
    behind: list["Cell"] = field(default_factory=list)

    @property
    def middle(self) -> float:
        return self.y + self.height / 2


@dataclass(eq=False)
class Wire:
    """An edge and the cells on its way; the first and the last one are boxes."""

    kind: str  # CSS classes
    label: str
    is_back: bool
    cells: list[Cell]
    y_out: float = 0
    y_in: float = 0


class Gap(NamedTuple):
    """The space behind a column: the x at which each of its parts starts, from left to right. Labels come last."""

    down: float  # loop edges that leave the column
    bend: float
    up: float  # loop edges that arrive at the next column


class Layout:
    """Columns by the longest path from an input, so edges go to the right; loop edges go back below the boxes.

    Edges bend between the columns only and meet a box at a right angle, with their label above the last part, so
    nothing overlaps.
    """

    def __init__(self, plan: StaticPlan):
        self.boxes = _make_boxes(plan)
        self.wires = [self._make_wire(plan, edge) for edge in drawn(plan.edges)]
        self.back = [wire for wire in self.wires if wire.is_back]
        self.columns: list[list[Cell]] = [[] for _ in range(1 + max(box.column for box in self.boxes.values()))]
        for cell in dict.fromkeys([*self.boxes.values(), *(cell for wire in self.wires for cell in wire.cells)]):
            self.columns[cell.column].append(cell)
        for box in self.boxes.values():
            text = TITLE + 16 + (SMALL + 5) * (len(box.lines) - 1)
            box.height = max(text, PITCH * (1 + max(len(box.wires_in), len(box.wires_out))))
            box.width = 24 + max(text_width(line, SMALL if row else TITLE) for row, line in enumerate(box.lines))
        self._place_rows()
        self._spread_ends()
        self.gaps = self._place_columns()
        self.bottom = max(cell.y + cell.height for cells in self.columns for cell in cells)
        self.height = self.bottom + CHANNEL * len(self.back)
        self.width = self.gaps[-1].up

    def _make_wire(self, plan: StaticPlan, edge: Edge) -> Wire:
        start = self.boxes[_key(edge.source, edge.source_field, "in")]
        end = self.boxes[_key(edge.target, edge.target_field, "out")]
        kinds = {
            "streamed": is_streamed(plan, edge),
            "each": edge.per_frame,
            "back": edge.is_back,
            "constant": edge.is_constant and not edge.first_only,
            "critical": is_critical(edge, group_of(plan, edge)),
        }
        cells = [start, *(Cell(column, "pass") for column in range(start.column + 1, end.column)), end]
        kind = " ".join(kind for kind, holds in kinds.items() if holds)
        wire = Wire(kind, edge_label(plan, edge), edge.is_back, cells)
        start.wires_out.append(wire)
        end.wires_in.append(wire)
        if not edge.is_back:
            for left, right in pairwise(cells):
                left.behind.append(right)
                right.before.append(left)
        return wire

    def _place_rows(self) -> None:
        """Put each cell near its neighbours, by a few sweeps over the columns."""
        for column in self.columns:
            _stack(column, lambda cell: 0)
        for _ in range(3):
            for column in self.columns[1:]:
                _stack(column, lambda cell: _mean(near.middle for near in cell.before))
            for column in self.columns[-2::-1]:
                _stack(column, lambda cell: _mean(near.middle for near in cell.behind) if cell.behind else cell.middle)
        cells = [cell for column in self.columns for cell in column]
        top = min(cell.y for cell in cells)
        for cell in cells:
            cell.y += MARGIN - top

    def _spread_ends(self) -> None:
        """Distribute the ends of edges over the sides of their boxes, in the order of their other ends."""
        for box in self.boxes.values():
            outs = sorted(box.wires_out, key=lambda wire: (wire.is_back, wire.cells[1].middle))
            for index, wire in enumerate(outs, 1):
                wire.y_out = box.y + box.height * index / (len(outs) + 1)
        for box in self.boxes.values():
            ins = sorted(box.wires_in, key=lambda wire: (wire.is_back, wire.cells[-2].middle, wire.y_out))
            for index, wire in enumerate(ins, 1):
                wire.y_in = box.y + box.height * index / (len(ins) + 1)

    def _place_columns(self) -> list[Gap]:
        """The gap behind each column; the last one only has room for loop edges."""
        gaps: list[Gap] = []
        x = float(MARGIN)
        for index, column in enumerate(self.columns):
            width = max(cell.width for cell in column)
            for cell in column:
                cell.x, cell.width = x, width
            down = x + width
            bend = down + LANE * sum(wire.cells[0].column == index for wire in self.back)
            if index + 1 == len(self.columns):
                gaps.append(Gap(down, bend, bend + MARGIN))
                break
            up = bend + BEND
            labels = up + LANE * sum(wire.cells[-1].column == index + 1 for wire in self.back)
            arriving = [wire for wire in self.wires if wire.cells[-1].column == index + 1]
            x = labels + 22 + max((text_width(wire.label, SMALL) for wire in arriving), default=0)
            gaps.append(Gap(down, bend, up))
        return gaps


def text_width(text: str, size: float) -> float:
    return len(text) * size * LETTER


def _make_boxes(plan: StaticPlan) -> dict[str, Cell]:
    boxes = {_key(ENTRY, name, "in"): Cell(0, "end", [name]) for name in plan.placeholders}
    for name, node in plan.nodes.items():
        feeds = [boxes[_key(edge.source, edge.source_field, "in")] for edge in drawn(node.slots) if not edge.is_back]
        column = 1 + max(box.column for box in feeds)
        boxes[name] = Cell(column, " ".join(["node", *node_kinds(node)]), [name, *node_marks(node)])
    for name, edge in plan.outputs.items():
        boxes[_key(ENTRY, name, "out")] = Cell(1 + boxes[edge.source].column, "end", [name])
    return boxes


def _key(node: str, name: str, end: str) -> str:
    return f"{end} {name}" if node == ENTRY else node


def _stack(column: list[Cell], wanted: Callable[[Cell], float]) -> None:
    """Put the cells below one another, as near to the wanted middles as their heights allow."""
    middles = {cell: wanted(cell) for cell in column}
    column.sort(key=middles.__getitem__)
    bottom = float("-inf")
    for cell in column:
        cell.y = max(middles[cell] - cell.height / 2, bottom)
        bottom = cell.y + cell.height + BETWEEN
    shift = _mean(cell.middle - middles[cell] for cell in column)
    for cell in column:
        cell.y -= shift


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else 0.0
