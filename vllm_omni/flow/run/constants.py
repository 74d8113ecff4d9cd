"""Frames that enter a loop from outside: kept until the call is over, and read again in every iteration.

Omni-Flow leaves open (sections 3.2, 3.5) what a join in a loop reads of an edge from outside in later iterations;
docs/control_flow.md has the rule.
"""

from collections.abc import Sequence

from vllm_omni.flow.graph.plan import Edge, NodePlan
from vllm_omni.flow.run.activation import ActivationRun
from vllm_omni.flow.run.bucket import inside
from vllm_omni.flow.run.frame import ITERATION, Frame, Root, SlotEos, Trace
from vllm_omni.flow.run.identity import bucket_id, find_root
from vllm_omni.flow.run.order import PathOrder


class _Constant:
    """The frames of one edge for all loops below one activation, or one yield, of its root."""

    __slots__ = ("_depth", "_frames", "_order", "_outer_loops", "_readers", "_slot")

    def __init__(self, edge: Edge, root: Root):
        self._slot = edge.slot
        self._depth = root.depth + edge.root_per_frame
        self._outer_loops = () if edge.root_per_frame else root.loops
        self._order: PathOrder[Frame] = PathOrder()
        self._frames: list[Frame] = []  # in order
        self._readers: list[ActivationRun] = []  # activations that have read what is here, until there is no more

    def push(self, message: Frame | SlotEos) -> tuple[Sequence[Frame], Sequence[ActivationRun]]:
        """Add a message; returns the frames that are due now, and the activations that read them."""
        trace = message.trace
        path = trace.path[self._depth :]
        loops = trace.loops if path else inside(trace.loops, self._outer_loops)
        if isinstance(message, Frame):
            due = self._order.push(path, message, loops)
        else:
            due = self._order.set_count(path, message.count, loops)
        if not due and not self._order.done:
            return (), ()
        self._frames += due
        readers = tuple(run for run in self._readers if not run.is_over)  # not those that attach while these read
        self._readers = [] if self._order.done else [*readers]
        return due, readers

    def attach(self, run: ActivationRun) -> None:
        """Let an activation read all frames from the first one on."""
        slot = run.bucket.slots[self._slot]
        slot.order = self._order
        run.bucket.take(self._slot, self._frames)
        if not self._order.done:
            self._readers.append(run)


class Constants:
    """The constants of one call at one node."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], _Constant] = {}  # (slot, activation id) ->

    def push(self, edge: Edge, message: Frame | SlotEos) -> tuple[Sequence[Frame], Sequence[ActivationRun]]:
        """Keep a message of a constant edge; returns the frames that are due now, and the activations to read them."""
        return self._find(edge, message.trace).push(message)

    def attach(self, run: ActivationRun, plan: NodePlan, trace: Trace) -> None:
        """Let an activation read the constants of its group.

        Args:
            trace: of the activation of the loop's header.
        """
        group = run.bucket.group
        is_first = all(key - ITERATION not in group.entered for key in trace.path)
        for slot in group.constants:
            if is_first or not plan.slots[slot].first_only:
                self._find(plan.slots[slot], trace).attach(run)
            else:
                run.bucket.close(slot)

    def _find(self, edge: Edge, trace: Trace) -> _Constant:
        assert edge.root is not None
        root = find_root(trace, edge.root)
        assert root is not None, f"{edge}: {edge.root} is above the loop and the source"
        key = (edge.slot, bucket_id(edge, root))
        return self._kept.get(key) or self._kept.setdefault(key, _Constant(edge, root))
