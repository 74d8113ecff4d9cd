"""``RequestTimelines``: when the scheduler did what for a request, sent along with the request's tokens.

From: HydraInfer, section 5.5 (latency breakdown).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import KV_FETCH_COMPLETED_WAITING, KV_FETCH_IN_PROGRESS
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from vllm_omni.messages.epd_step import EPDModelRunnerOutput
from vllm_omni.messages.timeline import TIMELINE, Mark, Task, Timeline, task_of

_KV_FETCH_MARKS = {KV_FETCH_IN_PROGRESS: Mark.PULL_BEGAN, KV_FETCH_COMPLETED_WAITING: Mark.PULL_ENDED}
_END_OF = {Mark.ENCODE_BEGAN: Mark.ENCODE_ENDED, Mark.PULL_BEGAN: Mark.PULL_ENDED}


class RequestTimelines:
    """Keeps a ``Timeline`` of each request that has no token yet, or was preempted since its last one.

    It leaves with the next token; marks that are added later (a preemption, the end) leave with the output that follows
    them. The front end finds stop strings, so a request's last output need not come from the engine. A request that
    only decodes has no timeline here, so that a step of decodes costs nothing.

    Args:
        is_on: False: no request has a timeline.
    """

    def __init__(self, clock: Callable[[], float], is_on: bool) -> None:
        self._clock = clock
        self.is_on = is_on
        self._timelines: dict[str, Timeline] = {}  # of requests that wait for a token
        self._num_tokens: dict[str, int] = {}  # of those that are scheduled: output tokens when they were
        self._images: dict[str, tuple[Mark, float]] = {}  # being encoded or pulled: what was started, and when
        self._step_ended_at = 0.0  # the step whose output is processed

    @property
    def is_empty(self) -> bool:
        """Whether no request and no image is tracked."""
        return not (self._timelines or self._num_tokens or self._images)

    # -- requests -----------------------------------------------------------------------------------------------------

    def note_queued(self, request: Request) -> None:
        if self.is_on:
            self._timelines[request.request_id] = timeline = Timeline(_task(request))
            timeline.add(Mark.QUEUED, self._clock())

    def note_preempted(self, request: Request) -> None:
        if not self.is_on:
            return
        timeline = self._timelines.setdefault(request.request_id, Timeline(_task(request)))
        timeline.add(Mark.PREEMPTED, self._clock())
        self._num_tokens.pop(request.request_id, None)

    def note_kv_fetch(self, request: Request, stage: str | None) -> None:
        timeline = self._timelines.get(request.request_id)
        if timeline is not None and stage in _KV_FETCH_MARKS:
            timeline.add(_KV_FETCH_MARKS[stage], self._clock())

    def end(self, request: Request) -> dict[str, Any]:
        """Remove the request; returns what is still to be sent, as a part of its ``kv_transfer_params``."""
        if not self.is_on:
            return {}
        timeline = self._take(request) or Timeline(_task(request))
        # The last token came with the step that is processed. An encode task has no token, and may end before it.
        timeline.add(Mark.ENDED, self._step_ended_at if request.num_output_tokens else self._clock())
        return {TIMELINE: timeline.pack()}

    def _take(self, request: Request) -> Timeline | None:
        timeline = self._timelines.pop(request.request_id, None)
        known = self._num_tokens.pop(request.request_id, None)
        if timeline is not None and known is not None and request.num_output_tokens > known:
            timeline.add(Mark.TOKEN, self._step_ended_at)
        return timeline

    # -- steps --------------------------------------------------------------------------------------------------------

    def note_scheduled(self, output: SchedulerOutput, requests: Mapping[str, Request], started_at: float) -> None:
        """Mark the requests whose first chunk, or first one after a preemption, is in this step."""
        if not self._timelines:
            return
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        if cached.resumed_req_ids:
            computed = zip(cached.req_ids, cached.num_computed_tokens, strict=True)
            starts |= {one: start for one, start in computed if one in cached.resumed_req_ids}
        for request_id, num_computed in starts.items():
            timeline = self._timelines.get(request_id)
            if timeline is None:
                continue
            request = requests[request_id]
            timeline.add(Mark.SCHEDULED, started_at)
            if timeline.task is Task.DECODE and num_computed < request.num_tokens - 1:
                timeline.add(Mark.RECOMPUTES, started_at)
            self._num_tokens[request_id] = request.num_output_tokens

    def note_step_end(self, output: SchedulerOutput, runner_output: ModelRunnerOutput) -> None:
        """A step has ended; its encodes, if they stood in front of its forward, took the time that the runner says."""
        self._step_ended_at = self._clock()
        if not isinstance(runner_output, EPDModelRunnerOutput) or runner_output.encode_times is None:
            return
        for request_id in output.scheduled_encoder_inputs:
            if (timeline := self._timelines.get(request_id)) is not None:
                _add_interval(timeline, Mark.ENCODE_BEGAN, *runner_output.encode_times)

    def add_to(self, outputs: Mapping[int, EngineCoreOutputs], requests: Mapping[str, Request]) -> None:
        """Send the timelines of requests that got a token in the step with that token."""
        for request_id, num_known in list(self._num_tokens.items()):
            request = requests.get(request_id)
            if request is None or request.num_output_tokens <= num_known:
                continue
            timeline = self._take(request)
            assert timeline is not None, "a request that computes its next token has a timeline"
            of_client = outputs.get(request.client_index)
            for output in of_client.outputs if of_client is not None else ():
                if output.request_id == request_id:
                    output.kv_transfer_params = {**(output.kv_transfer_params or {}), TIMELINE: timeline.pack()}

    # -- images -------------------------------------------------------------------------------------------------------

    def start_image(self, identifier: str, mark: Mark) -> None:
        """An image starts to be encoded or pulled: ``ENCODE_BEGAN``, ``PULL_BEGAN``."""
        if self.is_on:
            self._images[identifier] = mark, self._clock()

    def end_image(self, identifier: str, requests: Mapping[str, Request]) -> None:
        """An image is ready or lost. Each request that waits for it is marked, whichever it was started for."""
        started = self._images.pop(identifier, None)
        if started is None:
            return
        mark, started_at = started
        for request_id, timeline in self._timelines.items():
            if any(feature.identifier == identifier for feature in requests[request_id].mm_features):
                _add_interval(timeline, mark, started_at, self._clock())

    def forget_images(self) -> None:
        self._images.clear()


def _task(request: Request) -> Task:
    return task_of(request.sampling_params.extra_args if request.sampling_params is not None else None)


def _add_interval(timeline: Timeline, mark: Mark, started_at: float, ended_at: float) -> None:
    # It may have started for another request, before this one came.
    timeline.add(mark, max(started_at, timeline.first(Mark.QUEUED) or 0.0))
    timeline.add(_END_OF[mark], ended_at)
