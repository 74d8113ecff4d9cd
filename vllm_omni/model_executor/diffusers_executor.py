"""``DiffusersPipelineExecutor``: a diffusers pipeline in the engine core's own process.

From: vLLM-Omni design document, section 9.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from vllm_omni.model_executor.diffusers_runner import DiffusersRunner
from vllm_omni.model_executor.workerless_executor import WorkerlessExecutor


class DiffusersPipelineExecutor(WorkerlessExecutor):
    """Steps any pipeline of diffusers on one device; no workers, no messages.

    ``sleep`` and ``wake_up`` are upstream's, with its tags: what they do to the weights is ``DiffusersRunner``'s.
    """

    def _load_model(self) -> None:
        self._failure_callback: Callable[[], None] | None = None
        self._failure: Exception | None = None
        device = torch.device(self.vllm_config.device_config.device)
        if device.type == "cuda":
            torch.cuda.set_device(device.index or 0)
        self.runner = DiffusersRunner(self.vllm_config, device)

    def _execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        try:
            return self.runner.execute(scheduler_output)
        except Exception as exc:  # requests fail inside: this is the device, or a defect of ours
            self._failure = exc
            if self._failure_callback is not None:
                self._failure_callback()
            raise

    def register_failure_callback(self, callback: Callable[[], None]) -> None:
        """Called when no request can be served any more."""
        self._failure_callback = callback

    def check_health(self) -> None:
        """Raises:
        RuntimeError: a step has failed as a whole.
        """
        if self._failure is not None:
            raise RuntimeError(f"the executor has failed: {self._failure}") from self._failure

    def determine_available_memory(self) -> list[int]:
        return [self.runner.available_memory()]

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        match method:
            case "sleep" | "wake_up" | "discard":
                return getattr(self.runner, method)(*args, **kwargs)
            case "diffusion_statistics":
                return self.runner.statistics()
        return super()._call(method, *args, **kwargs)
