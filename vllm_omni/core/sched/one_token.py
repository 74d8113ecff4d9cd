"""Steps of requests that have no tokens but the one that ends them: shared by diffusion and generation schedulers.

Upstream's ``Scheduler`` adds, aborts and finishes these requests; it plans token budgets, KV blocks and encoder inputs,
none of which they have, so ``schedule`` is replaced and upstream's bookkeeping around it is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.v1.core.sched.output import CachedRequestData, NewRequestData
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_omni.messages.denoise_step import DenoiseOutput
from vllm_omni.messages.failure import Failure
from vllm_omni.messages.payload import Payload, pack, unpack
from vllm_omni.relay.hub import RelayHub


def start_step(scheduler: Scheduler, batch: Sequence[Request]) -> dict[str, Any]:
    """Move the batch's new requests from ``waiting`` to ``running``; returns the fields of its ``SchedulerOutput``."""
    cached = [request for request in batch if request.status is RequestStatus.RUNNING]
    new = [request for request in batch if request.status is not RequestStatus.RUNNING]
    for request in new:
        scheduler.waiting.remove_request(request)
        request.status = RequestStatus.RUNNING
        if scheduler.log_stats:  # as upstream: a request counts as executing between this event and its last output
            request.record_event(EngineCoreEventType.SCHEDULED)
        scheduler.running.append(request)
    return {
        "scheduled_new_reqs": [NewRequestData.from_request(request, block_ids=()) for request in new],
        "scheduled_cached_reqs": _cached_data(cached),
        "num_scheduled_tokens": {request.request_id: 1 for request in batch},
        "total_num_scheduled_tokens": len(batch),
        "scheduled_spec_decode_tokens": {},
        "scheduled_encoder_inputs": {},
        "finished_req_ids": scheduler.finished_req_ids,
        "free_encoder_mm_hashes": [],
    }


def _cached_data(requests: Sequence[Request]) -> CachedRequestData:
    return CachedRequestData(
        req_ids=[request.request_id for request in requests],
        resumed_req_ids=set(),
        new_token_ids=[],
        all_token_ids={},
        new_block_ids=[None for _ in requests],
        num_computed_tokens=[request.num_computed_tokens for request in requests],
        num_output_tokens=[request.num_output_tokens for request in requests],
    )


def release_dropped(scheduler: Scheduler, hub: RelayHub, output: ModelRunnerOutput) -> None:
    """Release what was published for requests aborted during the step: upstream drops their outputs."""
    for request_id, packed in zip(output.req_ids, output.pooler_output or (), strict=False):
        if packed is not None and request_id not in scheduler.requests:
            hub.release_payload(unpack(packed), for_all=True)


def finish_failed(scheduler: Scheduler, output: ModelRunnerOutput) -> list[tuple[int, EngineCoreOutput]]:
    """End the requests that failed in the step; returns (client index, error output) of each.

    Upstream cannot end a scheduled request with an error. Its ``update_from_output``, which comes after this, skips
    requests that have ended.
    """
    if not isinstance(output, DenoiseOutput):
        return []
    return [
        (request.client_index, _error_output(request, failure))
        for request_id, failure in output.failures.items()
        for request in scheduler.finish_requests(request_id, RequestStatus.FINISHED_ERROR)
    ]


def _error_output(request: Request, failure: Failure) -> EngineCoreOutput:
    payload = Payload(values={"error": failure.message, "invalid": failure.is_invalid})
    return EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=[],
        finish_reason=request.get_finished_reason(),
        pooling_output=pack(payload),
        events=request.take_events(),
        trace_headers=request.trace_headers,
    )


def add_outputs(
    outputs: dict[int, EngineCoreOutputs], more: Sequence[tuple[int, EngineCoreOutput]]
) -> dict[int, EngineCoreOutputs]:
    """Add outputs of requests, each with its client's index, to those of a step."""
    for client_index, output in more:
        outputs.setdefault(client_index, EngineCoreOutputs()).outputs.append(output)
    return outputs
