"""What an engine counts on its host arrives in the front end as it was."""

import asyncio
from typing import Any

from vllm.v1.engine import FinishReason
from vllm.v1.metrics.stats import FinishedRequestStats, IterationStats, PrefixCacheStats, SchedulerStats

from vllm_omni.engine.host_statistics import HostStatistics, Recorded, Totals

TOTALS = Totals({"audio": 3}, 17)


def iteration() -> IterationStats:
    made = IterationStats()
    made.num_generation_tokens = 5
    made.prompt_token_stats.total = made.prompt_token_stats.computed = 40
    made.inter_token_latencies_iter = [0.1, 0.2]
    made.finished_requests = [FinishedRequestStats(FinishReason.LENGTH, "a request", e2e_latency=0.25)]
    return made


def recorded(*steps: tuple[SchedulerStats | None, IterationStats | None], time_s: float = 0.0) -> list[Recorded]:
    """What is sent of these steps, by a clock of the test's own."""
    sent: list[bytes] = []
    waiting: list[Any] = []

    async def record() -> None:
        asyncio.get_running_loop().call_later = lambda delay, call: waiting.append(call)  # type: ignore[method-assign, assignment, return-value]
        statistics = HostStatistics(sent.append, lambda: TOTALS)
        for step in steps:
            statistics.record(*step)

    asyncio.run(record())
    for call in waiting:
        call()
    return [Recorded.unpack(memoryview(one)) for one in sent]


def test_steps_are_sent_together_and_are_as_they_were() -> None:
    scheduler = SchedulerStats(num_running_reqs=2, kv_cache_usage=0.5, prefix_cache_stats=PrefixCacheStats(queries=9))
    first = iteration()
    (one,) = recorded((scheduler, first), (None, None))
    assert one.totals == TOTALS
    assert [step.scheduler for step in one.steps] == [scheduler, None]
    arrived, none = (step.iteration_stats() for step in one.steps)
    assert none is None
    assert arrived is not None
    assert vars(arrived) == vars(first)
    assert arrived.finished_requests[0].finish_reason is FinishReason.LENGTH


def test_an_engine_that_makes_no_step_sends_nothing() -> None:
    assert recorded() == []
