"""``DiffusersPipelineExecutor``: a diffusers pipeline in the engine core's own process.

From: vLLM-Omni design document, section 9.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from vllm_omni.model_executor.stage_device import select_device
from vllm_omni.model_executor.workerless_executor import WorkerlessExecutor

RUNNER = "vllm_omni.worker.diffusion_runner.DiffusionModelRunner"
"""Resolved by name, as vLLM's executors resolve ``worker_cls``: the package of runners imports this one."""


class DiffusersPipelineExecutor(WorkerlessExecutor):
    """Steps any diffusers pipeline on one device, without workers or messages.

    ``sleep`` and ``wake_up`` take upstream's levels and tags; the runner applies them to the weights.
    """

    def _load_model(self) -> None:
        self._failure_callback: Callable[[], None] | None = None
        self._failure: Exception | None = None
        self.runner = resolve_obj_by_qualname(RUNNER)(self.vllm_config, select_device(self.parallel_config))
        self.runner.load_model()

    def _networks(self) -> Iterable[nn.Module]:
        networks: Iterable[nn.Module] = self.runner.networks()
        return networks

    def _execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        try:
            output: ModelRunnerOutput = self.runner.execute_model(scheduler_output)
            return output
        except Exception as exc:  # the runner catches the errors of requests: this is the device, or a defect
            self._failure = exc
            if self._failure_callback is not None:
                self._failure_callback()
            raise

    def register_failure_callback(self, callback: Callable[[], None]) -> None:
        """Register a callback for when the executor can serve no further request."""
        self._failure_callback = callback

    def check_health(self) -> None:
        """Raises:
        RuntimeError: a step has failed as a whole.
        """
        if self._failure is not None:
            raise RuntimeError(f"the executor has failed: {self._failure}") from self._failure

    def determine_available_memory(self) -> list[int]:
        num_bytes: int = self.runner.available_memory()
        return [num_bytes]

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        match method:
            case "sleep" | "wake_up" | "discard":
                return getattr(self.runner, method)(*args, **kwargs)
            case "diffusion_statistics":
                return self.runner.statistics()
        return super()._call(method, *args, **kwargs)
