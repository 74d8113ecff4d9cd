"""Metrics of several engines in one process: vLLM's, labelled with the stage, and those of the graph."""

from __future__ import annotations

import threading
from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats

from vllm_omni.messages.media_counts import MEDIA_POOL, MediaCounts
from vllm_omni.process.tether import ServerTether

MEDIA_BY_MEDIUM = {
    "hits": "Encoder outputs that were read instead of computed, by medium.",
    "evicted": "Encoder outputs that were evicted for others, by medium.",
    "corrupt": "Encoder outputs that were damaged when they were read, and were computed again, by medium.",
    "failures": "Errors of the medium.",
}
MEDIA_TOTALS = {
    "encoded": "Images, sounds and videos that were not in the pool, and were encoded.",
    "stored": "Encoder outputs that were stored.",
    "dropped": "Encoder outputs that were not stored: no room, too many at once, or the medium failed.",
}
"""Fields of ``MediaCounts`` -> what the metric of this name counts."""

STAGE_LABEL = "stage"
SERVER_LABEL = "server"


class StageTotals(NamedTuple):
    """What vLLM has counted of a stage's requests; all but ``num_waiting`` since its start."""

    num_waiting: int  # in the engine's queue, now
    num_tokens: int  # generated
    num_ended: int  # requests
    latency_s: float  # of these, from their arrival in the engine to their end, the sum


TOTALS = (
    "vllm:num_requests_waiting",
    "vllm:generation_tokens_total",
    "vllm:e2e_request_latency_seconds_count",
    "vllm:e2e_request_latency_seconds_sum",
)
"""The samples behind ``StageTotals``, in its order."""


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

    def totals(self, vllm_config: VllmConfig) -> StageTotals | None:
        """What was counted of a stage, over its data-parallel ranks; None: nothing is counted (``log_stats``)."""
        tether = stage_tether(vllm_config)
        with self._lock:
            registry = self._stages.get((str(tether.directory), tether.stage))
        if registry is None:
            return None
        sums: Counts[str] = Counts()
        for metric in registry.restricted_registry(TOTALS).collect():
            for sample in metric.samples:
                sums[sample.name] += sample.value  # type: ignore[assignment]
        waiting, tokens, ended, latency_s = (sums[name] for name in TOTALS)
        return StageTotals(int(waiting), int(tokens), int(ended), float(latency_s))

    def remove_stage(self, server: str, stage: str) -> None:
        """Forget an engine that has ended."""
        with self._lock:
            self._stages.pop((server, stage), None)

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
        registry = METRICS.add_stage(stage_tether(vllm_config))
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
        self._media = MediaMetrics(vllm_config, registry) if MEDIA_POOL in vllm_config.additional_config else None

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        counts = MediaCounts.of_statistics(scheduler_stats.ec_connector_stats) if scheduler_stats is not None else None
        if self._media is not None and counts is not None:
            self._media.add(counts, engine_idx)
        super().record(scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)


class MediaMetrics:
    """What a stage's pool of encoded media has done. vLLM's hook is for metrics of an EC connector alone."""

    def __init__(self, vllm_config: VllmConfig, registry: CollectorRegistry) -> None:
        self._model = str(vllm_config.model_config.served_model_name)
        labels = ["model_name", "engine"]
        self._by_medium = {
            name: Counter(f"vllm:media_pool_{name}", said, [*labels, "medium"], registry=registry)
            for name, said in MEDIA_BY_MEDIUM.items()
        }
        self._totals = {
            name: Counter(f"vllm:media_pool_{name}", said, labels, registry=registry)
            for name, said in MEDIA_TOTALS.items()
        }
        said = "Encoded media that are in the pool now, by medium."
        self._kept = Gauge("vllm:media_pool_kept", said, [*labels, "medium"], registry=registry)

    def add(self, counts: MediaCounts, engine: int) -> None:
        of = self._model, str(engine)
        for name, counter in self._by_medium.items():
            for medium, number in getattr(counts, name).items():
                counter.labels(*of, medium).inc(number)
        for name, counter in self._totals.items():
            counter.labels(*of).inc(getattr(counts, name))
        for medium, number in counts.kept.items():
            self._kept.labels(*of, medium).set(number)


def stage_tether(vllm_config: VllmConfig) -> ServerTether:
    tether = vllm_config.additional_config
    assert isinstance(tether, ServerTether), "StageEngine.start puts it there"
    return tether
