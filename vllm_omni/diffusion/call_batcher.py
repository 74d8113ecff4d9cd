"""``CallBatcher``: answer the pending network calls of many requests in as few forwards as possible."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from vllm_omni.diffusion.first_block_cache import FirstBlockCache, RowKey, RowStep
from vllm_omni.diffusion.merge_rules import RULES, MergeRule, Unmergeable
from vllm_omni.diffusion.merging import Fingerprints, count_rows, group_key, merge, num_tokens, split
from vllm_omni.diffusion.request import DiffusionRequest
from vllm_omni.diffusion.suspended_call import PendingCall, SuspendedCall, forget_frames

logger = logging.getLogger(__name__)

# Most padding of a forward: tokens, or a share of its own tokens; with more, a second forward is cheaper.
MAX_PADDING_TOKENS = 512
MAX_PADDING_SHARE = 0.25
# Unnamed calls of one denoiser in a step that are cached; a pipeline that makes more does not report its steps.
MAX_CACHED_CALLS = 4


@dataclass
class RunningRequest:
    """A request that was added to a stepper and has not ended."""

    request_id: str
    request: DiffusionRequest
    call: SuspendedCall
    has_started: bool = False
    preview: Tensor | None = None  # uint8 [H, W, 3], decoded since the last step

    @property
    def pending(self) -> PendingCall:
        assert self.call.pending is not None, f"request {self.request_id} waits for no call"
        return self.call.pending


@dataclass(frozen=True, slots=True)
class StepperStatistics:
    """Counts of denoiser forwards since the start."""

    num_forwards: int
    num_rows: int
    widths: dict[int, int]  # requests in a forward -> number of such forwards
    seconds_in_forwards: float  # of the host: on a GPU, until the work is queued


class CallBatcher:
    """Groups calls that can be merged, computes each group, and resumes its requests with their outputs.

    Args:
        max_rows: of a forward; a request with more rows is computed alone.
        cache: computes the denoisers that it supports.
        rules: component -> how its calls are merged; others are computed alone.
    """

    def __init__(self, max_rows: int, cache: FirstBlockCache | None, rules: Mapping[str, MergeRule]) -> None:
        self._max_rows = max_rows
        self._cache = cache
        self._rules = rules
        self._fingerprints = Fingerprints()
        self._num_rows = 0
        self._widths: Counter[int] = Counter()
        self._seconds = 0.0

    def run(self, waiting: Sequence[RunningRequest]) -> None:
        """Answer the pending call of each request."""
        groups: dict[Hashable, list[RunningRequest]] = {}
        for running in waiting:
            groups.setdefault(self._group_key(running), []).append(running)
        for group in groups.values():
            for part in self._parts(group):
                self._run_together(part)

    def statistics(self) -> StepperStatistics:
        return StepperStatistics(self._widths.total(), self._num_rows, dict(self._widths), self._seconds)

    # -- groups -------------------------------------------------------------------------------------------------------

    def _group_key(self, running: RunningRequest) -> Hashable:
        rule = self._rules.get(running.pending.component)
        if rule is not None:
            try:
                return group_key(running.pending, rule, self._fingerprints)
            except Unmergeable:
                pass
        return running.request_id

    def _parts(self, group: Sequence[RunningRequest]) -> Iterator[list[RunningRequest]]:
        """Split a group into parts of at most ``max_rows`` rows with little padding; similar lengths stay together."""
        if len(group) == 1:
            yield list(group)
            return
        rule = self._rules[group[0].pending.component]
        tokens = {running.request_id: num_tokens(running.pending, rule) for running in group}
        part: list[RunningRequest] = []
        num_rows = num_own = 0  # rows of the part, and its tokens without padding
        for running in sorted(group, key=lambda one: tokens[one.request_id][0]):
            rows = count_rows(running.pending, rule)
            row_tokens = sum(tokens[running.request_id])  # at least as many as of those before
            own = num_own + rows * row_tokens
            padding = (num_rows + rows) * row_tokens - own
            is_padded = padding > max(MAX_PADDING_TOKENS, MAX_PADDING_SHARE * own)
            if part and (num_rows + rows > self._max_rows or is_padded):
                yield part
                part, num_rows, own = [], 0, rows * row_tokens
            part.append(running)
            num_rows, num_own = num_rows + rows, own
        yield part

    # -- forwards -----------------------------------------------------------------------------------------------------

    def _run_together(self, part: Sequence[RunningRequest]) -> None:
        if len(part) > 1:
            calls = [running.pending for running in part]
            rule = self._rules[calls[0].component]
            try:
                merged, counts = merge(calls, rule)
                values = split(self._compute(part, replace(calls[0], kwargs=merged), counts), calls, counts, rule)
            except Exception as exc:  # one call is at fault: alone, it fails again, and the others succeed
                self._note_failure(part, calls[0].component, exc)
            else:
                for running, value in zip(part, values, strict=True):
                    running.call.resume(value)
                return
            del calls
        for running in part:
            try:
                value = self._compute([running], running.pending, [rows_of(running.pending)])
            except Exception as exc:
                running.call.throw(exc)
            else:
                running.call.resume(value)

    def _note_failure(self, part: Sequence[RunningRequest], component: str, error: Exception) -> None:
        said = "%d merged calls of %s failed and are now computed one by one: %s"
        logger.warning(said, len(part), component, error, exc_info=True)
        forget_frames(error)
        if self._cache is not None:
            for running in part:  # an entry may be left from the failed forward
                self._cache.drop(running.request_id, component)

    def _compute(self, part: Sequence[RunningRequest], call: PendingCall, counts: Sequence[int]) -> Any:
        """Compute one forward for the requests of ``part``. ``counts``: rows of each; 0: not known."""
        if not call.is_denoiser:
            return call.run()
        start = time.perf_counter()
        try:
            if self._cache is not None and all(counts) and self._cache.supports(call.module):
                return self._cache.forward(call.module, call.kwargs, *_cache_rows(part, counts))
            return call.run()
        finally:
            self._seconds += time.perf_counter() - start
            self._widths[len(part)] += 1
            self._num_rows += sum(counts) or 1


def rows_of(call: PendingCall) -> int:
    """Number of rows of a call; 0 if its class is not in the table of merge rules."""
    rule = RULES.get(type(call.module).__name__)
    if rule is None or call.positional:
        return 0
    try:
        return count_rows(call, rule)
    except Unmergeable:
        return 0


def _cache_rows(part: Sequence[RunningRequest], counts: Sequence[int]) -> tuple[list[RowKey | None], list[RowStep]]:
    """For each row of a forward, its key in the cache and the step of its request."""
    keys: list[RowKey | None] = []
    steps: list[RowStep] = []
    for running, rows in zip(part, counts, strict=True):
        call, progress = running.pending, running.call.progress
        is_cached = not call.branch.startswith("#") or int(call.branch[1:]) < MAX_CACHED_CALLS
        row_keys = [RowKey(running.request_id, call.component, call.branch, row) for row in range(rows)]
        keys += row_keys if is_cached else [None] * rows
        steps += [RowStep(progress.step_index, progress.num_steps)] * rows
    return keys, steps
