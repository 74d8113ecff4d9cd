"""What an activation waits for and reads: the inputs of one group, put together and in order.

From: Omni-Flow section 3.2 (definition of a bucket), 3.2.3 (activate_by_count), 3.3 (critical slots).
"""

import enum
from collections import deque
from collections.abc import Iterator, Sequence

from vllm_omni.errors import GraphError
from vllm_omni.flow.graph.plan import Edge, GroupPlan, NodePlan
from vllm_omni.flow.graph.transfer import Chunk
from vllm_omni.flow.run.credit import ReceiveWindow, open_all
from vllm_omni.flow.run.frame import Death, EndReason, Frame, SlotEos
from vllm_omni.flow.run.order import PathOrder
from vllm_omni.flow.run.sequence import Stream


class State(enum.Enum):
    WAITING = enum.auto()
    FIRED = enum.auto()
    DEAD = enum.auto()


NOTHING: deque[ReceiveWindow | None] = deque(maxlen=0)
SEVERITY = (EndReason.NONE, EndReason.EMPTY, EndReason.UNREACHABLE, EndReason.CANCEL, EndReason.ERROR)


class Slot:
    """One edge into an activation: what comes over it, in the order of paths."""

    __slots__ = (
        "_credited",
        "death",
        "edge",
        "error",
        "is_abandoned",
        "num_frames",
        "order",
        "reason",
        "stream",
        "windows",
    )

    def __init__(self, edge: Edge):
        self.edge = edge
        self.order: PathOrder[Frame] = PathOrder()
        self.stream: Stream[Chunk] = Stream()
        self.num_frames = 0  # with a payload, in order
        self.reason = EndReason.NONE  # the worst for which a part of it ended
        self.error: Exception | None = None
        self.death: Death | None = None  # of the parts that ended without a frame, the least
        self.windows: dict[int, ReceiveWindow] | None = None  # producing activation -> its window
        self.is_abandoned = False  # nobody reads it any more, though the activation runs
        self._credited: deque[ReceiveWindow | None] = NOTHING  # of the chunks that wait to be read

    @property
    def is_missing(self) -> bool:
        """Nothing came, but something may."""
        return not self.num_frames and not self.order.done

    @property
    def is_empty(self) -> bool:
        """Nothing came, and nothing will."""
        return self.order.done and not self.num_frames

    def add_window(self, origin: int, window: ReceiveWindow) -> None:
        if self.windows is None:
            self.windows = {}
            self._credited = deque([None] * len(self.stream))
            self.stream.on_read = self._on_read
        self.windows[origin] = window
        if self.is_abandoned:
            window.lift()

    def abandon(self) -> None:
        """Its reader has all that it wants: what is there and what comes is dropped, and holds nobody back."""
        self.is_abandoned = True
        self.stream.clear()
        self._credited.clear()
        for window in self.windows.values() if self.windows is not None else ():
            window.lift()

    def take(self, due: Sequence[Frame], *, is_final: bool) -> None:
        """Args:
        is_final: no other edge follows on this field.
        """
        done = self.order.done
        for frame in due:
            if frame.reason is EndReason.NONE:
                if not self.is_abandoned:
                    if self.windows is not None:
                        self._credited.append(self.windows.get(frame.origin))
                    is_last = done and is_final and frame is due[-1]
                    self.stream.put_nowait(Chunk(frame.payload, self.num_frames, is_last))
                self.num_frames += 1
            else:
                death = frame.lineage.death
                self.death = death if self.death is None else min(self.death, death)
                if SEVERITY.index(frame.reason) > SEVERITY.index(self.reason):
                    self.reason, self.error = frame.reason, frame.payload
        if done:  # one that broke off is known to its reader; one that never began is as if it were not there
            self.stream.finish(self.error if self.num_frames else None)

    def open_windows(self) -> None:
        if self.windows is not None:
            open_all(self.windows.values())

    def _on_read(self, _: Chunk) -> None:
        window = self._credited.popleft()
        if window is not None:
            window.on_read()


