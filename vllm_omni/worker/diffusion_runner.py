"""``DiffusionModelRunner``: the runner of a diffusion stage in a worker.

From: vLLM-Omni design document, section 11.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.tasks import SupportedTask
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from vllm_omni.model_executor.diffusers_runner import DiffusersRunner


class DiffusionModelRunner:
    """What ``DiffusionWorker`` asks of a runner. No language model's runner is extended: its buffers are for tokens."""

    steps: DiffusersRunner

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        self.vllm_config = vllm_config
        self.device = device

    def load_model(self) -> None:
        self.steps = DiffusersRunner(self.vllm_config, self.device)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        return self.steps.execute(scheduler_output)

    def get_model(self) -> Any:
        return self.steps.pipeline

    def get_kv_cache_spec(self) -> dict[str, Any]:
        return {}

    def get_supported_tasks(self) -> tuple[SupportedTask, ...]:
        return ("generate",)

    def reset_mm_cache(self) -> None:
        """Images come with the request that needs them."""

    def reset_encoder_cache(self) -> None:
        """As above."""

    def shutdown(self) -> None:
        self.steps.hub.close()
