"""What flows between the nodes of a graph, as lines of /metrics."""

import pytest

from vllm_omni.engine.flow_metrics import FlowMetrics
from vllm_omni.engine.request_record import RequestRecord
from vllm_omni.engine.traces import Traces
from vllm_omni.messages.payload import Payload, TensorRef
from vllm_omni.messages.report import NodeReport
from vllm_omni.messages.span import Span, SpanKind


def edge(chunks: int, first_wait_ms: float) -> Span:
    name = "thinker.text -> talker"
    attributes = {"chunks": chunks, "first_wait_ms": first_wait_ms}
    return Span(name, SpanKind.EDGE, 1.0, 2.0, name, 1, attributes=attributes)


def rows(*shape: int) -> TensorRef:
    return TensorRef("shm", shape, "bfloat16", b"", 1)


def values(metrics: FlowMetrics) -> dict[str, float]:
    """Values that are not 0, without buckets."""
    return {
        f"{sample.name.removeprefix('vllm_omni:')}{{{','.join(sample.labels.values())}}}": sample.value
        for metric in metrics.collect()
        for sample in metric.samples
        if sample.value and not sample.name.endswith(("bucket", "created"))
    }


@pytest.fixture
def metrics() -> FlowMetrics:
    return FlowMetrics()


def test_edges_count_their_chunks_and_how_long_the_first_one_waited(metrics: FlowMetrics) -> None:
    record = RequestRecord.of("hello", metrics)
    record.add(NodeReport("talker", spans=[edge(3, 20.0)]))
    record.add(NodeReport("talker", spans=[edge(2, 10.0)]))
    assert values(metrics) == {
        "edge_chunks_total{thinker.text -> talker}": 5.0,
        "edge_wait_seconds_count{thinker.text -> talker}": 2.0,
        "edge_wait_seconds_sum{thinker.text -> talker}": 0.03,
    }


def test_runs_and_waits_for_readers_add_up(metrics: FlowMetrics) -> None:
    record = RequestRecord.of("hello", metrics)
    record.add(NodeReport("rank", 0.25))
    record.add(NodeReport("rank", 0.5, held_s=2.0))
    assert values(metrics) == {
        "node_seconds_count{rank}": 2.0,
        "node_seconds_sum{rank}": 0.75,
        "node_held_seconds_total{rank}": 2.0,
    }


def test_what_is_published_is_leased_until_the_request_is_over(metrics: FlowMetrics) -> None:
    record = RequestRecord.of("hello", metrics)
    payload = Payload({"rows": rows(4, 8)}, apart={"talker": {"rows": rows(2, 8)}})
    record.add(NodeReport("thinker", published=[payload]))
    published = {"published_bytes_total{thinker}": 96.0, "published_tensors_total{thinker}": 2.0}
    assert values(metrics) == published | {"leased_bytes{thinker}": 96.0, "leased_tensors{thinker}": 2.0}
    record.end(Traces())
    record.end(Traces())
    assert values(metrics) == published
