"""Collect the inputs of one activation: the frames of one group, in order.

From: Omni-Flow section 3.2 (definition of a bucket), 3.2.3 (activate_by_count), 3.3 (critical slots).
"""

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from vllm_omni.errors import GraphError
from vllm_omni.flow.graph.plan import STARTED, Edge, GroupPlan, NodePlan
from vllm_omni.flow.graph.transfer import Chunk
from vllm_omni.flow.run.credit import ReceiveWindow, open_all
from vllm_omni.flow.run.frame import NOT_ACTIVATED, RAN, EndReason, Frame, SlotEos, Termination
from vllm_omni.flow.run.order import PathOrder
from vllm_omni.flow.run.sequence import Stream, StreamTimes


class BucketState(enum.Enum):
    WAITING = enum.auto()
    FIRED = enum.auto()
    UNREACHABLE = enum.auto()  # a field that it needs can get no frame


SEVERITY = (EndReason.NONE, EndReason.EMPTY, EndReason.UNREACHABLE, EndReason.CANCEL, EndReason.ERROR)


@dataclass(slots=True, eq=False)
class Slot:
    """One edge into an activation: its frames in the order of paths."""

    edge: Edge
    order: PathOrder[Frame] = field(default_factory=PathOrder)
    stream: Stream[Chunk] = field(default_factory=Stream)
    is_missing: bool = True  # no frame has arrived, but one may
    num_frames: int = 0  # with a payload, in order so far
    reason: EndReason = EndReason.NONE  # the most severe reason for which a part of it ended
    error: Exception | None = None
    termination: Termination | None = None  # the least of the parts that ended without a frame
    windows: dict[int, ReceiveWindow] | None = None  # producing activation -> its window
    is_abandoned: bool = False  # the activation runs, but has stopped reading it

    @property
    def is_empty(self) -> bool:
        """No frame has arrived, and none will."""
        return self.order.done and not self.num_frames

    def add_window(self, origin: int, window: ReceiveWindow) -> None:
        if self.windows is None:
            self.windows = {}
        self.windows[origin] = window
        if self.is_abandoned:
            window.lift()

    def abandon(self) -> None:
        """Stop reading: drop the frames that are here or will arrive, and hold no producer back."""
        self.is_abandoned = True
        self.stream.clear()
        for window in self.windows.values() if self.windows is not None else ():
            window.lift()

    def take(self, due: Sequence[Frame], *, is_final: bool) -> None:
        """Append frames that are due.

        Args:
            is_final: no other edge is read behind this one.
        """
        done = self.order.done
        for frame in due:
            if frame.reason is EndReason.NONE:
                if not self.is_abandoned:
                    window = None if self.windows is None else self.windows.get(frame.origin)
                    is_last = done and is_final and frame is due[-1]
                    self.stream.put_nowait(Chunk(frame.payload, self.num_frames, is_last), window)
                self.num_frames += 1
            else:
                # A constant may report that a loop has no further iteration: one before the loop that reads it.
                termination = NOT_ACTIVATED if self.edge.is_constant else frame.trace.termination
                self.termination = termination if self.termination is None else min(self.termination, termination)
                if SEVERITY.index(frame.reason) > SEVERITY.index(self.reason):
                    self.reason, self.error = frame.reason, frame.payload
        self.is_missing = not self.num_frames and not done
        if done:  # the reader gets the error of an edge that broke off; an edge without frames is skipped
            self.stream.finish(self.error if self.num_frames else None)

    def open_windows(self) -> None:
        if self.windows is not None:
            open_all(self.windows.values())


def inside(loops: tuple[int, ...], outer_loops: tuple[int, ...]) -> tuple[int, ...]:
    """The loops at the prefix of all paths whose iterations are part of what is collected."""
    return tuple(loop for loop in loops if loop not in outer_loops)


