"""Place a new activation in the order of its call: the trace of its own frames, and the extent of its bucket."""

from vllm_omni.flow.graph.plan import GroupPlan, NodePlan
from vllm_omni.flow.run.activation import ActivationRun
from vllm_omni.flow.run.bucket import Bucket, inside
from vllm_omni.flow.run.frame import ITERATION, RAN, REPEATED, Frame, SlotEos, Trace
from vllm_omni.flow.run.identity import above, find_root


def place_activation(plan: NodePlan, group: GroupPlan, message: Frame | SlotEos) -> ActivationRun:
    """The activation that a frame or a count is the first message of."""
    trace = message.trace
    if group.root is None:
        bucket = Bucket(plan, group, len(trace.path), trace.loops)
        if group.loop is not None:
            again = repeat_path(plan, group, trace)
            assert again is not None, "what leads back comes from below the header"
            trace = again
        elif trace.termination != RAN:
            trace = Trace(trace.path, trace.roots, trace.loops)
        fork_id = message.origin if isinstance(message, Frame) else 0
    else:
        root = find_root(trace, group.root)
        assert root is not None, "the root of a group is above every source of it"
        depth = root.depth + group.root_per_frame
        outer_loops = () if group.root_per_frame else root.loops
        path = trace.path[:depth]
        if group.loop is None:
            trace = Trace(path, above(trace, root), outer_loops)
        else:
            trace = Trace((*path, ITERATION + group.loop), above(trace, root, inclusive=False))
        bucket, fork_id = Bucket(plan, group, depth, outer_loops), root.activation_id
    if plan.loops:  # iterations of the own loop come first
        trace = Trace(trace.path, trace.roots, plan.loops + trace.loops)
    return ActivationRun(plan.name, message.activation_id, trace, bucket, fork_id)


def repeat_path(plan: NodePlan, group: GroupPlan, trace: Trace) -> Trace | None:
    """Repeat the path from the header of a loop to a frame or yield of an edge that leads back, below the iteration.

    Returns:
        The place of the iteration, or of several; None if the path ends above the header.
    """
    root = find_root(trace, plan.name)
    if root is None:
        return None
    assert group.loop is not None
    below = trace.path[root.depth :]
    repeated = (key + REPEATED if key >= ITERATION else key for key in below)
    loops = trace.loops if below else inside(trace.loops, root.loops)
    path = (*trace.path[: root.depth], ITERATION + group.loop, *repeated)
    return Trace(path, above(trace, root, inclusive=False), tuple(loop + REPEATED for loop in loops))


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
        loops = inside(loops, outer_loops)
    return Trace((*base.path, group.index, *trace.path[depth:]), base.roots, loops, trace.termination), base
