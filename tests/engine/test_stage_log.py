"""The log line of a stage, without engines."""

from collections import Counter as Counts
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from vllm.config import DeviceConfig, VllmConfig
from vllm.v1.engine import FinishReason
from vllm.v1.metrics.stats import FinishedRequestStats, IterationStats, PrefixCacheStats, SchedulerStats
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from vllm_omni.engine.stage_log import StageLogs, StageStatLogger
from vllm_omni.process.tether import ServerTether


class Lines:
    """The lines that are logged after some seconds."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._now = 100.0
        self._logs = StageLogs(clock=lambda: self._now)
        self._caplog = caplog
        caplog.set_level("INFO", "vllm_omni.engine.stage_log")

    def after(
        self,
        seconds: float,
        engines: Mapping[str, Sequence[StageStatLogger]],
        latencies: Mapping[str, str] | None = None,
    ) -> list[str]:
        self._now += seconds
        self._caplog.clear()
        self._logs.log(engines, latencies or {})
        return self._caplog.messages


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    return Lines(caplog)


def make_logger(stage: str = "thinker", num_results: Counts[str] | None = None) -> StageStatLogger:
    config = VllmConfig(device_config=DeviceConfig("cpu"))
    config.additional_config = ServerTether(Path("/a"), stage)
    return StageStatLogger(config, num_results=num_results)


def step(tokens: int = 0, prompt: int = 0, preempted: int = 0) -> IterationStats:
    stats = IterationStats()
    stats.num_generation_tokens, stats.prompt_token_stats.computed, stats.num_preempted_reqs = tokens, prompt, preempted
    return stats


def test_a_stage_logs_its_throughput_its_queue_its_cache_and_its_latency_in_one_line(lines: Lines) -> None:
    logger = make_logger()
    cached = PrefixCacheStats(requests=1, queries=200, hits=50)
    logger.record(SchedulerStats(num_running_reqs=1, prefix_cache_stats=cached), step(tokens=1, prompt=150))
    logger.record(SchedulerStats(num_running_reqs=2, num_waiting_reqs=1, kv_cache_usage=0.125), step(tokens=49))
    assert lines.after(5.0, {"thinker": [logger]}, {"thinker": "Avg latency of 3 reqs: 80.0 ms"}) == [
        "stage thinker: Avg prompt throughput: 30.0 tokens/s, Avg generation throughput: 10.0 tokens/s, "
        "Running: 2 reqs, Waiting: 1 reqs, CPU KV cache usage: 12.5%, Prefix cache hit rate: 25.0%, "
        "Avg latency of 3 reqs: 80.0 ms"
    ]


def test_a_stage_without_tokens_logs_its_steps_and_results(lines: Lines) -> None:
    results: Counts[str] = Counts()
    logger = make_logger("diffusion", results)
    for _ in range(20):
        logger.record(SchedulerStats(num_running_reqs=2, num_waiting_reqs=1), None)
    results["images"] += 40
    assert lines.after(10.0, {"diffusion": [logger]}) == [
        "stage diffusion: Avg steps: 2/s, Avg images: 4/s, Running: 2 reqs, Waiting: 1 reqs"
    ]


def test_a_stage_without_tokens_logs_how_long_its_engines_took_for_a_request(lines: Lines) -> None:
    engines = [make_logger("diffusion/0", Counts()), make_logger("diffusion/1", Counts())]
    for seconds, engine in zip((0.5, 1.0), engines, strict=True):
        stats = IterationStats()
        stats.finished_requests = [FinishedRequestStats(FinishReason.STOP, e2e_latency=seconds)]
        engine.record(SchedulerStats(), stats)
    (line,) = lines.after(10.0, {"diffusion": engines})
    assert (
        line == "stage diffusion: Avg steps: 0.2/s, Running: 0 reqs, Waiting: 0 reqs, Avg latency of 2 reqs: 750.0 ms"
    )
    assert lines.after(10.0, {"diffusion": engines}) == []


def test_a_stage_logs_when_it_is_idle_again_and_then_no_more(lines: Lines) -> None:
    logger = make_logger("diffusion", Counts())
    assert lines.after(10.0, {"diffusion": [logger]}) == []
    logger.record(SchedulerStats(num_running_reqs=1), None)
    assert len(lines.after(10.0, {"diffusion": [logger]})) == 1
    logger.record(SchedulerStats(), IterationStats())  # reports what has ended, and is no step
    (idle,) = lines.after(10.0, {"diffusion": [logger]})
    assert idle == "stage diffusion: Avg steps: 0/s, Running: 0 reqs, Waiting: 0 reqs"
    assert lines.after(10.0, {"diffusion": [logger]}) == []


def test_a_request_that_waits_is_logged_once_though_nothing_runs(lines: Lines) -> None:
    logger = make_logger()
    logger.record(SchedulerStats(num_waiting_reqs=1, num_skipped_waiting_reqs=1), None)
    (line,) = lines.after(10.0, {"thinker": [logger]})
    assert "Running: 0 reqs, Waiting: 2 reqs, Deferred: 1 reqs" in line
    assert lines.after(10.0, {"thinker": [logger]}) == []


def test_the_engines_of_a_stage_share_a_line(lines: Lines) -> None:
    engines = [make_logger("talker/0"), make_logger("talker/1")]
    for tokens, engine in zip((30, 10), engines, strict=True):
        engine.record(SchedulerStats(num_running_reqs=1, kv_cache_usage=tokens / 100), step(tokens, preempted=1))
    (line,) = lines.after(10.0, {"talker": engines})
    assert "Avg generation throughput: 4.0 tokens/s, Running: 2 reqs, Waiting: 0 reqs, Preemptions: 2" in line
    assert "CPU KV cache usage: 20.0%" in line


def test_each_interval_is_counted_anew(lines: Lines) -> None:
    logger = make_logger()
    for seconds in (10.0, 5.0):
        logger.record(SchedulerStats(num_running_reqs=1), step(tokens=50))
        (line,) = lines.after(seconds, {"thinker": [logger]})
        assert f"Avg generation throughput: {50 / seconds:.1f} tokens/s" in line


def test_steps_and_results_of_each_interval_are_counted_anew(lines: Lines) -> None:
    results: Counts[str] = Counts()
    logger = make_logger("diffusion", results)
    for seconds in (10.0, 5.0):
        logger.record(SchedulerStats(num_running_reqs=1), None)
        results["frames"] += 10
        (line,) = lines.after(seconds, {"diffusion": [logger]})
        assert line.startswith(f"stage diffusion: Avg steps: {1 / seconds:g}/s, Avg videos: {10 / seconds:g}/s, ")


def test_a_function_of_the_pipeline_logs_its_latency(lines: Lines) -> None:
    assert lines.after(10.0, {"thinker": [make_logger()]}, {"rank": "Avg latency of 1 reqs: 3.0 ms"}) == [
        "stage rank: Avg latency of 1 reqs: 3.0 ms"
    ]


def test_upstreams_further_lines_are_parts_of_the_line(lines: Lines) -> None:
    logger = make_logger()
    logger.spec_decoding_logging.observe(SpecDecodingStats(num_spec_tokens=2, num_drafts=1, num_draft_tokens=2))
    (line,) = lines.after(10.0, {"thinker": [logger]})
    assert ", SpecDecoding metrics: Mean acceptance length: 1.00, " in line
    assert lines.after(10.0, {"thinker": [logger]}) == []


def test_upstreams_own_line_is_not_logged_beside_it(caplog: pytest.LogCaptureFixture) -> None:
    logger = make_logger()
    caplog.set_level("DEBUG", "vllm.v1.metrics")
    caplog.clear()
    logger.record(SchedulerStats(num_running_reqs=1), step(tokens=1))
    logger.log()
    assert caplog.messages == []
