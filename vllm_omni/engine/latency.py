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

# Where tasks of one request overlap (several answers, images encoded in several places), execution counts before
# queueing, and the earlier stage before the later one, which waits for it in the end.
_PRECEDENCE = {part: index for index, part in enumerate((*(p for p in PARTS if p not in _QUEUEING), *_QUEUEING))}


class Phase(NamedTuple):
    part: Part
    begin: float
    end: float


def break_down(arrived_at: float, ended_at: float, timelines: Sequence[Timeline]) -> dict[str, float]:
    """Split a request's latency into seconds by part, which sum to ``ended_at - arrived_at``. An unused part is 0.

    Time that no task covers counts as waiting for the next one: before the first task, as its queueing (the prompt is
    read then, and its images processed); between two stages, as the migration; before a repeated task, as its queueing;
    after the last task, as its execution (the answer travels to its reader).

    A decode that was preempted and is recomputed counts as decode: queueing, then execution.

    Args:
        arrived_at, ended_at: seconds of ``time.time``; an earlier ``ended_at`` is taken as ``arrived_at``.
        timelines: of all tasks, including failed ones; without any, all the time is prefill queueing.
    """
    ended_at = max(arrived_at, ended_at)
    phases = sorted((one for line in timelines for one in phases_of(line, ended_at)), key=lambda one: one.begin)
    # Clocks of two processes may differ by a little, and a task may outlive its request.
    phases = [Phase(one.part, *(min(max(at, arrived_at), ended_at) for at in one[1:])) for one in phases]
    cuts = sorted({arrived_at, ended_at, *(at for one in phases for at in one[1:])})
    parts = dict.fromkeys(map(str, PARTS), 0.0)
    for begin, end in pairwise(cuts):
        active = [one.part for one in phases if one.begin <= begin and end <= one.end]
        part = min(active, key=_PRECEDENCE.__getitem__) if active else _part_of_gap(begin, end, phases)
        parts[part] += end - begin
    return parts


def phases_of(timeline: Timeline, ended_at: float) -> Iterator[Phase]:
    """The time from each mark of a task to the next; the last phase lasts until ``ended_at``."""
    marks = sorted(timeline.marks, key=lambda mark: mark[1])  # stable: marks of equal time keep their order
    progress = _TaskProgress(timeline.task)
    for index, (mark, begin) in enumerate(marks):
        if mark is Mark.ENDED:
            return
        later = marks[index + 1 :]
        progress.apply(mark)
        part = progress.part(will_encode=any(one is Mark.ENCODE_BEGAN for one, _ in later))
        yield Phase(part, begin, later[0][1] if later else max(begin, ended_at))


class _TaskProgress:
    """What one task is doing, mark by mark."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._is_scheduled = False
        self._is_decoding = task is Task.DECODE
        self._num_encoding = self._num_pulling = 0  # images of the task, which may overlap
        self._has_encoded = self._has_token = False

    def apply(self, mark: Mark) -> None:
        match mark:
            case Mark.ENCODE_BEGAN:
                self._num_encoding += 1
            case Mark.ENCODE_ENDED:
                self._num_encoding -= 1
                self._has_encoded = True
            case Mark.PULL_BEGAN:
                self._num_pulling += 1
            case Mark.PULL_ENDED:
                self._num_pulling -= 1
            case Mark.SCHEDULED | Mark.PREEMPTED:
                self._is_scheduled = mark is Mark.SCHEDULED
            case Mark.TOKEN:
                self._has_token = True
                self._is_decoding = self._task is not Task.PREFILL  # the token of a prefill task is discarded
            case Mark.RECOMPUTES:
                self._is_decoding = self._is_decoding and self._has_token

    def part(self, *, will_encode: bool) -> Part:
        """The part to which the time until the next mark counts."""
        if self._num_pulling > 0:
            return Part.PD_MIGRATION if self._task is Task.DECODE else Part.EP_MIGRATION
        if self._num_encoding > 0:
            return Part.ENCODE_EXECUTION
        if self._is_scheduled:
            return Part.DECODE_EXECUTION if self._is_decoding else Part.PREFILL_EXECUTION
        if self._is_decoding:
            return Part.DECODE_QUEUEING
        if will_encode:
            return Part.ENCODE_QUEUEING
        if self._task is Task.ENCODE:  # once encoded, an image is put where the next instance finds it
            return Part.EP_MIGRATION if self._has_encoded else Part.ENCODE_QUEUEING
        return Part.PREFILL_QUEUEING


def _part_of_gap(begin: float, end: float, phases: Sequence[Phase]) -> Part:
    # A zero-length phase is attributed to the next task: a first token that was the last started no decode.
    before = max((one for one in phases if one.begin < one.end <= begin), key=lambda one: one.end, default=None)
    before = before or max((one for one in phases if one.end <= begin), key=lambda one: one.end, default=None)
    after = min((one for one in phases if one.begin >= end), key=lambda one: one.begin, default=None)
    # Stages by number: encode, prefill, decode. A migration is the end of one and the start of the next.
    left = None if before is None else PARTS.index(before.part) // 3
    if after is None:
        return Part.PREFILL_QUEUEING if left is None else _EXECUTION[left]
    right = (PARTS.index(after.part) + 1) // 3
    if left is None or left >= right:
        return _QUEUEING[right]
    return Part.EP_MIGRATION if left == 0 else Part.PD_MIGRATION
