"""The log line of a stage: what vLLM logs of an engine, for all engines of the stage, with its requests' latency."""

from __future__ import annotations

import logging
import time
from collections import Counter as Counts
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import LoggingStatLogger
from vllm.v1.metrics.stats import CachingMetrics, IterationStats, SchedulerStats

from vllm_omni.engine.metrics import stage_tether
from vllm_omni.messages.media_counts import MediaCounts

logger = logging.getLogger(__name__)

RESULTS = {"images": "images", "frames": "videos", "audio": "sounds"}
"""Name of a result in a payload -> what log lines call it; a vocoder's sounds are the windows that it decodes."""


class Interval(NamedTuple):
    """What an engine has done since the last line."""

    counts: Counts[str]  # by what the line calls them
    queue: SchedulerStats  # now
    num_preemptions: int
    num_corrupted: int
    latencies_s: list[float]  # of the requests that have ended
    caches: dict[str, CachingMetrics]  # over the most recent requests
    kv_cache_device: str | None  # None: the engine has neither tokens nor a KV cache
    details: list[str]


class StageStatLogger(LoggingStatLogger):
    """Counts what an engine does, as upstream's logger, for the line that ``StageLogs`` makes of a stage's engines.

    Args:
        num_results: of an engine without tokens and KV cache, its results since the start, by their name in a payload
            (see ``MultimodalOutputProcessor``); None: it generates tokens.
    """

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0, *, num_results: Counts[str] | None = None):
        super().__init__(vllm_config, engine_index)
        self._stage = stage_tether(vllm_config).stage
        self._num_results = num_results
        self._num_taken: Counts[str] = Counts()
        self._num_steps = 0
        self._latencies_s: list[float] = []

    def record(
        self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None, *args: Any, **kwargs: Any
    ) -> None:
        if scheduler_stats is not None:
            MediaCounts.of_statistics(scheduler_stats.ec_connector_stats)  # upstream would take them for a connector's
        super().record(scheduler_stats, iteration_stats, *args, **kwargs)
        ended = [] if iteration_stats is None else [one.e2e_latency for one in iteration_stats.finished_requests]
        self._latencies_s += ended
        self._num_steps += scheduler_stats is not None and (bool(ended) or scheduler_stats.num_running_reqs > 0)

    def log(self) -> None:
        """Log nothing, unlike upstream, whose line is of one engine and several more of its parts."""

    @property
    def log_prefix(self) -> str:
        return f"stage {self._stage}: "  # of the lines of each iteration, which a flag of vLLM's asks for

    def take(self) -> Interval:
        """Take what has been counted since the last call."""
        if self._num_results is None:
            tokens = {"prompt": self.num_prompt_tokens, "generation": self.num_generation_tokens}
            counts = Counts({f"{name} throughput": number for name, number in tokens.items()})
        else:
            new = self._num_results - self._num_taken
            counts = Counts({"steps": self._num_steps, **{RESULTS[name]: number for name, number in new.items()}})
            self._num_taken = self._num_results.copy()
        interval = Interval(
            counts,
            self.last_scheduler_stats,
            self.num_preemptions,
            self.num_corrupted_reqs,
            self._latencies_s,
            {
                "Prefix": self.prefix_caching_metrics,
                "External prefix": self.connector_prefix_caching_metrics,
                "MM": self.mm_caching_metrics,
            },
            None if self._num_results is not None else self.kv_cache_device,
            self._take_details(),
        )
        self._num_steps, self._latencies_s = 0, []
        self._reset(self.last_log_time)
        return interval

    def _take_details(self) -> list[str]:
        """What upstream logs in further lines: about speculative decoding, connectors and use of the hardware."""
        details: list[str] = []

        def add(message: str, *values: object) -> None:
            details.append((message % values if values else message).strip())

        self.spec_decoding_logging.log(log_fn=add)
        self.kv_connector_logging.log(log_fn=add)
        self.ec_connector_logging.log(log_fn=add)
        if self._enable_perf_stats():
            self.perf_metrics_logging.log(log_fn=add)
        if self.cudagraph_logging is not None:  # a flag of vLLM's asks for this table, which has lines of its own
            self.cudagraph_logging.log(log_fn=logger.info)
        return details


