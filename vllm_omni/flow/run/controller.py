"""One controller per node: frames come in, the node fires, its emissions go out. All of it is table look-ups."""

import asyncio
import functools
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any, NamedTuple

from vllm_omni.errors import CallAborted, GraphError
from vllm_omni.flow.graph.declarations import Scheduling
from vllm_omni.flow.graph.plan import Edge, GroupPlan, NodePlan
from vllm_omni.flow.graph.transfer import ENTRY, CallInfo, Chunk
from vllm_omni.flow.run.activity import Activity
from vllm_omni.flow.run.bucket import Bucket, State
from vllm_omni.flow.run.credit import UNLIMITED, ReceiveWindow, open_all
from vllm_omni.flow.run.frame import NO_BUCKET, TURN, Credit, Death, EndReason, Frame, Lineage, Path, SlotEos
from vllm_omni.flow.run.identity import above, find_root
from vllm_omni.flow.run.link import Link
from vllm_omni.flow.run.node import Activation, Node
from vllm_omni.flow.run.order import PathOrder
from vllm_omni.flow.run.outbound import Outbound, send_count
from vllm_omni.flow.run.reading import chain, transfer
from vllm_omni.flow.run.scope import CallScope

logger = logging.getLogger(__name__)

NO_PARAMETERS: Mapping[str, Any] = {}


class _Run:
    """An activation from the first frame on."""

    __slots__ = (
        "activation_id",
        "activity",
        "bucket",
        "cancelled",
        "credited",
        "fork_id",
        "has_started",
        "lineage",
        "out",
        "task",
    )

    def __init__(self, node: str, activation_id: int, lineage: Lineage, bucket: Bucket, fork_id: int):
        self.activation_id = activation_id
        self.activity = Activity(node, activation_id)
        self.lineage = lineage
        self.bucket = bucket
        self.fork_id = fork_id  # the activation that feeds its edges that are per frame
        self.out: Outbound | None = None
        self.credited: asyncio.Future[None] | None = None  # while it waits for credit
        self.task: asyncio.Task[None] | None = None
        self.has_started = False
        self.cancelled = False  # by its call


class _Turn(NamedTuple):
    """A place in the order of a node's activations; what PathOrder puts in order."""

    run: _Run | None  # None: dead
    seq: int = 0
    last: bool = True


class _Order:
    """The activations of a node with session scheduling, one at a time."""

    __slots__ = ("due", "pending", "places", "running")

    def __init__(self) -> None:
        self.places: PathOrder[_Turn] = PathOrder()
        self.pending: dict[int, _Run] = {}  # fired, and not started
        self.due: deque[_Run] = deque()  # of these: whose turn it is, behind `running`
        self.running: _Run | None = None


class _Choice:
    """Groups of which the first one wins, for one frame of what is above them."""

    __slots__ = ("is_decided", "num_dead", "runs")

    def __init__(self) -> None:
        self.runs: list[_Run] = []
        self.num_dead = 0
        self.is_decided = False


class _Call:
    """What a node has of a call; what only some nodes need is made when they need it."""

    __slots__ = ("cancelled", "choices", "closing", "counted", "order", "plan", "runs", "scope", "windows")

    def __init__(self, scope: CallScope, plan: NodePlan):
        self.scope = scope
        self.plan = plan
        self.runs: dict[
            int, _Run | None
        ] = {}  # activation id -> run; None: it is over, and swallows what still arrives
        self.windows: dict[tuple[int, int], ReceiveWindow] | None = None  # (slot, origin), edges per frame
        self.counted: set[Path] | None = None  # paths the yields of which were passed on
        self.choices: dict[Path, _Choice] = {} if plan.first_wins else NO_CHOICES
        self.order = _Order() if plan.scheduling is Scheduling.SESSION else None
        self.cancelled = False  # as a whole
        self.closing = False  # nobody hears it any more: nothing new fires


NO_CHOICES: dict[Path, _Choice] = {}


