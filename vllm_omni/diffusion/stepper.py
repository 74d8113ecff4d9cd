"""``PipelineStepper``: run many requests on one pipeline, each at its own denoise step, with merged forwards."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vllm_omni.diffusion import outputs
from vllm_omni.diffusion.call_batcher import CallBatcher, StepperStatistics, rows_of
from vllm_omni.diffusion.first_block_cache import FirstBlockCache
from vllm_omni.diffusion.limits import CallLimits
from vllm_omni.diffusion.merge_check import find_merging_rules
from vllm_omni.diffusion.merge_rules import MergeRule
from vllm_omni.diffusion.pipeline_arguments import pipeline_arguments
from vllm_omni.diffusion.pipeline_copy import PipelineCopies
from vllm_omni.diffusion.previews import Previewer
from vllm_omni.diffusion.request import DiffusionRequest
from vllm_omni.diffusion.suspended_call import PendingCall, SuspendedCall, forget_frames
from vllm_omni.errors import InvalidRequest

MAX_STEP_S = 1.0
"""A step that has computed for so long starts no further forward."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """State of a request after a step."""

    step_index: int  # denoise steps done so far
    num_steps: int  # of the whole run; 0: not known yet
    output: dict[str, Any] | None = None  # set at the end: see ``outputs.collect``
    error: Exception | None = None  # the request failed; InvalidRequest if the pipeline rejected its arguments
    preview: Tensor | None = None  # uint8 [H, W, 3], decoded in this step
    num_rows: int = 0  # of the pending calls; one for an output whose denoiser is not in the table of merge rules
    num_bytes: int = 0  # tensors of those calls
    num_cache_bytes: int = 0  # needed for its cache entries, all outputs and branches; 0: its denoiser is not cached

    @property
    def has_ended(self) -> bool:
        return self.output is not None or self.error is not None


@dataclass(eq=False)
class RunningRequest:
    """A request that was added to a stepper and has not ended."""

    request: DiffusionRequest
    calls: list[SuspendedCall]  # one for each output: pipelines differ in what several outputs of a call share

    @property
    def has_ended(self) -> bool:
        return self.error is not None or all(call.has_ended for call in self.calls)

    @property
    def error(self) -> Exception | None:
        return next((call.error for call in self.calls if call.error is not None), None)

    @property
    def is_between(self) -> bool:
        """Whether an output has not started, or waits for another network than a denoiser."""
        return not all(call.has_ended or (call.pending and call.pending.is_denoiser) for call in self.calls)

    @property
    def pending(self) -> list[PendingCall]:
        return [call.pending for call in self.calls if call.pending is not None]


class PipelineStepper:
    """Steps requests through one pipeline. Not thread-safe; the pipeline itself is neither called nor changed.

    Args:
        pipeline: loaded, on its device.
        max_rows: of a forward; the outputs of a request with more rows make their forwards in parts.
        cache: computes the denoisers that it supports.
        merge: False: one request per forward, and no check at the start.
        rules: merge rule of each component, from an earlier check of the same weights; None: check now.
        limits: of a request; None: no limits.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        pipeline: Any,
        *,
        max_rows: int = 8,
        cache: FirstBlockCache | None = None,
        merge: bool = True,
        rules: Mapping[str, MergeRule] | None = None,
        limits: CallLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._pipeline = pipeline
        self._copies = PipelineCopies(pipeline)
        self._cache = cache
        self._limits = limits
        self._clock = clock
        self.running: dict[str, RunningRequest] = {}  # by id
        self._previewer = Previewer(pipeline)
        if merge and rules is None:
            with torch.no_grad():
                rules = find_merging_rules(pipeline)
        self.rules: Mapping[str, MergeRule] = dict(rules or {}) if merge else {}  # component -> rule that holds
        self._batcher = CallBatcher(max_rows, cache, self.rules)

    def add(self, request_id: str, request: DiffusionRequest) -> None:
        """Add a request; nothing runs until the next step.

        Raises:
            InvalidRequest: the pipeline does not accept the request, or it exceeds the limits.
        """
        assert request_id not in self.running, f"request {request_id} is already here"
        calls = []
        for index in range(request.params.num_outputs_per_prompt):
            arguments = pipeline_arguments(self._pipeline, request, index)
            if self._limits is not None:
                self._limits.check_arguments(arguments)
            calls.append(SuspendedCall(self._copies, arguments, request_id, index, self._limits))
        self._previewer.add_to(calls[0], request.params.preview_every)
        self.running[request_id] = RunningRequest(request, calls)

    def abort(self, request_id: str) -> None:
        """Remove a request and free its tensors; does nothing for an unknown one."""
        running = self.running.pop(request_id, None)
        if running is not None:
            with torch.no_grad():
                for call in running.calls:
                    call.cancel()
            self.drop_cache(request_id)

    def step(self, request_ids: Sequence[str]) -> dict[str, StepOutcome]:
        """Call the denoiser once for each output of each request.

        A new request encodes its text first; a request whose last denoise step this was decodes its outputs. A request
        that has ended, with its outputs or an error, is removed.

        After ``MAX_STEP_S`` the step ends with the forward that it computes, so that the caller can abort and add
        requests; the calls that it did not reach come first in the next step.

        Returns:
            Request -> its state, without the requests that have not reached a denoiser.

        Raises:
            KeyError: a request was not added, or has ended.
        """
        assert len(set(request_ids)) == len(request_ids), "a request makes one step at a time"
        chosen = {request_id: self.running[request_id] for request_id in request_ids}
        calls = [call for running in chosen.values() for call in running.calls]
        end_s = self._clock() + MAX_STEP_S

        def is_late() -> bool:
            return self._clock() >= end_s

        with torch.no_grad():  # per thread, and left by the pipelines in any order: see suspended_call.py
            self._run_until_denoiser(calls, is_late)
            if not is_late():
                self._batcher.run([call for call in calls if call.pending is not None], is_late)
                self._run_until_denoiser(calls, is_late)
            outcomes = {one: self._outcome(one, it) for one, it in chosen.items() if it.has_ended or not it.is_between}
        for request_id, outcome in outcomes.items():
            if outcome.has_ended:
                self.abort(request_id)  # where one output has failed, the others have not ended
        return outcomes

    def grant_cache(self, request_id: str, num_bytes: int) -> None:
        """Allow a request cache entries of at most ``num_bytes``; does nothing for an unknown one."""
        running = self.running.get(request_id)
        if running is not None and self._cache is not None:
            self._cache.grant(request_id, num_bytes, running.request.params.cache_threshold)

    def drop_cache(self, request_id: str) -> None:
        """Free the cache entries of a request and end its grant; safe at any time."""
        if self._cache is not None:
            self._cache.drop(request_id)

    def statistics(self) -> StepperStatistics:
        return self._batcher.statistics()

    def _run_until_denoiser(self, calls: Sequence[SuspendedCall], is_late: Callable[[], bool]) -> None:
        """Compute texts, images and previews until each call waits for a denoiser or has ended, or it is late."""
        for call in calls:
            if not call.has_started:
                call.resume()
                if is_late():
                    return
        while waiting := [call for call in calls if call.pending is not None and not call.pending.is_denoiser]:
            self._batcher.run(waiting, is_late)
            if is_late():
                return

    def _outcome(self, request_id: str, running: RunningRequest) -> StepOutcome:
        output, error = self._end(running) if running.has_ended else (None, None)
        first, pending = running.calls[0], running.pending
        preview, first.preview = first.preview, None
        return StepOutcome(
            step_index=min(call.progress.step_index for call in running.calls),
            num_steps=first.progress.num_steps,
            output=output,
            error=error,
            preview=preview,
            num_rows=sum(rows_of(call) or 1 for call in pending),
            num_bytes=num_bytes([call.kwargs for call in pending]),
            num_cache_bytes=self._num_cache_bytes(request_id, running),
        )

    def _end(self, running: RunningRequest) -> tuple[dict[str, Any] | None, Exception | None]:
        """The outputs of a request that has ended, or its error."""
        error = running.error
        if error is None:
            try:
                output_type = running.request.params.output_type
                parts = [outputs.collect(self._pipeline, call.result, output_type) for call in running.calls]
                return outputs.join(parts), None
            except Exception as exc:
                error = forget_frames(exc)
        has_denoised = any(call.has_denoised for call in running.calls)
        is_rejected = isinstance(error, ValueError | TypeError) and not has_denoised
        if is_rejected and not isinstance(error, InvalidRequest):
            error = InvalidRequest(f"{type(self._pipeline).__name__}: {error}")
        return None, error

    def _num_cache_bytes(self, request_id: str, running: RunningRequest) -> int:
        if self._cache is None:
            return 0
        threshold = running.request.params.cache_threshold
        is_on = self._cache.threshold if threshold is None else threshold
        return self._cache.num_bytes(request_id) if is_on else 0


def num_bytes(value: Any) -> int:
    """Bytes of all tensors in nested containers."""
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(num_bytes(one) for one in value.values())
    if isinstance(value, list | tuple):
        return sum(num_bytes(one) for one in value)
    return 0
