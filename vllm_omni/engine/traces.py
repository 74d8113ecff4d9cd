"""``Traces``: the spans of the latest requests, kept for who asks, and sent to a collector of OpenTelemetry."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import getrandbits
from typing import Protocol

from vllm_omni.messages.span import Span, new_span_id

MAX_REQUESTS = 256  # that are kept
MAX_SPANS = 1024  # of one request; a long speech has one for each chunk of the vocoder


@dataclass
class RequestTrace:
    """The spans of one request.

    Attributes:
        graph: that answers it.
        began_at: seconds of ``time.time``; so is ``ended_at``, 0.0 while it runs.
        headers: the trace context for its engines; None: nothing is sent to a collector.
        parent_id: of the client's span; 0: none.
        error: why it failed; "": it did not.
        num_dropped: spans beyond ``MAX_SPANS``.
    """

    request_id: str
    graph: str
    began_at: float
    span_id: int
    trace_id: int
    parent_id: int = 0
    headers: dict[str, str] | None = None
    ended_at: float = 0.0
    error: str = "the client has left"  # until it is answered
    spans: list[Span] = field(default_factory=list)
    num_dropped: int = 0

    def add(self, spans: Sequence[Span]) -> None:
        room = MAX_SPANS - len(self.spans)
        self.spans += spans[:room]
        self.num_dropped += max(0, len(spans) - room)


class TraceExporter(Protocol):
    """Sends traces to a collector, without waiting for it."""

    def context_of(self, headers: Mapping[str, str] | None) -> tuple[int, int, bool]:
        """The client's trace context: trace id and span id (0: none), and whether the trace is sampled."""

    def export(self, trace: RequestTrace) -> None: ...

    def close(self) -> None: ...


class Traces:
    """The latest requests that have ended, by their ids.

    Args:
        exporter: None: nothing is sent.
    """

    def __init__(self, exporter: TraceExporter | None = None) -> None:
        self._exporter = exporter
        self._ended: OrderedDict[str, RequestTrace] = OrderedDict()

    def begin(
        self, request_id: str, graph: str, began_at: float, headers: Mapping[str, str] | None = None
    ) -> RequestTrace:
        """The trace of a request that starts.

        Args:
            headers: of the client's request; a trace that they do not sample is kept, and not sent.
        """
        trace = RequestTrace(request_id, graph, began_at, new_span_id(), getrandbits(128) or 1)
        if self._exporter is None:
            return trace
        trace_id, trace.parent_id, is_sampled = self._exporter.context_of(headers)
        trace.trace_id = trace_id or trace.trace_id
        if is_sampled:
            parent = f"00-{trace.trace_id:032x}-{trace.span_id:016x}-01"
            trace.headers = {**(headers or {}), "traceparent": parent}
        return trace

    def end(self, trace: RequestTrace) -> None:
        """Keep the trace of a request that has ended, and send it."""
        trace.ended_at = time.time()
        self._ended.pop(trace.request_id, None)
        self._ended[trace.request_id] = trace
        if len(self._ended) > MAX_REQUESTS:
            self._ended.popitem(last=False)
        if self._exporter is not None and trace.headers is not None:
            self._exporter.export(trace)

    def find(self, request_id: str) -> RequestTrace | None:
        return self._ended.get(request_id)

    def latest(self) -> list[RequestTrace]:
        """All that are kept, the latest first."""
        return list(reversed(self._ended.values()))

    def close(self) -> None:
        """Send what has not been sent."""
        if self._exporter is not None:
            self._exporter.close()
