"""One request that goes through a graph."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence, Set
from types import TracebackType
from typing import Any

from vllm_omni.errors import CallAborted, DeadlineExceeded
from vllm_omni.flow.graph.plan import Route
from vllm_omni.flow.graph.transfer import ENTRY
from vllm_omni.flow.run.activity import Activity, ActivityTracker
from vllm_omni.flow.run.clock import Clock, TimerHandle
from vllm_omni.flow.run.frame import Frame, OutputFrame, Report, Root, SlotEos, Trace
from vllm_omni.flow.run.identity import activation_id
from vllm_omni.flow.run.link import Link
from vllm_omni.flow.run.outputs import CallOutputs
from vllm_omni.flow.run.scope import CallScope, Controller

logger = logging.getLogger(__name__)

AT_ENTRY = Trace(roots=(Root(ENTRY, 0, 0, 0, ()),))


class GraphCall:
    """One request: an async iterator of the frames of its wanted outputs, in order within each output.

    Made by ``GraphRuntime.open``; it runs from then on, whether it is read or not. Iteration ends when every wanted
    output and every activation has ended. Leave early with ``aclose()`` (or ``async with``): cancelling the reader
    alone leaves the call running.

    Args:
        within: the call that this one is part of, if any.
        until: the outputs that complete the call.
        controllers: of the nodes of the route.
        on_closed: called when the call is over.
        on_report: called with what its activations report.
    """

    def __init__(
        self,
        call_id: str,
        session: str | None,
        within: GraphCall | None,
        route: Route,
        until: frozenset[str],
        controllers: Sequence[Controller],
        link: Link,
        clock: Clock,
        on_closed: Callable[[GraphCall], None],
        on_report: Callable[[Any], None],
    ):
        self.call_id = call_id
        self.session = session
        self.within = within
        self.parameters: Mapping[str, Any] = {}  # see GlobalParameters; once it has started
        self.route = route
        self.error: Exception | None = None  # that ended it early
        self._until = until
        self._controllers = controllers
        self._link = link
        self._clock = clock
        self._on_closed = on_closed
        self._on_report = on_report
        self._tracker = ActivityTracker(self._close)
        self._outputs = CallOutputs(call_id, route.windows, link, self._on_output_end, self._fail)
        self._timer: TimerHandle | None = None
        self._opened: list[Controller] = []
        self._parts: list[GraphCall] = []  # open calls within this one
        self._started = False  # False while it waits for another call of its session
        self._stopping = False
        self._closed = asyncio.Event()
        if within is not None:
            within._parts.append(self)

    def __aiter__(self) -> GraphCall:
        return self

    async def __anext__(self) -> OutputFrame:
        """The next frame.

        Raises:
            CallAborted, DeadlineExceeded, or the error of a node or transfer function (``__notes__`` name the node):
                the call is over, unread frames are dropped, and every activation has finished its clean-up.
        """
        return await self._outputs.read()

    async def __aenter__(self) -> GraphCall:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def abort(self, reason: str = "no reason given") -> None:
        """Cancel every activation and wait until each has cleaned up; iteration then raises ``CallAborted``.

        Does nothing to a call that is over, and only waits for one that is stopping.
        """
        self.stop(CallAborted(f"call {self.call_id!r} aborted: {reason}"))
        await self._closed.wait()

    async def aclose(self) -> None:
        """As ``abort``, but iteration just ends, and unread frames are dropped."""
        self.stop(None)
        await self._closed.wait()
        self._outputs.drop_unread()

    @property
    def running_nodes(self) -> frozenset[str]:
        """The nodes with activations in flight; those of a call within this one as "graph.call > node"."""
        inner = {f"{part.route.graph} > {node}" for part in self._parts for node in part.running_nodes}
        return frozenset(activity.node for activity in self._tracker.inflight) - {ENTRY} | inner

    # ---- for the runtime ----

    @property
    def num_buffered(self) -> int:
        return self._outputs.num_buffered

    def start_timer(self, deadline_s: float) -> None:
        opened_at = self._clock.monotonic()
        self._timer = self._clock.call_later(deadline_s, lambda: self._expire(self._clock.monotonic() - opened_at))

    def start(self, inputs: Mapping[str, Any], context: Any, parameters: Mapping[str, Any]) -> None:
        """Open the call at its controllers, and send the placeholders."""
        self._started = True
        self.parameters = parameters
        scope = CallScope(self.call_id, self.route, self._tracker, context, self.session, parameters, self._clock)
        for name in self.route.outputs:
            self._tracker.start(Activity(ENTRY, output=name))
        for controller in self._controllers:
            controller.open(scope)
            self._opened.append(controller)
        for edge in self.route.outlets[ENTRY].edges:
            to = (edge.target, edge.slot, edge.target_field, activation_id(edge, AT_ENTRY, 0, 0))
            self._link.send(Frame(self.call_id, ENTRY, *to, 0, True, inputs[edge.source_field], trace=AT_ENTRY))

    def receive(self, message: Any) -> None:
        match message:
            case Frame():
                if not message.field:
                    self._fail(message.source, message.payload)
                elif not self._stopping:
                    self._outputs.receive_frame(message)
            case SlotEos():
                if not self._stopping:
                    self._outputs.receive_count(message)
            case Report():  # also while it stops: it may concern what must be released
                self._on_report(message.payload)
            case _:  # from a host
                message.report_to(self._tracker)

    def stop(self, error: Exception | None) -> None:
        """Start to end the call early; it closes when the last activation has acknowledged."""
        if self._stopping or self._closed.is_set():
            return
        self._stopping = True
        self.error = error
        self._outputs.drop_unread()
        if not self._started:
            self._close()
            return
        for controller in self._opened:
            controller.cancel(self.call_id)
        for name in self.route.outputs:
            self._tracker.end(Activity(ENTRY, output=name))

    def lose(self, nodes: Set[str], error: Exception) -> None:
        """Stop without waiting for activations of ``nodes``, whose process has died."""
        self.stop(error)
        for activity in self._tracker.inflight:
            if activity.node in nodes:
                self._tracker.end(activity)

    # ---- the end ----

    def _on_output_end(self, name: str) -> None:
        self._tracker.end(Activity(ENTRY, output=name))
        if self._until.isdisjoint(self._outputs.open):
            # Later: an activation may be in the middle of the emission that ended this output.
            asyncio.get_running_loop().call_soon(self._cancel_unread)

    def _cancel_unread(self) -> None:
        """Cancel the activations that still produce: all outputs that complete the call have ended."""
        if not self._stopping and not self._closed.is_set():
            unread = self._outputs.open
            self._outputs.cancel_open()
            for controller in self._opened:
                controller.cancel(self.call_id, unfinished_only=True)
            for name in unread:
                self._tracker.end(Activity(ENTRY, output=name))

    def _fail(self, node: str, error: Exception) -> None:
        if not self._stopping:
            self.stop(error)
        elif self.error is not None:
            self.error.add_note(f"while the call was stopped, node {node!r} raised {error!r}")
        else:
            logger.warning("call %r: node %r raised while the call was closed", self.call_id, node, exc_info=error)

    def _expire(self, elapsed_s: float) -> None:
        waits = "" if self._started else f"it still waited for another call of session {self.session!r}; "
        nodes = ", ".join(sorted(self.running_nodes)) or "none"
        outputs = ", ".join(self._outputs.open) or "none"
        self.stop(
            DeadlineExceeded(
                f"call {self.call_id!r} is not done at its deadline, {elapsed_s:.3g} s after it was opened; {waits}"
                f"nodes still running: {nodes}; outputs not ended: {outputs}"
            )
        )

    def _close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for controller in self._opened:
            controller.close(self.call_id)
        if self.within is not None:
            self.within._parts.remove(self)
        self._on_closed(self)
        self._outputs.drop_open()
        self._outputs.finish(self.error)
        self._closed.set()
