"""Metrics of several engines in one process: vLLM's, labelled with the stage, and those of the graph."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import LoggingStatLogger, PrometheusStatLogger
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

from vllm_omni.process.tether import ServerTether

logger = logging.getLogger(__name__)

RESULTS = {"images": "images", "frames": "videos", "audio": "sounds"}
"""Name of a result in a payload -> what log lines call it; a vocoder's sounds are the windows that it decodes."""

STAGE_LABEL = "stage"
SERVER_LABEL = "server"


class StageMetrics(Collector):
    """Collects the metrics of this process's stages for the process's registry.

    Upstream's logger first unregisters every metric of vLLM's from that registry, so an engine would remove those of
    earlier engines. Here each stage has its own registry; the stage's name is added as a label when they are read, and
    metrics of one name are merged, as the text format requires.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stages: dict[tuple[str, str], CollectorRegistry] = {}  # server's directory, stage
        self._graphs: dict[str, Callable[[], Iterable[Metric]]] = {}  # server's directory -> its own metrics

    def describe(self) -> Iterable[Metric]:
        """Declare no names: they change with the stages, so the registry cannot check them for duplicates."""
        return []

    def add_stage(self, tether: ServerTether) -> CollectorRegistry:
        """Create an empty registry for a stage."""
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
        # A process nearly always has one server, whose metrics need no label for it.
        servers = list(dict.fromkeys([*graphs, *(server for server, _ in stages)]))
        merged: dict[str, Metric] = {}
        for (server, stage), registry in stages.items():
            _merge(merged, registry.collect(), {STAGE_LABEL: stage, **_server_label(servers, server)})
        for server, collect in graphs.items():
            _merge(merged, collect(), _server_label(servers, server))
        yield from merged.values()


def _server_label(servers: list[str], server: str) -> dict[str, str]:
    """The label of a server: none for the first of a process; the others are numbered from 1."""
    index = servers.index(server)
    return {SERVER_LABEL: str(index)} if index else {}


def _merge(merged: dict[str, Metric], metrics: Iterable[Metric], labels: dict[str, str]) -> None:
    for metric in metrics:
        into = merged.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type, metric.unit))
        for sample in metric.samples:
            # Prometheus renames labels that the scraper sets in the same way.
            own = {f"exported_{name}" if name in labels else name: value for name, value in sample.labels.items()}
            into.samples.append(sample._replace(labels=own | labels))


METRICS = StageMetrics()
REGISTRY.register(METRICS)


class StagePrometheusStatLogger(PrometheusStatLogger):
    """Upstream's logger with metrics in the registry of its stage."""

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int] | None = None) -> None:
        registry = METRICS.add_stage(_tether(vllm_config))
        kinds = {
            "_gauge_cls": partial(Gauge, registry=registry),
            "_counter_cls": partial(Counter, registry=registry),
            "_histogram_cls": partial(Histogram, registry=registry),
        }
        # Upstream's attributes for other metric classes; the loggers that this one creates have them, too.
        for name in ("_spec_decoding_cls", "_kv_connector_cls", "_ec_connector_cls", "_perf_metrics_cls"):
            upstream = getattr(PrometheusStatLogger, name)
            setattr(self, name, type(upstream.__name__, (upstream,), kinds))
        for name, kind in kinds.items():
            setattr(self, name, kind)
        super().__init__(vllm_config, engine_indexes)


class StageLoggingStatLogger(LoggingStatLogger):
    """Upstream's log lines about throughput, with the stage's name as prefix."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        super().__init__(vllm_config, engine_index)
        self._stage = _tether(vllm_config).stage

    @property
    def log_prefix(self) -> str:
        return f"stage {self._stage}: "


class StepStatLogger(StageLoggingStatLogger):
    """Logs steps and results of a stage that has neither tokens nor a KV cache.

    Args:
        num_results: results since the start, by their name in a payload; see ``MultimodalOutputProcessor``.
    """

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0, *, num_results: Counts) -> None:
        super().__init__(vllm_config, engine_index)
        self._num_results = num_results
        self._num_logged: Counts = Counts()
        self._num_steps = 0

    def record(
        self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None, *args: Any, **kwargs: Any
    ) -> None:
        super().record(scheduler_stats, iteration_stats, *args, **kwargs)
        has_ended = iteration_stats is not None and bool(iteration_stats.finished_requests)
        self._num_steps += scheduler_stats is not None and (has_ended or scheduler_stats.num_running_reqs > 0)

    def log(self) -> None:
        seconds = max(time.monotonic() - self.last_log_time, 1e-9)
        self._update_stats()
        rates = {"steps": self._num_steps / seconds}
        rates |= {RESULTS[name]: number / seconds for name, number in (self._num_results - self._num_logged).items()}
        stats = self.last_scheduler_stats
        log = logger.info if any(rates.values()) else logger.debug
        log(
            "%s%s, Running: %d reqs, Waiting: %d reqs",
            self.log_prefix,
            ", ".join(f"Avg {name}: {rate:.3g}/s" for name, rate in rates.items()),
            stats.num_running_reqs,
            stats.num_waiting_reqs,
        )
        self._num_steps, self._num_logged = 0, self._num_results.copy()


def _tether(vllm_config: VllmConfig) -> ServerTether:
    tether = vllm_config.additional_config
    assert isinstance(tether, ServerTether), "StageEngine.start puts it there"
    return tether
