"""A request's notes as fields of its answer and as lines of /metrics."""

from typing import Any

import pytest

from vllm_omni.engine.latency import PARTS
from vllm_omni.engine.latency_metrics import LatencyMetrics, RequestLatency
from vllm_omni.engine.request_record import RequestRecord
from vllm_omni.errors import CallAborted, InvalidRequest, StageFailed
from vllm_omni.messages.report import NodeReport
from vllm_omni.messages.slo import Slo
from vllm_omni.messages.timeline import Mark, Task, TaskTimes, Timeline

SLOS = {"thinker": Slo(ttft_ms=1000, tpot_ms=100)}


def make_record() -> RequestRecord:
    """A request whose first token came after 0.5 s, with gaps of 0.05 s."""
    record = RequestRecord(arrived_at=100.0)
    timeline = Timeline(Task.WHOLE, [(Mark.QUEUED, 100.1), (Mark.SCHEDULED, 100.2), (Mark.TOKEN, 100.5)])
    token_times = [(0, 1, 100.5 + 0.05 * number) for number in range(11)]
    record.add(NodeReport("thinker", task=TaskTimes(Task.WHOLE, 100.1, 101.0, [timeline], token_times)))
    talker = Timeline(Task.WHOLE, [(Mark.QUEUED, 100.6), (Mark.SCHEDULED, 100.6), (Mark.TOKEN, 100.7)])
    record.add(NodeReport("talker", task=TaskTimes(Task.WHOLE, 100.6, 103.0, [talker])))
    return record


def values(metrics: LatencyMetrics) -> dict[str, float]:
    """The thinker's values that are not 0, without buckets."""
    return {
        "/".join([sample.name.removeprefix("vllm_omni:"), *filter(None, [sample.labels.get("part")])]): sample.value
        for metric in metrics.collect()
        for sample in metric.samples
        if sample.labels.get("stage") == "thinker" and sample.value and not sample.name.endswith(("bucket", "created"))
    }


def make_latency(record: RequestRecord) -> tuple[RequestLatency, LatencyMetrics]:
    metrics = LatencyMetrics()
    return RequestLatency(record, "thinker", SLOS, metrics), metrics


def test_an_answer_has_its_latency_by_part_and_stage() -> None:
    latency, metrics = make_latency(make_record())
    parts, reports = latency.end()
    assert sum(parts["thinker"].values()) == pytest.approx(1.0)  # from the arrival
    assert sum(parts["talker"].values()) == pytest.approx(2.4)  # from its first task
    assert parts["thinker"]["prefill_queueing"] == pytest.approx(0.2)
    assert reports["thinker"].is_met_strictly and reports["thinker"].ttft_s == pytest.approx(0.5)
    found = values(metrics)
    assert {name for name in found if name.startswith("latency_part_seconds_count/")} == {
        f"latency_part_seconds_count/{part}" for part in PARTS
    }
    assert found["latency_part_seconds_sum/decode_execution"] == pytest.approx(0.5)


def test_a_stage_that_continues_a_prompt_meets_its_slo_from_where_that_was_read() -> None:
    record = make_record()
    record.stage_times["talker"].token_times = [(0, 1, 100.7)]
    for continued, ttft_s in ((None, 0.1), ({"talker": "thinker"}, 0.7)):
        latency = RequestLatency(record, "thinker", {"talker": Slo(ttft_ms=500)}, LatencyMetrics(), continued)
        assert latency.end()[1]["talker"].ttft_s == pytest.approx(ttft_s)


@pytest.mark.parametrize(
    ("change", "counted"),
    [
        ({}, {"requests", "met", "met_strictly"}),
        ({"late": 1}, {"requests", "met"}),
        ({"late": 2}, {"requests", "missed_tpot"}),
        ({"arrived_at": 99.0}, {"requests", "missed_ttft"}),
        ({"arrived_at": 99.0, "late": 5}, {"requests", "missed_ttft", "missed_tpot"}),
    ],
)
def test_requests_that_meet_their_slo_are_counted(change: dict[str, Any], counted: set[str]) -> None:
    record = make_record()
    record.arrived_at = change.get("arrived_at", 100.0)
    times = record.stage_times["thinker"].token_times
    for number in range(change.get("late", 0)):
        times[number + 6 :] = [(index, n, at + 0.2) for index, n, at in times[number + 6 :]]
    latency, metrics = make_latency(record)
    latency.end()
    assert {name for name in values(metrics) if name.startswith("slo_")} == {f"slo_{one}_total" for one in counted}


def test_the_log_describes_the_requests_since_it_was_last_asked() -> None:
    latency, metrics = make_latency(make_record())
    assert metrics.take() == {}
    latency.end()
    described = metrics.take()
    assert described["thinker"].startswith("Avg latency of 1 reqs: 1000.0 ms (prefill queueing 200.0, ")
    assert "decode execution 500.0" in described["thinker"]
    assert described["thinker"].endswith("), SLO met: 1 of 1 reqs")
    assert described["talker"].startswith("Avg latency of 1 reqs: 2400.0 ms (") and "SLO" not in described["talker"]
    assert metrics.take() == {}


def test_the_log_counts_a_failed_request_without_a_latency() -> None:
    latency, metrics = make_latency(RequestRecord())
    latency.fail(StageFailed("thinker", "died"))
    assert metrics.take() == {"thinker": "SLO met: 0 of 1 reqs"}


def test_a_failed_request_misses_its_slo() -> None:
    latency, metrics = make_latency(RequestRecord())
    latency.fail(StageFailed("thinker", "died"))
    assert values(metrics) == {"slo_requests_total": 1, "slo_missed_ttft_total": 1, "slo_failed_total": 1}


@pytest.mark.parametrize("exc", [CallAborted("by its owner"), InvalidRequest("no prompt")])
def test_aborted_and_invalid_requests_are_not_counted(exc: Exception) -> None:
    latency, metrics = make_latency(make_record())
    latency.fail(exc)
    assert values(metrics) == {}
