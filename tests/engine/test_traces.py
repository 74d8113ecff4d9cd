"""The traces of the latest requests, for who asks and for a collector."""

import pytest

from tests.collector import attributes, collector
from vllm_omni.engine import traces as module
from vllm_omni.engine.otel import OtelExporter
from vllm_omni.engine.traces import MAX_SPANS, Traces
from vllm_omni.messages.span import Span, SpanKind

CLIENTS_TRACE, CLIENTS_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def span(name: str, id: int = 1, parent: int = 0, error: str = "") -> Span:
    kind = SpanKind.PART if parent else SpanKind.STAGE
    return Span(name, kind, 1.0, 2.5, name, id, parent, {"outputs": 3}, error)


def test_the_latest_requests_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_REQUESTS", 2)
    traces = Traces()
    for name in "abcb":
        traces.end(traces.begin(name, "graph", 1.0))
    assert [trace.request_id for trace in traces.latest()] == ["b", "c"]
    assert traces.find("a") is None


def test_a_request_is_found_once_it_has_ended() -> None:
    traces = Traces()
    trace = traces.begin("a", "graph", 1.0)
    assert traces.find("a") is None
    traces.end(trace)
    assert traces.find("a") is trace
    assert trace.ended_at > trace.began_at


def test_spans_beyond_the_limit_are_counted() -> None:
    trace = Traces().begin("a", "graph", 1.0)
    trace.add([span("talker")] * (MAX_SPANS - 1))
    trace.add([span("talker")] * 3)
    assert (len(trace.spans), trace.num_dropped) == (MAX_SPANS, 2)


def test_without_a_collector_engines_get_no_context() -> None:
    headers = {"traceparent": f"00-{CLIENTS_TRACE}-{CLIENTS_SPAN}-01"}
    assert Traces().begin("a", "graph", 1.0, headers).headers is None


def test_spans_reach_a_collector_within_the_clients_trace() -> None:
    with collector() as service:
        traces = Traces(OtelExporter(service.url))
        headers = {"traceparent": f"00-{CLIENTS_TRACE}-{CLIENTS_SPAN}-01", "tracestate": "a=b"}
        trace = traces.begin("a", "graph", 0.5, headers)
        assert trace.headers is not None
        assert trace.headers == headers | {"traceparent": f"00-{CLIENTS_TRACE}-{trace.span_id:016x}-01"}
        trace.add([span("talker", id=7, error="it died"), span("prefill execution", id=8, parent=7)])
        trace.error = ""
        traces.end(trace)
        traces.close()
        found = {one.name: one for one in service.spans(CLIENTS_TRACE)}
    request, talker, part = (found[name] for name in ("request", "talker", "prefill execution"))
    assert request.parent_span_id.hex() == CLIENTS_SPAN
    assert talker.parent_span_id == request.span_id
    assert part.parent_span_id == talker.span_id == (7).to_bytes(8, "big")
    assert (talker.start_time_unix_nano, talker.end_time_unix_nano) == (1_000_000_000, 2_500_000_000)
    assert (request.status.code, talker.status.code, talker.status.message) == (1, 2, "it died")
    assert attributes(request)["gen_ai.request.id"] == "a"
    assert attributes(talker)["vllm_omni.outputs"] == 3


@pytest.mark.parametrize("header", [None, "00-zz-1-01", "hello", f"00-{'0' * 32}-{CLIENTS_SPAN}-01"])
def test_a_request_without_a_valid_context_begins_a_trace(header: str | None) -> None:
    with collector() as service:
        traces = Traces(OtelExporter(service.url))
        trace = traces.begin("a", "graph", 0.5, None if header is None else {"traceparent": header})
        traces.end(trace)
        traces.close()
        (request,) = service.spans(f"{trace.trace_id:032x}")
    assert not request.parent_span_id


def test_a_trace_that_the_client_does_not_sample_is_kept_and_not_sent() -> None:
    with collector() as service:
        traces = Traces(OtelExporter(service.url))
        trace = traces.begin("a", "graph", 0.5, {"traceparent": f"00-{CLIENTS_TRACE}-{CLIENTS_SPAN}-00"})
        traces.end(trace)
        traces.close()
        assert not service.spans(CLIENTS_TRACE)
    assert trace.headers is None
    assert traces.find("a") is trace


def test_a_collector_that_is_away_costs_nothing() -> None:
    traces = Traces(OtelExporter("http://127.0.0.1:1"))
    traces.end(traces.begin("a", "graph", 0.5))
    assert traces.find("a") is not None
    traces.close()
