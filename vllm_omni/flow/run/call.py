"""A graph at work: the runtime holds the controllers, a call is one request going through them."""

import asyncio
import logging
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

from vllm_omni.errors import CallAborted, DeadlineExceeded, GraphError, InvalidRequest, OmniError, RoleUnavailable
from vllm_omni.flow.graph.plan import Route, StaticPlan
from vllm_omni.flow.graph.transfer import ENTRY
from vllm_omni.flow.run.activity import Activity, ActivityTracker
from vllm_omni.flow.run.clock import Clock, LoopClock, TimerHandle
from vllm_omni.flow.run.controller import NodeController
from vllm_omni.flow.run.credit import ReceiveWindow, open_all
from vllm_omni.flow.run.frame import Credit, EndReason, Frame, Lineage, OutputFrame, Root, SlotEos
from vllm_omni.flow.run.identity import activation_id
from vllm_omni.flow.run.link import InProcessLink, Link
from vllm_omni.flow.run.node import Node
from vllm_omni.flow.run.order import PathOrder
from vllm_omni.flow.run.scope import CallScope, Controller, RemoteNode
from vllm_omni.flow.run.sequence import Stream
from vllm_omni.flow.run.session import GCScheduler, ParameterStore
from vllm_omni.names import suggest

logger = logging.getLogger(__name__)

AT_ENTRY = Lineage(roots=(Root(ENTRY, 0, 0, 0, ()),))


@dataclass(frozen=True, slots=True)
class FlowStatistics:
    """What a runtime holds at this moment; all zero when it is idle."""

    num_open_calls: int
    num_waiting_calls: int  # of those that are open, for another one of their session
    num_running_activations: int
    num_buffered_frames: int  # arrived, not yet read by their node or user


class _Output:
    """A graph output that has not ended: what all activations of its node send, in order."""

    __slots__ = ("num_frames", "order", "reason", "windows")

    def __init__(self) -> None:
        self.order: PathOrder[Frame] = PathOrder()
        self.num_frames = 0
        self.reason = EndReason.UNREACHABLE  # why the last part of it ended
        self.windows: dict[int, ReceiveWindow] = {}  # producing activation -> its window


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
        until: frozenset[str],
        controllers: Sequence[Controller],
        runtime: "GraphRuntime",
    ):
        self.call_id = call_id
        self.session = session
        self._route = route
        self._controllers = controllers
        self._runtime = runtime
        self._tracker = ActivityTracker(self._close)
        self._until = until  # outputs that complete the call
        self._outputs = {name: _Output() for name in sorted(route.outputs)}  # that have not ended
        self._frames: Stream[OutputFrame] = Stream(self._on_read, self._on_wait)
        self._credited: deque[ReceiveWindow | None] = deque()  # of the frames that wait to be read
        self._timer: TimerHandle | None = None
        self._opened: list[Controller] = []
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
        self._clear()

    # ---- below: for the runtime ----

    def _arm(self, deadline_s: float) -> None:
        clock, opened_at = self._runtime.clock, self._runtime.clock.monotonic()
        self._timer = clock.call_later(deadline_s, lambda: self._expire(clock.monotonic() - opened_at))

    def _start(self, inputs: Mapping[str, Any], context: Any) -> None:
        self._started = True
        scope = CallScope(
            self.call_id,
            self._route,
            self._tracker,
            context,
            self.session,
            self._runtime._parameters.of(self.session, self.call_id),
        )
        for name in self._route.outputs:
            self._tracker.begin(Activity(ENTRY, output=name))
        for controller in self._controllers:
            controller.open(scope)
            self._opened.append(controller)
        for field, edges in self._route.outlets[ENTRY].whole.items():
            for edge in edges:
                self._runtime.link.send(
                    Frame(
                        self.call_id,
                        ENTRY,
                        edge.target,
                        edge.slot,
                        edge.target_field,
                        activation_id(edge, AT_ENTRY, 0, 0),
                        0,
                        True,
                        inputs[field],
                        lineage=AT_ENTRY,
                    )
                )

    def _receive(self, message: Any) -> None:
        match message:
            case Frame():
                self._receive_frame(message)
            case SlotEos():
                self._receive_count(message)
            case _:  # from a host
                message.report_to(self._tracker)

    def _lose(self, nodes: Set[str], error: Exception) -> None:
        self._stop(error)
        for activity in self._tracker.inflight:
            if activity.node in nodes:
                self._tracker.end(activity)

    def _receive_frame(self, frame: Frame) -> None:
        if not frame.field:
            self._fail(frame.source, frame.payload)
        elif not self._stopping and (output := self._outputs.get(frame.field)) is not None:
            window = output.windows.get(frame.origin)
            if window is None:
                grant = partial(self._grant, frame.source, frame.origin, frame.field)
                window = output.windows[frame.origin] = ReceiveWindow(grant)
            window.on_received(frame.seq)
            due = output.order.push(frame.lineage.path, frame, frame.lineage.turns)
            self._deliver(frame.source, frame.field, output, due)
            if self._frames.is_waited_for:  # what comes ahead of its turn must not hold back what is before it
                window.open_if_full()

    def _receive_count(self, message: SlotEos) -> None:
        output = None if self._stopping else self._outputs.get(message.field)
        if output is not None:
            due = output.order.set_count(message.lineage.path, message.count, message.lineage.turns)
            self._deliver(message.source, message.field, output, due)

    def _deliver(self, source: str, name: str, output: _Output, due: Sequence[Frame]) -> None:
        done = output.order.done
        for frame in due:
            if frame.reason is EndReason.NONE:
                is_last = done and frame is due[-1]
                chunk = OutputFrame(name, frame.payload, output.num_frames, is_last)
                self._put(chunk, output.windows[frame.origin])
                output.num_frames += 1
                output.reason = EndReason.NONE if frame.last else EndReason.EMPTY
            elif frame.reason is EndReason.ERROR:
                self._fail(source, frame.payload)
                return
            else:
                output.reason = frame.reason
        if done:
            if not due or due[-1].reason is not EndReason.NONE:
                reason = output.reason
                if output.num_frames and reason is not EndReason.CANCEL:
                    reason = EndReason.EMPTY
                self._put(OutputFrame(name, None, output.num_frames, True, reason), None)
            self._end_output(name)

    def _clear(self) -> None:
        self._frames.clear()
        self._credited.clear()

    def _put(self, frame: OutputFrame, window: ReceiveWindow | None) -> None:
        self._credited.append(window)
        self._frames.put_nowait(frame)

    def _grant(self, source: str, activation_id: int, output: str, limit: int) -> None:
        self._runtime.link.send(Credit(self.call_id, source, activation_id, ENTRY, 0, output, limit))

    def _on_read(self, _: OutputFrame) -> None:
        window = self._credited.popleft()
        if window is not None:
            window.on_read()

    def _on_wait(self) -> None:
        for output in self._outputs.values():
            open_all(output.windows.values())

    def _end_output(self, name: str) -> None:
        del self._outputs[name]
        self._tracker.end(Activity(ENTRY, output=name))
        if self._until.isdisjoint(self._outputs):
            # Not now: an activation may stand in the middle of the emission that brought us here.
            asyncio.get_running_loop().call_soon(self._cancel_unheard)

    def _cancel_unheard(self) -> None:
        """All outputs that count have ended, so who still produces does it for nobody."""
        if not self._stopping and not self._closed.is_set():
            unheard = list(self._outputs)
            self._outputs.clear()
            for controller in self._opened:
                controller.cancel(self.call_id, unfinished_only=True)
            for name in unheard:
                self._tracker.end(Activity(ENTRY, output=name))

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
        outputs = ", ".join(sorted(self._outputs))
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
        self._clear()
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
        self._outputs.clear()
        self._frames.finish(self._error)
        self._closed.set()


