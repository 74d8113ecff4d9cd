"""Metrics of several engines in one process: vLLM's own, each with the name of its stage, and those of the graph."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import LoggingStatLogger, PrometheusStatLogger

from vllm_omni.process.tether import ServerTether

STAGE_LABEL = "stage"
SERVER_LABEL = "server"


class StageMetrics(Collector):
    """All metrics of this process's stages, as one collector of the process's registry.

    Upstream's logger first takes every metric of vLLM's out of that registry, so an engine wipes those of the engines
    built before it. Here each stage has a registry of its own, which upstream does not know; the stage's name becomes a
    label when they are read, and metrics of one name are put together, as the text format wants them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stages: dict[tuple[str, str], CollectorRegistry] = {}  # server's directory, stage
        self._graphs: dict[str, Callable[[], Iterable[Metric]]] = {}  # server's directory -> its own metrics

    def describe(self) -> Iterable[Metric]:
        """Nothing: names come and go with the stages, so the registry cannot check them for duplicates."""
        return []

    def add_stage(self, tether: ServerTether) -> CollectorRegistry:
        """The registry of a stage, which is empty."""
        registry = CollectorRegistry()
        with self._lock:
            self._stages[str(tether.directory), tether.stage] = registry
        return registry

    def add_graph(self, server: str, collect: Callable[[], Iterable[Metric]]) -> None:
        with self._lock:
            self._graphs[server] = collect

    def remove_server(self, server: str) -> None:
        """Forget the stages and the graph of a server that has ended."""
        with self._lock:
            self._stages = {key: registry for key, registry in self._stages.items() if key[0] != server}
            self._graphs.pop(server, None)

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            stages, graphs = dict(self._stages), dict(self._graphs)
        # Nearly always there is one server in a process; only then would its name say nothing.
        servers = list(dict.fromkeys([*graphs, *(server for server, _ in stages)]))
        merged: dict[str, Metric] = {}
        for (server, stage), registry in stages.items():
            _merge(merged, registry.collect(), {STAGE_LABEL: stage, **_server_label(servers, server)})
        for server, collect in graphs.items():
            _merge(merged, collect(), _server_label(servers, server))
        yield from merged.values()


def _server_label(servers: list[str], server: str) -> dict[str, str]:
    """The first server of a process has none, the others are numbered from 1."""
    index = servers.index(server)
    return {SERVER_LABEL: str(index)} if index else {}


def _merge(merged: dict[str, Metric], metrics: Iterable[Metric], labels: dict[str, str]) -> None:
    for metric in metrics:
        into = merged.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type, metric.unit))
        for sample in metric.samples:
            # Prometheus's own way with a label that the scraper sets, too.
            own = {f"exported_{name}" if name in labels else name: value for name, value in sample.labels.items()}
            into.samples.append(sample._replace(labels=own | labels))


METRICS = StageMetrics()
REGISTRY.register(METRICS)


class StagePrometheusStatLogger(PrometheusStatLogger):
    """Upstream's, whose metrics are in the registry of its stage."""

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int] | None = None) -> None:
        registry = METRICS.add_stage(_tether(vllm_config))
        kinds = {
            "_gauge_cls": partial(Gauge, registry=registry),
            "_counter_cls": partial(Counter, registry=registry),
            "_histogram_cls": partial(Histogram, registry=registry),
        }
        # Upstream's way of putting other metric classes in their place, down to the loggers that this one makes.
        for name in ("_spec_decoding_cls", "_kv_connector_cls", "_ec_connector_cls", "_perf_metrics_cls"):
            upstream = getattr(PrometheusStatLogger, name)
            setattr(self, name, type(upstream.__name__, (upstream,), kinds))
        for name, kind in kinds.items():
            setattr(self, name, kind)
        super().__init__(vllm_config, engine_indexes)


class StageLoggingStatLogger(LoggingStatLogger):
    """Upstream's lines about throughput, which begin with the stage's name."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        super().__init__(vllm_config, engine_index)
        self._stage = _tether(vllm_config).stage

    @property
    def log_prefix(self) -> str:
        return f"stage {self._stage}: "


def _tether(vllm_config: VllmConfig) -> ServerTether:
    tether = vllm_config.additional_config
    assert isinstance(tether, ServerTether), "StageEngine.start puts it there"
    return tether
