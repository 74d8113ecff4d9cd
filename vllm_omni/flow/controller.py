"""One controller per node: frames come in, the node fires, its emissions go out. All of it is table look-ups."""

import asyncio
import functools
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from vllm_omni.errors import CallAborted, GraphError
from vllm_omni.flow.activity import Activity, Tracker
from vllm_omni.flow.credit import UNLIMITED, ReceiveWindow, SendLimits, open_all
from vllm_omni.flow.dsl import what_exists
from vllm_omni.flow.frame import ENTRY, CallInfo, Chunk, Credit, Emission, EndReason, Frame
from vllm_omni.flow.link import Link
from vllm_omni.flow.plan import Edge, NodePlan, Route
from vllm_omni.flow.sequence import SequenceQueue, Stream


@dataclass(frozen=True, slots=True)
class Activation:
    """One run of a node for one call."""

    call_id: str
    node: str
    interface: str
    activation_id: int
    inputs: Mapping[str, AsyncIterator[Chunk]]  # input field -> its chunks in order, behind the transfer function
    wanted: frozenset[str]  # output fields that somebody needs in this call; others may be emitted and go nowhere
    context: Any  # as passed to GraphRuntime.open
    session: str | None = None  # likewise


class Node(Protocol):
    """What a role brings to the graph."""

    def forward(self, activation: Activation) -> AsyncIterator[Emission]:
        """Serve one activation: an async generator of emissions.

        It is cancelled, at most once, when its call is aborted or fails, or when nobody can see its output any more:
        ``CancelledError`` at whichever await it stands, be it in its ``finally``, or ``GeneratorExit`` at a yield where
        it is held back by a slow reader. The end of its clean-up is the acknowledgement that the call waits for. What
        it raises fails that call alone.
        """


@dataclass(frozen=True, slots=True)
class CallScope:
    """What every controller knows about a call."""

    call_id: str
    route: Route
    tracker: Tracker
    context: Any
    session: str | None = None


@functools.lru_cache(maxsize=4096)
def derive_activation_id(source_activation_id: int, target: str) -> int:
    """The activation of ``target`` fed by an activation of its predecessor, the same in every process.

    All frames of a streamed field feed one activation, so the yield index takes no part.

    From: Omni-Flow appendix A, Algorithm 2, rule A; the call is the other half of the key.
    """
    seed = f"{source_activation_id}:{target}".encode()
    return int.from_bytes(hashlib.blake2b(seed, digest_size=7).digest())  # 56 bits: fits any wire integer


@dataclass(slots=True, eq=False)
class _Input:
    """One input field of an activation: its frames in order, and how many more of them may come."""

    edge: Edge
    queue: SequenceQueue = field(default_factory=SequenceQueue)
    stream: Stream[Chunk] = field(default_factory=Stream)
    window: ReceiveWindow | None = None  # from the first frame on, which tells where credit goes
    origin: int = 0  # the producing activation


@dataclass(slots=True, eq=False)
class _Run:
    """An activation from the first frame on; after its end it stays, empty, to swallow what still arrives."""

    activation_id: int
    inputs: dict[str, _Input]
    next_seq: dict[str, int]  # wanted output fields that have not ended -> seq of their next frame
    limits: SendLimits
    credited: asyncio.Future[None] | None = None  # while it waits for credit
    task: asyncio.Task[None] | None = None
    cancelled: bool = False  # by its call


@dataclass(slots=True, eq=False)
class _Call:
    scope: CallScope
    runs: dict[int, _Run] = field(default_factory=dict)  # activation id -> run
    cancelled: bool = False  # as a whole


def _open_windows(run: _Run) -> None:
    open_all(each.window for each in run.inputs.values() if each.window is not None)


