"""The spans of the edges that an activation has read."""

from __future__ import annotations

from vllm_omni.flow import ENTRY, Activation
from vllm_omni.messages.span import Span, SpanKind, new_span_id


def edge_spans(activation: Activation) -> list[Span]:
    """The edges from other nodes: from the first chunk that arrived to the last that was read."""
    spans = []
    for edge, times in activation.edge_times():
        if edge.source == ENTRY or not times.num_read:
            continue
        name = f"{edge.source}.{edge.source_field} -> {edge.target}"
        waited_ms = round(1000 * (times.read_at - times.put_at), 3)
        attributes = {"chunks": times.num_read, "first_wait_ms": waited_ms}
        one = Span(name, SpanKind.EDGE, times.put_at, times.last_read_at, name, new_span_id(), attributes=attributes)
        spans.append(one)
    return spans
