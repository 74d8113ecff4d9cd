"""Metrics of a server's graph: requests in it, whether its stages are up, and what its instances did."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from vllm_omni.engine.flow_metrics import FlowMetrics
from vllm_omni.engine.function_node import FunctionNode
from vllm_omni.engine.function_process import FunctionProcess
from vllm_omni.engine.group import EngineGroup
from vllm_omni.engine.instances import InstanceGroup
from vllm_omni.engine.latency_metrics import LatencyMetrics
from vllm_omni.engine.media_budget import MediaBudget
from vllm_omni.engine.media_connector import decoded_media
from vllm_omni.engine.metrics import STAGE_LABEL
from vllm_omni.engine.node import ServedNode
from vllm_omni.engine.queue_limits import QueueLimits
from vllm_omni.engine.stage import StageEngine
from vllm_omni.flow import GraphRuntime
from vllm_omni.model_executor.row_cache import row_cache_bytes
from vllm_omni.process.status import StageState


def collect(
    runtime: GraphRuntime,
    engines: Collection[StageEngine],
    nodes: Collection[ServedNode],
    latency_metrics: LatencyMetrics,
    queue_limits: QueueLimits,
    flow_metrics: FlowMetrics,
    media_budget: MediaBudget,
) -> Iterator[Metric]:
    """Collect the metrics of one server, when Prometheus asks for them."""
    yield from latency_metrics.collect()
    yield from flow_metrics.collect()
    yield from _runtime_metrics(runtime)
    yield from _limit_metrics(queue_limits)
    functions = [node for node in nodes if isinstance(node, FunctionNode)]
    yield from _health_metrics([*engines, *(process for one in functions for process in one.processes)])
    yield from _function_metrics(functions)
    yield from _row_metrics(engines)
    yield from _media_metrics(media_budget)
    if groups := [node for node in nodes if isinstance(node, EngineGroup)]:
        yield from _group_metrics(groups)
    if instances := [node for node in groups if isinstance(node, InstanceGroup)]:
        yield from _instance_metrics(instances)


def _runtime_metrics(runtime: GraphRuntime) -> Iterator[Metric]:
    statistics = runtime.statistics()
    for name, meaning in (
        ("num_open_calls", "Calls of graphs that run: requests, and what these call as a node."),
        ("num_running_activations", "Stages at work on a request, over all requests."),
        ("num_buffered_frames", "Chunks not yet read by their stage or user."),
    ):
        yield GaugeMetricFamily(f"vllm_omni:{name}", meaning, getattr(statistics, name))


def _limit_metrics(limits: QueueLimits) -> Iterator[Metric]:
    requests = GaugeMetricFamily(
        "vllm_omni:limited_requests", "Requests of a stage that has a limit.", labels=[STAGE_LABEL]
    )
    largest = GaugeMetricFamily("vllm_omni:max_requests", "The limit, max_num_queued_reqs.", labels=[STAGE_LABEL])
    rejected = _counter("requests_rejected", "Requests that were rejected as the stage had as many as it may.")
    for stage, (number, limit) in limits.num_open().items():
        requests.add_metric([stage], number)
        largest.add_metric([stage], limit)
        rejected.add_metric([stage], limits.num_rejected[stage])
    yield from (requests, largest, rejected) if requests.samples else ()


def _health_metrics(engines: Iterable[StageEngine | FunctionProcess]) -> Iterator[Metric]:
    is_up = GaugeMetricFamily(
        "vllm_omni:stage_up", "1 while the stage's engine, or a function's process, is alive.", labels=[STAGE_LABEL]
    )
    restarts = _counter("stage_restarts", "Restarts of a stage's engine, or of a function's process.")
    for engine in engines:
        status = engine.current_status()
        is_up.add_metric([engine.name], int(status.state in (StageState.RUNNING, StageState.DRAINED)))
        restarts.add_metric([engine.name], status.num_restarts)
    yield from (is_up, restarts)


def _group_metrics(groups: Iterable[EngineGroup]) -> Iterator[Metric]:
    tasks = _counter("instance_tasks", "Tasks assigned to an instance, requests to a replica.")
    redone = _counter("tasks_redone", "Tasks or requests assigned to a second instance or replica.")
    chosen = CounterMetricFamily(
        "vllm_omni:instance_choices",
        "Assignments by what decided: outstanding work, the order, the session, or pages that the chosen one holds.",
        labels=[STAGE_LABEL, "by"],
    )
    for group in groups:
        statistics = group.router.statistics()
        for reason, number in statistics.num_chosen.items():
            chosen.add_metric([group.name, reason], number)
        for name, number in statistics.num_tasks.items():
            tasks.add_metric([name], number)
        redone.add_metric([group.name], statistics.num_redone)
    yield from (tasks, redone, chosen)


def _function_metrics(functions: Iterable[FunctionNode]) -> Iterator[Metric]:
    runs = _counter("function_runs", "Runs of a function of the pipeline that have ended.")
    failed = _counter("function_failures", "Runs that ended with an error of the function's own.")
    for function in functions:
        runs.add_metric([function.name], function.num_runs)
        failed.add_metric([function.name], function.num_failed)
    yield from (runs, failed) if runs.samples else ()


def _row_metrics(engines: Iterable[StageEngine]) -> Iterator[Metric]:
    kept = GaugeMetricFamily(
        "vllm_omni:row_cache_bytes", "Room for rows beside the stage's KV cache.", labels=[STAGE_LABEL]
    )
    found = _counter("cached_rows", "Rows of tokens in the prefix cache that later stages were sent.")
    for engine in engines:
        if num_bytes := row_cache_bytes(engine.vllm_config):
            kept.add_metric([engine.name], num_bytes)
            found.add_metric([engine.name], engine.llm.num_cached_rows)
    yield from (kept, found) if kept.samples else ()


def _media_metrics(budget: MediaBudget) -> Iterator[Metric]:
    for name, meaning, held in (
        ("received_bytes", "Bodies of requests, and files that prompts name, as they were sent.", budget.received),
        ("media_bytes", "What media of prompts take to be decoded and processed.", budget),
    ):
        yield GaugeMetricFamily(f"vllm_omni:{name}", meaning, held.num_held_bytes + held.num_bytes_elsewhere)
    if not decoded_media().max_bytes:
        return
    statistics = decoded_media().statistics()
    yield GaugeMetricFamily(
        "vllm_omni:decoded_media_bytes", "Decoded files of prompts that are kept.", statistics.num_bytes
    )
    for name, meaning, number in (
        ("media_decoded", "Files of prompts that were decoded.", statistics.num_misses),
        ("media_found_decoded", "Files of prompts that had been decoded before.", statistics.num_hits),
    ):
        yield CounterMetricFamily(f"vllm_omni:{name}", meaning, number)


def _instance_metrics(groups: Iterable[InstanceGroup]) -> Iterator[Metric]:
    encoded = _counter("images_encoded", "Images that the instances of a stage encoded.")
    found = _counter("images_found", "Images that had been encoded before.")
    migrated = _counter("kv_migrations", "KV caches that migrated.")
    for group in groups:
        statistics = group.statistics()
        encoded.add_metric([group.name], statistics.num_encoded)
        found.add_metric([group.name], statistics.images.num_hits)
        migrated.add_metric([group.name], statistics.num_migrations)
    yield from (encoded, found, migrated)


def _counter(name: str, meaning: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"vllm_omni:{name}", meaning, labels=[STAGE_LABEL])
