"""``GenerationScheduler``: requests without token steps, such as a vocoder's, that ``GenerationExecutor`` answers.

From: vLLM-Omni (paper), section 3.3 (generation engines without token steps).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_omni.core.sched.frame_stream import FrameStream
from vllm_omni.core.sched.read_window import num_read_of
from vllm_omni.core.sched.unqueued import add_outputs, last_output
from vllm_omni.messages.denoise_step import DenoiseOutput
from vllm_omni.messages.payload import Payload, pack, unpack
from vllm_omni.messages.stage_step import StreamSchedulerOutput
from vllm_omni.relay.hub import process_hub


class GenerationScheduler(Scheduler):
    """Each step has the oldest requests, up to ``max_num_seqs``; each of them ends with the step.

    A request that reads a stream of frames keeps its slot until the stream has ended, and is in the steps for which it
    has enough frames. Its model has state for it, for at most ``max_num_seqs`` requests; others wait.

    Upstream's ``Scheduler`` adds, aborts and finishes the requests. It plans token budgets, KV blocks and encoder
    inputs, none of which they have, so ``schedule`` is replaced and upstream's bookkeeping around it is kept.
    """

    running: list[Request]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.hub = process_hub(self.vllm_config.additional_config)
        self.streams: dict[str, FrameStream] = {}  # by request

    # -- start and end of a request -----------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        if (num_read := num_read_of(request)) is not None:
            stream = self.streams.get(request.request_id)
            if stream is not None and stream.window is not None:
                stream.window.note_read(num_read)
            return
        super().add_request(request)
        if (stream := FrameStream.of(request, self.hub)) is not None:
            self.streams[request.request_id] = stream

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        # Upstream calls this however a request ends.
        if (stream := self.streams.pop(request.request_id, None)) is not None:
            stream.close()
        return super()._free_request(request, delay_free_blocks)

    # -- one step -----------------------------------------------------------------------------------------------------

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        return True  # there is none; upstream would preempt running requests, whose steps would be lost

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        batch = self._ready_requests() if self.pause_state is not PauseState.PAUSED_ALL else []
        ids = [request.request_id for request in batch]
        streams = {one: self.streams[one].take() for one in ids if one in self.streams}
        output = StreamSchedulerOutput(**self._start_step(batch), streams=streams)
        self._update_after_schedule(output)
        return output

    def _ready_requests(self) -> list[Request]:
        """The running requests that a step can continue, and the oldest ready ones for the free slots."""
        ready = [one for one in self.requests.values() if self._is_ready(one)]
        num_slots = 0 if self.pause_state is PauseState.PAUSED_NEW else self.max_num_running_reqs - len(self.running)
        new = [one for one in ready if one.status is not RequestStatus.RUNNING]
        return [one for one in ready if one.status is RequestStatus.RUNNING] + new[:num_slots]

    def _is_ready(self, request: Request) -> bool:
        stream = self.streams.get(request.request_id)
        return stream is None or stream.is_ready()

    def _start_step(self, batch: Sequence[Request]) -> dict[str, Any]:
        """Move the batch's new requests to ``running``; returns the fields of its ``SchedulerOutput``."""
        cached = [request for request in batch if request.status is RequestStatus.RUNNING]
        new = [request for request in batch if request.status is not RequestStatus.RUNNING]
        for request in new:
            self.waiting.remove_request(request)
            request.status = RequestStatus.RUNNING
            if self.log_stats:  # as upstream: a request counts as executing between this event and its last output
                request.record_event(EngineCoreEventType.SCHEDULED)
            self.running.append(request)
        return {
            "scheduled_new_reqs": [NewRequestData.from_request(request, block_ids=()) for request in new],
            "scheduled_cached_reqs": CachedRequestData(
                req_ids=[request.request_id for request in cached],
                resumed_req_ids=set(),
                new_token_ids=[],
                all_token_ids={},
                new_block_ids=[None for _ in cached],
                num_computed_tokens=[request.num_computed_tokens for request in cached],
                num_output_tokens=[request.num_output_tokens for request in cached],
            ),
            "num_scheduled_tokens": {request.request_id: 1 for request in batch},
            "total_num_scheduled_tokens": len(batch),
            "scheduled_spec_decode_tokens": {},
            "scheduled_encoder_inputs": {},
            "finished_req_ids": self.finished_req_ids,
            "free_encoder_mm_hashes": [],
        }

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        # Upstream drops the outputs of requests that were aborted during the step: release what they published.
        packs = model_runner_output.pooler_output or ()
        for request_id, packed in zip(model_runner_output.req_ids, packs, strict=False):
            if packed is not None and request_id not in self.requests:
                self.hub.release_payload(unpack(packed), for_all=True)
            elif packed is not None and (stream := self.streams.get(request_id)) is not None:
                stream.num_made += 1
        # Upstream cannot end a scheduled request with an error; its own update skips requests that have ended.
        failures = model_runner_output.failures if isinstance(model_runner_output, DenoiseOutput) else {}
        failed = [
            last_output(request, pooling_output=pack(Payload(values=failure.report)))
            for request_id, failure in failures.items()
            for request in self.finish_requests(request_id, RequestStatus.FINISHED_ERROR)
        ]
        return add_outputs(super().update_from_output(scheduler_output, model_runner_output), failed)
