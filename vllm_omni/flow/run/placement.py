"""Place a new activation in the order of its call: the trace of its own frames, and the extent of its bucket."""

from typing import NamedTuple

from vllm_omni.flow.graph.plan import GroupPlan, NodePlan
from vllm_omni.flow.run.frame import ITERATION, Termination, Trace
from vllm_omni.flow.run.identity import above, find_root


class Place(NamedTuple):
    trace: Trace
    depth: int  # see Bucket
    outer_loops: tuple[int, ...]  # see Bucket
    fork_id: int  # the activation that feeds its per-frame edges


def place_activation(group: GroupPlan, trace: Trace, origin: int) -> Place:
    """The place of the activation that a frame or a count belongs to.

    Args:
        trace: trace of the message.
        origin: the activation that sent it.
    """
    if group.root is None:
        own = trace if trace.termination is Termination.NONE else Trace(trace.path, trace.roots, trace.loops)
        return Place(own, len(trace.path), trace.loops, origin)
    root = find_root(trace, group.root)
    assert root is not None, "the root of a group is above every source of it"
    depth = root.depth + group.root_per_frame
    outer_loops = () if group.root_per_frame else root.loops
    path = trace.path[:depth]
    if group.loop is None:
        own = Trace(path, above(trace, root), outer_loops)
    else:
        own = Trace((*path, ITERATION + group.loop), above(trace, root, inclusive=False))
    return Place(own, depth, outer_loops, root.activation_id)


def insert_choice(plan: NodePlan, group: GroupPlan, trace: Trace) -> tuple[Trace, Trace | None]:
    """Add the index of a group to a path, below the node above all groups.

    Returns:
        The new trace, and the trace below which there is one path for each group; None if the path ends above it.
    """
    root = find_root(trace, plan.choice_root or "")
    if root is None:
        return trace, None
    depth = root.depth + plan.choice_per_frame
    if len(trace.path) < depth:
        return trace, None
    outer_loops = () if plan.choice_per_frame else root.loops
    base = Trace(trace.path[:depth], above(trace, root), outer_loops)
    loops = trace.loops
    if len(trace.path) == depth:
        loops = tuple(loop for loop in loops if loop not in outer_loops)
    return Trace((*base.path, group.index, *trace.path[depth:]), base.roots, loops, trace.termination), base
