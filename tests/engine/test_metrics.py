"""Metrics of several stages and servers of one process, without engines."""

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from vllm.config import DeviceConfig, VllmConfig
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

from vllm_omni.engine.metrics import StageMetrics, StageTotals
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


def test_totals_are_those_of_one_stage_over_its_ranks(metrics: StageMetrics) -> None:
    for stage, value in (("talker", 1), ("thinker", 10)):
        tether = ServerTether(Path("/a"), stage)
        registry = metrics.add_stage(tether)
        queue = Gauge("vllm:num_requests_waiting", "Waiting.", ["engine"], registry=registry)
        tokens = Counter("vllm:generation_tokens", "Tokens.", ["engine"], registry=registry)
        latency = Histogram("vllm:e2e_request_latency_seconds", "Latency.", ["engine"], registry=registry)
        for rank in ("0", "1"):
            queue.labels(rank).set(value)
            tokens.labels(rank).inc(100 * value)
            latency.labels(rank).observe(value)
    config = VllmConfig(device_config=DeviceConfig("cpu"))
    config.additional_config = ServerTether(Path("/a"), "talker")
    assert metrics.totals(config) == StageTotals(num_waiting=2, num_tokens=200, num_ended=2, latency_s=2.0)


def test_a_stage_that_counts_nothing_has_no_totals(metrics: StageMetrics) -> None:
    config = VllmConfig(device_config=DeviceConfig("cpu"))
    config.additional_config = ServerTether(Path("/a"), "talker")
    assert metrics.totals(config) is None


def test_a_label_of_the_same_name_is_renamed(metrics: StageMetrics) -> None:
    registry = metrics.add_stage(ServerTether(Path("/a"), "thinker"))
    Counter("vllm:fetches", "Fetches.", ["stage"], registry=registry).labels("waiting").inc()
    (labels,) = read(metrics)["vllm:fetches_total"]
    assert labels == {("exported_stage", "waiting"), ("stage", "thinker")}
