"""One controller per node: it receives frames, fires the node and sends its emissions, by table look-ups."""

from __future__ import annotations

import asyncio
import functools
import logging
from dataclasses import dataclass, field

from vllm_omni.errors import CallAborted, GraphError
from vllm_omni.flow.graph.declarations import Scheduling
from vllm_omni.flow.graph.plan import STARTED, Edge, GroupPlan
from vllm_omni.flow.graph.transfer import ENTRY
from vllm_omni.flow.run.activation import ActivationRun
from vllm_omni.flow.run.bucket import BucketState
from vllm_omni.flow.run.constants import Constants
from vllm_omni.flow.run.frame import (
    NO_BUCKET,
    NO_ITERATION,
    EdgeCredit,
    EndReason,
    Frame,
    Path,
    SlotEos,
    Trace,
    leads_nowhere,
)
from vllm_omni.flow.run.inbound import InboundCredit
from vllm_omni.flow.run.link import Link
from vllm_omni.flow.run.node import Node
from vllm_omni.flow.run.outbound import Outbound, send_count
from vllm_omni.flow.run.placement import insert_choice, place_activation, repeat_path
from vllm_omni.flow.run.scope import CallScope
from vllm_omni.flow.run.session_order import SessionOrder

logger = logging.getLogger(__name__)

CANCEL_TIMEOUT_S = 10.0
"""How long the clean-up of a cancelled activation may take. Its call does not wait for it any longer than that."""


@dataclass(slots=True)
class _Choice:
    """Groups of which the first one wins, for one frame of the node above them."""

    runs: list[ActivationRun] = field(default_factory=list)
    num_unreachable: int = 0
    is_decided: bool = False


NO_CHOICES: dict[Path, _Choice] = {}


class _CallState:
    """The state of one call at one node; parts that only some nodes need are created on demand."""

    __slots__ = ("cancelled", "choices", "closing", "constants", "counted", "credit", "order", "plan", "runs", "scope")

    def __init__(self, scope: CallScope, node: str, link: Link):
        self.scope = scope
        self.plan = plan = scope.route.nodes[node]
        self.runs: dict[int, ActivationRun | None] = {}  # by activation id; None: over, late frames are dropped
        self.credit = InboundCredit(link, scope.call_id)
        self.order: SessionOrder | None = None  # session scheduling
        self.constants: Constants | None = None  # read in every iteration of a loop
        self.counted: set[Path] | None = None  # paths of which the number of yields was passed on
        self.choices: dict[Path, _Choice] = {} if plan.first_wins else NO_CHOICES
        self.cancelled = False  # nothing is delivered
        self.closing = False  # nothing fires


