"""Metrics of several stages and servers of one process, without engines."""

from collections import Counter as Counts
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from vllm.config import DeviceConfig, VllmConfig
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

from vllm_omni.engine.metrics import StageMetrics, StepStatLogger
from vllm_omni.process.tether import ServerTether


@pytest.fixture
def metrics() -> StageMetrics:
    return StageMetrics()


def read(metrics: StageMetrics) -> dict[str, dict[frozenset[tuple[str, str]], float]]:
    """Read as a scraper does: sample -> labels -> value; repeated names or labels are an error."""
    registry = CollectorRegistry()
    registry.register(metrics)
    samples: dict[str, dict[frozenset[tuple[str, str]], float]] = {}
    families: set[str] = set()
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        assert family.name not in families
        families.add(family.name)
        for sample in family.samples:
            values = samples.setdefault(sample.name, {})
            labels = frozenset(sample.labels.items())
            assert labels not in values
            values[labels] = sample.value
    return samples


def add_running(metrics: StageMetrics, server: str, stage: str, value: float) -> None:
    registry = metrics.add_stage(ServerTether(Path(server), stage))
    Gauge("vllm:num_requests_running", "Running.", ["engine"], registry=registry).labels("0").set(value)


def test_each_stage_has_its_own_value_which_other_engines_keep(metrics: StageMetrics) -> None:
    add_running(metrics, "/a", "thinker", 1)
    add_running(metrics, "/a", "talker", 2)
    unregister_vllm_metrics()
    assert read(metrics)["vllm:num_requests_running"] == {
        frozenset({("engine", "0"), ("stage", "thinker")}): 1,
        frozenset({("engine", "0"), ("stage", "talker")}): 2,
    }


def test_servers_of_one_process_are_labelled_and_removed_separately(metrics: StageMetrics) -> None:
    def collect() -> list[Metric]:
        return [GaugeMetricFamily("vllm_omni:num_open_calls", "Open.", 3)]

    for server in ("/a", "/b"):
        metrics.add_graph(server, collect)
        add_running(metrics, server, "thinker", 1)
    samples = read(metrics)
    assert set(samples["vllm_omni:num_open_calls"]) == {frozenset(), frozenset({("server", "1")})}
    assert len(samples["vllm:num_requests_running"]) == 2
    metrics.remove_server("/a")
    assert set(read(metrics)["vllm_omni:num_open_calls"]) == {frozenset()}
    metrics.remove_server("/b")
    assert read(metrics) == {}


def test_a_label_of_the_same_name_is_renamed(metrics: StageMetrics) -> None:
    registry = metrics.add_stage(ServerTether(Path("/a"), "thinker"))
    Counter("vllm:fetches", "Fetches.", ["stage"], registry=registry).labels("waiting").inc()
    (labels,) = read(metrics)["vllm:fetches_total"]
    assert labels == {("exported_stage", "waiting"), ("stage", "thinker")}


def test_a_stage_without_tokens_logs_its_steps_and_results(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    config = VllmConfig(device_config=DeviceConfig("cpu"))
    config.additional_config = ServerTether(Path("/a"), "diffusion")
    num_results: Counts[str] = Counts()
    logger = StepStatLogger(config, num_results=num_results)

    def lines(seconds: float) -> list[str]:
        nonlocal now
        caplog.clear()
        now += seconds
        logger.log()
        return [record.getMessage() for record in caplog.records]

    caplog.set_level("INFO", "vllm_omni")
    assert lines(10.0) == []  # idle
    for _ in range(20):
        logger.record(SchedulerStats(num_running_reqs=2, num_waiting_reqs=1), None)
    num_results["images"] += 40
    assert lines(10.0) == ["stage diffusion: Avg steps: 2/s, Avg images: 4/s, Running: 2 reqs, Waiting: 1 reqs"]
    logger.record(SchedulerStats(), IterationStats())  # a step that only reports what has ended
    assert lines(10.0) == []
