"""What an activation waits for and reads: the inputs of one group, put together and in order.

From: Omni-Flow section 3.2 (definition of a bucket), 3.2.3 (activate_by_count), 3.3 (critical slots).
"""

import enum
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence

from vllm_omni.errors import GraphError
from vllm_omni.flow.credit import ReceiveWindow
from vllm_omni.flow.frame import Chunk, Death, EndReason, Frame, Lineage, SlotEos
from vllm_omni.flow.order import PathOrder
from vllm_omni.flow.plan import Edge, GroupPlan, NodePlan
from vllm_omni.flow.sequence import Stream


class State(enum.Enum):
    WAITING = enum.auto()
    FIRED = enum.auto()
    DEAD = enum.auto()


SEVERITY = (EndReason.NONE, EndReason.EMPTY, EndReason.UNREACHABLE, EndReason.CANCEL, EndReason.ERROR)


class Slot:
    """One edge into an activation: what comes over it, in the order of paths."""

    __slots__ = ("_credited", "death", "edge", "error", "num_frames", "order", "reason", "stream", "windows")

    def __init__(self, edge: Edge):
        self.edge = edge
        self.order: PathOrder[Frame] = PathOrder()
        self.stream: Stream[Chunk] = Stream()
        self.num_frames = 0  # with a payload, in order
        self.reason = EndReason.NONE  # the worst for which a part of it ended
        self.error: Exception | None = None
        self.death = Death.ALIVE
        self.windows: dict[int, ReceiveWindow] = {}  # producing activation -> its window
        self._credited: deque[ReceiveWindow] = deque()  # of the chunks that wait to be read

    @property
    def is_empty(self) -> bool:
        """Nothing came, and nothing will."""
        return self.order.done and not self.num_frames

    def add_window(self, origin: int, window: ReceiveWindow) -> None:
        self.windows[origin] = window
        self.stream.on_read = self._on_read

    def take(self, due: Sequence[Frame], *, is_final: bool) -> None:
        """Args:
        is_final: no other edge follows on this field.
        """
        for frame in due:
            window = self.windows.get(frame.origin)
            if window is not None:
                window.num_received += 1
            if frame.reason is EndReason.NONE:
                if window is not None:
                    self._credited.append(window)
                last = is_final and self.order.done and frame is due[-1]
                self.stream.put_nowait(Chunk(frame.payload, self.num_frames, last))
                self.num_frames += 1
            else:
                self.death = max(self.death, frame.lineage.death)
                if SEVERITY.index(frame.reason) > SEVERITY.index(self.reason):
                    self.reason, self.error = frame.reason, frame.payload
        if self.order.done:
            self.stream.finish(self.error)

    def _on_read(self, _: Chunk) -> None:
        self._credited.popleft().on_read()


class Bucket:
    """Collects what belongs together until its node can fire:

        required  <=  slots with a frame  |  slots that ended without one

    and is dead as soon as a field can get nothing. A group with a single edge has no other to wait for; it uses the
    same class with one slot. Lazily made with the first frame, left to the garbage when its activation is over.

    Args:
        depth: length of the path that everything in it begins with.
        turns: loops at that path, which come again outside of it.
    """

    __slots__ = ("_counts", "_depth", "_turns", "group", "slots", "state")

    def __init__(self, plan: NodePlan, group: GroupPlan, depth: int, turns: tuple[int, ...]):
        self.group = group
        self.slots = {index: Slot(plan.slots[index]) for indices in group.slots.values() for index in indices}
        self.state = State.WAITING
        self._depth = depth
        self._turns = turns
        self._counts: dict[str, int] = {}  # field -> chunks that are read of it, once it fired by count

    def push(self, frame: Frame) -> State:
        """Take a frame; returns the state behind it."""
        slot = self.slots[frame.slot]
        path = frame.lineage.path[self._depth :]
        turns = frame.lineage.turns if path else self._inside(frame.lineage)
        return self._take(slot, slot.order.push(path, frame, turns))

    def set_count(self, eos: SlotEos) -> State:
        """Learn how many yields there were below a path."""
        slot = self.slots[eos.slot]
        path = eos.lineage.path[self._depth :]
        turns = eos.lineage.turns if path else self._inside(eos.lineage)
        return self._take(slot, slot.order.set_count(path, eos.count, turns))

    def inputs(self) -> Iterator[tuple[str, list[Slot]]]:
        for field, indices in self.group.slots.items():
            yield field, [self.slots[index] for index in indices]

    def limit(self, field: str) -> int | None:
        """How many chunks of a field are read; None: all."""
        return self._counts.get(field)

    def why_dead(self) -> tuple[EndReason, Exception | None, Death]:
        """What to tell those below: the worst reason for which a slot is empty."""
        worst = max((slot for slot in self.slots.values()), key=lambda slot: SEVERITY.index(slot.reason))
        death = max(Death.NEVER_LIVED, *(slot.death for slot in self.slots.values()))
        if worst.reason in (EndReason.ERROR, EndReason.CANCEL):
            return worst.reason, worst.error, death
        return EndReason.UNREACHABLE, None, death

    def windows(self) -> Iterator[ReceiveWindow]:
        for slot in self.slots.values():
            yield from slot.windows.values()

    @property
    def is_waited_for(self) -> bool:
        """Its activation waits for more."""
        return any(slot.stream.is_waited_for for slot in self.slots.values())

    @property
    def num_buffered(self) -> int:
        return sum(len(slot.order) + len(slot.stream) for slot in self.slots.values())

    def _inside(self, lineage: Lineage) -> tuple[int, ...]:
        return tuple(loop for loop in lineage.turns if loop not in self._turns) if lineage.turns else ()

    def _take(self, slot: Slot, due: Sequence[Frame]) -> State:
        had_frames = slot.num_frames
        indices = self.group.slots[slot.edge.target_field]
        slot.take(due, is_final=slot.edge.slot == indices[-1] and not self.group.counts)
        if self.state is State.WAITING and (self.group.counts or slot.order.done or not had_frames):
            self.state = self._judge_counts() if self.group.counts else self._judge()
        return self.state

    def _judge(self) -> State:
        for index in self.group.critical:
            if self.slots[index].is_empty:
                return State.DEAD
        for _, slots in self.inputs():
            if all(slot.is_empty for slot in slots):
                return State.DEAD
        if all(slot.num_frames or slot.order.done for slot in self.slots.values()):
            return State.FIRED
        return State.WAITING

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
                        f"node {slot.edge.target!r}: input {field!r} says how many frames to wait for, and carries {number!r}; "
                        "send an integer of at least 0"
                    )
                return number
        return -1


async def read(slots: Sequence[AsyncIterator[Chunk]], limit: int | None) -> AsyncGenerator[Chunk, None]:
    """Several edges of one field, one after the other; no more than ``limit`` chunks."""
    seq = 0
    for chunks in slots:
        if seq == limit:
            return
        async for chunk in chunks:
            yield Chunk(chunk.payload, seq, chunk.last or seq + 1 == limit)
            seq += 1
            if seq == limit:
                return
