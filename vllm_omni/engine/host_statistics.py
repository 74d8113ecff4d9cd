"""``HostStatistics``: what an engine counts whose controller is on another host than the front end, which shows it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
from vllm.v1.engine import FinishReason
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import (
    FinishedRequestStats,
    IterationStats,
    MultiModalCacheStats,
    PromptTokenStats,
    SchedulerStats,
)
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

SEND_EVERY_S = 0.5


class Step(msgspec.Struct, frozen=True, array_like=True):
    """What vLLM's client gives to its loggers after a step, the second as the values of its attributes."""

    scheduler: SchedulerStats | None
    iteration: dict[str, Any] | None

    def iteration_stats(self) -> IterationStats | None:
        if self.iteration is None:
            return None
        made = IterationStats()
        vars(made).update(self.iteration)
        counts: dict[str, Any] = self.iteration["prompt_token_stats"]
        made.prompt_token_stats = PromptTokenStats(**{**counts, "ALL_SOURCES": PromptTokenStats.ALL_SOURCES})
        ended = [{**one, "finish_reason": FinishReason(one["finish_reason"])} for one in made.finished_requests]
        made.finished_requests = [FinishedRequestStats(**one) for one in ended]
        return made


class Totals(msgspec.Struct, frozen=True, array_like=True):
    """What ``MultimodalOutputProcessor`` counts since its start."""

    results: dict[str, int]
    num_cached_rows: int


class Recorded(msgspec.Struct, frozen=True, array_like=True):
    """What an engine has counted since the last one, and since its start."""

    steps: list[Step]
    totals: Totals

    def pack(self) -> bytes:
        (data,) = MsgpackEncoder(size_threshold=1 << 62).encode(self)
        return bytes(data)

    @classmethod
    def unpack(cls, data: memoryview) -> Recorded:
        """Raises:
        msgspec.ValidationError: it is of another version.
        """
        unpacked: Recorded = MsgpackDecoder(cls).decode([data])
        return unpacked


class HostStatistics(StatLoggerBase):
    """Collects what vLLM's client counts of an engine, and sends it on twice a second.

    Args:
        send: called with a ``Recorded``, packed.
        totals: as they are.
    """

    def __init__(self, send: Callable[[bytes], None], totals: Callable[[], Totals]) -> None:
        self._send, self._totals = send, totals
        self._steps: list[Step] = []
        self._is_due = False

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        iteration = None if iteration_stats is None else {**vars(iteration_stats)}
        self._steps.append(Step(scheduler_stats, iteration))
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_later(SEND_EVERY_S, self._flush)

    def log_engine_initialized(self) -> None:
        """The front end has logged it."""

    def _flush(self) -> None:
        steps, self._steps, self._is_due = self._steps, [], False
        self._send(Recorded(steps, self._totals()).pack())
