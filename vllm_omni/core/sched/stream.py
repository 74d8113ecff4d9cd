"""``StreamScheduler``: vLLM's scheduler for autoregressive stages, which holds requests that wait for another stage.

A request of a consumer waits for the rows of its stream; one of a producer, for credits (``stream_gates.py``). Rows
leave with the step that needs them, in its ``SchedulerOutput``, and so reach every rank of a tensor-parallel stage.

From: vLLM-Omni (paper), section 3.3 (stages that overlap); SGLang-Omni (communication, Streaming Flow).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_omni.core.sched.stream_gates import StreamGates
from vllm_omni.core.sched.timeline import RequestTimelines
from vllm_omni.kv.kv_connector import RelayKVConnector
from vllm_omni.messages.stage_step import StreamSchedulerOutput
from vllm_omni.messages.timeline import TIMELINES
from vllm_omni.relay.hub import process_hub


class StreamScheduler(Scheduler):
    """Requests that wait for a stream keep their place in ``running``, their KV blocks and their slot in the batch.

    Attributes:
        gates: the streams of requests.
        timelines: when what was done for a request, if the engine's ``additional_config`` asks for it.
        clock: seconds, comparable to vLLM's ``Request.arrival_time``.
    """

    running: list[Request]
    clock: Callable[[], float] = staticmethod(time.time)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        additional_config = self.vllm_config.additional_config
        self.hub = process_hub(additional_config)
        self.gates = StreamGates(self.hub)
        self.timelines = RequestTimelines(lambda: self.clock(), is_on=bool(additional_config.get(TIMELINES)))

    # -- start and end of a request -----------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        if request.request_id not in self.requests:  # else a session's next input
            self.timelines.note_queued(request)
        super().add_request(request)
        self.gates.add(request)

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        # Upstream calls this however a request ends, and sends what it returns with the request's last output.
        self.gates.remove(request.request_id)
        kv_transfer_params, ec_transfer_params = super()._free_request(request, delay_free_blocks)
        if timeline := self.timelines.end(request):
            kv_transfer_params = {**(kv_transfer_params or {}), **timeline}
        return kv_transfer_params, ec_transfer_params

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        finished = super().finish_requests(request_ids, finished_status)
        if finished_status is RequestStatus.FINISHED_ABORTED and isinstance(self.connector, RelayKVConnector):
            # Upstream ignores requests that had just ended; their last output may never have been read.
            ids = {request_ids} if isinstance(request_ids, str) else set(request_ids or ())
            self.connector.abort_announced(ids - {request.request_id for request in finished})
        return finished

    def num_external_tokens(self, request: Request) -> int:
        """Tokens of a waiting request's prompt that are not computed here, as their KV pages will be pulled."""
        if self.connector is None or request.num_computed_tokens:
            return 0
        if isinstance(self.connector, RelayKVConnector):
            return self.connector.num_announced_tokens(request)
        # vLLM's own connectors remove the mark once they have started.
        is_external = (request.kv_transfer_params or {}).get("do_remote_prefill")
        return request.num_prompt_tokens if is_external else 0

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)
        self.timelines.note_preempted(request)

    def _set_kv_fetch_stage(self, request: Request, stage: str | None) -> None:
        # Upstream tracks here, for its statistics, the requests whose KV cache is being transferred.
        super()._set_kv_fetch_stage(request, stage)
        self.timelines.note_kv_fetch(request, stage)

    def reset_encoder_cache(self) -> None:
        super().reset_encoder_cache()
        self.timelines.forget_images()

    # -- one iteration ------------------------------------------------------------------------------------------------

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        started_at = self.clock()
        output = self._schedule_open(throttle_prefills) if self.gates else super().schedule(throttle_prefills)
        self.timelines.note_scheduled(output, self.requests, started_at)
        return output

    def _schedule_open(self, throttle_prefills: bool) -> SchedulerOutput:
        """Schedule without the running requests that wait for a stream; waiting ones are skipped by upstream's hook."""
        running = self.running
        held = {request for request in running if self.gates.is_held(request)}
        if not held:
            return self._with_rows(super().schedule(throttle_prefills))
        self.running = [request for request in running if request not in held]
        # Upstream's count of requests that are not scheduled and keep their place in the runner's batch.
        self.num_waiting_for_streaming_input += len(held)
        try:
            output = super().schedule(throttle_prefills)
        finally:
            self.num_waiting_for_streaming_input -= len(held)
            kept = set(self.running)
            old = [request for request in running if request in held or request in kept]
            self.running = old + [request for request in self.running if request not in set(running)]
        if not output.total_num_scheduled_tokens and self.waiting:
            self._preempt_producer(held)
        return self._with_rows(output)

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        # Upstream's hook for requests that are not ready: it skips them without holding up those behind them.
        return not self.gates.is_held(request) and super()._handle_blocked_waiting_request(request)

    def _preempt_producer(self, held: set[Request]) -> None:
        """Preempt one request without credits if that lets a waiting request be admitted.

        Otherwise two stages can wait for each other: this one for a reader that the next stage has not admitted, and
        the next stage for rows of a request that is not admitted here.
        """
        if all(self.gates.is_held(waiting) for waiting in self.waiting):
            return
        for request in reversed(self.running):
            if request in held and self.gates.writes_stream(request):
                self.running.remove(request)
                self._preempt_request(request, time.monotonic())
                return

    def _with_rows(self, output: SchedulerOutput) -> SchedulerOutput:
        streams = self.gates.take_rows(output.num_scheduled_tokens)
        return StreamSchedulerOutput(**vars(output), streams=streams) if streams else output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        self.timelines.note_step_end(scheduler_output, model_runner_output)
        self.gates.watch_outputs(model_runner_output, self.requests)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self.timelines.add_to(outputs, self.requests)
        return outputs
