"""A request's trace in Chrome's format, for ``chrome://tracing`` and https://ui.perfetto.dev."""

from __future__ import annotations

from typing import Any

from vllm_omni.engine.traces import RequestTrace
from vllm_omni.messages.span import Span, SpanKind


def chrome_trace(trace: RequestTrace) -> dict[str, Any]:
    """Convert a trace to a JSON object.

    A track of spans is a thread; spans of one track that overlap, as those of chunks that a stage makes at the same
    time, are divided among several.
    """
    request = Span(
        trace.request_id,
        SpanKind.REQUEST,
        trace.began_at,
        trace.ended_at,
        "request",
        trace.span_id,
        attributes={"graph": trace.graph},
        error=trace.error,
    )
    tracks: dict[tuple[str, int], int] = {}  # (track, lane) -> thread
    ends: dict[str, list[float]] = {}  # track -> the end of the last span in each lane
    lanes: dict[int, int] = {}  # span -> its lane, which is that of its parts
    events = []
    for span in sorted([request, *trace.spans], key=lambda one: (one.parent != 0, one.began_at)):
        lane = lanes[span.parent] if span.parent in lanes else _free_lane(ends.setdefault(span.track, []), span)
        lanes[span.id] = lane
        thread = tracks.setdefault((span.track, lane), len(tracks) + 1)
        args = dict(span.attributes) | ({"error": span.error} if span.error else {})
        microseconds = {"ts": _us(span.began_at), "dur": _us(span.ended_at - span.began_at)}
        events.append(
            {"name": span.name, "cat": span.kind, "ph": "X", "pid": 1, "tid": thread, **microseconds, "args": args}
        )
    for (track, lane), thread in tracks.items():
        name = track if lane == 0 else f"{track} ({lane + 1})"
        events.append({"name": "thread_name", "ph": "M", "pid": 1, "tid": thread, "args": {"name": name}})
    about = {"request_id": trace.request_id, "dropped_spans": trace.num_dropped}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _free_lane(ends: list[float], span: Span) -> int:
    for lane, end in enumerate(ends):
        if end <= span.began_at:
            ends[lane] = span.ended_at
            return lane
    ends.append(span.ended_at)
    return len(ends) - 1


def _us(seconds: float) -> float:
    return round(1e6 * seconds, 1)
