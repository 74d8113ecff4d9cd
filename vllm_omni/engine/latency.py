"""Where a request's latency goes: eight parts that sum to the whole, from the timelines of its tasks.

From: HydraInfer, section 5.5 (Figure 13).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple

from vllm_omni.messages.timeline import Mark, Task, Timeline


class Part(StrEnum):
    ENCODE_QUEUEING = "encode_queueing"
    ENCODE_EXECUTION = "encode_execution"
    EP_MIGRATION = "ep_migration"
    PREFILL_QUEUEING = "prefill_queueing"
    PREFILL_EXECUTION = "prefill_execution"
    PD_MIGRATION = "pd_migration"
    DECODE_QUEUEING = "decode_queueing"
    DECODE_EXECUTION = "decode_execution"


PARTS = tuple(Part)
_QUEUEING = (Part.ENCODE_QUEUEING, Part.PREFILL_QUEUEING, Part.DECODE_QUEUEING)
_EXECUTION = (Part.ENCODE_EXECUTION, Part.PREFILL_EXECUTION, Part.DECODE_EXECUTION)

# Where tasks of one request overlap (several answers, images encoded in several places): work before waiting, and of
# two works the earlier stage's, which the later one waits for in the end.
_PRECEDENCE = {part: index for index, part in enumerate((*(p for p in PARTS if p not in _QUEUEING), *_QUEUEING))}

_BEGIN_OF = {Mark.ENCODE_ENDED: Mark.ENCODE_BEGAN, Mark.PULL_ENDED: Mark.PULL_BEGAN}


class _Phase(NamedTuple):
    part: Part
    begin: float
    end: float


def break_down(arrived_at: float, ended_at: float, timelines: Sequence[Timeline]) -> dict[str, float]:
    """Seconds of a request by part; they sum to the whole, ``ended_at - arrived_at``. A stage that it did not have: 0.

    What no task covers belongs to what it was a wait for: before the first task, to that task's queueing (the prompt is
    read there, its images prepared); between two stages, to the migration; before a task that is done again, to its
    queueing; behind the last, to its execution (the answer travels to its reader).

    A decode that was preempted and is computed again counts as decode: queueing, then execution.

    Args:
        arrived_at, ended_at: seconds of ``time.time``; an ``ended_at`` before the arrival is taken for it.
        timelines: of all tasks, those that failed included; none: everything is prefill queueing.
    """
    ended_at = max(arrived_at, ended_at)
    phases = sorted((one for line in timelines for one in _phases(line, ended_at)), key=lambda one: one.begin)
    # Clocks of two processes may differ by a little, and a task may outlive its request.
    phases = [_Phase(one.part, *(min(max(at, arrived_at), ended_at) for at in one[1:])) for one in phases]
    cuts = sorted({arrived_at, ended_at, *(at for one in phases for at in one[1:])})
    parts = dict.fromkeys(map(str, PARTS), 0.0)
    for begin, end in pairwise(cuts):
        active = [one.part for one in phases if one.begin <= begin and end <= one.end]
        part = min(active, key=_PRECEDENCE.__getitem__) if active else _part_of_gap(begin, end, phases)
        parts[part] += end - begin
    return parts


def _phases(timeline: Timeline, ended_at: float) -> Iterator[_Phase]:
    """What the marks of one task are the begins and ends of; the last lasts until ``ended_at``."""
    marks = sorted(timeline.marks, key=lambda mark: mark[1])  # stable: equal times stay in the order of what happened
    is_scheduled = False
    num_under_way = {Mark.ENCODE_BEGAN: 0, Mark.PULL_BEGAN: 0}  # of its images several may be
    is_decoding = timeline.task is Task.DECODE
    for index, (mark, begin) in enumerate(marks):
        if mark is Mark.ENDED:
            return
        if mark in num_under_way:
            num_under_way[mark] += 1
        elif mark in _BEGIN_OF:
            num_under_way[_BEGIN_OF[mark]] -= 1
        elif mark in (Mark.SCHEDULED, Mark.PREEMPTED):
            is_scheduled = mark is Mark.SCHEDULED
        elif mark is Mark.TOKEN:
            is_decoding = timeline.task is not Task.PREFILL  # whose token is thrown away
        elif mark is Mark.RECOMPUTES and not any(one is Mark.TOKEN for one, _ in marks[:index]):
            is_decoding = False
        later = marks[index + 1 :]
        if num_under_way[Mark.PULL_BEGAN] > 0:
            part = Part.PD_MIGRATION if timeline.task is Task.DECODE else Part.EP_MIGRATION
        elif num_under_way[Mark.ENCODE_BEGAN] > 0:
            part = Part.ENCODE_EXECUTION
        elif is_scheduled:
            part = Part.DECODE_EXECUTION if is_decoding else Part.PREFILL_EXECUTION
        elif is_decoding:
            part = Part.DECODE_QUEUEING
        elif any(one is Mark.ENCODE_BEGAN for one, _ in later):
            part = Part.ENCODE_QUEUEING
        elif timeline.task is Task.ENCODE:  # what is encoded is put where the next instance finds it
            has_encoded = any(one is Mark.ENCODE_ENDED for one, _ in marks[: index + 1])
            part = Part.EP_MIGRATION if has_encoded else Part.ENCODE_QUEUEING
        else:
            part = Part.PREFILL_QUEUEING
        yield _Phase(part, begin, later[0][1] if later else max(begin, ended_at))


def _part_of_gap(begin: float, end: float, phases: Sequence[_Phase]) -> Part:
    # What took no time says what begins, and not what ended: a first token that was the last began no decode.
    before = max((one for one in phases if one.begin < one.end <= begin), key=lambda one: one.end, default=None)
    before = before or max((one for one in phases if one.end <= begin), key=lambda one: one.end, default=None)
    after = min((one for one in phases if one.begin >= end), key=lambda one: one.begin, default=None)
    # Stages by number: encode, prefill, decode. A migration is the end of one and the begin of the next.
    left = None if before is None else PARTS.index(before.part) // 3
    if after is None:
        return Part.PREFILL_QUEUEING if left is None else _EXECUTION[left]
    right = (PARTS.index(after.part) + 1) // 3
    if left is None or left >= right:
        return _QUEUEING[right]
    return Part.EP_MIGRATION if left == 0 else Part.PD_MIGRATION