class GraphRuntime:
    """Runs calls of one plan, or of several that share nodes, on the event loop it is used from.

    Args:
        plans: compiled graphs; see ``parse_graphs`` for several.
        nodes: role name -> the node that serves it, or ``Remote()``; one for each role of the plans.
        clock: where deadlines come from; the event loop's by default.
        link: how frames travel between controllers; within the process by default.

    Raises:
        GraphError: ``nodes`` does not match the roles of the plans, or roles that share parameters are in several
            processes.

    From: Omni-Flow section 3.4.
    """

    def __init__(
        self,
        plans: StaticPlan | Sequence[StaticPlan],
        nodes: Mapping[str, Node | RemoteNode],
        *,
        clock: Clock | None = None,
        link: Link | None = None,
    ):
        all_plans = [plans] if isinstance(plans, StaticPlan) else list(plans)
        self.plans = {plan.name: plan for plan in all_plans}
        roles = frozenset[str]().union(*(plan.roles for plan in all_plans))
        graphs = ", ".join(repr(plan.name) for plan in all_plans)
        _match(f"graph {graphs}: no node is bound to role", roles, nodes, GraphError)
        _match(f"graph {graphs}: has no role", nodes, roles, GraphError)
        self.clock: Clock = clock or LoopClock()
        self.link: Link = link or InProcessLink()
        self._controllers: dict[str, Controller] = {}
        self._calls: dict[str, GraphCall] = {}
        self._scheduler = GCScheduler()
        self._parameters = ParameterStore(one for plan in all_plans for one in plan.parameters.values())
        self._routes: dict[tuple[str, frozenset[str]], Route] = {}  # a handful: one for each set of outputs asked for
        self._closing = False
        self._lost: dict[str, str] = {}  # role served elsewhere -> why it is not
        for plan in all_plans:
            for name, node_plan in plan.nodes.items():
                node = nodes[node_plan.role]
                if name in self._controllers:
                    continue
                if isinstance(node, RemoteNode):
                    if node_plan.parameters:
                        raise GraphError(
                            f"graph {plan.name!r}: role {node_plan.role!r} is served by another process, where its "
                            f"parameters {', '.join(map(repr, node_plan.parameters))} are not; serve it in this process"
                        )
                    self._controllers[name] = node.make_controller(name, self.link)
                else:
                    controller = self._controllers[name] = NodeController(name, node, self.link)
                    self.link.bind(name, controller.receive)
        self.link.bind(ENTRY, self._receive)

    def open(
        self,
        call_id: str,
        inputs: Mapping[str, Any],
        outputs: Iterable[str] = (),
        *,
        graph: str | None = None,
        entry: str | None = None,
        context: Any = None,
        deadline_s: float | None = None,
        session: str | None = None,
    ) -> GraphCall:
        """Start a call; the nodes that its inputs feed have been fired when this returns, unless its session is busy.

        Args:
            inputs: placeholder -> payload. Placeholders that ``outputs`` do not depend on may be left out.
            outputs: what the caller wants; nodes that none of it depends on are never activated.
            graph: which one, where there are several.
            entry: instead of ``outputs``: a graph call that the graph declares.
            context: handed to every activation and transfer function as it is.
            deadline_s: a call not over by then is aborted, and raises ``DeadlineExceeded``.
            session: calls of one session run one after the other, in the order in which they were opened.

        Raises:
            InvalidRequest: a graph, entry, output or input does not exist or is missing, or ``call_id`` is in use.
            RoleUnavailable: a role that the outputs need was lost.
            OmniError: the runtime is closed.
        """
        plan = self._choose(call_id, graph)
        where = f"call {call_id!r} of graph {plan.name!r}"
        wanted = until = frozenset(outputs)
        if entry is not None:
            _match(f"{where}: no graph call", [entry], plan.graph_calls, InvalidRequest)
            if wanted:
                raise InvalidRequest(f"{where}: graph call {entry!r} says what is asked for; leave outputs out")
            wanted, until = plan.graph_calls[entry].outputs, plan.graph_calls[entry].until
        if self._closing:
            raise OmniError(f"{where}: the runtime is closed")
        if call_id in self._calls:
            raise InvalidRequest(f"{where}: a call of this id is still open; abort it, or use another id")
        if not wanted:
            raise InvalidRequest(f"{where}: asks for no output; {suggest('', plan.outputs)}")
        if deadline_s is not None and deadline_s <= 0:
            raise InvalidRequest(f"{where}: deadline_s is {deadline_s}, but must be greater than 0, or None")
        _match(f"{where}: no output", wanted, plan.outputs, InvalidRequest)
        _match(f"{where}: no input", inputs, plan.placeholders, InvalidRequest)
        key = (plan.name, wanted)
        route = self._routes.get(key) or self._routes.setdefault(key, plan.route(wanted))
        _match(f"{where}: outputs {sorted(wanted)} need input", route.placeholders, inputs, InvalidRequest)
        for node in route.nodes.values() if self._lost else ():
            if (reason := self._lost.get(node.role)) is not None:
                raise RoleUnavailable(f"{where}: role {node.role!r} is not there: {reason}")

        call = GraphCall(call_id, session, route, until, [self._controllers[name] for name in route.nodes], self)
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

    def _choose(self, call_id: str, graph: str | None) -> StaticPlan:
        if graph is None:
            if len(self.plans) > 1:
                raise InvalidRequest(
                    f"call {call_id!r}: there are several graphs, say which; {suggest('', self.plans)}"
                )
            return next(iter(self.plans.values()))
        _match(f"call {call_id!r}: no graph", [graph], self.plans, InvalidRequest)
        return self.plans[graph]

    def end_session(self, session: str) -> None:
        """Release what the calls of a session share; calls that are open keep theirs, later ones begin anew."""
        self._parameters.end(session)

    async def abort(self, call_id: str, reason: str = "no reason given") -> None:
        """Abort an open call, see ``GraphCall.abort``; an unknown id is ignored."""
        call = self._calls.get(call_id)
        if call is not None:
            await call.abort(reason)

    def statistics(self) -> FlowStatistics:
        # Copies: metrics are read in another thread than the loop's.
        calls, controllers = list(self._calls.values()), list(self._controllers.values())
        read_by_users = sum(
            len(call._frames) + sum(len(output.order) for output in list(call._outputs.values())) for call in calls
        )
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
        self._parameters.end_all()

    def shutdown_hosts(self) -> None:
        """Tell the processes that serve roles that there is no more work for them; call it after ``aclose``."""
        for controller in self._controllers.values():
            controller.shutdown()

    def lose(self, role: str, reason: str) -> None:
        """The process that serves a role has died: calls that need it fail, and new ones are refused until ``regain``.

        Nobody is waited for there any more.
        """
        self._lost[role] = reason
        names = {name for plan in self.plans.values() for name, node in plan.nodes.items() if node.role == role}
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
        self._parameters.leave(call.session, call.call_id)
        if call.session is not None:
            self._scheduler.leave(call.session, call.call_id)


def _match(complaint: str, names: Iterable[str], existing: Collection[str], error: type[OmniError]) -> None:
    for name in sorted(names):
        if name not in existing:
            raise error(f"{complaint} {name!r}; {suggest(name, existing)}")