class NodeController:
    """Inbound routing, firing and outbound dispatch of one node, for all calls and graphs.

    A frame goes to the bucket that its activation id names, and the node fires once the bucket is complete. Each
    activation is one task, so branches do not wait for one another; everything else runs synchronously within the
    delivery of a frame. Only a node with session scheduling runs its activations in order.

    From: Omni-Flow section 3.4.
    """

    def __init__(self, name: str, node: Node, link: Link):
        self.name = name
        self._node = node
        self._link = link
        self._calls: dict[str, _CallState] = {}

    def open(self, scope: CallScope) -> None:
        """Accept frames of a call from now on."""
        call = self._calls[scope.call_id] = _CallState(scope, self.name, self._link)
        if call.plan.scheduling is Scheduling.SESSION:
            call.order = SessionOrder(functools.partial(self._start, call), call.credit)

    def cancel(self, call_id: str, *, unfinished_only: bool = False) -> None:
        """Cancel the activations of a call; each acknowledges by ending its activity, within ``CANCEL_TIMEOUT_S``. No
        further activation fires.

        Args:
            unfinished_only: let activations finish their clean-up if they have ended all of their wanted fields, and
                continue to deliver frames to them. Otherwise no frame is delivered.
        """
        call = self._calls[call_id]
        call.closing = True
        call.cancelled = call.cancelled or not unfinished_only
        if call.order is not None:
            call.order.closed = True
        for run in list(call.runs.values()):
            if run is None:
                continue
            if run.task is None:
                self._forget(call, run)  # it will not fire, so its producers must not wait for it
            elif not run.cancelled:
                assert run.out is not None
                if run.out.next_seq or not unfinished_only:
                    run.cancelled = True
                    self._cancel(call, run, run.task)

    def _cancel(self, call: _CallState, run: ActivationRun, task: asyncio.Task[None]) -> None:
        task.cancel()
        if run.has_started:
            run.timer = call.scope.clock.call_later(CANCEL_TIMEOUT_S, functools.partial(self._abandon, call, run))
        else:  # its task never runs, so only a callback sees its end
            task.add_done_callback(functools.partial(self._on_never_started, call, run))

    def close(self, call_id: str) -> None:
        """Forget a call without activations in flight; late frames are dropped."""
        del self._calls[call_id]

    def shutdown(self) -> None:
        """Nothing to do: the controller ends with the runtime's process."""

    @property
    def num_running(self) -> int:
        return sum(run.task is not None and not run.task.done() for run in self._runs())

    @property
    def num_buffered(self) -> int:
        return sum(run.bucket.num_buffered for run in self._runs())

    def _runs(self) -> list[ActivationRun]:
        # Copies: the thread of the metrics reads them, too.
        calls = list(self._calls.values())
        return [run for call in calls for run in list(call.runs.values()) if run is not None]

    # ---- inbound ----

    def receive(self, message: Frame | SlotEos | EdgeCredit) -> None:
        """Deliver a frame or a count to its bucket, which may fire the node; deliver credit to its activation."""
        call = self._calls.get(message.call_id)
        if call is None or call.cancelled:
            return
        if isinstance(message, EdgeCredit):
            producer = call.runs.get(message.activation_id)
            if producer is not None:
                producer.on_credit(message)
            return
        edge = call.plan.slots[message.slot]
        group = call.plan.groups[edge.group]
        if edge.is_constant:
            self._on_constant(call, edge, message)
            return
        if isinstance(message, SlotEos) and message.activation_id == NO_BUCKET:
            self._pass_count(call, group, message)
            return
        run = call.runs.get(message.activation_id)
        if run is None and message.activation_id not in call.runs:
            run = self._create(call, group, message)
        if run is None:
            call.credit.drop(edge, message)
            return
        try:
            if isinstance(message, Frame):
                if message.seq or not message.last or edge.per_frame:  # otherwise it is the only one of its edge
                    call.credit.on_frame(run, edge, message)
                state = run.bucket.push(message)
            else:
                state = run.bucket.set_count(message)
            if group.constants:
                state = self._read_constants(call, run, message)
        except GraphError as exc:
            self._on_wrong_count(call, run, exc)
            return
        self._on_bucket(call, run, state, message.slot)

    def _create(self, call: _CallState, group: GroupPlan, message: Frame | SlotEos) -> ActivationRun | None:
        """Create the activation of its first message; None if another group has already won."""
        plan = call.plan
        run = call.runs[message.activation_id] = place_activation(plan, group, message)
        if plan.choice_root is None or group.loop is not None:
            return run
        if not plan.first_wins:
            run.trace = self._insert_choice(call, group, run.trace)
            return run
        choice = call.choices.setdefault(run.trace.path, _Choice())
        if choice.is_decided:
            self._forget(call, run)
            return None
        choice.runs.append(run)
        return run

    def _on_bucket(self, call: _CallState, run: ActivationRun, state: BucketState, slot: int) -> None:
        """Fire or end an activation whose bucket is complete; open windows while an activation waits for input."""
        group = run.bucket.group
        if run.task is None and run.out is None:
            if state is BucketState.FIRED:
                self._on_fired(call, run)
            elif state is BucketState.UNREACHABLE:
                self._on_unreachable(call, run)
            else:
                run.bucket.slots[slot].open_windows()  # its producer must not wait for an activation that waits
        elif run.task is None:
            assert call.order is not None  # it waits for its place
            if call.plan.loops_around:
                run.bucket.open_windows()
            call.order.open_pending()
        elif group.root is not None and (group.counts is not None or run.bucket.is_waited_for):
            run.bucket.open_windows()

    # ---- constants of a loop ----

    def _on_constant(self, call: _CallState, edge: Edge, message: Frame | SlotEos) -> None:
        """Keep a frame that enters a loop from outside, and deliver it to the activations that have started to read."""
        if message.activation_id == NO_BUCKET:
            return  # a count above the loop, which arrives by the header, too
        if isinstance(message, Frame):
            call.credit.lift(edge, message)
        if call.constants is None:
            call.constants = Constants()
        due, readers = call.constants.push(edge, message)
        for run in readers:
            try:
                run.bucket.take(edge.slot, due)
            except GraphError as exc:
                self._on_wrong_count(call, run, exc)
            else:
                self._on_bucket(call, run, run.bucket.state, edge.slot)

    def _read_constants(self, call: _CallState, run: ActivationRun, message: Frame | SlotEos) -> BucketState:
        """Let an activation read its constants once the header of its loop has started."""
        is_start = call.plan.slots[message.slot].source_field == STARTED and not run.reads_constants
        if is_start and isinstance(message, Frame) and message.reason is EndReason.NONE:
            run.reads_constants = True
            if call.constants is None:
                call.constants = Constants()
            call.constants.attach(run, call.plan, message.trace)
        return run.bucket.state

    # ---- counts of yields ----

    def _insert_choice(self, call: _CallState, group: GroupPlan, trace: Trace) -> Trace:
        trace, base = insert_choice(call.plan, group, trace)
        if base is not None:
            self._count_once(call, base, call.plan.num_choices)
        return trace

    def _pass_count(self, call: _CallState, group: GroupPlan, eos: SlotEos) -> None:
        """Pass on a count of yields above this node: it holds for the nodes below, too."""
        trace = eos.trace
        if group.loop is not None:
            again = repeat_path(call.plan, group, trace)
            if again is not None:
                self._count_once(call, again, eos.count)
            return
        if call.plan.choice_root is not None and not call.plan.first_wins:
            trace = self._insert_choice(call, group, trace)
        self._count_once(call, trace, eos.count)

    def _count_once(self, call: _CallState, trace: Trace, count: int) -> None:
        if call.counted is None:
            call.counted = set()
        if trace.path in call.counted:
            return
        call.counted.add(trace.path)
        send_count(call.scope.route.outlets[self.name].edges, self._link, call.scope.call_id, trace, count)
        if call.order is not None:
            call.order.set_count(trace.path, count, trace.loops)

    # ---- firing ----

    def _on_fired(self, call: _CallState, run: ActivationRun) -> None:
        plan, group = call.plan, run.bucket.group
        if call.closing:
            self._forget(call, run)
            return
        if group.loop is not None:
            if plan.max_iterations is not None and run.num_iterations(plan) > plan.max_iterations:
                self._on_unreachable(call, run)
                return
        elif plan.first_wins:
            self._decide(call, run)
        run.out = Outbound(plan, call.scope, self._link, run.activation_id, run.trace)
        if call.order is None:
            self._start(call, run)
        else:
            call.order.add(run, in_loop=bool(plan.loops_around))

    def _decide(self, call: _CallState, winner: ActivationRun) -> None:
        choice = call.choices[winner.trace.path]
        choice.is_decided = True
        for other in choice.runs:
            if other is not winner:
                self._forget(call, other)
        choice.runs.clear()

    def _start(self, call: _CallState, run: ActivationRun) -> None:
        call.scope.tracker.start(run.activity)
        if call.scope.route.outlets[self.name].reports_start:
            assert run.out is not None
            run.out.report_start()
        name = f"{call.scope.call_id}/{self.name}"
        run.task = asyncio.get_running_loop().create_task(self._work(call, run), name=name)

    async def _work(self, call: _CallState, run: ActivationRun) -> None:
        """One activation, from its first step to the end of its clean-up."""
        run.has_started = True
        error: BaseException | None = None
        try:
            await run.serve(self._node, call.plan, call.scope)
        except BaseException as exc:
            error = exc
            if not isinstance(exc, Exception | asyncio.CancelledError):
                raise
        finally:
            self._on_done(call, run, error)

    # ---- termination ----

    def _on_unreachable(self, call: _CallState, run: ActivationRun) -> None:
        """End the outputs of an activation that cannot run."""
        plan, group, trace = call.plan, run.bucket.group, run.trace
        reason, error, termination = run.bucket.unreachable_reason()
        if plan.first_wins and group.loop is None:
            choice = call.choices[trace.path]
            choice.num_unreachable += 1
            if choice.num_unreachable < plan.num_choices:
                self._forget(call, run)
                return
        if group.loop is not None:
            termination = NO_ITERATION + plan.loop_depth
        # Only the header of a loop has loops of its own, which come first.
        loops = trace.loops[len(plan.loops) if leads_nowhere(termination, plan.loop_depth) else 0 :]
        self._forget(call, run)
        ended = Trace(trace.path, trace.roots, loops, termination)
        Outbound(plan, call.scope, self._link, run.activation_id, ended).end(reason, error)
        if call.order is not None:
            call.order.skip(trace.path, loops)

    def _on_wrong_count(self, call: _CallState, run: ActivationRun, error: GraphError) -> None:
        """Fail a call in which the number of frames to wait for is no number."""
        self._forget(call, run)
        self._report(call, error, EndReason.ERROR)

    def _on_never_started(self, call: _CallState, run: ActivationRun, _: asyncio.Task[None]) -> None:
        self._on_done(call, run, None)

    def _abandon(self, call: _CallState, run: ActivationRun) -> None:
        """End an activation although its task runs: the node ignores its cancellation. Nothing it yields is sent."""
        where = f"call {call.scope.call_id!r}: node {self.name!r}"
        logger.warning(
            "%s has not ended %g s after it was cancelled; the call no longer waits for it", where, CANCEL_TIMEOUT_S
        )
        self._on_done(call, run, None)
        run.is_abandoned = True

    def _on_done(self, call: _CallState, run: ActivationRun, error: BaseException | None) -> None:
        assert run.out is not None
        if run.timer is not None:
            run.timer.cancel()
        if run.is_abandoned:
            return
        self._forget(call, run)
        if isinstance(error, Exception):
            error.add_note(f"in node {self.name!r} of call {call.scope.call_id!r}")
            self._on_error(call, run.out, error)
        elif error is not None and not run.cancelled:
            where = f"node {self.name!r} of call {call.scope.call_id!r}"
            self._report(call, CallAborted(f"{where} was cancelled from outside"), EndReason.CANCEL)
        if run.cancelled and not call.cancelled:  # a reader that finishes its clean-up must not wait for more frames
            run.out.end(EndReason.CANCEL)
        if call.order is not None:
            call.order.on_done(run)
        call.scope.tracker.end(run.activity)

    def _on_error(self, call: _CallState, out: Outbound, error: Exception) -> None:
        """Fail the call at once, unless a node further down has an alternative to this node."""
        if call.plan.is_optional and not call.cancelled:
            where = f"call {call.scope.call_id!r}: node {self.name!r}"
            logger.warning("%s raised; the call continues with an alternative", where, exc_info=error)
            out.end(EndReason.ERROR, error)
        else:
            self._report(call, error, EndReason.ERROR)

    def _forget(self, call: _CallState, run: ActivationRun) -> None:
        """Drop the state of an activation that is over; its producers must not wait for it."""
        if call.runs.get(run.activation_id) is not None:
            call.runs[run.activation_id] = None
            run.is_over = True
            call.credit.release(run)

    def _report(self, call: _CallState, error: BaseException, reason: EndReason) -> None:
        self._link.send(Frame(call.scope.call_id, self.name, ENTRY, 0, "", 0, 0, True, error, reason))