class Bucket:
    """Collects what belongs together until its node can fire:

        required  <=  slots with a frame  |  slots that ended without one

    and is dead as soon as a field can get nothing. A group with a single edge has no other to wait for; it uses the
    same class with one slot. Lazily made with the first frame, left to the garbage when its activation is over.

    Args:
        depth: length of the path that everything in it begins with.
        turns: loops at that path, which come again outside of it.
    """

    __slots__ = ("_counts", "_depth", "_num_missing", "_turns", "group", "slots", "state")

    def __init__(self, plan: NodePlan, group: GroupPlan, depth: int, turns: tuple[int, ...]):
        self.group = group
        self.slots = {index: Slot(plan.slots[index]) for index in group.all_slots}
        self.state = State.WAITING
        self._depth = depth
        self._turns = turns
        self._num_missing = len(self.slots)  # slots that have no frame and may get one
        self._counts: dict[str, int] | None = None  # field -> chunks that are read of it, once it fired by count

    def push(self, frame: Frame) -> State:
        """Take a frame; returns the state behind it."""
        slot, lineage = self.slots[frame.slot], frame.lineage
        path = lineage.path[self._depth :]
        turns = lineage.turns
        if turns and not path:
            turns = self._inside(turns)
        was_missing = slot.is_missing
        return self._take(slot, slot.order.push(path, frame, turns), was_missing)

    def set_count(self, eos: SlotEos) -> State:
        """Learn how many yields there were below a path."""
        slot, lineage = self.slots[eos.slot], eos.lineage
        path = lineage.path[self._depth :]
        turns = lineage.turns if path else self._inside(lineage.turns)
        was_missing = slot.is_missing
        return self._take(slot, slot.order.set_count(path, eos.count, turns), was_missing)

    def inputs(self) -> Iterator[tuple[str, list[Slot]]]:
        for field, indices in self.group.slots.items():
            yield field, [self.slots[index] for index in indices]

    def limit(self, field: str) -> int | None:
        """How many chunks of a field are read; None: all."""
        return None if self._counts is None else self._counts[field]

    def why_dead(self) -> tuple[EndReason, Exception | None, Death]:
        """What to tell those below: the worst reason for which a slot is empty."""
        empty = [slot for slot in self.slots.values() if slot.is_empty] or list(
            self.slots.values()
        )  # too few of a field
        worst = max(empty, key=lambda slot: SEVERITY.index(slot.reason))
        # Where nothing was, a loop that took no turn may have been: it is the least that tells of all that is below.
        death = max(Death.NEVER_LIVED, min(slot.death or Death.ALIVE for slot in empty))
        if worst.reason in (EndReason.ERROR, EndReason.CANCEL):
            return worst.reason, worst.error, death
        return EndReason.UNREACHABLE, None, death

    def add_window(self, index: int, origin: int, window: ReceiveWindow) -> None:
        """A producer needs to be told how far a slot is read: from now on, who waits for one slot opens the others."""
        self.slots[index].add_window(origin, window)
        if self.group.root is not None:
            for slot in self.slots.values():
                slot.stream.on_wait = slot.stream.on_wait or self.open_windows

    def open_windows(self) -> None:
        for slot in self.slots.values():
            slot.open_windows()

    @property
    def is_waited_for(self) -> bool:
        """Its activation waits for more."""
        return any(slot.stream.is_waited_for for slot in self.slots.values())

    @property
    def num_buffered(self) -> int:
        return sum(len(slot.order) + len(slot.stream) for slot in self.slots.values())

    def _inside(self, turns: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(loop for loop in turns if loop not in self._turns)

    def _take(self, slot: Slot, due: Sequence[Frame], was_missing: bool) -> State:
        group = self.group
        slot.take(due, is_final=slot.edge.is_last_of_field and group.counts is None)
        if self.state is State.WAITING:
            if group.counts is not None:
                self.state = self._judge_counts()
            elif was_missing and not slot.is_missing:
                self._num_missing -= 1
                if not slot.num_frames and self._has_nothing(slot):
                    self.state = State.DEAD
                elif not self._num_missing:
                    self.state = State.FIRED
        return self.state

    def _has_nothing(self, slot: Slot) -> bool:
        """The field of an empty slot has no other one that could stand in for it."""
        if slot.edge.slot in self.group.critical:
            return True
        return all(self.slots[index].is_empty for index in self.group.slots[slot.edge.target_field])

    def _judge_counts(self) -> State:
        """A field counts in the order in which it will be read, so that what is read does not depend on who is fast."""
        counts = self.group.counts
        assert counts is not None
        wanted: dict[str, int] = {}
        for field in self.group.slots:
            count = counts.get(field, 1)
            wanted[field] = self._number(count) if isinstance(count, str) else count
        fires = True
        for field, slots in self.inputs():
            arrived, is_open = 0, False
            for slot in slots:
                arrived += slot.num_frames
                if not slot.order.done:
                    is_open = True
                    break
            if wanted[field] < 0:  # its number has not come
                fires = False
            elif arrived < wanted[field]:
                if not is_open:
                    return State.DEAD
                fires = False
        if not fires:
            return State.WAITING
        self._counts = wanted
        return State.FIRED

    def _number(self, field: str) -> int:
        """What a field that carries a number says; -1 while it has not come."""
        for index in self.group.slots[field]:
            slot = self.slots[index]
            if slot.num_frames:
                number = slot.stream.peek().payload
                if not isinstance(number, int) or number < 0:
                    raise GraphError(
                        f"node {slot.edge.target!r}: input {field!r} says how many frames to wait for, and carries "
                        f"{number!r}; send an integer of at least 0"
                    )
                return number
        return -1
