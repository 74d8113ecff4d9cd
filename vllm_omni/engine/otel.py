"""``OtelExporter``: traces of requests as spans of OpenTelemetry, with vLLM's settings (``--otlp-traces-endpoint``)."""

from __future__ import annotations

from collections.abc import Mapping
from threading import Thread

from opentelemetry.propagate import extract
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, get_current_span
from vllm.tracing.otel import get_span_exporter

from vllm_omni.engine.traces import RequestTrace

SCOPE = InstrumentationScope("vllm_omni")
CLOSE_TIMEOUT_S = 2.0


class OtelExporter:
    """Sends a request's spans once it has ended, from a thread of OpenTelemetry's.

    A request is a span with a child for each run on an engine, each function and each edge. vLLM's own span of an
    engine's request, ``llm_request``, is a child of the run's.

    Args:
        endpoint: URL of the collector; the protocol is that of ``OTEL_EXPORTER_OTLP_TRACES_PROTOCOL``, as for vLLM.
    """

    def __init__(self, endpoint: str) -> None:
        self._processor = BatchSpanProcessor(get_span_exporter(endpoint))
        self._resource = Resource.create({"service.name": "vllm_omni"})

    def context_of(self, headers: Mapping[str, str] | None) -> tuple[int, int, bool]:
        """See ``TraceExporter``; a malformed context is none."""
        context = get_current_span(extract(headers or {})).get_span_context()
        if not context.is_valid:
            return 0, 0, True
        return context.trace_id, context.span_id, bool(context.trace_flags.sampled)

    def export(self, trace: RequestTrace) -> None:
        self._send(
            trace,
            "request",
            (trace.span_id, trace.parent_id),
            (trace.began_at, trace.ended_at),
            {"gen_ai.request.id": trace.request_id, "vllm_omni.graph": trace.graph},
            trace.error,
            SpanKind.SERVER,
        )
        for span in trace.spans:
            attributes = {f"vllm_omni.{name}": value for name, value in span.attributes.items()}
            attributes |= {"vllm_omni.kind": span.kind.value, "vllm_omni.track": span.track}
            ids, times = (span.id, span.parent or trace.span_id), (span.began_at, span.ended_at)
            self._send(trace, span.name, ids, times, attributes, span.error, SpanKind.INTERNAL)

    def _send(
        self,
        trace: RequestTrace,
        name: str,
        ids: tuple[int, int],
        times: tuple[float, float],
        attributes: Mapping[str, str | int | float | bool],
        error: str,
        kind: SpanKind,
    ) -> None:
        own, parent = ids

        def context(span_id: int) -> SpanContext:
            return SpanContext(trace.trace_id, span_id, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))

        self._processor.on_end(
            ReadableSpan(
                name,
                context(own),
                context(parent) if parent else None,
                self._resource,
                attributes,
                kind=kind,
                status=Status(StatusCode.ERROR, error) if error else Status(StatusCode.OK),
                start_time=int(times[0] * 1e9),
                end_time=int(times[1] * 1e9),
                instrumentation_scope=SCOPE,
            )
        )

    def close(self) -> None:
        """Send what waits, for a moment: a server whose collector is away ends all the same."""
        closing = Thread(target=self._processor.shutdown, daemon=True)  # upstream's would try for half a minute
        closing.start()
        closing.join(CLOSE_TIMEOUT_S)
