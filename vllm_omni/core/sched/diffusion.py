"""``DiffusionScheduler``: which requests share the next call of a denoiser.

From: vLLM-Omni design document, section 7; paper, section 3.3.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_omni.config.diffusion import DIFFUSION, DiffusionConfig
from vllm_omni.core.sched.dit_cache import DiTCacheConfig, DiTCacheManager
from vllm_omni.core.sched.generation import GenerationScheduler
from vllm_omni.diffusion.request import DiffusionRequest
from vllm_omni.messages.denoise_step import CallSize, DenoiseOutput, DenoiseSchedulerOutput
from vllm_omni.messages.stage_step import STAGE_ARGS

Shape = tuple[Any, ...]


@dataclass
class _Job:
    """One request that has not ended."""

    request: Request
    shape: Shape
    num_rows: int
    num_bytes: int | None = None  # of its next denoiser call; None: not known yet

    @property
    def is_running(self) -> bool:
        return self.request.status is RequestStatus.RUNNING


class DiffusionScheduler(GenerationScheduler):
    """Each step has requests of one shape, which their runner puts into as few calls of the denoiser as it can.

    The lowest ``priority`` comes first, and within one priority the oldest. A request that does not fit beside those
    before it is passed over for others that do; the requests before it end, so it does not starve. Between shapes with
    a request of the lowest priority, that of the oldest is served, unless another would otherwise wait for more than
    ``max_wait_batches`` batches.

    A request that has started keeps its slot (one of ``max_num_seqs``) until it ends: its intermediate results are in
    the runner, and nothing is computed twice. A shape whose requests have no slot is served once one is free.

    The runner is notified of aborts with the next step.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = DiffusionConfig.of(self.vllm_config.additional_config)
        self.max_rows = config.max_rows or self.max_num_running_reqs
        self.max_batch_bytes = config.max_batch_bytes
        self.max_wait_batches = config.max_wait_batches
        self.cache = DiTCacheManager(DiTCacheConfig(config.cache_bytes, config.cache_ttl_s))
        self.jobs: dict[str, _Job] = {}  # by request, in the order of arrival
        self.waits: dict[Shape, int] = {}  # batches of other shapes since the last one of each

    # -- start and end of a request -----------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        args = diffusion_request(request)
        self.jobs[request.request_id] = _Job(request, shape_of(args), args.params.num_outputs_per_prompt)

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        # Upstream calls this however a request ends.
        self.jobs.pop(request.request_id, None)
        self.cache.release_cache(request.request_id)
        return super()._free_request(request, delay_free_blocks)

    # -- scheduling ---------------------------------------------------------------------------------------------------

    def schedule(self, throttle_prefills: bool = False) -> DenoiseSchedulerOutput:
        batch = [job.request for job in self._choose_batch()]
        fields = self._start_step(batch)
        self.cache.start_batch([request.request_id for request in batch])
        self.cache.clear_expired_cache()
        output = DenoiseSchedulerOutput(**fields, cache_update=self.cache.take_update())
        self._update_after_schedule(output)
        return output

    def _choose_batch(self) -> list[_Job]:
        num_slots = self.max_num_running_reqs - len(self.running)
        if self.pause_state is PauseState.PAUSED_ALL:
            return []
        if self.pause_state is PauseState.PAUSED_NEW:
            num_slots = 0
        by_shape: dict[Shape, list[_Job]] = {}  # the shape of the most urgent request first
        for job in sorted(self.jobs.values(), key=lambda job: job.request.priority):  # stable: the oldest first
            by_shape.setdefault(job.shape, []).append(job)
        urgency: dict[Shape, int] = {}  # of the shapes of which a request can run
        for shape, jobs in by_shape.items():
            if priorities := [job.request.priority for job in jobs if num_slots or job.is_running]:
                urgency[shape] = min(priorities)
        self.waits = {shape: self.waits.get(shape, 0) for shape in by_shape}
        if not urgency:
            return []
        most = min(urgency.values())
        chosen = self._choose_shape([shape for shape in urgency if urgency[shape] == most])
        for shape in by_shape:
            self.waits[shape] += 1
        self.waits[chosen] = 0
        return self._fill(by_shape[chosen], num_slots)

    def _choose_shape(self, shapes: Sequence[Shape]) -> Shape:
        """Choose the first shape if all others can still be served in time; else the one that has waited longest."""
        first, *others = shapes
        others.sort(key=self.waits.__getitem__, reverse=True)  # stable: of two, the one of the older request
        if any(self.waits[shape] + place >= self.max_wait_batches for place, shape in enumerate(others)):
            return others[0] if self.waits[others[0]] >= self.waits[first] else first
        return first

    def _fill(self, jobs: Iterable[_Job], num_slots: int) -> list[_Job]:
        batch: list[_Job] = []
        num_rows = num_bytes = 0
        # A call of unknown size is assumed to be as large as the known ones of its shape.
        row_bytes = max((job.num_bytes // job.num_rows for job in jobs if job.num_bytes is not None), default=0)
        for job in jobs:
            if not job.is_running and not num_slots:
                continue
            job_bytes = row_bytes * job.num_rows if job.num_bytes is None else job.num_bytes
            fits_rows = num_rows + job.num_rows <= self.max_rows
            fits_bytes = self.max_batch_bytes is None or num_bytes + job_bytes <= self.max_batch_bytes
            if batch and not (fits_rows and fits_bytes):  # alone it is scheduled at any size, or it would never be
                continue
            batch.append(job)
            num_rows += job.num_rows
            num_bytes += job_bytes
            num_slots -= not job.is_running
        return batch

    # -- results of a step --------------------------------------------------------------------------------------------

    def update_from_output(
        self, scheduler_output: DenoiseSchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        if isinstance(model_runner_output, DenoiseOutput):
            self._take_calls(model_runner_output.pending)
        return super().update_from_output(scheduler_output, model_runner_output)

    def _take_calls(self, calls: Mapping[str, CallSize]) -> None:
        for request_id, call in calls.items():
            if (job := self.jobs.get(request_id)) is not None:
                job.num_rows, job.num_bytes = call.num_rows, call.num_bytes
                if call.num_cache_bytes:
                    self.cache.allocate_cache(request_id, call.num_cache_bytes)  # without room it runs uncached


def diffusion_request(request: Request) -> DiffusionRequest:
    """Read the request as it was admitted."""
    assert request.sampling_params is not None and request.sampling_params.extra_args is not None
    return DiffusionRequest.from_args(request.sampling_params.extra_args[STAGE_ARGS][DIFFUSION])


def shape_of(request: DiffusionRequest) -> Shape:
    """Derive the shape of a request's denoiser calls, as far as its parameters determine it.

    Where the calls of two requests of one shape cannot be merged after all, the runner makes two calls.
    """
    params = request.params
    # A number among the pipeline's further arguments may be a size as well: seconds of sound, an area.
    extra = sorted((key, value) for key, value in params.extra_args.items() if isinstance(value, int | float))
    return (params.height, params.width, params.num_frames, *(image.size for image in request.images), *extra)
