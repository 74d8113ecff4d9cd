"""Words and marks for the nodes and edges of a plan, shared by all formats."""

import textwrap
from collections.abc import Iterable

from vllm_omni.flow.graph.declarations import Scheduling
from vllm_omni.flow.graph.plan import STARTED, Edge, GroupPlan, NodePlan, StaticPlan
from vllm_omni.flow.graph.transfer import ENTRY

CRITICAL = "#c0392b"  # red
NODE_STYLES = {  # kind of node -> its style in Mermaid
    "join": "fill:#fdf0d0,stroke:#b98a1d",
    "session": "stroke-width:3px",
    "header": "stroke-dasharray:8 5",
}
BOX_LETTERS = 34  # in a line below the name of a node


def traits(node: NodePlan) -> list[str]:
    """Properties of a node as a whole that are not the default."""
    found: list[str] = [] if node.graph is None else [f"calls graph {node.graph}"]
    if node.scheduling is not Scheduling.LEAST_OUTSTANDING:
        found.append(node.scheduling.value.replace("_", " "))
    if node.first_wins:
        found.append("first wins")
    elif node.choice_root is not None and node.choice_root != ENTRY:
        found.append(f"ordered {_per(node.choice_root, node.choice_per_frame)}")
    if node.max_iterations is not None and node.loops:
        found.append(f"at most {node.max_iterations} iterations")
    return found


def node_marks(node: NodePlan) -> list[str]:
    """The lines of a box below the node's name."""
    conditions = [] if is_single_edge(node) else [f"on {fires(group)}" for group in node.groups]
    return [line for mark in [*conditions, *traits(node)] for line in _fold(mark)]


def fires(group: GroupPlan) -> str:
    """The fields that a group needs, and how often they are gathered."""
    counts = group.counts or {}
    names = [name for name in group.slots if name != STARTED]
    fields = " + ".join(f"{name} x {counts[name]}" if name in counts else name for name in names)
    if group.loop is not None:
        return f"{fields}: {'each ' if group.per_frame_slots else ''}an iteration of loop {group.loop}"
    if group.root is None:
        return f"{fields}: direct"
    return f"{fields}: {'by count, ' if counts else ''}{_per(group.root, group.root_per_frame)}"


def is_single_edge(node: NodePlan) -> bool:
    """Whether one edge is all that fires a node, so that its groups need no description."""
    return len(node.groups) == 1 and node.groups[0].root is None


def is_join(node: NodePlan) -> bool:
    return any(len(group.all_slots) - (STARTED in group.slots) > 1 or group.counts for group in node.groups)


def is_critical(edge: Edge, group: GroupPlan | None) -> bool:
    """Whether only this edge can fill its field of a bucket."""
    return group is not None and group.root is not None and edge.slot in group.critical


def node_kinds(node: NodePlan) -> list[str]:
    kinds = {"join": is_join(node), "session": node.scheduling is Scheduling.SESSION, "header": bool(node.loops)}
    return [kind for kind, holds in kinds.items() if holds]


def drawn(edges: Iterable[Edge]) -> list[Edge]:
    """The edges that were declared."""
    return [edge for edge in edges if edge.is_declared]


def group_of(plan: StaticPlan, edge: Edge) -> GroupPlan | None:
    return None if edge.target == ENTRY else plan.nodes[edge.target].groups[edge.group]


def enters(edge: Edge) -> str:
    """Which iterations of a loop read an edge that enters it elsewhere than at its header."""
    if not edge.is_constant:
        return ""
    return "first iteration" if edge.first_only else "constant"


def is_streamed(plan: StaticPlan, edge: Edge) -> bool:
    return edge.source != ENTRY and plan.nodes[edge.source].outputs[edge.source_field].streamed


def edge_label(plan: StaticPlan, edge: Edge) -> str:
    """The loop, or how it enters one; the source field, unless both ends name it, and the target field of a join;
    the transfer function.
    """
    name = "" if edge.source == ENTRY else edge.source_field
    if edge.target == ENTRY and edge.source_field == edge.target_field:
        name = ""
    if edge.target != ENTRY and edge.source_field != edge.target_field and len(plan.nodes[edge.target].slots) > 1:
        name = f"{name} as {edge.target_field}".strip()
    transfer = "" if edge.transfer is None else f"{_transfer_name(edge)}()"
    group = group_of(plan, edge)
    loop = f"loop {group.loop}" if group is not None and edge.is_back else enters(edge)
    return ": ".join(part for part in (loop, name, transfer) if part)


def source(edge: Edge) -> str:
    field = edge.source_field if edge.source == ENTRY else f"{edge.source}.{edge.source_field}"
    return field if edge.transfer is None else f"{field} by {_transfer_name(edge)}()"


def listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "nothing"


def _transfer_name(edge: Edge) -> str:
    return str(getattr(edge.transfer, "__name__", None) or type(edge.transfer).__name__)


def _per(root: str, per_frame: bool) -> str:
    if root == ENTRY:
        return "once a call"
    return f"per {'frame' if per_frame else 'activation'} of {root}"


def _fold(mark: str) -> list[str]:
    """Break a mark into lines that fit a box, behind the colon if possible."""
    head, colon, tail = mark.partition(": ")
    parts = [head + ":", tail] if colon and len(mark) > BOX_LETTERS else [mark]
    return [line for part in parts for line in textwrap.wrap(part, BOX_LETTERS)]
