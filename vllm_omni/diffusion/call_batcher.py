"""``CallBatcher``: answer the pending network calls of many requests in as few forwards as possible."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm_omni.diffusion.first_block_cache import FirstBlockCache, RowKey, RowStep
from vllm_omni.diffusion.merge_rules import RULES, MergeRule, Unmergeable
from vllm_omni.diffusion.merging import Fingerprints, count_rows, group_key, merge, num_tokens, split
from vllm_omni.diffusion.suspended_call import PendingCall, SuspendedCall, forget_frames

logger = logging.getLogger(__name__)

# Most padding of a forward: tokens, or a share of its own tokens; with more, a second forward is cheaper.
MAX_PADDING_TOKENS = 512
MAX_PADDING_SHARE = 0.25
# Unnamed calls of one denoiser in a step that are cached; a pipeline that makes more does not report its steps.
MAX_CACHED_CALLS = 4


@dataclass(frozen=True, slots=True)
class StepperStatistics:
    """Counts of denoiser forwards since the start."""

    num_forwards: int
    num_rows: int
    widths: dict[int, int]  # calls of pipelines, one for each output, in a forward -> number of such forwards
    seconds_in_forwards: float  # of the host: on a GPU, until the work is queued


class CallBatcher:
    """Groups calls that can be merged, computes each group, and resumes its pipelines with their outputs.

    Args:
        max_rows: of a forward; a call with more rows is computed alone.
        cache: computes the denoisers that it supports.
        rules: component -> how its calls are merged; others are computed alone.
    """

    def __init__(self, max_rows: int, cache: FirstBlockCache | None, rules: Mapping[str, MergeRule]) -> None:
        self._max_rows = max_rows
        self._cache = cache
        self._rules = rules
        self._fingerprints = Fingerprints()
        self._num_turns = 0  # forwards of any network
        self._num_rows = 0
        self._widths: Counter[int] = Counter()
        self._seconds = 0.0

    def run(self, waiting: Sequence[SuspendedCall], is_late: Callable[[], bool]) -> None:
        """Answer the pending call of each, in the order of their last forwards; once it is late, stop after one."""
        groups: dict[Hashable, list[SuspendedCall]] = {}
        for call in sorted(waiting, key=_last_turn):
            groups.setdefault(self._group_key(call), []).append(call)
        parts = [part for group in groups.values() for part in self._parts(group)]
        for part in sorted(parts, key=lambda part: min(map(_last_turn, part))):
            self._run_together(part)
            self._num_turns += 1
            for call in part:
                call.last_turn = self._num_turns
            if is_late():
                return

    def statistics(self) -> StepperStatistics:
        return StepperStatistics(self._widths.total(), self._num_rows, dict(self._widths), self._seconds)

    # -- groups -------------------------------------------------------------------------------------------------------

    def _group_key(self, call: SuspendedCall) -> Hashable:
        pending = pending_of(call)
        rule = self._rules.get(pending.component)
        if rule is not None:
            try:
                return group_key(pending, rule, self._fingerprints)
            except Unmergeable:
                pass
        return id(call)

    def _parts(self, group: Sequence[SuspendedCall]) -> Iterator[list[SuspendedCall]]:
        """Split a group into parts of at most ``max_rows`` rows with little padding; similar lengths stay together."""
        if len(group) == 1:
            yield list(group)
            return
        rule = self._rules[pending_of(group[0]).component]
        tokens = {call: num_tokens(pending_of(call), rule) for call in group}
        part: list[SuspendedCall] = []
        num_rows = num_own = 0  # rows of the part, and its tokens without padding
        for call in sorted(group, key=lambda one: tokens[one][0]):
            rows = count_rows(pending_of(call), rule)
            row_tokens = sum(tokens[call])  # at least as many as of those before
            own = num_own + rows * row_tokens
            padding = (num_rows + rows) * row_tokens - own
            is_padded = padding > max(MAX_PADDING_TOKENS, MAX_PADDING_SHARE * own)
            if part and (num_rows + rows > self._max_rows or is_padded):
                yield part
                part, num_rows, own = [], 0, rows * row_tokens
            part.append(call)
            num_rows, num_own = num_rows + rows, own
        yield part

    # -- forwards -----------------------------------------------------------------------------------------------------

    def _run_together(self, part: Sequence[SuspendedCall]) -> None:
        if len(part) > 1:
            calls = [pending_of(call) for call in part]
            rule = self._rules[calls[0].component]
            try:
                merged, counts = merge(calls, rule)
                values = split(self._compute(part, replace(calls[0], kwargs=merged), counts), calls, counts, rule)
            except Exception as exc:  # one call is at fault: alone, it fails again, and the others succeed
                self._note_failure(part, calls[0].component, exc)
            else:
                for call, value in zip(part, values, strict=True):
                    call.resume(value)
                return
            del calls
        for call in part:
            try:
                value = self._compute([call], pending_of(call), [rows_of(pending_of(call))])
            except Exception as exc:
                call.throw(exc)
            else:
                call.resume(value)

    def _note_failure(self, part: Sequence[SuspendedCall], component: str, error: Exception) -> None:
        said = "%d merged calls of %s failed and are now computed one by one: %s"
        logger.warning(said, len(part), component, error, exc_info=True)
        forget_frames(error)
        if self._cache is not None:
            for call in part:  # an entry may be left from the failed forward
                self._cache.drop(call.request_id, component)

    def _compute(self, part: Sequence[SuspendedCall], merged: PendingCall, counts: Sequence[int]) -> Any:
        """Compute one forward for the calls of ``part``. ``counts``: rows of each; 0: not known."""
        if not merged.is_denoiser:
            return merged.run()
        start = time.perf_counter()
        try:
            if self._cache is not None and all(counts) and self._cache.supports(merged.module):
                return self._cache.forward(merged.module, merged.kwargs, *_cache_rows(part, counts))
            return merged.run()
        finally:
            self._seconds += time.perf_counter() - start
            self._widths[len(part)] += 1
            self._num_rows += sum(counts) or 1


def _last_turn(call: SuspendedCall) -> int:
    return call.last_turn


def pending_of(call: SuspendedCall) -> PendingCall:
    assert call.pending is not None, f"output {call.output_index} of request {call.request_id} waits for no network"
    return call.pending


def rows_of(call: PendingCall) -> int:
    """Number of rows of a call; 0 if its class is not in the table of merge rules."""
    rule = RULES.get(type(call.module).__name__)
    if rule is None or call.positional:
        return 0
    try:
        return count_rows(call, rule)
    except Unmergeable:
        return 0


def _cache_rows(part: Sequence[SuspendedCall], counts: Sequence[int]) -> tuple[list[RowKey | None], list[RowStep]]:
    """For each row of a forward, its key in the cache and the step of its request."""
    keys: list[RowKey | None] = []
    steps: list[RowStep] = []
    for call, rows in zip(part, counts, strict=True):
        pending, progress = pending_of(call), call.progress
        is_cached = not pending.branch.startswith("#") or int(pending.branch[1:]) < MAX_CACHED_CALLS
        first = call.output_index * rows  # outputs of one request have as many rows each
        for row in range(first, first + rows):
            keys.append(RowKey(call.request_id, pending.component, pending.branch, row) if is_cached else None)
            steps.append(RowStep(progress.step_index, progress.num_steps))
    return keys, steps