class StageLogs:
    """Logs one line for each stage that has done something, or whose queue has changed, since the last call.

    Args:
        clock: in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._logged_at = clock()
        self._queues: dict[str, tuple[int, int]] = {}  # stage -> requests that ran and waited in its last line

    def log(self, stages: Mapping[str, Sequence[StageStatLogger]], latencies: Mapping[str, str]) -> None:
        """Take what has been counted, and log the lines.

        Args:
            stages: the engines of each stage.
            latencies: what is said of the requests that were answered meanwhile (``LatencyMetrics.take``), by stage,
                functions of the pipeline included.
        """
        now = self._clock()
        seconds = max(now - self._logged_at, 1e-9)
        self._logged_at = now
        for stage in dict.fromkeys([*stages, *latencies]):
            intervals = [engine.take() for engine in stages.get(stage, ())]
            latency = [latencies[stage]] if stage in latencies else _describe_latency(intervals)
            has_changed = self._has_changed(stage, intervals)
            if latency or has_changed or any(any(one.counts.values()) or one.details for one in intervals):
                logger.info("stage %s: %s", stage, ", ".join([*_describe(intervals, seconds), *latency]))

    def _has_changed(self, stage: str, intervals: Sequence[Interval]) -> bool:
        before = self._queues.get(stage, (0, 0))
        self._queues[stage] = queue = _queue(intervals)
        return queue != before


def _queue(intervals: Sequence[Interval]) -> tuple[int, int]:
    """How many requests run, and how many wait."""
    queues = [one.queue for one in intervals]
    return (
        sum(one.num_running_reqs for one in queues),
        sum(one.num_waiting_reqs + one.num_skipped_waiting_reqs for one in queues),
    )


def _describe_latency(intervals: Sequence[Interval]) -> list[str]:
    """The mean latency of requests in the engines of a stage without tokens, whose parts are not measured."""
    found = [one for interval in intervals if interval.kv_cache_device is None for one in interval.latencies_s]
    return [f"Avg latency of {len(found)} reqs: {1000 * fmean(found):.1f} ms"] if found else []


def _describe(intervals: Sequence[Interval], seconds: float) -> list[str]:
    """The parts of a line, in upstream's words; none for a function, which is no engine."""
    if not intervals:
        return []
    counts = Counts[str]()
    for one in intervals:
        counts.update(one.counts)
    device = intervals[0].kv_cache_device
    rate = "Avg {}: {:.3g}/s" if device is None else "Avg {}: {:.1f} tokens/s"
    running, waiting = _queue(intervals)
    parts = [rate.format(name, number / seconds) for name, number in counts.items()]
    parts += [f"Running: {running} reqs", f"Waiting: {waiting} reqs", *_describe_rare(intervals)]
    if device is not None:
        usage = sum(one.queue.kv_cache_usage for one in intervals) / len(intervals)
        parts.append(f"{device} KV cache usage: {usage:.1%}")
    parts += _describe_caches(intervals)
    return parts + [detail for one in intervals for detail in one.details]


def _describe_rare(intervals: Sequence[Interval]) -> list[str]:
    """What is counted, and seldom happens."""
    counts = {
        "Deferred: {} reqs": sum(one.queue.num_skipped_waiting_reqs for one in intervals),
        "Preemptions: {}": sum(one.num_preemptions for one in intervals),
        "Corrupted: {} reqs": sum(one.num_corrupted for one in intervals),
    }
    return [text.format(number) for text, number in counts.items() if number]


def _describe_caches(intervals: Sequence[Interval]) -> list[str]:
    """The hit rate of each cache that was asked."""
    parts = []
    for name in intervals[0].caches:
        caches = [one.caches[name] for one in intervals]
        if queries := sum(cache.aggregated_query_total for cache in caches):
            hits = sum(cache.aggregated_query_hit for cache in caches)
            parts.append(f"{name} cache hit rate: {hits / queries:.1%}")
    return parts
