"""Histograms that the server itself fills in, beside those of its stages (``engine/metrics.py``)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client import REGISTRY, CollectorRegistry, Histogram, Metric
from prometheus_client.registry import Collector

SECONDS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5, 10, 15, 20, 30, 60)


class ServerMetrics(Collector):
    """Metrics that register themselves as one collector.

    One by one they would be lost: a vLLM engine that starts takes every metric out of the process's registry whose name
    has "vllm" in it.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._registry = CollectorRegistry()
        registry.register(self)

    def _histogram(self, name: str, what: str, buckets: Sequence[float] = SECONDS) -> Histogram:
        return Histogram(f"vllm_omni:{name}", what, buckets=buckets, registry=self._registry)

    def collect(self) -> Iterable[Metric]:
        return self._registry.collect()