class Bucket:
    """Collects frames that belong together until their node can fire:

        required  <=  slots with a frame  |  slots that ended without one

    It is unreachable as soon as a field can get no frame. A group with a single edge uses the same class with one slot.
    Created with the first frame; garbage when its activation is over.

    Args:
        depth: length of the common prefix of all paths in it.
        outer_loops: loops at that prefix, whose iterations are outside of the bucket.
    """

    __slots__ = ("_counts", "_depth", "_num_missing", "_outer_loops", "group", "slots", "state")

    def __init__(self, plan: NodePlan, group: GroupPlan, depth: int, outer_loops: tuple[int, ...]):
        self.group = group
        self.slots = {index: Slot(plan.slots[index]) for index in group.all_slots}
        self.state = BucketState.WAITING
        self._depth = depth
        self._outer_loops = outer_loops
        self._num_missing = len(self.slots)  # slots that have no frame but may get one
        self._counts: dict[str, int] | None = None  # field -> chunks to read, once it fired by count

    def push(self, frame: Frame) -> BucketState:
        """Add a frame; returns the new state."""
        slot, trace = self.slots[frame.slot], frame.trace
        path = trace.path[self._depth :]
        loops = trace.loops
        if loops and not path:
            loops = inside(loops, self._outer_loops)
        return self._take(slot, slot.order.push(path, frame, loops))

    def set_count(self, eos: SlotEos) -> BucketState:
        """Set the number of yields below a path; returns the new state."""
        slot, trace = self.slots[eos.slot], eos.trace
        path = trace.path[self._depth :]
        loops = trace.loops if path else inside(trace.loops, self._outer_loops)
        return self._take(slot, slot.order.set_count(path, eos.count, loops))

    def take(self, index: int, due: Sequence[Frame]) -> None:
        """Append frames of a constant, which are in order."""
        self._take(self.slots[index], due)

    def close(self, index: int) -> None:
        """End a slot without frames."""
        self.slots[index].order.done = True
        self._take(self.slots[index], ())

    def inputs(self) -> Iterator[tuple[str, list[Slot]]]:
        for name, indices in self.group.slots.items():
            if name != STARTED:
                yield name, [self.slots[index] for index in indices]

    def edge_times(self) -> list[tuple[Edge, StreamTimes]]:
        """When the edges carried something; those that did not are left out."""
        slots = [slot for slot in self.slots.values() if slot.edge.target_field != STARTED]
        return [(slot.edge, slot.stream.times) for slot in slots if slot.stream.times.put_at]

    def is_of_producer(self, error: Exception) -> bool:
        """Whether an error came with a frame: a producer raised it."""
        return any(slot.error is error for slot in self.slots.values())

    def limit(self, field: str) -> int | None:
        """The number of chunks to read of a field; None: all."""
        return None if self._counts is None else self._counts[field]

    def unreachable_reason(self) -> tuple[EndReason, Exception | None, Termination]:
        """The report to the nodes below: the most severe reason for which a slot is empty."""
        slots = list(self.slots.values())
        empty = [slot for slot in slots if slot.is_empty] or slots  # none is empty: a counted field got too few frames
        worst = max(empty, key=lambda slot: SEVERITY.index(slot.reason))
        # An empty slot may combine parts from a loop that started no iteration with others: the least one covers both.
        termination = max(NOT_ACTIVATED, min(slot.termination or RAN for slot in empty))
        if worst.reason in (EndReason.ERROR, EndReason.CANCEL):
            return worst.reason, worst.error, termination
        return EndReason.UNREACHABLE, None, termination

    def add_window(self, index: int, origin: int, window: ReceiveWindow) -> None:
        """Grant credit for a slot to its producer. From now on, a reader that waits for one slot opens the others."""
        self.slots[index].add_window(origin, window)
        if self.group.root is not None:
            for slot in self.slots.values():
                slot.stream.on_wait = slot.stream.on_wait or self.open_windows

    def open_windows(self) -> None:
        for slot in self.slots.values():
            slot.open_windows()

    @property
    def is_waited_for(self) -> bool:
        """Its activation waits for more frames."""
        return any(slot.stream.is_waited_for for slot in self.slots.values())

    @property
    def num_buffered(self) -> int:
        return sum(len(slot.order) + len(slot.stream) for slot in self.slots.values())

    def _take(self, slot: Slot, due: Sequence[Frame]) -> BucketState:
        group, was_missing = self.group, slot.is_missing
        slot.take(due, is_final=slot.edge.is_last_of_field and group.counts is None)
        if self.state is BucketState.WAITING:
            if group.counts is not None:
                self.state = self._judge_counts()
            elif was_missing and not slot.is_missing:
                self._num_missing -= 1
                if not slot.num_frames and self._has_nothing(slot):
                    self.state = BucketState.UNREACHABLE
                elif not self._num_missing:
                    self.state = BucketState.FIRED
        return self.state

    def _has_nothing(self, slot: Slot) -> bool:
        """Whether the field of an empty slot has no other slot with frames."""
        if slot.edge.slot in self.group.critical:
            return True
        return all(self.slots[index].is_empty for index in self.group.slots[slot.edge.target_field])

    def _judge_counts(self) -> BucketState:
        """Count the frames of each field in the order of reading, so the chunks read do not depend on timing."""
        counts, start = self.group.counts, self.group.slots.get(STARTED)
        assert counts is not None
        if start is not None and self.slots[start[0]].is_empty:
            return BucketState.UNREACHABLE
        wanted: dict[str, int] = {}
        for name in self.group.slots:
            count = counts.get(name, 1)
            wanted[name] = self._number(count) if isinstance(count, str) else count
        fires = True
        for name, slots in self.inputs():
            arrived, is_open = 0, False
            for slot in slots:
                arrived += slot.num_frames
                if not slot.order.done:
                    is_open = True
                    break
            if wanted[name] < 0:  # its number has not arrived
                fires = False
            elif arrived < wanted[name]:
                if not is_open:
                    return BucketState.UNREACHABLE
                fires = False
        if not fires:
            return BucketState.WAITING
        self._counts = wanted
        return BucketState.FIRED

    def _number(self, field: str) -> int:
        """The payload of a field that carries a number; -1 while it has not arrived."""
        for index in self.group.slots[field]:
            slot = self.slots[index]
            if slot.num_frames:
                number = slot.stream.peek().payload
                if not isinstance(number, int) or number < 0:
                    raise GraphError(
                        f"node {slot.edge.target!r}: input {field!r} must carry a number of frames to wait for, got "
                        f"{number!r}; send an integer of at least 0"
                    )
                return number
        return -1