class NodeController:
    """Inbound routing, firing and outbound dispatch of one node, for all calls.

    A node with a single predecessor has no bucket: it fires with the first frame that carries a payload and reads the
    rest as a stream. If all inputs end without one, it never fires, and says UNREACHABLE downstream. Each activation is
    one task, so branches do not wait for each other; everything else happens synchronously in whoever delivers a frame.

    From: Omni-Flow section 3.4.
    """

    def __init__(self, plan: NodePlan, node: Node, link: Link):
        self.plan = plan
        self._node = node
        self._link = link
        self._calls: dict[str, _Call] = {}

    def open(self, scope: CallScope) -> None:
        """Accept frames of a call from now on."""
        self._calls[scope.call_id] = _Call(scope)

    def cancel(self, call_id: str, *, unfinished_only: bool = False) -> None:
        """Cancel the activations of a call; each acknowledges by ending its activity.

        Args:
            unfinished_only: spare those that have ended all of their wanted fields and are merely tidying up, and go on
                delivering frames to them. Otherwise the call is dead: nothing is delivered, nothing fires.
        """
        call = self._calls[call_id]
        call.cancelled = call.cancelled or not unfinished_only
        for run in call.runs.values():
            if run.task is not None and not run.cancelled and (run.next_seq or not unfinished_only):
                run.cancelled = True
                run.task.cancel()

    def close(self, call_id: str) -> None:
        """Forget a call none of whose activations is in flight; frames that still arrive are dropped."""
        del self._calls[call_id]

    @property
    def num_running(self) -> int:
        tasks = [run.task for call in list(self._calls.values()) for run in list(call.runs.values())]
        return sum(task is not None and not task.done() for task in tasks)

    @property
    def num_buffered(self) -> int:
        runs = [run for call in list(self._calls.values()) for run in list(call.runs.values())]
        return sum(len(one.queue) + len(one.stream) for run in runs for one in list(run.inputs.values()))

    def receive(self, message: Frame | Credit) -> None:
        """Inbound: put a frame in its place, and fire the node if this is what it was waiting for; take credit."""
        call = self._calls.get(message.call_id)
        if call is None or call.cancelled:
            return
        if isinstance(message, Credit):
            self._take_credit(call, message)
            return
        frame = message
        run = call.runs.get(frame.activation_id) or self._begin(call, frame.activation_id)
        place = run.inputs.get(frame.field)
        if place is None:  # the activation ended without reading all of its input
            if not frame.last:
                self._grant(frame.call_id, self.plan.inputs[frame.field], frame.origin, UNLIMITED)
            return
        if place.window is None and frame.source != ENTRY:
            place.origin = frame.origin
            place.window = ReceiveWindow(functools.partial(self._grant, frame.call_id, place.edge, frame.origin))
            place.stream.on_read = place.window.on_read
        for due in place.queue.push(frame):
            if place.window is not None:
                place.window.num_received += 1
            if due.reason is EndReason.NONE:
                place.stream.put_nowait(Chunk(due.payload, due.seq, due.last))
                if run.task is None:
                    self._fire(call, run)
            if due.last:
                place.stream.finish()
                if run.task is None and all(each.queue.ended for each in run.inputs.values()):
                    self._end_outputs(call, run, EndReason.UNREACHABLE)
        if len(run.inputs) > 1 and any(each.stream.is_waited_for for each in run.inputs.values()):
            _open_windows(run)

    def _begin(self, call: _Call, activation_id: int) -> _Run:
        wanted = call.scope.route.outbound[self.plan.name]
        readers = {name: tuple((edge.target, edge.target_field) for edge in edges) for name, edges in wanted.items()}
        inputs = {name: _Input(edge) for name, edge in self.plan.inputs.items()}
        run = _Run(activation_id, inputs, dict.fromkeys(wanted, 0), SendLimits(readers))
        if len(inputs) > 1:  # who waits for one field may need frames behind which another waits
            for place in inputs.values():
                place.stream.on_wait = functools.partial(_open_windows, run)
        call.runs[activation_id] = run
        return run

    def _grant(self, call_id: str, edge: Edge, origin: int, limit: int) -> None:
        self._link.send(Credit(call_id, edge.source, origin, edge.target, edge.target_field, limit))

    def _take_credit(self, call: _Call, credit: Credit) -> None:
        run = call.runs.get(credit.activation_id)
        if run is not None:
            run.limits.on_credit((credit.reader, credit.field), credit.limit)
            if run.credited is not None and not run.limits.full and not run.credited.done():
                run.credited.set_result(None)

    def _fire(self, call: _Call, run: _Run) -> None:
        scope, name = call.scope, self.plan.name
        scope.tracker.begin(Activity(name, run.activation_id))
        run.task = asyncio.get_running_loop().create_task(self._forward(call, run), name=f"{scope.call_id}/{name}")
        # A task cancelled before its first step runs no line of its own: its end is only seen from outside.
        run.task.add_done_callback(functools.partial(self._on_done, call, run))

    async def _forward(self, call: _Call, run: _Run) -> None:
        scope, plan = call.scope, self.plan
        async with AsyncExitStack() as cleanup:
            inputs: dict[str, AsyncIterator[Chunk]] = {}
            for name, edge in plan.inputs.items():
                inputs[name] = run.inputs[name].stream
                if edge.transfer is not None:
                    info = CallInfo(scope.call_id, scope.context, edge.source, edge.target)
                    inputs[name] = await cleanup.enter_async_context(aclosing(_transfer(edge, inputs[name], info)))
            wanted = frozenset(run.next_seq)
            emissions = self._node.forward(
                Activation(
                    scope.call_id,
                    plan.name,
                    plan.interface,
                    run.activation_id,
                    inputs,
                    wanted,
                    scope.context,
                    scope.session,
                )
            )
            if isinstance(emissions, AsyncGenerator):
                await cleanup.enter_async_context(aclosing(emissions))
            async for emission in emissions:
                if run.cancelled:  # the node swallowed its cancellation; closing it below is the second notice
                    return
                self._emit(call, run, emission)
                while run.limits.full:
                    run.credited = asyncio.get_running_loop().create_future()
                    await run.credited
        if not run.cancelled:
            self._end_outputs(call, run, EndReason.EMPTY)

    def _emit(self, call: _Call, run: _Run, emission: Emission) -> None:
        name = emission.field
        declared = self.plan.outputs.get(name)
        if declared is None:
            known = what_exists(name, self.plan.outputs)
            raise GraphError(f"node {self.plan.name!r} emitted field {name!r}, which it does not declare; {known}")
        edges = call.scope.route.outbound[self.plan.name].get(name)
        if edges is None:
            return
        seq = run.next_seq.get(name)
        if seq is None:
            why = "after its last frame" if declared.streamed else "twice; declare Field(streamed=True)"
            raise GraphError(f"node {self.plan.name!r} emitted field {name!r} {why}")
        last = emission.last or not declared.streamed
        if last:
            del run.next_seq[name]
        else:
            run.next_seq[name] = seq + 1
            run.limits.on_sent(name)
        self._send(call, run, edges, seq, last, emission.payload, EndReason.NONE)

    def _end_outputs(self, call: _Call, run: _Run, reason: EndReason) -> None:
        while run.next_seq:
            name, seq = run.next_seq.popitem()
            self._send(call, run, call.scope.route.outbound[self.plan.name][name], seq, True, None, reason)

    def _send(
        self, call: _Call, run: _Run, edges: tuple[Edge, ...], seq: int, last: bool, payload: Any, reason: EndReason
    ) -> None:
        call_id = call.scope.call_id
        for edge in edges:
            aid = derive_activation_id(run.activation_id, edge.target)
            self._link.send(
                Frame(
                    call_id,
                    edge.source,
                    edge.target,
                    edge.target_field,
                    aid,
                    seq,
                    last,
                    payload,
                    reason,
                    run.activation_id,
                )
            )

    def _on_done(self, call: _Call, run: _Run, task: asyncio.Task[None]) -> None:
        for place in run.inputs.values():  # who produces for it still must not wait for it
            if place.window is not None and not place.queue.ended:
                self._grant(call.scope.call_id, place.edge, place.origin, UNLIMITED)
        run.inputs = {}
        where = f"node {self.plan.name!r} of call {call.scope.call_id!r}"
        if not task.cancelled():
            error = task.exception()
            if error is not None:
                error.add_note(f"in {where}")
                self._report(call, error, EndReason.ERROR)
        elif not run.cancelled:
            self._report(call, CallAborted(f"{where} was cancelled from outside"), EndReason.CANCEL)
        if run.cancelled and not call.cancelled:  # a reader that is merely tidying up must not wait for more
            self._end_outputs(call, run, EndReason.CANCEL)
        call.scope.tracker.end(Activity(self.plan.name, run.activation_id))

    def _report(self, call: _Call, error: BaseException, reason: EndReason) -> None:
        self._link.send(Frame(call.scope.call_id, self.plan.name, ENTRY, "", 0, 0, True, error, reason))


async def _transfer(edge: Edge, chunks: AsyncIterator[Chunk], info: CallInfo) -> AsyncGenerator[Chunk, None]:
    """Run an edge's transfer function lazily, in the consumer's task; number its chunks, name it in its errors."""
    assert edge.transfer is not None
    try:
        async with AsyncExitStack() as cleanup:
            converted = edge.transfer(chunks, info)
            if isinstance(converted, AsyncGenerator):
                await cleanup.enter_async_context(aclosing(converted))
            seq = 0
            async for chunk in converted:
                yield chunk if chunk.seq == seq else Chunk(chunk.payload, seq, chunk.last)
                if chunk.last:
                    return
                seq += 1
    except Exception as exc:
        exc.add_note(f"in transfer function {getattr(edge.transfer, '__qualname__', edge.transfer)!r} on edge {edge}")
        raise
