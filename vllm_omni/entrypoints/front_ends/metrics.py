"""``SharedMetrics``: what ``/metrics`` of any front end shows: the engines' metrics, and those of all front ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from prometheus_client import REGISTRY, CollectorRegistry, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from starlette.responses import Response


class SharedMetrics(Collector):
    """Merges the metrics that front ends keep in files with those of this process, which has the engines.

    A front end counts what it serves, this process what it runs: where both have a metric, it is that of the front
    ends. What one that has ended had counted remains.

    Args:
        parent: of the directory with the files.
    """

    def __init__(self, parent: Path) -> None:
        self.directory = parent / "metrics"
        self.directory.mkdir()
        self._files = MultiProcessCollector(CollectorRegistry(), str(self.directory))
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def describe(self) -> list[Metric]:
        return []  # known only when they are collected

    def collect(self) -> Iterator[Metric]:
        shared = {one.name: one for one in self._files.collect()}
        yield from ({one.name: one for one in REGISTRY.collect()} | shared).values()

    def show(self, accept: str) -> Response:
        """Args:
        accept: the header of the request.
        """
        encode, content_type = choose_encoder(accept)
        return Response(encode(self._registry), headers={"Content-Type": content_type})
