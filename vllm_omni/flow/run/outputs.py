"""The outputs of a call: frames of all producing activations, in order, for one reader."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from vllm_omni.flow.graph.transfer import ENTRY
from vllm_omni.flow.run.credit import ReceiveWindow, open_all
from vllm_omni.flow.run.frame import EdgeCredit, EndReason, Frame, OutputFrame, SlotEos
from vllm_omni.flow.run.link import Link
from vllm_omni.flow.run.order import PathOrder
from vllm_omni.flow.run.sequence import Stream


@dataclass(slots=True)
class _Output:
    """A graph output that has not ended."""

    window: int | None  # frames that a producer may be ahead; None: ``credit.WINDOW``
    order: PathOrder[Frame] = field(default_factory=PathOrder)
    num_frames: int = 0
    reason: EndReason = EndReason.UNREACHABLE  # for which its last part ended
    windows: dict[int, ReceiveWindow] = field(default_factory=dict)  # producing activation -> its window


class CallOutputs:
    """The outputs of a call that have not ended, and the frames that wait to be read.

    Args:
        names: output -> frames that a producer may be ahead of the reader; None: ``credit.WINDOW``.
        on_end: called with the name of an output that has ended.
        on_error: called with the node and the error that ended an output.
    """

    def __init__(
        self,
        call_id: str,
        names: Mapping[str, int | None],
        link: Link,
        on_end: Callable[[str], None],
        on_error: Callable[[str, Exception], None],
    ):
        self._call_id = call_id
        self._link = link
        self._on_end = on_end
        self._on_error = on_error
        self._open = {name: _Output(names[name]) for name in sorted(names)}
        self._frames: Stream[OutputFrame] = Stream(self._on_wait)

    @property
    def open(self) -> list[str]:
        """The outputs that have not ended."""
        return list(self._open)

    @property
    def num_buffered(self) -> int:
        return len(self._frames) + sum(len(output.order) for output in list(self._open.values()))

    async def read(self) -> OutputFrame:
        """The next frame; raises StopAsyncIteration or the error of ``finish`` behind the last one."""
        return await self._frames.__anext__()

    def receive_frame(self, frame: Frame) -> None:
        output = self._open.get(frame.field)
        if output is None:
            return
        window = output.windows.get(frame.origin)
        if window is None:
            grant = partial(self._grant, frame.source, frame.origin, frame.field)
            window = output.windows[frame.origin] = ReceiveWindow(grant, output.window)
        window.on_received(frame.seq)
        self._deliver(frame.source, frame.field, output, output.order.push(frame.trace.path, frame, frame.trace.loops))
        if self._frames.is_waited_for:  # an early frame must not hold back those before it
            window.open_if_full()

    def receive_count(self, eos: SlotEos) -> None:
        output = self._open.get(eos.field)
        if output is not None:
            due = output.order.set_count(eos.trace.path, eos.count, eos.trace.loops)
            self._deliver(eos.source, eos.field, output, due)

    def drop_open(self) -> None:
        """Ignore further frames of all outputs."""
        self._open.clear()

    def cancel_open(self) -> None:
        """End all outputs, and ignore further frames."""
        for name, output in self._open.items():
            self._frames.put_nowait(OutputFrame(name, None, output.num_frames, True, EndReason.CANCEL))
        self._open.clear()

    def drop_unread(self) -> None:
        self._frames.clear()

    def finish(self, error: Exception | None) -> None:
        """End the iteration behind the unread frames, with ``error`` if there is one."""
        self._frames.finish(error)

    def _deliver(self, source: str, name: str, output: _Output, due: Sequence[Frame]) -> None:
        done = output.order.done
        for frame in due:
            if frame.reason is EndReason.NONE:
                is_last = done and frame is due[-1]
                made = OutputFrame(name, frame.payload, output.num_frames, is_last)
                self._frames.put_nowait(made, output.windows[frame.origin])
                output.num_frames += 1
                output.reason = EndReason.NONE if frame.last else EndReason.EMPTY
            elif frame.reason is EndReason.ERROR:
                self._on_error(source, frame.payload)
                return
            else:
                output.reason = frame.reason
        if done:
            if not due or due[-1].reason is not EndReason.NONE:
                reason = output.reason
                if output.num_frames and reason is not EndReason.CANCEL:
                    reason = EndReason.EMPTY
                self._frames.put_nowait(OutputFrame(name, None, output.num_frames, True, reason))
            del self._open[name]
            self._on_end(name)

    def _grant(self, source: str, activation_id: int, output: str, limit: int) -> None:
        self._link.send(EdgeCredit(self._call_id, source, activation_id, ENTRY, 0, output, limit))

    def _on_wait(self) -> None:
        for output in self._open.values():
            open_all(output.windows.values())
