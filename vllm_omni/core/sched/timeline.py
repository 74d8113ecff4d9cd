"""``TimedScheduler``: notes when it did what for a request, and sends that along with the request's tokens.

From: HydraInfer, section 5.5 (latency breakdown).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import KV_FETCH_COMPLETED_WAITING, KV_FETCH_IN_PROGRESS
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from vllm_omni.core.sched.stream import StreamScheduler
from vllm_omni.messages.epd_step import EPDModelRunnerOutput
from vllm_omni.messages.timeline import TIMELINE, TIMELINES, Mark, Task, Timeline, task_of


class TimedScheduler(StreamScheduler):
    """Keeps a ``Timeline`` of each request that has no token yet, or was preempted since its last.

    It leaves with the first token, and what is added later (a preemption, the end) with the output that it is known
    at: a stop string is found by the front end, so that a request's last output need not be the engine's. What decodes
    has no timeline here, so that a step of decodes costs nothing.
    """

    clock: Callable[[], float] = staticmethod(time.time)  # the clock of vLLM's ``Request.arrival_time``

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.timelines: dict[str, Timeline] = {}  # of requests that wait for a token
        self._computing: dict[str, int] = {}  # those of them that are scheduled: how many tokens they have
        self._begun: dict[str, tuple[Mark, float]] = {}  # images under way: what was begun, and when
        self._is_timed = bool(self.vllm_config.additional_config.get(TIMELINES))
        self._now = 0.0  # when the step ended whose output is looked at

    # -- requests come and go -----------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        if request.request_id not in self.requests:  # else the next input of a session
            self.note_queued(request)
        super().add_request(request)

    def note_queued(self, request: Request) -> None:
        if self._is_timed:
            self.timelines[request.request_id] = timeline = Timeline(self._task_of(request))
            timeline.add(Mark.QUEUED, self.clock())

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        # What this returns goes into the request's last output, if it has one.
        kv_transfer_params, ec_transfer_params = super()._free_request(request, delay_free_blocks)
        if not self._is_timed:
            return kv_transfer_params, ec_transfer_params
        timeline = self._take(request) or Timeline(self._task_of(request))
        # Its last token came with the step; an encode task, which has none, may end before upstream looks at that.
        timeline.add(Mark.ENDED, self._now if request.num_output_tokens else self.clock())
        return {**(kv_transfer_params or {}), TIMELINE: timeline.pack()}, ec_transfer_params

    def _take(self, request: Request) -> Timeline | None:
        timeline = self.timelines.pop(request.request_id, None)
        known = self._computing.pop(request.request_id, None)
        if timeline is not None and known is not None and request.num_output_tokens > known:
            timeline.add(Mark.TOKEN, self._now)
        return timeline

    @staticmethod
    def _task_of(request: Request) -> Task:
        return task_of(request.sampling_params.extra_args if request.sampling_params is not None else None)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)
        if self._is_timed:
            timeline = self.timelines.setdefault(request.request_id, Timeline(self._task_of(request)))
            timeline.add(Mark.PREEMPTED, self.clock())
            self._computing.pop(request.request_id, None)

    def _set_kv_fetch_stage(self, request: Request, stage: str | None) -> None:
        # Upstream's own book on requests whose KV cache travels, kept where it keeps statistics.
        super()._set_kv_fetch_stage(request, stage)
        timeline = self.timelines.get(request.request_id)
        if timeline is not None and stage == KV_FETCH_IN_PROGRESS:
            timeline.add(Mark.PULL_BEGAN, self.clock())
        elif timeline is not None and stage == KV_FETCH_COMPLETED_WAITING:
            timeline.add(Mark.PULL_ENDED, self.clock())

    # -- one iteration ------------------------------------------------------------------------------------------------

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        if not self.timelines:
            return super().schedule(throttle_prefills)
        began_at = self.clock()
        output = super().schedule(throttle_prefills)
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        if cached.resumed_req_ids:
            starts |= {
                one: start
                for one, start in zip(cached.req_ids, cached.num_computed_tokens, strict=True)
                if one in cached.resumed_req_ids
            }
        for request_id, num_computed in starts.items():
            timeline = self.timelines.get(request_id)
            if timeline is None:
                continue
            request = self.requests[request_id]
            timeline.add(Mark.SCHEDULED, began_at)
            if timeline.task is Task.DECODE and num_computed < request.num_tokens - 1:
                timeline.add(Mark.RECOMPUTES, began_at)
            self._computing[request_id] = request.num_output_tokens
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        if not self._is_timed:
            return super().update_from_output(scheduler_output, model_runner_output)
        self._now = self.clock()
        if self.timelines:
            self._note_inline_encodes(scheduler_output, model_runner_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for request_id, num_known in list(self._computing.items()):
            request = self.requests.get(request_id)
            if request is not None and request.num_output_tokens > num_known:
                self._send(request, outputs)
        return outputs

    def _send(self, request: Request, outputs: dict[int, EngineCoreOutputs]) -> None:
        timeline = self._take(request)
        assert timeline is not None, "what computes towards a token has one"
        of_client = outputs.get(request.client_index)
        for output in of_client.outputs if of_client is not None else ():
            if output.request_id == request.request_id:
                output.kv_transfer_params = {**(output.kv_transfer_params or {}), TIMELINE: timeline.pack()}

    # -- images -------------------------------------------------------------------------------------------------------

    def note_begun(self, identifier: str, mark: Mark) -> None:
        """An image begins to be encoded, or pulled from another instance: ``ENCODE_BEGAN``, ``PULL_BEGAN``."""
        if self._is_timed:
            self._begun[identifier] = mark, self.clock()

    def note_ready(self, identifier: str) -> None:
        """It is there, or was lost on its way: for every request that waits for it, whoever it was begun for."""
        begun = self._begun.pop(identifier, None)
        if begun is None:
            return
        mark, began_at = begun
        for request_id, timeline in self.timelines.items():
            if any(feature.identifier == identifier for feature in self.requests[request_id].mm_features):
                _add_interval(timeline, mark, began_at, self.clock())

    def reset_encoder_cache(self) -> None:
        super().reset_encoder_cache()
        self._begun.clear()

    def _note_inline_encodes(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> None:
        """Those in front of the forward, where upstream has them."""
        if not isinstance(model_runner_output, EPDModelRunnerOutput) or model_runner_output.encode_times is None:
            return
        for request_id in scheduler_output.scheduled_encoder_inputs:
            if (timeline := self.timelines.get(request_id)) is not None:
                _add_interval(timeline, Mark.ENCODE_BEGAN, *model_runner_output.encode_times)


_END_OF = {Mark.ENCODE_BEGAN: Mark.ENCODE_ENDED, Mark.PULL_BEGAN: Mark.PULL_ENDED}


def _add_interval(timeline: Timeline, mark: Mark, began_at: float, ended_at: float) -> None:
    # It may have been begun for another request, before this one came.
    timeline.add(mark, max(began_at, timeline.first(Mark.QUEUED) or 0.0))
    timeline.add(_END_OF[mark], ended_at)
