"""An executor without workers: the model runs in the engine core's own process, a batch at a time.

From: vLLM-Omni design document, section 9 (``DiffusersPipelineExecutor``), of which this is the part that generation
stages share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import cached_property
from typing import Any

import torch
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.models.registry import ModelRegistry
from vllm.profiler.wrapper import WorkerProfiler, create_worker_profiler
from vllm.tasks import SupportedTask
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.executor.abstract import Executor
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

from vllm_omni.model_executor.denoise_step import Failure, make_failure, make_output
from vllm_omni.model_executor.generation_model import GenerationModel
from vllm_omni.model_executor.stage_model import STAGE_ARGS
from vllm_omni.model_executor.step_threads import StepThreads
from vllm_omni.relay import Payload
from vllm_omni.relay.hub import process_hub

_ANSWERED = (
    "relay_statistics",
    "reset_mm_cache",
    "reset_encoder_cache",
    "shutdown",
    "synchronize_device",
    "update_max_model_len",
)


class OneShotExecutor(Executor):
    """Runs a ``GenerationModel``: the requests of a step are answered whole, in that step.

    A request that fails is answered with its error; only the loss of the process itself fails the engine.
    """

    supports_pp = False

    def _init_executor(self) -> None:
        self.hub = process_hub(self.vllm_config.additional_config)
        self.hub.prepare()
        self.model = self._load_model()
        self._profiler: WorkerProfiler | None = None
        if self.vllm_config.device_config.device_type == "cpu":
            StepThreads(self.vllm_config.additional_config).take(
                0
            )  # its long steps would hold up the others' short ones

    def _load_model(self) -> GenerationModel:
        model_config = self.model_config
        model_cls, _ = ModelRegistry.resolve_model_cls(model_config.architectures, model_config)
        model = model_cls(vllm_config=self.vllm_config)
        assert isinstance(model, GenerationModel), f"{model_cls.__name__} is not a GenerationModel"
        model.load_weights(DefaultModelLoader(self.load_config).get_all_weights(model_config, model))
        return model.to(self.vllm_config.device_config.device).eval()

    # -- a step -------------------------------------------------------------------------------------------------------

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        requests = scheduler_output.scheduled_new_reqs
        output = EMPTY_MODEL_RUNNER_OUTPUT
        if requests:
            if self._profiler is not None:
                self._profiler.step()
            request_ids = [request.req_id for request in requests]
            answers, failures = self._answer(requests)
            output = make_output(request_ids, answers, ended=answers.keys(), failures=failures)
        if not non_block:
            return output
        future: Future[ModelRunnerOutput] = Future()
        future.set_result(output)
        return future

    @torch.inference_mode()
    def _answer(self, requests: Sequence[NewRequestData]) -> tuple[dict[str, Payload], dict[str, Failure]]:
        failures: dict[str, Failure] = {}
        batch: dict[str, Any] = {}
        for request in requests:
            params = request.sampling_params
            args = (params.extra_args or {}).get(STAGE_ARGS, {}) if params is not None else {}
            try:
                batch[request.req_id] = self.model.read(args)
            except Exception as exc:  # the request fails, the engine core must live
                failures[request.req_id] = make_failure(request.req_id, exc)
        return self._generate(batch, failures), failures

    def _generate(self, batch: Mapping[str, Any], failures: dict[str, Failure]) -> dict[str, Payload]:
        if not batch:
            return {}
        try:
            outputs = self.model.generate(list(batch.values()))
        except Exception as exc:  # as above, and it costs the others of the batch no more than time
            if len(batch) == 1:
                failures |= {request_id: make_failure(request_id, exc) for request_id in batch}
                return {}
            return {key: one for item in batch.items() for key, one in self._generate(dict([item]), failures).items()}
        return {
            request_id: self.hub.publish(request_id, tensors)
            for request_id, tensors in zip(batch, outputs, strict=True)
        }

    # -- what an engine core asks of any executor ---------------------------------------------------------------------

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
    ) -> Any:
        """There are no workers: telling them to drop state they do not have is answered, other calls are refused."""
        if method not in _ANSWERED:
            raise ValueError(f"a generation stage has no workers to call {method!r} on")
        answers = [self.hub.plain_statistics() if method == "relay_statistics" else None]
        future: Future[list[Any]] = Future()
        future.set_result(answers)
        return future if non_block else answers

    def profile(
        self,
        is_start: bool = True,
        profile_prefix: str | None = None,
        *,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> None:
        """As upstream's workers: from the next step on, to a trace file in the configured directory."""
        config = self.vllm_config.profiler_config
        if config.profiler is None:
            raise ValueError("profiling is not enabled: give profiler_config")
        name = f"{profile_prefix or 'generation'}_rank0"
        if self._profiler is None:
            self._profiler = create_worker_profiler(config, worker_name=name, local_rank=0)
        if is_start:
            self._profiler.set_output_name(name)
            self._profiler.start(delay_iterations=delay_iterations, max_iterations=max_iterations)
        else:
            self._profiler.stop()

    def check_health(self) -> None:
        """Healthy as long as the process answers."""

    def get_kv_cache_specs(self) -> list[dict[str, Any]]:
        return [{}]

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        return [["NHD"]]  # vLLM asserts that every worker names one, also where there is no cache to lay out

    def set_kv_cache_layout(self, layout_name: str) -> None:
        pass

    def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
        pass

    def compile_or_warm_up_model(self) -> None:
        pass

    def shutdown(self) -> None:
        self.hub.close()

    @cached_property
    def supported_tasks(self) -> tuple[SupportedTask, ...]:
        return ("generate",)
