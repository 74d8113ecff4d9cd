"""A graph at work: the runtime holds the controllers, a call is one request going through them."""

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

from vllm_omni.errors import CallAborted, DeadlineExceeded, GraphError, InvalidRequest, OmniError, RoleUnavailable
from vllm_omni.flow.activity import Activity, ActivityTracker
from vllm_omni.flow.clock import Clock, LoopClock, TimerHandle
from vllm_omni.flow.controller import CallScope, Node, NodeController, derive_activation_id
from vllm_omni.flow.credit import ReceiveWindow
from vllm_omni.flow.dsl import what_exists
from vllm_omni.flow.frame import ENTRY, Credit, Frame, OutputFrame
from vllm_omni.flow.host import Remote, RemoteController, cancellation, error_of
from vllm_omni.flow.link import Began, Cancelled, Ended, Failed, InProcessLink, Link
from vllm_omni.flow.plan import Route, StaticPlan
from vllm_omni.flow.sequence import SequenceQueue, Stream
from vllm_omni.flow.session import GCScheduler

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FlowStatistics:
    """What a runtime holds at this moment; all zero when it is idle."""

    num_open_calls: int
    num_waiting_calls: int  # of those that are open, for another one of their session
    num_running_activations: int
    num_buffered_frames: int  # arrived, not yet read by their node or user


class GraphCall:
    """One request: an async iterator of the frames of its wanted outputs, in order within each output.

    Made by ``GraphRuntime.open``, and running from then on whether it is read or not. Iteration ends when every wanted
    output has ended and every activation with it. Leave early with ``aclose()`` (or ``async with``), which iteration
    alone does not do: cancelling the reader leaves the call running.
    """

    def __init__(
        self,
        call_id: str,
        session: str | None,
        route: Route,
        controllers: Sequence[NodeController | RemoteController],
        runtime: "GraphRuntime",
    ):
        self.call_id = call_id
        self.session = session
        self._route = route
        self._controllers = controllers
        self._runtime = runtime
        self._tracker = ActivityTracker(self._close)
        self._queues = {name: SequenceQueue() for name in route.outputs}  # outputs that have not ended
        self._windows: dict[str, ReceiveWindow] = {}  # of outputs a frame of which has come
        self._frames: Stream[OutputFrame] = Stream(self._on_read)
        self._timer: TimerHandle | None = None
        self._opened: list[NodeController | RemoteController] = []
        self._started = False  # it may have to wait for another call of its session
        self._stopping = False
        self._error: Exception | None = None
        self._closed = asyncio.Event()

    def __aiter__(self) -> "GraphCall":
        return self

    async def __anext__(self) -> OutputFrame:
        """The next frame.

        Raises:
            CallAborted, DeadlineExceeded, or what a node or transfer function raised (``__notes__`` name the node): the
                call is over, frames not yet read are dropped, and every activation has finished its clean-up.
        """
        return await self._frames.__anext__()

    async def __aenter__(self) -> "GraphCall":
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def abort(self, reason: str = "no reason given") -> None:
        """Cancel every activation and wait until each has cleaned up; iteration then raises ``CallAborted``.

        Does nothing to a call that is over, and no more than wait for one that is stopping.
        """
        self._stop(CallAborted(f"call {self.call_id!r} aborted: {reason}"))
        await self._closed.wait()

    async def aclose(self) -> None:
        """As ``abort``, but iteration just ends, and frames not yet read are dropped."""
        self._stop(None)
        await self._closed.wait()
        self._frames.clear()

    # ---- below: for the runtime ----

    def _arm(self, deadline_s: float) -> None:
        clock, opened_at = self._runtime.clock, self._runtime.clock.monotonic()
        self._timer = clock.call_later(deadline_s, lambda: self._expire(clock.monotonic() - opened_at))

    def _start(self, inputs: Mapping[str, Any], context: Any) -> None:
        self._started = True
        scope = CallScope(self.call_id, self._route, self._tracker, context, self.session)
        for name in self._route.outputs:
            self._tracker.begin(Activity(ENTRY, output=name))
        for controller in self._controllers:
            controller.open(scope)
            self._opened.append(controller)
        for field, edges in self._route.outbound[ENTRY].items():
            for edge in edges:
                activation_id = derive_activation_id(0, edge.target)
                self._runtime.link.send(
                    Frame(self.call_id, ENTRY, edge.target, edge.target_field, activation_id, 0, True, inputs[field])
                )

    def _receive(self, message: Any) -> None:
        match message:
            case Frame():
                self._receive_frame(message)
            case Began():
                self._tracker.begin(Activity(message.node, message.activation_id))
            case Ended():
                self._tracker.end(Activity(message.node, message.activation_id))
            case Cancelled():
                self._tracker.end(cancellation(message.node))
            case Failed():
                self._fail(message.node, error_of(message))

    def _lose(self, nodes: Set[str], error: Exception) -> None:
        self._stop(error)
        for activity in self._tracker.inflight:
            if activity.node in nodes:
                self._tracker.end(activity)

    def _receive_frame(self, frame: Frame) -> None:
        if not frame.field:
            self._fail(frame.source, frame.payload)
        elif not self._stopping and frame.field in self._queues:
            window = self._windows.get(frame.field)
            if window is None:
                grant = partial(self._grant, frame.source, frame.origin, frame.field)
                window = self._windows[frame.field] = ReceiveWindow(grant)
            for due in self._queues[frame.field].push(frame):
                window.num_received += 1
                self._frames.put_nowait(OutputFrame(due.field, due.payload, due.seq, due.last, due.reason))
                if due.last:
                    self._end_output(due.field)

    def _grant(self, source: str, activation_id: int, output: str, limit: int) -> None:
        self._runtime.link.send(Credit(self.call_id, source, activation_id, ENTRY, output, limit))

    def _on_read(self, frame: OutputFrame) -> None:
        self._windows[frame.field].on_read()

    def _end_output(self, name: str) -> None:
        del self._queues[name]
        self._tracker.end(Activity(ENTRY, output=name))
        if not self._queues:
            # Not now: an activation may stand in the middle of the emission that brought us here.
            asyncio.get_running_loop().call_soon(self._cancel_unheard)

    def _cancel_unheard(self) -> None:
        """All outputs have ended, so who still produces does it for nobody."""
        if not self._stopping and not self._closed.is_set():
            for controller in self._opened:
                controller.cancel(self.call_id, unfinished_only=True)

    def _fail(self, node: str, error: Exception) -> None:
        if not self._stopping:
            self._stop(error)
        elif self._error is not None:
            self._error.add_note(f"while it was stopped, node {node!r} raised {error!r}")
        else:
            logger.warning("call %r: node %r raised while it was closed", self.call_id, node, exc_info=error)

    def _expire(self, elapsed_s: float) -> None:
        inflight = self._tracker.inflight
        nodes = ", ".join(sorted({activity.node for activity in inflight if activity.node != ENTRY}))
        waits = "" if self._started else f"it still waited for another call of session {self.session!r}; "
        outputs = ", ".join(sorted(self._queues))
        self._stop(
            DeadlineExceeded(
                f"call {self.call_id!r} is not done after {elapsed_s:.3g} s; {waits}"
                f"nodes still running: {nodes or 'none'}; outputs not ended: {outputs or 'none'}"
            )
        )

    def _stop(self, error: Exception | None) -> None:
        """Begin to end the call early; ``_close`` follows when the last activation has acknowledged."""
        if self._stopping or self._closed.is_set():
            return
        self._stopping = True
        self._error = error
        self._frames.clear()
        if not self._started:
            self._close()
            return
        for controller in self._opened:
            controller.cancel(self.call_id)
        for name in self._route.outputs:
            self._tracker.end(Activity(ENTRY, output=name))

    def _close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for controller in self._opened:
            controller.close(self.call_id)
        self._runtime._forget(self)
        self._queues.clear()
        self._windows.clear()
        self._frames.finish(self._error)
        self._closed.set()


