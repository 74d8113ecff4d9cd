"""One activation of a node: its inputs, its outputs, and the iteration over ``Node.forward``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from typing import Any

from vllm_omni.flow.graph.plan import NodePlan
from vllm_omni.flow.graph.transfer import CallInfo, Chunk
from vllm_omni.flow.run.activity import Activity
from vllm_omni.flow.run.bucket import Bucket, Slot
from vllm_omni.flow.run.clock import TimerHandle
from vllm_omni.flow.run.frame import ITERATION, EdgeCredit, EndReason, Trace
from vllm_omni.flow.run.node import Activation, Node
from vllm_omni.flow.run.outbound import Outbound
from vllm_omni.flow.run.scope import CallScope

NO_PARAMETERS: Mapping[str, Any] = {}


@dataclass(slots=True, eq=False)
class ActivationRun:
    """An activation from its first frame to the end of its clean-up."""

    node: str
    activation_id: int
    trace: Trace
    bucket: Bucket
    fork_id: int  # the activation that feeds its per-frame edges
    out: Outbound | None = None  # set when it fires
    task: asyncio.Task[None] | None = None
    has_started: bool = False
    cancelled: bool = False  # by its call
    timer: TimerHandle | None = None  # until which a cancelled one may clean up
    is_abandoned: bool = False  # it took longer
    reads_constants: bool = False  # the header of its loop has started
    is_over: bool = False  # its state is dropped
    credited: asyncio.Future[None] | None = None  # while it waits for credit

    @property
    def activity(self) -> Activity:
        return Activity(self.node, self.activation_id)

    def on_credit(self, credit: EdgeCredit) -> None:
        if self.out is None:
            return
        limits = self.out.limits
        limits.on_credit((credit.reader, credit.slot, credit.field), credit.limit)
        if self.credited is not None and not limits.full and not self.credited.done():
            self.credited.set_result(None)

    def num_iterations(self, plan: NodePlan) -> int:
        """The iterations of the node's loops before this activation."""
        return sum(key - ITERATION in plan.loops_around for key in self.trace.path)

    def serve(self, node: Node, plan: NodePlan, scope: CallScope) -> Coroutine[Any, Any, None]:
        """Run the node on the inputs, and send its yields."""
        group, slots = self.bucket.group, self.bucket.slots
        if group.is_plain:
            inputs = {name: slots[index].stream for name, (index,) in group.slots.items()}
            return self._forward(node, plan, scope, inputs)
        return self._transfer_and_forward(node, plan, scope)

    async def _transfer_and_forward(self, node: Node, plan: NodePlan, scope: CallScope) -> None:
        """Run transfer functions and concatenate the edges of a field, both in the activation's task."""
        async with AsyncExitStack() as cleanup:
            inputs: dict[str, AsyncIterator[Chunk]] = {}
            for name, slots in self.bucket.inputs():
                streams: list[AsyncIterator[Chunk]] = []
                for slot in slots:
                    streams.append(slot.stream)
                    if slot.edge.transfer is not None:
                        info = CallInfo(scope.call_id, scope.context, slot.edge.source, slot.edge.target)
                        streams[-1] = await cleanup.enter_async_context(aclosing(transfer(slot, info)))
                inputs[name] = streams[0]
                if len(streams) > 1 or self.bucket.group.counts is not None:
                    chunks = chain(streams, self.bucket.limit(name))
                    inputs[name] = await cleanup.enter_async_context(aclosing(chunks))
            await self._forward(node, plan, scope, inputs)

    async def _forward(
        self, node: Node, plan: NodePlan, scope: CallScope, inputs: Mapping[str, AsyncIterator[Chunk]]
    ) -> None:
        out = self.out
        assert out is not None
        emissions = node.forward(
            Activation(
                scope.call_id,
                plan.name,
                plan.interface,
                self.activation_id,
                inputs,
                scope.route.outlets[plan.name].fields,
                scope.context,
                scope.session,
                self.trace.path,
                {name: scope.parameters[name] for name in plan.parameters} if plan.parameters else NO_PARAMETERS,
                self.num_iterations(plan) if plan.loops_around else 0,
                self.bucket.is_of_producer,
                out.report,
                self.bucket.edge_times,
                lambda: out.held_s,
                scope.route.outlets[plan.name].nodes,
            )
        )
        is_over = False
        try:
            async for emission in emissions:
                if self.cancelled:  # the node swallowed its cancellation; aclose() below is the second notice
                    return
                out.emit(emission)
                while out.limits.full:
                    self.credited = asyncio.get_running_loop().create_future()
                    waits_since = scope.clock.monotonic()
                    await self.credited
                    out.held_s += scope.clock.monotonic() - waits_since
            is_over = True
        finally:
            if not is_over and isinstance(emissions, AsyncGenerator):
                await emissions.aclose()
        if not self.cancelled:
            out.end(EndReason.EMPTY)


# ---- inputs ----


async def chain(slots: Sequence[AsyncIterator[Chunk]], limit: int | None) -> AsyncGenerator[Chunk, None]:
    """Concatenate the edges of one field, up to ``limit`` chunks."""
    seq = 0
    for chunks in slots:
        if seq == limit:
            return
        async for chunk in chunks:
            yield Chunk(chunk.payload, seq, chunk.last or seq + 1 == limit)
            seq += 1
            if seq == limit:
                return


async def transfer(slot: Slot, info: CallInfo) -> AsyncGenerator[Chunk, None]:
    """Run an edge's transfer function lazily, in the consumer's task; number its chunks and name it in its errors."""
    edge = slot.edge
    assert edge.transfer is not None
    try:
        async with AsyncExitStack() as cleanup:
            converted = edge.transfer(slot.stream, info)
            if isinstance(converted, AsyncGenerator):
                await cleanup.enter_async_context(aclosing(converted))
            seq = 0
            async for chunk in converted:
                if chunk.last:
                    # Before the chunk is processed: the edge's remaining frames must not wait for that.
                    await cleanup.aclose()
                    slot.abandon()
                yield chunk if chunk.seq == seq else Chunk(chunk.payload, seq, chunk.last)
                if chunk.last:
                    return
                seq += 1
    except Exception as exc:
        if exc is not slot.error:  # the producer's, which the function has not caught
            name = getattr(edge.transfer, "__qualname__", edge.transfer)
            exc.add_note(f"in transfer function {name!r} on edge {edge}")
        raise
