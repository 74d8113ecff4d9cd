"""``Timeline``: the times of what an engine did for a request, on a clock that the processes of a host share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any

TIMELINE = "timeline"
"""Key of an output's ``kv_transfer_params`` under which a timeline leaves the engine; the front end removes it."""

TIMELINES = "timelines"
"""Key of an engine's ``additional_config`` that turns timelines on."""


class Mark(IntEnum):
    """An event; it ends the interval before it."""

    QUEUED = 0  # arrived at the scheduler
    ENCODE_BEGAN = 1  # of a batch with an image of the request
    ENCODE_ENDED = 2
    PULL_BEGAN = 3  # admitted, and the pull of its caches starts
    PULL_ENDED = 4
    SCHEDULED = 5  # its first chunk, or the first after a preemption
    PREEMPTED = 6
    TOKEN = 7  # end of the step with its first token, or with the first one after a preemption
    RECOMPUTES = 8  # a decode task computes the prompt itself, as its KV cache did not arrive
    ENDED = 9  # its last token


class Task(StrEnum):
    """What one engine does for a request."""

    WHOLE = "whole"  # all tasks, except for what a cache has
    ENCODE = "encode"  # its images
    PREFILL = "prefill"  # its prompt, for another engine
    DECODE = "decode"  # its answer to a prompt that another engine computed


def task_of(extra_args: Mapping[str, Any] | None) -> Task:
    """The task of a request with these ``SamplingParams.extra_args``."""
    args = extra_args or {}
    ec, kv = args.get("ec_transfer_params"), args.get("kv_transfer_params")
    if isinstance(ec, Mapping) and ec.get("encode_only"):
        return Task.ENCODE
    if isinstance(kv, Mapping) and kv.get("do_remote_decode"):
        return Task.PREFILL
    if isinstance(kv, Mapping) and kv.get("do_remote_prefill"):
        return Task.DECODE
    return Task.WHOLE


@dataclass
class Timeline:
    """The marks of one task, in no order. Seconds of ``time.time``, as vLLM's ``Request.arrival_time``."""

    task: Task
    marks: list[tuple[Mark, float]] = field(default_factory=list)

    def add(self, mark: Mark, at: float) -> None:
        self.marks.append((mark, at))

    def first(self, mark: Mark) -> float | None:
        return min((at for one, at in self.marks if one is mark), default=None)

    def last(self, mark: Mark) -> float | None:
        return max((at for one, at in self.marks if one is mark), default=None)

    def pack(self) -> dict[str, Any]:
        """Convert to types that msgpack knows."""
        return {"task": self.task.value, "marks": [[mark.value, at] for mark, at in self.marks]}

    @classmethod
    def unpack(cls, packed: Mapping[str, Any]) -> Timeline:
        return cls(Task(packed["task"]), [(Mark(mark), at) for mark, at in packed["marks"]])


@dataclass
class TaskNotes:
    """What the front end receives about one task while its engine runs it."""

    timelines: dict[str, Timeline] = field(default_factory=dict)  # by answer, as vLLM runs each of ``n`` as a request
    # (index of the answer, number of tokens, time), of requests with an SLO.
    token_times: list[tuple[int, int, float]] = field(default_factory=list)


@dataclass(frozen=True)
class TaskTimes:
    """One task that has ended or failed."""

    task: Task
    sent_at: float
    ended_at: float
    timelines: list[Timeline] = field(default_factory=list)  # of its answers
    token_times: list[tuple[int, int, float]] = field(default_factory=list)  # see ``TaskNotes``


@dataclass
class StageTimes:
    """All tasks of one request in one stage of the graph, added as they end."""

    began_at: float
    ended_at: float
    timelines: list[Timeline] = field(default_factory=list)
    token_times: list[tuple[int, int, float]] = field(default_factory=list)  # of the answers for the user

    def add(self, times: TaskTimes) -> None:
        """Add a task; one without a timeline is known by its start and end."""
        lost = [Timeline(times.task, [(Mark.QUEUED, times.sent_at), (Mark.ENDED, times.ended_at)])]
        self.timelines += times.timelines or lost
        if times.task in (Task.WHOLE, Task.DECODE):  # the tokens of other tasks are discarded
            self.token_times += times.token_times
        self.ended_at = max(self.ended_at, times.ended_at)
