"""``PipelineStepper``: many requests on one pipeline, each at its own step, with their forwards made together."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from vllm_omni.diffusion import outputs
from vllm_omni.diffusion.first_block_cache import FirstBlockCache, RowKey, RowStep
from vllm_omni.diffusion.merge_check import find_merging_rules
from vllm_omni.diffusion.merging import (
    RULES,
    Fingerprints,
    MergeRule,
    Unmergeable,
    count_rows,
    group_key,
    merge,
    num_tokens,
)
from vllm_omni.diffusion.merging import split as split_output
from vllm_omni.diffusion.request import DiffusionRequest, pipeline_arguments
from vllm_omni.diffusion.suspended_call import CopiedPipeline, PendingCall, SuspendedCall, forget_frames
from vllm_omni.errors import InvalidRequest

logger = logging.getLogger(__name__)

# What padding may add to a forward: so many tokens, or such a share of its own; beyond, a second one costs less.
MAX_PADDING_TOKENS = 512
MAX_PADDING_SHARE = 0.25
MAX_CACHED_CALLS = 4  # unnamed calls of one denoiser in a step; a pipeline with more does not tell its steps


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Where a request stands after a step."""

    step_index: int  # denoise steps done so far
    num_steps: int  # of all; 0: not known yet
    output: dict[str, Any] | None = None  # when it has ended: see ``outputs.collect``
    error: Exception | None = None  # it failed, alone; InvalidRequest where the pipeline refused its arguments
    preview: Tensor | None = None  # uint8 [H, W, 3], of the latest step that has one
    num_rows: int = 0  # of the call that it waits for; 0: not known, its denoiser is not in the table
    num_bytes: int = 0  # tensors of that call
    num_cache_bytes: int = 0  # what its row cache entries need, all branches; 0: its denoiser is not cached

    @property
    def has_ended(self) -> bool:
        return self.output is not None or self.error is not None


@dataclass(frozen=True, slots=True)
class StepperStatistics:
    """Of the denoisers since the start."""

    num_forwards: int
    num_rows: int
    widths: dict[int, int]  # requests in a forward -> such forwards
    seconds_in_forwards: float  # of the host: on a GPU, until the work is queued


@dataclass
class _Running:
    request_id: str
    request: DiffusionRequest
    call: SuspendedCall
    has_begun: bool = False
    preview: Tensor | None = None


@dataclass
class _Counts:
    num_rows: int = 0
    widths: Counter[int] = field(default_factory=Counter)
    seconds: float = 0.0


