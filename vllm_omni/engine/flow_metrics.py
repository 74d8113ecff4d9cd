"""``FlowMetrics``: what flows between the nodes of a server's graph, from what its nodes report, on ``/metrics``."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Gauge, Histogram
from prometheus_client import Counter as CounterMetric
from prometheus_client.metrics_core import Metric

from vllm_omni.engine.metrics import STAGE_LABEL
from vllm_omni.messages.payload import DTYPES, TensorRef
from vllm_omni.messages.report import NodeReport
from vllm_omni.messages.span import SpanKind

EDGE_LABEL = "edge"
_SECONDS = (0.0001, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)


class Leased(Counter[tuple[str, str]]):
    """What a request's stages have published and not released: (stage, "bytes" or "tensors") -> number."""


class FlowMetrics:
    """The metrics of one server, in a registry of its own (see ``StageMetrics``)."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()

        def histogram(name: str, what: str, label: str) -> Histogram:
            return Histogram(f"vllm_omni:{name}_seconds", what, [label], buckets=_SECONDS, registry=registry)

        def counter(name: str, what: str, label: str) -> CounterMetric:
            return CounterMetric(f"vllm_omni:{name}", what, [label], registry=registry)

        def gauge(name: str, what: str) -> Gauge:
            return Gauge(f"vllm_omni:{name}", what, [STAGE_LABEL], registry=registry)

        self._run = histogram("node", "Seconds of a node's run without waits for its input.", STAGE_LABEL)
        self._wait = histogram("edge_wait", "Seconds in which an edge's first chunk waited to be read.", EDGE_LABEL)
        self._chunks = counter("edge_chunks", "Chunks of an edge that were read.", EDGE_LABEL)
        held = "Seconds in which a node waited for credit of those that read its outputs."
        self._held = counter("node_held_seconds", held, STAGE_LABEL)
        self._published = {
            "bytes": counter("published_bytes", "Bytes that a stage has published for others.", STAGE_LABEL),
            "tensors": counter("published_tensors", "Tensors that a stage has published for others.", STAGE_LABEL),
        }
        self._leased = {
            "bytes": gauge("leased_bytes", "Of these, bytes that belong to requests which run."),
            "tensors": gauge("leased_tensors", "Of these, tensors that belong to requests which run."),
        }

    def collect(self) -> Iterable[Metric]:
        return self._registry.collect()

    def observe(self, report: NodeReport, leased: Leased) -> None:
        """Add what a node has reported.

        Args:
            leased: of the request; what is published is added to it.
        """
        node = report.node
        if report.seconds is not None:
            self._run.labels(node).observe(report.seconds)
        if report.held_s:
            self._held.labels(node).inc(report.held_s)
        for span in report.spans:
            if span.kind is SpanKind.EDGE:
                self._chunks.labels(span.name).inc(float(span.attributes["chunks"]))
                self._wait.labels(span.name).observe(float(span.attributes["first_wait_ms"]) / 1000)
        refs = [ref for payload in report.published for ref in payload.refs()]
        for kind, number in (("tensors", len(refs)), ("bytes", sum(map(num_bytes, refs)))) if refs else ():
            self._published[kind].labels(node).inc(number)
            self._leased[kind].labels(node).inc(number)
            leased[node, kind] += number

    def release(self, leased: Leased) -> None:
        """A request has ended: what it held is released."""
        for (node, kind), number in leased.items():
            self._leased[kind].labels(node).dec(number)
        leased.clear()


def num_bytes(ref: TensorRef) -> int:
    dtype = DTYPES.get(ref.dtype)
    return 0 if dtype is None else math.prod(ref.shape) * dtype.itemsize