class NodeController:
    """Inbound routing, firing and outbound dispatch of one node, for all calls and graphs.

    A frame goes to the bucket that its activation id names. Once that has what it needs the node fires: each activation
    is one task, so branches do not wait for each other; everything else happens synchronously in whoever delivers a
    frame. Only a node with session scheduling keeps its activations in order.

    From: Omni-Flow section 3.4.
    """

    def __init__(self, name: str, node: Node, link: Link):
        self.name = name
        self._node = node
        self._link = link
        self._calls: dict[str, _Call] = {}

    def open(self, scope: CallScope) -> None:
        """Accept frames of a call from now on."""
        self._calls[scope.call_id] = _Call(scope, scope.route.nodes[self.name])

    def cancel(self, call_id: str, *, unfinished_only: bool = False) -> None:
        """Cancel the activations of a call; each acknowledges by ending its activity.

        Args:
            unfinished_only: spare those that have ended all of their wanted fields and are merely tidying up, and go on
                delivering frames to them. Otherwise the call is dead: nothing is delivered. Either way, nothing fires.
        """
        call = self._calls[call_id]
        call.closing = True
        call.cancelled = call.cancelled or not unfinished_only
        for run in list(call.runs.values()):
            if run is None:
                continue
            if run.task is None:
                self._forget(call, run)  # it will not fire: who produces for it must not wait for it
            elif not run.cancelled:
                assert run.out is not None
                if run.out.next_seq or not unfinished_only:
                    run.cancelled = True
                    run.task.cancel()
                    if not run.has_started:  # it runs no line of its own: its end is only seen from outside
                        run.task.add_done_callback(functools.partial(self._on_never_started, call, run))

    def close(self, call_id: str) -> None:
        """Forget a call none of whose activations is in flight; frames that still arrive are dropped."""
        del self._calls[call_id]

    def shutdown(self) -> None:
        """Nothing to do: the controller ends with the runtime's process."""

    @property
    def num_running(self) -> int:
        return sum(run.task is not None and not run.task.done() for run in self._runs())

    @property
    def num_buffered(self) -> int:
        return sum(run.bucket.num_buffered for run in self._runs())

    def _runs(self) -> list[_Run]:
        # Copies: metrics are read in another thread than the loop's.
        calls = list(self._calls.values())
        return [run for call in calls for run in list(call.runs.values()) if run is not None]

    # ---- inbound ----

    def receive(self, message: Frame | SlotEos | Credit) -> None:
        """Put a frame in its place, and fire the node if this is what it was waiting for; take a count, or credit."""
        call = self._calls.get(message.call_id)
        if call is None or call.cancelled:
            return
        if isinstance(message, Credit):
            self._take_credit(call, message)
            return
        edge = call.plan.slots[message.slot]
        group = call.plan.groups[edge.group]
        if isinstance(message, SlotEos) and message.activation_id == NO_BUCKET:
            self._pass_count(call, group, message)
            return
        run = call.runs.get(message.activation_id)
        if run is None:
            if message.activation_id in call.runs:
                self._refuse(edge, message)
                return
            origin = message.origin if isinstance(message, Frame) else 0
            run = self._begin(call, group, message.lineage, message.activation_id, origin)
            if run is None:
                self._refuse(edge, message)
                return
        try:
            if isinstance(message, Frame):
                if message.source != ENTRY and (not message.last or message.seq or edge.per_frame):  # more may come
                    self._watch(call, run, edge, message)
                state = run.bucket.push(message)
            else:
                state = run.bucket.set_count(message)
        except GraphError as exc:  # a count that is no number
            self._fail(call, run, exc)
            return
        if run.task is None and run.out is None:
            if state is State.FIRED:
                self._on_fired(call, run)
            elif state is State.DEAD:
                self._on_dead(call, run)
            else:
                run.bucket.slots[message.slot].open_windows()  # it waits, so nobody may wait for it
        elif run.task is None:
            if call.plan.loops_around:
                run.bucket.open_windows()
            self._open_pending(call)
        elif group.root is not None and (group.counts is not None or run.bucket.is_waited_for):
            run.bucket.open_windows()

    def _begin(self, call: _Call, group: GroupPlan, lineage: Lineage, activation_id: int, origin: int) -> _Run | None:
        """The activation that a frame or a count is the first to speak of; None if another group has won already."""
        plan = call.plan
        path, roots, turns = lineage.path, lineage.roots, lineage.turns
        depth, outside, fork_id = len(path), turns, origin
        if group.root is not None:
            root = find_root(lineage, group.root)
            assert root is not None
            depth = root.depth + group.root_per_frame
            outside = () if group.root_per_frame else root.turns
            path, turns = path[:depth], outside
            if group.loop is not None:
                path, roots, turns = (*path, TURN + group.loop), above(lineage, root, inclusive=False), ()
            else:
                roots = above(lineage, root)
            fork_id = root.activation_id
        bucket = Bucket(plan, group, depth, outside)
        is_direct = group.root is None and lineage.death is Death.ALIVE
        own = lineage if is_direct else Lineage(path, roots, turns)
        if plan.choice_root is not None and group.loop is None and not plan.first_wins:
            own = self._insert_choice(call, group, own)
        if plan.loops:
            own = Lineage(own.path, own.roots, plan.loops + own.turns)  # the turns of this loop come first
        run = _Run(self.name, activation_id, own, bucket, fork_id)
        if plan.first_wins and group.loop is None:
            choice = call.choices.setdefault(own.path, _Choice())
            if choice.is_decided:
                call.runs[activation_id] = run
                self._forget(call, run)
                return None
            choice.runs.append(run)
        call.runs[activation_id] = run
        return run

    def _insert_choice(self, call: _Call, group: GroupPlan, lineage: Lineage) -> Lineage:
        """Of several groups: the group takes its place in the path, below what is above all groups."""
        root = find_root(lineage, call.plan.choice_root or "")
        if root is None:
            return lineage
        depth = root.depth + call.plan.choice_per_frame
        if len(lineage.path) < depth:
            return lineage
        base = lineage.path[:depth]
        outside = () if call.plan.choice_per_frame else root.turns
        roots = above(lineage, root)
        self._count_once(call, Lineage(base, roots, outside), call.plan.num_choices)
        turns = lineage.turns
        if len(lineage.path) == depth:
            turns = tuple(loop for loop in turns if loop not in outside)
        return Lineage((*base, group.index, *lineage.path[depth:]), roots, turns, lineage.death)

    def _pass_count(self, call: _Call, group: GroupPlan, eos: SlotEos) -> None:
        """What was counted above this node holds for what is below it as well."""
        lineage = eos.lineage
        if call.plan.choice_root is not None and not call.plan.first_wins:
            lineage = self._insert_choice(call, group, lineage)
        self._count_once(call, lineage, eos.count)

    def _count_once(self, call: _Call, lineage: Lineage, count: int) -> None:
        if call.counted is None:
            call.counted = set()
        if lineage.path in call.counted:
            return
        call.counted.add(lineage.path)
        edges = call.scope.route.outlets[self.name].edges
        send_count(edges, self._link, call.scope.call_id, lineage, count)
        if call.order is not None:
            self._take_turns(call, call.order, call.order.places.set_count(lineage.path, count, lineage.turns))

    def _watch(self, call: _Call, run: _Run, edge: Edge, frame: Frame) -> None:
        """See to it that the producer learns how far its reader is."""
        slot = run.bucket.slots[frame.slot]
        if edge.per_frame:
            if not slot.order.done:  # no duplicate
                fork_window = self._fork_window(call, edge, frame.origin)
                fork_window.num_received += 1
                if not run.bucket.group.limits_forks:
                    fork_window.on_read()
            return
        window = None if slot.windows is None else slot.windows.get(frame.origin)
        if window is None:
            window = self._make_window(frame.call_id, edge, frame.origin)
            run.bucket.add_window(frame.slot, frame.origin, window)
        window.on_received(frame.seq)

    def _fork_window(self, call: _Call, edge: Edge, origin: int) -> ReceiveWindow:
        """Of an edge that is per frame: what is read of it are activations, when they are over."""
        if call.windows is None:
            call.windows = {}
        window = call.windows.get((edge.slot, origin))
        if window is None:
            window = self._make_window(call.scope.call_id, edge, origin)
            call.windows[edge.slot, origin] = window
        return window

    def _settle_frame(self, call: _Call, run: _Run, index: int) -> None:
        """An activation is over: the frame that it had of a fork is read, or will not be when it comes."""
        slot = run.bucket.slots[index]
        window = self._fork_window(call, slot.edge, run.fork_id)
        has_come = slot.order.done
        if not has_come:
            window.num_received += 1
        if run.bucket.group.limits_forks or not has_come:
            window.on_read()

    def _make_window(self, call_id: str, edge: Edge, origin: int) -> ReceiveWindow:
        return ReceiveWindow(functools.partial(self._grant, call_id, edge, origin))

    def _grant(self, call_id: str, edge: Edge, origin: int, limit: int) -> None:
        self._link.send(Credit(call_id, edge.source, origin, edge.target, edge.slot, edge.target_field, limit))

    def _refuse(self, edge: Edge, message: Frame | SlotEos) -> None:
        """It comes for an activation that is over, which does not read it: who sends more must not wait."""
        if isinstance(message, Frame) and message.source != ENTRY and not message.last:
            self._grant(message.call_id, edge, message.origin, UNLIMITED)

    def _take_credit(self, call: _Call, credit: Credit) -> None:
        run = call.runs.get(credit.activation_id)
        if run is not None and run.out is not None:
            limits = run.out.limits
            limits.on_credit((credit.reader, credit.slot, credit.field), credit.limit)
            if run.credited is not None and not limits.full and not run.credited.done():
                run.credited.set_result(None)

    # ---- firing ----

    def _on_fired(self, call: _Call, run: _Run) -> None:
        plan, group = call.plan, run.bucket.group
        if call.closing:
            self._forget(call, run)
            return
        if self._is_turn_too_many(plan, run):
            self._on_dead(call, run)
            return
        if plan.first_wins and group.loop is None:
            choice = call.choices[run.lineage.path]
            choice.is_decided = True
            for other in choice.runs:
                if other is not run:
                    self._forget(call, other)
            choice.runs.clear()
        run.out = self._outbound(call, run.activation_id, run.lineage)
        if call.order is not None:
            for slot in run.bucket.slots.values():
                slot.stream.on_wait = functools.partial(self._on_wait_in_order, call, run)
            if plan.loops_around:
                run.bucket.open_windows()
            call.order.pending[run.activation_id] = run
            turn = _Turn(run)
            self._take_turns(call, call.order, call.order.places.push(run.lineage.path, turn, run.lineage.turns))
        else:
            self._start(call, run)

    @staticmethod
    def _is_turn_too_many(plan: NodePlan, run: _Run) -> bool:
        if run.bucket.group.loop is None or plan.max_iterations is None:
            return False
        return _count_turns(plan, run) > plan.max_iterations

    def _on_dead(self, call: _Call, run: _Run) -> None:
        plan, group = call.plan, run.bucket.group
        reason, error, death = run.bucket.why_dead()
        if plan.first_wins and group.loop is None:
            choice = call.choices[run.lineage.path]
            choice.num_dead += 1
            if choice.num_dead < plan.num_choices:
                self._forget(call, run)
                return
        if group.loop is not None:
            death = Death.NO_TURN
        lineage = run.lineage
        turns = () if death is Death.NO_TURN else lineage.turns
        self._forget(call, run)
        self._outbound(call, run.activation_id, Lineage(lineage.path, lineage.roots, turns, death)).end(reason, error)
        if call.order is not None:
            self._take_turns(call, call.order, call.order.places.push(lineage.path, _Turn(None), turns))

    def _take_turns(self, call: _Call, order: _Order, due: Sequence[_Turn]) -> None:
        order.due.extend(turn.run for turn in due if turn.run is not None)
        self._next_turn(call, order)

    def _next_turn(self, call: _Call, order: _Order) -> None:
        if order.running is None and order.due and not call.closing:
            order.running = order.due.popleft()
            del order.pending[order.running.activation_id]
            self._start(call, order.running)
        self._open_pending(call)

    def _open_pending(self, call: _Call) -> None:
        """An activation whose time has not come may hold nobody back on whom those before it may depend.

        While one of those runs and does not wait it needs nobody; but in a loop what waits may be a turn of its own: it
        is always open.
        """
        order = call.order
        assert order is not None
        if order.running is None or order.running.bucket.is_waited_for:
            for run in order.pending.values():
                run.bucket.open_windows()
            if call.windows is not None:
                open_all(call.windows.values())

    def _on_wait_in_order(self, call: _Call, run: _Run) -> None:
        run.bucket.open_windows()
        self._open_pending(call)

    def _outbound(self, call: _Call, activation_id: int, lineage: Lineage) -> Outbound:
        scope = call.scope
        return Outbound(call.plan, scope.route.outlets[self.name], self._link, scope.call_id, activation_id, lineage)

    def _start(self, call: _Call, run: _Run) -> None:
        call.scope.tracker.begin(run.activity)
        name = f"{call.scope.call_id}/{self.name}"
        run.task = asyncio.get_running_loop().create_task(self._work(call, run), name=name)

    async def _work(self, call: _Call, run: _Run) -> None:
        """One activation, from its first step to the end of its clean-up."""
        run.has_started = True
        error: BaseException | None = None
        try:
            group = run.bucket.group
            if group.is_plain:
                slots = run.bucket.slots
                await self._serve(call, run, {name: slots[index].stream for name, (index,) in group.slots.items()})
            else:
                await self._read_and_serve(call, run)
        except (Exception, asyncio.CancelledError) as exc:
            error = exc
        except BaseException as exc:
            self._on_done(call, run, exc)
            raise
        self._on_done(call, run, error)

    async def _read_and_serve(self, call: _Call, run: _Run) -> None:
        """Where edges have transfer functions, or fields several edges: those are run in the activation's task, too."""
        async with AsyncExitStack() as cleanup:
            inputs: dict[str, AsyncIterator[Chunk]] = {}
            for name, slots in run.bucket.inputs():
                streams: list[AsyncIterator[Chunk]] = []
                for slot in slots:
                    streams.append(slot.stream)
                    if slot.edge.transfer is not None:
                        info = CallInfo(call.scope.call_id, call.scope.context, slot.edge.source, slot.edge.target)
                        streams[-1] = await cleanup.enter_async_context(aclosing(transfer(slot, info)))
                inputs[name] = streams[0]
                if len(streams) > 1 or run.bucket.group.counts is not None:
                    chunks = chain(streams, run.bucket.limit(name))
                    inputs[name] = await cleanup.enter_async_context(aclosing(chunks))
            await self._serve(call, run, inputs)

    async def _serve(self, call: _Call, run: _Run, inputs: Mapping[str, AsyncIterator[Chunk]]) -> None:
        scope, plan, out = call.scope, call.plan, run.out
        assert out is not None
        emissions = self._node.forward(
            Activation(
                scope.call_id,
                plan.name,
                plan.interface,
                run.activation_id,
                inputs,
                out.wanted,
                scope.context,
                scope.session,
                run.lineage.path,
                {name: scope.parameters[name] for name in plan.parameters} if plan.parameters else NO_PARAMETERS,
                _count_turns(plan, run) if plan.loops_around else 0,
            )
        )
        is_over = False
        try:
            async for emission in emissions:
                if run.cancelled:  # the node swallowed its cancellation; closing it below is the second notice
                    return
                out.emit(emission)
                while out.limits.full:
                    run.credited = asyncio.get_running_loop().create_future()
                    await run.credited
            is_over = True
        finally:
            if not is_over and isinstance(emissions, AsyncGenerator):
                await emissions.aclose()
        if not run.cancelled:
            out.end(EndReason.EMPTY)

    def _on_never_started(self, call: _Call, run: _Run, _: asyncio.Task[None]) -> None:
        self._on_done(call, run, None)

    def _on_done(self, call: _Call, run: _Run, error: BaseException | None) -> None:
        assert run.out is not None
        self._forget(call, run)
        if isinstance(error, Exception):
            error.add_note(f"in node {self.name!r} of call {call.scope.call_id!r}")
            self._raise(call, run, error)
        elif error is not None and not run.cancelled:
            where = f"node {self.name!r} of call {call.scope.call_id!r}"
            self._report(call, CallAborted(f"{where} was cancelled from outside"), EndReason.CANCEL)
        if run.cancelled and not call.cancelled:  # a reader that is merely tidying up must not wait for more
            run.out.end(EndReason.CANCEL)
        if call.order is not None and call.order.running is run:
            call.order.running = None
            self._next_turn(call, call.order)
        call.scope.tracker.end(run.activity)

    def _raise(self, call: _Call, run: _Run, error: Exception) -> None:
        """What a node raised fails the call at once, unless somebody further down can do without the node."""
        if call.plan.is_optional and run.out is not None and not call.cancelled:
            logger.warning("call %r does without node %r, which raised", call.scope.call_id, self.name, exc_info=error)
            run.out.end(EndReason.ERROR, error)
        else:
            self._report(call, error, EndReason.ERROR)

    def _fail(self, call: _Call, run: _Run, error: Exception) -> None:
        self._forget(call, run)
        self._report(call, error, EndReason.ERROR)

    def _forget(self, call: _Call, run: _Run) -> None:
        """An activation is over: give back what it did not read."""
        if call.runs.get(run.activation_id) is None:
            return
        call.runs[run.activation_id] = None
        for slot in run.bucket.slots.values():  # who produces for it still must not wait for it
            if not slot.order.done and slot.windows is not None:
                for origin in slot.windows:
                    self._grant(call.scope.call_id, slot.edge, origin, UNLIMITED)
        for index in run.bucket.group.per_frame_slots:
            self._settle_frame(call, run, index)

    def _report(self, call: _Call, error: BaseException, reason: EndReason) -> None:
        self._link.send(Frame(call.scope.call_id, self.name, ENTRY, 0, "", 0, 0, True, error, reason))


def _count_turns(plan: NodePlan, run: _Run) -> int:
    return sum(key - TURN in plan.loops_around for key in run.lineage.path)