class GraphRuntime:
    """Runs calls of one plan on the event loop it is used from.

    Args:
        nodes: role name -> the node that serves it, or ``Remote()``; one for each role of the plan.
        clock: where deadlines come from; the event loop's by default.
        link: how frames travel between controllers; within the process by default.

    Raises:
        GraphError: ``nodes`` does not match the roles of the plan.

    From: Omni-Flow section 3.4.
    """

    def __init__(
        self,
        plan: StaticPlan,
        nodes: Mapping[str, Node | Remote],
        *,
        clock: Clock | None = None,
        link: Link | None = None,
    ):
        _match(f"graph {plan.name!r}: no node is bound to role", plan.roles, nodes, GraphError)
        _match(f"graph {plan.name!r}: has no role", nodes, plan.roles, GraphError)
        self.plan = plan
        self.clock: Clock = clock or LoopClock()
        self.link: Link = link or InProcessLink()
        self._controllers: dict[str, NodeController | RemoteController] = {}
        self._calls: dict[str, GraphCall] = {}
        self._scheduler = GCScheduler()
        self._routes: dict[frozenset[str], Route] = {}  # a handful: one for each set of outputs that is asked for
        self._closing = False
        self._lost: dict[str, str] = {}  # role served elsewhere -> why it is not
        for name, node_plan in plan.nodes.items():
            node = nodes[node_plan.role]
            if isinstance(node, Remote):
                self._controllers[name] = RemoteController(node_plan, self.link)
            else:
                controller = self._controllers[name] = NodeController(node_plan, node, self.link)
                self.link.bind(name, controller.receive)
        self.link.bind(ENTRY, self._receive)

    def open(
        self,
        call_id: str,
        inputs: Mapping[str, Any],
        outputs: Iterable[str],
        *,
        context: Any = None,
        deadline_s: float | None = None,
        session: str | None = None,
    ) -> GraphCall:
        """Start a call; the nodes that its inputs feed have been fired when this returns, unless its session is busy.

        Args:
            inputs: placeholder -> payload. Placeholders that ``outputs`` do not depend on may be left out.
            outputs: what the caller wants; nodes that none of it depends on are never activated.
            context: handed to every activation and transfer function as it is.
            deadline_s: a call not over by then is aborted, and raises ``DeadlineExceeded``.
            session: calls of one session run one after the other, in the order in which they were opened.

        Raises:
            InvalidRequest: an output or input does not exist or is missing, or ``call_id`` is in use.
            RoleUnavailable: a role that the outputs need was lost.
            OmniError: the runtime is closed.
        """
        where = f"call {call_id!r} of graph {self.plan.name!r}"
        wanted = frozenset(outputs)
        if self._closing:
            raise OmniError(f"{where}: the runtime is closed")
        if call_id in self._calls:
            raise InvalidRequest(f"{where}: a call of this id is still open; abort it, or use another id")
        if not wanted:
            raise InvalidRequest(f"{where}: asks for no output; {what_exists('', self.plan.outputs)}")
        if deadline_s is not None and deadline_s <= 0:
            raise InvalidRequest(f"{where}: deadline_s is {deadline_s}, but must be greater than 0, or None")
        _match(f"{where}: no output", wanted, self.plan.outputs, InvalidRequest)
        _match(f"{where}: no input", inputs, self.plan.placeholders, InvalidRequest)
        route = self._routes.get(wanted) or self._routes.setdefault(wanted, self.plan.route(wanted))
        _match(f"{where}: outputs {sorted(wanted)} need input", route.placeholders, inputs, InvalidRequest)
        for name in route.nodes if self._lost else ():
            if (reason := self._lost.get(self.plan.nodes[name].role)) is not None:
                raise RoleUnavailable(f"{where}: role {self.plan.nodes[name].role!r} is not there: {reason}")

        call = GraphCall(call_id, session, route, [self._controllers[name] for name in route.nodes], self)
        self._calls[call_id] = call
        if deadline_s is not None:
            call._arm(deadline_s)
        start = partial(self._start, call, inputs, context)
        if session is None:
            start()
        else:
            self._scheduler.enter(session, call_id, start)
        if call._error is not None:
            raise call._error
        return call

    async def abort(self, call_id: str, reason: str = "no reason given") -> None:
        """Abort an open call, see ``GraphCall.abort``; an unknown id is ignored."""
        call = self._calls.get(call_id)
        if call is not None:
            await call.abort(reason)

    def statistics(self) -> FlowStatistics:
        # Copies: metrics are read in another thread than the loop's.
        calls, controllers = list(self._calls.values()), list(self._controllers.values())
        read_by_users = sum(len(call._frames) + sum(map(len, list(call._queues.values()))) for call in calls)
        return FlowStatistics(
            num_open_calls=len(calls),
            num_waiting_calls=self._scheduler.num_waiting,
            num_running_activations=sum(controller.num_running for controller in controllers),
            num_buffered_frames=read_by_users + sum(controller.num_buffered for controller in controllers),
        )

    async def aclose(self) -> None:
        """Refuse new calls, abort those that are open, and wait until all have cleaned up."""
        self._closing = True
        calls = list(self._calls.values())
        for call in calls:
            call._stop(CallAborted(f"call {call.call_id!r} aborted: the runtime was closed"))
        for call in calls:
            await call._closed.wait()

    def lose(self, role: str, reason: str) -> None:
        """The process that serves a role has died: calls that need it fail, and new ones are refused until ``regain``.

        Nobody is waited for there any more.
        """
        self._lost[role] = reason
        names = {name for name, node in self.plan.nodes.items() if node.role == role}
        for call in list(self._calls.values()):
            if names.intersection(call._route.nodes):
                call._lose(names, RoleUnavailable(f"role {role!r} was lost: {reason}"))

    def regain(self, role: str) -> None:
        """The role is served again."""
        self._lost.pop(role, None)

    def _receive(self, message: Any) -> None:
        call = self._calls.get(message.call_id)
        if call is not None:
            call._receive(message)

    def _start(self, call: GraphCall, inputs: Mapping[str, Any], context: Any) -> None:
        try:
            call._start(inputs, context)
        except Exception as exc:  # the link failed: what has been fired must not be left behind
            call._stop(exc)

    def _forget(self, call: GraphCall) -> None:
        del self._calls[call.call_id]
        if call.session is not None:
            self._scheduler.leave(call.session, call.call_id)


def _match(complaint: str, names: Iterable[str], existing: Collection[str], error: type[OmniError]) -> None:
    for name in sorted(names):
        if name not in existing:
            raise error(f"{complaint} {name!r}; {what_exists(name, existing)}")
