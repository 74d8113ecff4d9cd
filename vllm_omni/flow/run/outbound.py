"""Send the yields of an activation along the edges of the plan, and report the fields that it did not yield.

From: Omni-Flow section 3.4, outbound dispatch: ARRIVED, SLOT_EOS, UNREACHABLE.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from vllm_omni.errors import GraphError
from vllm_omni.flow.graph.plan import PER_FRAME, STARTED, Edge, NodePlan
from vllm_omni.flow.graph.transfer import ENTRY
from vllm_omni.flow.run.credit import SendLimits
from vllm_omni.flow.run.frame import (
    NO_BUCKET,
    Emission,
    EndReason,
    Frame,
    Report,
    Root,
    SlotEos,
    Trace,
    leads_nowhere,
)
from vllm_omni.flow.run.identity import activation_id, bucket_for, find_root, targets
from vllm_omni.flow.run.link import Link
from vllm_omni.flow.run.scope import CallScope
from vllm_omni.names import suggest

NO_LIMITS = SendLimits({})


class Outbound:
    """The sending side of one activation, or of one that cannot run.

    Args:
        own_id: the activation's id.
        trace: trace of the activation.
    """

    def __init__(self, plan: NodePlan, scope: CallScope, link: Link, own_id: int, trace: Trace):
        self._plan = plan
        self._outlets = outlets = scope.route.outlets[plan.name]
        self._link = link
        self._call_id = scope.call_id
        self._id = own_id
        if plan.is_root:
            root = Root(plan.name, own_id, 0, len(trace.path), trace.loops)
            trace = Trace(trace.path, (*trace.roots, root), trace.loops, trace.termination)
        self._trace = trace
        self._whole = targets(outlets, trace, own_id)
        self._num_yields = 0  # on per-frame edges
        self.held_s = 0.0  # that the activation has waited for credit
        # Wanted fields that have not ended -> seq of the next frame.
        self.next_seq = dict.fromkeys(outlets.whole, 0) | dict.fromkeys(outlets.per_frame, 0)
        self.limits = SendLimits(outlets.readers, outlets.windows) if outlets.readers else NO_LIMITS

    def report_start(self) -> None:
        """Let the nodes of the loop read their constants."""
        del self.next_seq[STARTED]
        for edge, target_id in self._whole[STARTED]:
            self._send(edge, target_id, self._trace, 0, True, None, EndReason.NONE)

    def report(self, payload: Any) -> None:
        """Report to the reader of the call."""
        self._link.send(Report(self._call_id, ENTRY, payload))

    def emit(self, emissions: Emission | Sequence[Emission]) -> None:
        """Send one yield.

        Raises:
            GraphError: a field that the node did not declare, or that has ended.
        """
        if isinstance(emissions, Emission):
            emissions = (emissions,)
        for emission in emissions:
            self._send_whole(emission)
        frames: dict[str, Emission] = {}
        for emission in emissions if self._outlets.per_frame else ():
            name = emission.field
            if name in frames:
                raise GraphError(f"node {self._plan.name!r} yielded field {name!r} twice at once; yield each by itself")
            if name in self._outlets.per_frame:
                frames[name] = emission
        if frames:
            self._send_yield(frames)

    def _send_whole(self, emission: Emission) -> None:
        name = emission.field
        declared = self._plan.outputs.get(name)
        if declared is None:
            known = suggest(name, self._plan.outputs)
            raise GraphError(f"node {self._plan.name!r} emitted field {name!r}, which it does not declare; {known}")
        seq = self.next_seq.get(name)
        streamed = declared.streamed
        if seq is None:
            if name in self._outlets.fields:
                why = "after its last frame" if streamed else "twice; declare Field(streamed=True)"
                raise GraphError(f"node {self._plan.name!r} emitted field {name!r} {why}")
            return  # no reader in this call
        last = emission.last or not streamed
        if last:
            del self.next_seq[name]
        else:
            self.next_seq[name] = seq + 1
        whole = self._whole.get(name, ())
        if whole and not last:
            self.limits.on_sent(name)
        for edge, target_id in whole:
            self._send(edge, target_id, self._trace, seq, last, emission.payload, EndReason.NONE)

    def end(self, reason: EndReason, error: BaseException | None = None) -> None:
        """End all fields that have not ended, for ``reason``."""
        for name in [name for name in self._whole if name in self.next_seq]:
            seq = self.next_seq.pop(name)
            for edge, target_id in self._whole[name]:
                self._send(edge, target_id, self._trace, seq, True, error, reason)
        self.next_seq.clear()
        if self._outlets.per_frame:
            if reason is not EndReason.EMPTY:  # an additional yield carries the reason
                self._send_yield({}, reason, error)
            edges = (edge for each in self._outlets.per_frame.values() for edge in each)
            send_count(edges, self._link, self._call_id, self._trace, self._num_yields)

    def _send_yield(
        self, frames: dict[str, Emission], reason: EndReason = EndReason.EMPTY, error: BaseException | None = None
    ) -> None:
        index = self._num_yields
        self._num_yields += 1
        roots = self._trace.roots
        if self._plan.is_root:
            roots = (*roots[:-1], msgspec.structs.replace(roots[-1], index=index))
        trace = Trace((*self._trace.path, index), roots, (), self._trace.termination)
        self.limits.on_sent(PER_FRAME)
        for name, edges in self._outlets.per_frame.items():
            emission = frames.get(name)
            for edge in edges:
                payload, why = (error, reason) if emission is None else (emission.payload, EndReason.NONE)
                self._send(edge, activation_id(edge, trace, self._id, index), trace, 0, True, payload, why)

    def _send(
        self, edge: Edge, target_id: int, trace: Trace, seq: int, last: bool, payload: Any, reason: EndReason
    ) -> None:
        if edge.is_back and trace.termination and leads_nowhere(trace.termination, edge.loop_depth):
            return  # an iteration that was not started has no next one
        self._link.send(
            Frame(
                self._call_id,
                edge.source,
                edge.target,
                edge.slot,
                edge.target_field,
                target_id,
                seq,
                last,
                payload,
                reason,
                self._id,
                trace,
            )
        )


def send_count(edges: Iterable[Edge], link: Link, call_id: str, trace: Trace, count: int) -> None:
    """Report the number of yields at a path: own ones, or a count received from above."""
    for edge in edges:
        bucket = bucket_for(edge, trace)
        if edge.is_back and bucket == NO_BUCKET and not _starts_iterations(edge, trace):
            continue  # the header knows the counts above its loop
        link.send(SlotEos(call_id, edge.source, edge.target, edge.slot, edge.target_field, bucket, trace, count))


def _starts_iterations(edge: Edge, trace: Trace) -> bool:
    """Whether each yield below a path may start an iteration."""
    if not edge.per_frame or find_root(trace, edge.target) is None:
        return False
    return not leads_nowhere(trace.termination, edge.loop_depth)
