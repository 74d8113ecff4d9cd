"""``DiffusionModelRunner``: load a diffusers pipeline and execute engine steps on it.

From: vLLM-Omni design document, sections 9 and 11.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import psutil
import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.tasks import SupportedTask
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

from vllm_omni.config.diffusion import DIFFUSION, DiffusionConfig
from vllm_omni.config.diffusion_params import DiffusionParams
from vllm_omni.diffusion.first_block_cache import FirstBlockCache
from vllm_omni.diffusion.limits import CallLimits
from vllm_omni.diffusion.loading import PipelineWeights, load_diffusers_pipeline, resolve_dtype
from vllm_omni.diffusion.pipeline_arguments import frame_rate
from vllm_omni.diffusion.pipeline_copy import networks_of
from vllm_omni.diffusion.request import DiffusionRequest
from vllm_omni.diffusion.stepper import PipelineStepper, StepOutcome
from vllm_omni.messages.denoise_step import (
    CallSize,
    DenoiseOutput,
    DenoiseSchedulerOutput,
    make_output,
)
from vllm_omni.messages.failure import Failure, make_failure
from vllm_omni.messages.payload import Payload
from vllm_omni.messages.stage_step import STAGE_ARGS, Readers, readers_of
from vllm_omni.relay.hub import process_hub
from vllm_omni.worker.stage_inputs import pull_inputs


@dataclass
class RunningParams:
    """Parameters of a request that has started, and its progress."""

    params: DiffusionParams
    readers: Readers
    step_index: int = 0  # denoise steps done at the latest engine step


class DiffusionModelRunner:
    """Runs a pipeline for ``DiffusionWorker`` or ``DiffusersPipelineExecutor``. Not thread-safe.

    Extends none of vLLM's runners, whose buffers are for tokens. A failing request ends alone; only an error of the
    device itself is raised, because nothing can be computed on the device afterwards.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        self.vllm_config = vllm_config
        self.device = device
        self.hub = process_hub(vllm_config.additional_config)
        self.hub.prepare()
        self.requests: dict[str, RunningParams] = {}  # by id, of the requests that have started

    def load_model(self) -> None:
        """Load the pipeline and check which of its networks can merge requests.

        Raises:
            MissingDependency, ConfigError: see ``load_diffusers_pipeline``.
        """
        config = DiffusionConfig.of(self.vllm_config.additional_config)
        model_config = self.vllm_config.model_config
        is_default_dtype = model_config.dtype == resolve_dtype("auto", self.device)
        load = partial(
            load_diffusers_pipeline,
            model_config.model,
            dtype="auto" if is_default_dtype else model_config.dtype,  # "auto" keeps some decoders in float32
            device=self.device,
            attention_backend=config.attention_backend,
            vae_tiling=config.vae_tiling,
            vae_slicing=config.vae_slicing,
            hub={
                "revision": model_config.revision,
                "cache_dir": self.vllm_config.load_config.download_dir,
                "token": model_config.hf_token,
                "trust_remote_code": model_config.trust_remote_code,
            },
            index=model_config.hf_config.model_config,
        )
        self.pipeline = load()
        self.weights = PipelineWeights(self.pipeline, self.device, load)
        self.cache = FirstBlockCache(threshold=config.cache_threshold) if config.cache_threshold else None
        max_rows = config.max_rows or self.vllm_config.scheduler_config.max_num_seqs
        self.limits = CallLimits(self.pipeline, config.limits)
        self.stepper = PipelineStepper(
            self.pipeline, max_rows=max_rows, cache=self.cache, merge=config.merge, limits=self.limits
        )

    # -- a step -------------------------------------------------------------------------------------------------------

    def execute_model(self, scheduler_output: SchedulerOutput) -> DenoiseOutput:
        """Forget finished requests, then call the denoiser once for each scheduled request.

        A step with new requests starts these only, so that it ends at once: the front end learns of its state (which
        requests run) when a step ends, and the first call may take long.
        """
        # Finished first: an id may be aborted and submitted again within one step.
        for request_id in scheduler_output.finished_req_ids:
            self.stepper.abort(request_id)
            self.requests.pop(request_id, None)
        failures: dict[str, Failure] = {}
        new = scheduler_output.scheduled_new_reqs
        self._start(new, failures)
        self._update_cache(scheduler_output)
        scheduled = list(scheduler_output.num_scheduled_tokens)
        outcomes = {} if new else self._step(scheduled, failures)
        payloads = self._publish(outcomes, failures) or self._notify_started(new, failures)
        ended = [one for one, outcome in outcomes.items() if outcome.output is not None and one not in failures]
        pending = {
            request_id: CallSize(outcome.num_rows, outcome.num_bytes, outcome.num_cache_bytes)
            for request_id, outcome in outcomes.items()
            if not outcome.has_ended
        }
        for request_id in (*ended, *failures):
            self.requests.pop(request_id, None)
        return make_output(scheduled, payloads, ended=ended, failures=failures, pending=pending)

    def _start(self, new_requests: Sequence[NewRequestData], failures: dict[str, Failure]) -> None:
        for new in new_requests:
            params = new.sampling_params
            assert params is not None and params.extra_args is not None, "every request has stage arguments"
            try:
                args = params.extra_args[STAGE_ARGS]
                request = DiffusionRequest.from_args(args[DIFFUSION])
                request = pull_inputs(request, self.hub)
                self.stepper.add(new.req_id, request)
                self.requests[new.req_id] = RunningParams(request.params, readers_of(args))
            except Exception as exc:  # the request fails, the engine must live
                failures[new.req_id] = make_failure(new.req_id, exc, invalid=ValueError)

    def _update_cache(self, scheduler_output: SchedulerOutput) -> None:
        if isinstance(scheduler_output, DenoiseSchedulerOutput):
            for request_id in scheduler_output.cache_update.dropped:
                self.stepper.drop_cache(request_id)
            for request_id, num_bytes in scheduler_output.cache_update.granted.items():
                self.stepper.grant_cache(request_id, num_bytes)

    def _step(self, request_ids: Sequence[str], failures: dict[str, Failure]) -> Mapping[str, StepOutcome]:
        if not request_ids:
            return {}
        try:
            return self.stepper.step(request_ids)
        except torch.AcceleratorError:  # nothing can be computed on this device afterwards
            raise
        except Exception as exc:  # a defect, since the stepper handles the errors of requests; the engine must live
            for request_id in request_ids:
                self.stepper.abort(request_id)
                failures[request_id] = make_failure(request_id, exc)
            return {}

    def _publish(self, outcomes: Mapping[str, StepOutcome], failures: dict[str, Failure]) -> dict[str, Payload]:
        payloads = {}
        for request_id, outcome in outcomes.items():
            try:
                if outcome.error is not None:
                    raise outcome.error
                if (payload := self._payload(request_id, outcome)) is not None:
                    payloads[request_id] = payload
            except torch.AcceleratorError:  # nothing can be computed on this device afterwards
                raise
            except Exception as exc:  # the request fails, the engine must live
                failures[request_id] = make_failure(request_id, exc)
        return payloads

    def _notify_started(
        self, new_requests: Sequence[NewRequestData], failures: Mapping[str, Failure]
    ) -> dict[str, Payload]:
        """Outputs of the requests that have started, where they ask for them."""
        started = [new.req_id for new in new_requests if new.req_id not in failures]
        notified = [one for one in started if self.requests[one].params.notify_start]
        return {one: Payload(values={"step": 0, "num_steps": 0}) for one in notified}

    def _payload(self, request_id: str, outcome: StepOutcome) -> Payload | None:
        """Output of a step for the user: the result, a preview, the progress, or nothing."""
        running = self.requests[request_id]
        progress = {"step": outcome.step_index, "num_steps": outcome.num_steps}
        if outcome.output is not None:
            fps = frame_rate(self.pipeline, running.params) if "frames" in outcome.output else None
            more = progress if fps is None else {**progress, "fps": fps}
            return self.hub.publish(request_id, {**outcome.output, **more}, **running.readers)
        # Guidance in two calls takes two engine steps for each denoise step.
        is_step = outcome.step_index > running.step_index
        running.step_index = outcome.step_index
        if outcome.preview is not None:
            return self.hub.publish(request_id, {"preview": outcome.preview, **progress})
        return Payload(values=progress) if is_step and running.params.progress else None

    # -- called by vLLM's worker ------------------------------------------------------------------------------------

    def get_model(self) -> Any:
        return self.pipeline

    def networks(self) -> Iterable[nn.Module]:
        return networks_of(self.pipeline).values()

    def get_kv_cache_spec(self) -> dict[str, Any]:
        return {}

    def get_supported_tasks(self) -> tuple[SupportedTask, ...]:
        return ("generate",)

    def reset_mm_cache(self) -> None:
        """Do nothing: input images arrive with each request and are not cached."""

    def reset_encoder_cache(self) -> None:
        """Do nothing; see ``reset_mm_cache``."""

    def shutdown(self) -> None:
        self.hub.close()

    # -- memory -------------------------------------------------------------------------------------------------------

    def available_memory(self) -> int:
        """Bytes free for requests: on a GPU within ``gpu_memory_utilization``, on a CPU what the system has free."""
        if self.device.type != "cuda":
            return int(psutil.virtual_memory().available)
        free, total = torch.cuda.mem_get_info(self.device)
        memory_share = self.vllm_config.cache_config.gpu_memory_utilization
        return max(0, int(total * memory_share) - (total - free))

    def sleep(self, level: int = 1) -> None:
        """Free the device's memory: level 1 keeps the weights in the CPU's memory, level 2 drops them."""
        if level > 1:
            self.weights.discard()
        else:
            self.weights.offload()

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        if not tags or "weights" in tags:
            self.weights.restore()

    def discard(self, tags: Sequence[str]) -> None:
        """Drop the weights if tagged; the tag "kv_cache" frees nothing, since requests own what they computed."""
        if "weights" in tags:
            self.weights.discard()

    def statistics(self) -> dict[str, Any]:
        """``StepperStatistics`` as plain types, plus the number of started requests and of rows the cache skipped."""
        return {
            **asdict(self.stepper.statistics()),
            "num_requests": len(self.requests),
            "num_rows_reused": 0 if self.cache is None else self.cache.statistics().num_rows_reused,
        }
