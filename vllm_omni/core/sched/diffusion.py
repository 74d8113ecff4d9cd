"""``DiffusionScheduler``: which requests share the next call of a denoiser.

Also for engines that answer each request in one step (``OneShotExecutor``): their requests have one shape and end with
the first step that schedules them.

From: vLLM-Omni design document, section 7; paper, section 3.3.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_omni.config.diffusion import DIFFUSION, DiffusionConfig
from vllm_omni.core.sched.dit_cache import DiTCacheConfig, DiTCacheManager
from vllm_omni.diffusion.request import DiffusionRequest
from vllm_omni.messages.denoise_step import CallSize, DenoiseOutput, DenoiseSchedulerOutput, Failure
from vllm_omni.messages.payload import Payload, pack, unpack
from vllm_omni.messages.stage_step import STAGE_ARGS
from vllm_omni.relay.hub import process_hub

Shape = tuple[Any, ...]


@dataclass
class _Job:
    """One request that has not ended."""

    request: Request
    shape: Shape
    num_rows: int
    num_bytes: int | None = None  # of the call that it waits for; None: not known yet

    @property
    def has_begun(self) -> bool:
        return self.request.status is RequestStatus.RUNNING

    def take(self, call: CallSize) -> None:
        self.num_rows, self.num_bytes = call.num_rows, call.num_bytes


class DiffusionScheduler(Scheduler):
    """Each step has requests of one shape, which their runner puts into as few calls of the denoiser as it can.

    Within a shape the oldest come first; one that does not fit into what they leave is passed over for younger ones
    that do, and never for good: those before it end. Between shapes the one of the oldest request is served, unless
    another has waited for so many batches that it would wait too long otherwise (``max_wait_batches``).

    A request that has begun keeps its seat (``max_num_seqs``) until it ends: what it has computed lies with the runner,
    and nothing is ever computed twice. A shape without a seat is served when one is free.

    Adding, aborting and finishing are upstream's. What was aborted is told to the runner with the next step.
    """

    running: list[Request]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        additional_config = self.vllm_config.additional_config
        config = DiffusionConfig.of(additional_config)
        self.hub = process_hub(additional_config)
        self.max_rows = config.max_rows or self.max_num_running_reqs
        self.max_batch_bytes = config.max_batch_bytes
        self.max_wait_batches = config.max_wait_batches
        self.cache = DiTCacheManager(DiTCacheConfig(config.cache_bytes, config.cache_ttl_s))
        self.jobs: dict[str, _Job] = {}  # by request, in the order of arrival
        self.waits: dict[Shape, int] = {}  # batches of other shapes since the last one of each

    # -- a request begins and ends ------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        asked = diffusion_request(request)
        if asked is None:
            self.jobs[request.request_id] = _Job(request, (), 1)
        else:
            self.jobs[request.request_id] = _Job(request, shape_of(asked), asked.params.num_outputs_per_prompt)

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        # Upstream calls this for whatever way a request ends.
        self.jobs.pop(request.request_id, None)
        self.cache.release_cache(request.request_id)
        return super()._free_request(request, delay_free_blocks)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        # Upstream preempts what runs, to be computed again; here there is no such cache, and steps would be lost.
        return True

    # -- a step -------------------------------------------------------------------------------------------------------

    def schedule(self, throttle_prefills: bool = False) -> DenoiseSchedulerOutput:
        # Upstream plans token budgets, KV blocks and encoder inputs here; none of them exists for these requests.
        batch = self._choose_batch()
        begun = [job.request for job in batch if job.has_begun]
        new = [job.request for job in batch if not job.has_begun]
        for request in new:
            self.waiting.remove_request(request)
            request.status = RequestStatus.RUNNING
            if self.log_stats:  # as upstream: between this and the last output a request is executed
                request.record_event(EngineCoreEventType.SCHEDULED)
            self.running.append(request)
        self.cache.start_batch([job.request.request_id for job in batch])
        self.cache.clear_expired_cache()
        output = DenoiseSchedulerOutput(
            scheduled_new_reqs=[NewRequestData.from_request(request, block_ids=()) for request in new],
            scheduled_cached_reqs=_cached(begun),
            num_scheduled_tokens={job.request.request_id: 1 for job in batch},
            total_num_scheduled_tokens=len(batch),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            finished_req_ids=self.finished_req_ids,
            free_encoder_mm_hashes=[],
            cache_update=self.cache.take_update(),
        )
        self._update_after_schedule(output)
        return output

    def _choose_batch(self) -> list[_Job]:
        num_seats = self.max_num_running_reqs - len(self.running)
        if self.pause_state is PauseState.PAUSED_ALL:
            return []
        if self.pause_state is PauseState.PAUSED_NEW:
            num_seats = 0
        by_shape: dict[Shape, list[_Job]] = {}  # the shape of the oldest request first
        for job in self.jobs.values():
            by_shape.setdefault(job.shape, []).append(job)
        shapes = [shape for shape, jobs in by_shape.items() if num_seats or any(job.has_begun for job in jobs)]
        self.waits = {shape: self.waits.get(shape, 0) for shape in by_shape}
        if not shapes:
            return []
        chosen = self._choose_shape(shapes)
        for shape in by_shape:
            self.waits[shape] += 1
        self.waits[chosen] = 0
        return self._fill(by_shape[chosen], num_seats)

    def _choose_shape(self, shapes: Sequence[Shape]) -> Shape:
        """The first, if each of the others can then still be served in time, those that have waited longest first."""
        first, *others = shapes
        others.sort(key=self.waits.__getitem__, reverse=True)  # stable: of two, the one of the older request
        if any(self.waits[shape] + place >= self.max_wait_batches for place, shape in enumerate(others)):
            return others[0] if self.waits[others[0]] >= self.waits[first] else first
        return first

    def _fill(self, jobs: Iterable[_Job], num_seats: int) -> list[_Job]:
        batch: list[_Job] = []
        num_rows = num_bytes = 0
        # A call that is not known yet is taken to be like those of its shape that are.
        row_bytes = max((job.num_bytes // job.num_rows for job in jobs if job.num_bytes is not None), default=0)
        for job in jobs:
            if not job.has_begun and not num_seats:
                continue
            job_bytes = row_bytes * job.num_rows if job.num_bytes is None else job.num_bytes
            fits_rows = num_rows + job.num_rows <= self.max_rows
            fits_bytes = self.max_batch_bytes is None or num_bytes + job_bytes <= self.max_batch_bytes
            if batch and not (fits_rows and fits_bytes):  # alone, it goes whatever its size: it would never otherwise
                continue
            batch.append(job)
            num_rows += job.num_rows
            num_bytes += job_bytes
            num_seats -= not job.has_begun
        return batch

    # -- what became of it --------------------------------------------------------------------------------------------

    def update_from_output(
        self, scheduler_output: DenoiseSchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        self._release_dropped(model_runner_output)
        failed: list[tuple[Request, Failure]] = []
        if isinstance(model_runner_output, DenoiseOutput):
            for request_id, call in model_runner_output.pending.items():
                if (job := self.jobs.get(request_id)) is not None:
                    job.take(call)
                    if call.num_cache_bytes:
                        self.cache.allocate_cache(request_id, call.num_cache_bytes)  # else it goes on without
            # Upstream has no way to end a request of a step by an error; it passes over those that have ended.
            for request_id, failure in model_runner_output.failures.items():
                failed += [(one, failure) for one in self.finish_requests(request_id, RequestStatus.FINISHED_ERROR)]
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for request, failure in failed:
            core_outputs = outputs.setdefault(request.client_index, EngineCoreOutputs())
            core_outputs.outputs.append(_error_output(request, failure))
        return outputs

    def _release_dropped(self, output: ModelRunnerOutput) -> None:
        """What was published for requests that were aborted during the step, whose outputs upstream drops."""
        for request_id, packed in zip(output.req_ids, output.pooler_output or (), strict=False):
            if packed is not None and request_id not in self.requests:
                self.hub.release_payload(unpack(packed), for_all=True)


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


def _cached(requests: Sequence[Request]) -> CachedRequestData:
    return CachedRequestData(
        req_ids=[request.request_id for request in requests],
        resumed_req_ids=set(),
        new_token_ids=[],
        all_token_ids={},
        new_block_ids=[None for _ in requests],
        num_computed_tokens=[request.num_computed_tokens for request in requests],
        num_output_tokens=[request.num_output_tokens for request in requests],
    )


def diffusion_request(request: Request) -> DiffusionRequest | None:
    """The request as it was admitted; None for a stage of another kind."""
    params = request.sampling_params
    args = (params.extra_args or {}).get(STAGE_ARGS, {}) if params is not None else {}
    return DiffusionRequest.from_args(args[DIFFUSION]) if DIFFUSION in args else None


def shape_of(request: DiffusionRequest) -> Shape:
    """What determines the shape of a request's denoiser calls, as far as its parameters tell.

    Requests of one shape whose calls cannot be merged all the same are separated by the runner, which makes two calls.
    """
    params = request.params
    # A number among the pipeline's further arguments may be a size as well: seconds of sound, an area.
    extra = sorted((key, value) for key, value in params.extra_args.items() if isinstance(value, int | float))
    return (params.height, params.width, params.num_frames, *(image.size for image in request.images), *extra)