class PipelineStepper:
    """Steps requests through one pipeline. For one thread; everything that a request changes is its own.

    Args:
        pipeline: loaded and on its device; never called itself.
        max_rows: of a forward; a request with more makes its forwards alone.
        cache: computes the denoisers in place of their own forward, where it can.
        merge: False: one request a forward, and no test at the start.
        rules: of the components that are merged, from an earlier test at a start with the same weights; None: test.
    """

    def __init__(
        self,
        pipeline: Any,
        *,
        max_rows: int = 8,
        cache: FirstBlockCache | None = None,
        merge: bool = True,
        rules: Mapping[str, MergeRule] | None = None,
    ):
        self._pipeline = pipeline
        self._copied = CopiedPipeline(pipeline)
        self._max_rows = max_rows
        self._cache = cache
        self._running: dict[str, _Running] = {}
        self._fingerprints = Fingerprints()
        self._counts = _Counts()
        self._can_preview = True
        if merge and rules is None:
            with torch.no_grad():
                rules = find_merging_rules(pipeline)
        self._rules = dict(rules or {}) if merge else {}

    @property
    def rules(self) -> Mapping[str, MergeRule]:
        """Of the components that are merged, after the test at the start."""
        return self._rules

    def add(self, request_id: str, request: DiffusionRequest) -> None:
        """Admit a request; nothing runs yet.

        Raises:
            InvalidRequest: for what can be seen without running.
        """
        assert request_id not in self._running, f"request {request_id} is already here"
        arguments = pipeline_arguments(self._pipeline, request)
        running = _Running(request_id, request, SuspendedCall(self._copied, arguments))
        self._add_previews(running)
        self._running[request_id] = running

    def abort(self, request_id: str) -> None:
        """Forget a request wherever it stands; its tensors are free on return. Of an unknown one: nothing."""
        running = self._running.pop(request_id, None)
        if running is not None:
            with torch.no_grad():
                running.call.cancel()
            self.drop_cache(request_id)

    def step(self, request_ids: Sequence[str]) -> dict[str, StepOutcome]:
        """One call of the denoiser for each, in as few forwards as may be.

        New ones encode their texts first; those which thereby have done their last decode. One that has ended, with
        output or error, is no longer here afterwards.

        Raises:
            KeyError: a request that was not added, or has ended.
        """
        assert len(set(request_ids)) == len(request_ids), "a request makes one step at a time"
        chosen = [self._running[request_id] for request_id in request_ids]
        with torch.no_grad():  # what pipelines set per thread, in an order that is not theirs: see suspended.py
            for running in chosen:
                if not running.has_begun:
                    running.has_begun = True
                    running.call.resume()
            self._run_up_to_denoisers(chosen)
            self._run([running for running in chosen if running.call.pending is not None])
            self._run_up_to_denoisers(chosen)
            outcomes = {running.request_id: self._outcome(running) for running in chosen}
        for request_id, outcome in outcomes.items():
            if outcome.has_ended:
                del self._running[request_id]
                self.drop_cache(request_id)
        return outcomes

    def grant_cache(self, request_id: str, num_bytes: int) -> None:
        """Let a request keep row cache entries of at most so many bytes; of an unknown one: nothing."""
        running = self._running.get(request_id)
        if running is not None and self._cache is not None:
            self._cache.grant(request_id, num_bytes, running.request.params.cache_threshold)

    def drop_cache(self, request_id: str) -> None:
        """Free a request's row cache entries, and its grant; safe at any time."""
        if self._cache is not None:
            self._cache.drop(request_id)

    def statistics(self) -> StepperStatistics:
        counts = self._counts
        return StepperStatistics(
            num_forwards=counts.widths.total(),
            num_rows=counts.num_rows,
            widths=dict(counts.widths),
            seconds_in_forwards=counts.seconds,
        )

    # --- calls of networks

    def _run_up_to_denoisers(self, chosen: Sequence[_Running]) -> None:
        """Texts, pictures and previews, until each waits for a denoiser or has ended."""
        while waiting := [r for r in chosen if r.call.pending is not None and not r.call.pending.is_denoiser]:
            self._run(waiting)

    def _run(self, waiting: Sequence[_Running]) -> None:
        """Answer the pending call of each."""
        groups: dict[Hashable, list[_Running]] = {}
        for running in waiting:
            groups.setdefault(self._group_key(running), []).append(running)
        for group in groups.values():
            for part in self._parts(group):
                self._run_together(part)

    def _group_key(self, running: _Running) -> Hashable:
        pending = running.call.pending
        assert pending is not None
        rule = self._rules.get(pending.component)
        if rule is not None:
            try:
                return group_key(pending, rule, self._fingerprints)
            except Unmergeable:
                pass
        return running.request_id

    def _parts(self, group: Sequence[_Running]) -> Iterator[list[_Running]]:
        """Of at most ``max_rows`` rows, and without much padding; those of like lengths together, else in order."""
        if len(group) == 1:
            yield list(group)
            return
        part: list[_Running] = []
        num_rows = num_own = 0  # rows of the part, and the tokens that are their own
        for running in sorted(group, key=lambda one: self._num_tokens(one.call.pending)[0]):
            rows = self._count_rows(running.call.pending)
            length, others = self._num_tokens(running.call.pending)  # no shorter than those before
            own = num_own + rows * (length + others)
            padding = (num_rows + rows) * (length + others) - own
            is_padded = padding > max(MAX_PADDING_TOKENS, MAX_PADDING_SHARE * own)
            if part and (num_rows + rows > self._max_rows or is_padded):
                yield part
                part, num_rows, own = [], 0, rows * (length + others)
            part.append(running)
            num_rows, num_own = num_rows + rows, own
        yield part

    def _num_tokens(self, call: PendingCall | None) -> tuple[int, int]:
        assert call is not None
        return num_tokens(call, self._rules[call.component])

    def _count_rows(self, call: PendingCall | None) -> int:
        assert call is not None
        return count_rows(call, self._rules[call.component])

    def _run_together(self, part: Sequence[_Running]) -> None:
        calls = [running.call.pending for running in part if running.call.pending is not None]
        if len(part) > 1:
            rule = self._rules[calls[0].component]
            try:
                merged, counts = merge(calls, rule)
                values = split_output(self._compute(part, calls, merged, counts), calls, counts, rule)
            except Exception as exc:  # one of them is at fault: it will fail again alone, and the others not
                logger.warning(
                    "%d merged calls of %s failed, now one by one: %s",
                    len(part),
                    calls[0].component,
                    exc,
                    exc_info=True,
                )
                forget_frames(exc)
                for running in part:
                    if self._cache is not None:  # part of an entry may be of the forward that failed
                        self._cache.drop(running.request_id, calls[0].component)
            else:
                for running, value in zip(part, values, strict=True):
                    running.call.resume(value)
                return
        for running in part:
            self._run_alone(running)

    def _run_alone(self, running: _Running) -> None:
        call = running.call.pending
        assert call is not None
        try:
            value = self._compute([running], [call], call.kwargs, None)
        except Exception as exc:
            running.call.throw(exc)
        else:
            del call
            running.call.resume(value)

    def _compute(
        self,
        part: Sequence[_Running],
        calls: Sequence[PendingCall],
        kwargs: dict[str, Any],
        counts: Sequence[int] | None,
    ) -> Any:
        """One forward. ``counts``: rows of each call; None: a single call, as it is."""
        call = calls[0]
        if not call.is_denoiser:
            return replace(call, kwargs=kwargs).run()
        num_known = len(part)
        if counts is None:
            rows = _rows_alone(call)
            counts, num_known = [rows or 1], rows
        start = time.perf_counter()
        try:
            if self._cache is not None and num_known and self._cache.supports(call.module):
                keys: list[RowKey | None] = []
                steps: list[RowStep] = []
                for running, one, rows in zip(part, calls, counts, strict=True):
                    keys += _keys(running, one, rows)
                    progress = running.call.progress
                    steps += [RowStep(progress.step_index, progress.num_steps)] * rows
                return self._cache.forward(call.module, kwargs, keys, steps)
            return replace(call, kwargs=kwargs).run()
        finally:
            self._counts.seconds += time.perf_counter() - start
            self._counts.widths[len(part)] += 1
            self._counts.num_rows += sum(counts)

    # --- what a step says

    def _outcome(self, running: _Running) -> StepOutcome:
        call, params = running.call, running.request.params
        output, error = None, call.error
        if call.has_ended and error is None:
            try:
                output = outputs.collect(self._pipeline, call.result, params.output_type)
            except Exception as exc:
                error = forget_frames(exc)
            call.result = None
        if (
            isinstance(error, ValueError | TypeError)
            and not call.has_denoised
            and not isinstance(error, InvalidRequest)
        ):
            error = InvalidRequest(f"{type(self._pipeline).__name__}: {error}")
        preview, running.preview = running.preview, None
        return StepOutcome(
            step_index=call.progress.step_index,
            num_steps=call.progress.num_steps,
            output=output,
            error=error,
            preview=preview,
            num_rows=0 if call.pending is None else _rows_alone(call.pending),
            num_bytes=0 if call.pending is None else num_bytes(call.pending.kwargs),
            num_cache_bytes=self._num_cache_bytes(running),
        )

    def _num_cache_bytes(self, running: _Running) -> int:
        if self._cache is None:
            return 0
        threshold = running.request.params.cache_threshold
        is_on = self._cache.threshold if threshold is None else threshold
        return self._cache.num_bytes(running.request_id) if is_on else 0

    def _add_previews(self, running: _Running) -> None:
        arguments = running.call.arguments
        every = running.request.params.preview_every
        if not every or not self._can_preview:
            return
        if "callback_on_step_end" not in self._copied.parameters:
            self._no_previews("it has no callback_on_step_end")
            return
        height, width = arguments.get("height"), arguments.get("width")

        def show(pipeline: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
            is_last = step + 1 == running.call.progress.num_steps  # the picture itself is about to come
            if (step + 1) % every == 0 and not is_last and self._can_preview:
                try:
                    running.preview = outputs.preview(pipeline, values["latents"], height, width)
                except Exception as exc:
                    self._no_previews(f"{exc}")
            return {}

        arguments["callback_on_step_end"] = show

    def _no_previews(self, reason: str) -> None:
        self._can_preview = False
        logger.warning("no previews of %s: %s", type(self._pipeline).__name__, reason)


def _rows_alone(call: PendingCall) -> int:
    """0: its class is not in the table, and so the rows are not known."""
    rule = RULES.get(type(call.module).__name__)
    if rule is None or call.positional:
        return 0
    try:
        return count_rows(call, rule)
    except Unmergeable:
        return 0


def _keys(running: _Running, call: PendingCall, rows: int) -> list[RowKey | None]:
    if call.branch.startswith("#") and int(call.branch[1:]) >= MAX_CACHED_CALLS:
        return [None] * rows
    return [RowKey(running.request_id, call.component, call.branch, row) for row in range(rows)]


def num_bytes(value: Any) -> int:
    """Of all tensors in nested containers."""
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(num_bytes(one) for one in value.values())
    if isinstance(value, list | tuple):
        return sum(num_bytes(one) for one in value)
    return 0
