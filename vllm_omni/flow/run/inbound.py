"""Grant credit to the producers that feed a node, for one call."""

import functools

from vllm_omni.flow.graph.plan import Edge
from vllm_omni.flow.graph.transfer import ENTRY
from vllm_omni.flow.run.activation import ActivationRun
from vllm_omni.flow.run.credit import UNLIMITED, ReceiveWindow, open_all
from vllm_omni.flow.run.frame import EdgeCredit, Frame, SlotEos
from vllm_omni.flow.run.link import Link


class InboundCredit:
    """The reader's side of all edges into one node.

    An edge that is read whole has a window for each activation and producer, in the slot of the bucket. A per-frame
    edge has one for each producer, here: an activation that is over counts as a frame that was read.
    """

    __slots__ = ("_call_id", "_forks", "_link")

    def __init__(self, link: Link, call_id: str):
        self._link = link
        self._call_id = call_id
        self._forks: dict[tuple[int, int], ReceiveWindow] | None = None  # (slot, producing activation) -> its window

    def on_frame(self, run: ActivationRun, edge: Edge, frame: Frame) -> None:
        """Count a frame of an edge that may carry several."""
        slot = run.bucket.slots[frame.slot]
        if edge.per_frame:
            if not slot.order.done:  # otherwise a duplicate
                window = self._fork_window(edge, frame.origin)
                window.num_received += 1
                if not run.bucket.group.limits_forks:
                    window.on_read()
            return
        whole = None if slot.windows is None else slot.windows.get(frame.origin)
        if whole is None:
            whole = self._make_window(edge, frame.origin)
            run.bucket.add_window(frame.slot, frame.origin, whole)
        whole.on_received(frame.seq)

    def release(self, run: ActivationRun) -> None:
        """Grant the producers of an activation that is over the credit for all frames that it did not read."""
        for slot in run.bucket.slots.values():
            if not slot.order.done and slot.windows is not None:
                for origin in slot.windows:
                    self._grant(slot.edge, origin, UNLIMITED)
        for index in run.bucket.group.per_frame_slots:
            slot = run.bucket.slots[index]
            window = self._fork_window(slot.edge, run.fork_id)
            has_arrived = slot.order.done
            if not has_arrived:
                window.num_received += 1
            if run.bucket.group.limits_forks or not has_arrived:
                window.on_read()

    def drop(self, edge: Edge, message: Frame | SlotEos) -> None:
        """Lift the limit of a producer whose frame arrived for an activation that is over."""
        if isinstance(message, Frame) and message.source != ENTRY and not message.last:
            self._grant(edge, message.origin, UNLIMITED)

    def lift(self, edge: Edge, frame: Frame) -> None:
        """Lift the limit of a producer with its first frame of a constant, all of which are kept."""
        if frame.source != ENTRY and not frame.seq and (edge.per_frame or not frame.last):
            self._grant(edge, frame.origin, UNLIMITED)

    def open_forks(self) -> None:
        """Open the full windows of all per-frame edges."""
        if self._forks is not None:
            open_all(self._forks.values())

    def _fork_window(self, edge: Edge, origin: int) -> ReceiveWindow:
        if self._forks is None:
            self._forks = {}
        window = self._forks.get((edge.slot, origin))
        if window is None:
            window = self._forks[edge.slot, origin] = self._make_window(edge, origin)
        return window

    def _make_window(self, edge: Edge, origin: int) -> ReceiveWindow:
        return ReceiveWindow(functools.partial(self._grant, edge, origin), edge.window)

    def _grant(self, edge: Edge, origin: int, limit: int) -> None:
        self._link.send(
            EdgeCredit(self._call_id, edge.source, origin, edge.target, edge.slot, edge.target_field, limit)
        )
