"""``DiffusionWorker``: one device of a diffusion stage, under vLLM's own executors.

From: vLLM-Omni design document, section 10.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.gpu_worker import Worker, init_worker_distributed_environment
from vllm.v1.worker.worker_base import CompilationTimes

from vllm_omni.model_executor.rank_memory import RankMemory, parameter_bytes
from vllm_omni.model_executor.stage_device import select_device
from vllm_omni.vllm_patches import quiet_groups_of_one_rank
from vllm_omni.worker.diffusion_runner import DiffusionModelRunner


class DiffusionWorker(Worker):
    """Runs a diffusers pipeline on one CPU or GPU.

    Overrides what upstream's worker does for language models only: KV cache, warm-up, and the memory pool for sleeping,
    which would have to hold diffusers' allocations.
    """

    model_runner: DiffusionModelRunner

    def init_device(self) -> None:
        self.device = select_device(self.parallel_config, self.local_rank)
        with quiet_groups_of_one_rank() if self.device.type == "cpu" else nullcontext():
            init_worker_distributed_environment(
                self.vllm_config,
                self.rank,
                self.distributed_init_method,
                self.local_rank,
                current_platform.dist_backend,
            )
        self.model_runner = DiffusionModelRunner(self.vllm_config, self.device)

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        self.model_runner.load_model()
        if (memory := RankMemory.of(self.vllm_config, self.rank)) is not None:
            memory.report(parameter_bytes(self.model_runner.networks()))

    def get_supported_kv_cache_layouts(self) -> list[str]:
        return ["NHD"]  # vLLM asserts that every worker names a layout, even without a KV cache

    def determine_available_memory(self) -> int:
        return self.model_runner.available_memory()

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        pass

    def compile_or_warm_up_model(self) -> CompilationTimes:
        return CompilationTimes(language_model=0.0, encoder=0.0)

    def update_max_model_len(self, max_model_len: int) -> None:
        pass

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        if self.profiler is not None and scheduler_output.total_num_scheduled_tokens:
            self.profiler.step()
        return self.model_runner.execute_model(scheduler_output)

    def sleep(self, level: int = 1) -> None:
        self.model_runner.sleep(level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        self.model_runner.wake_up(tags)

    def discard(self, tags: Sequence[str]) -> None:
        self.model_runner.discard(tags)

    def relay_statistics(self) -> dict[str, dict[str, int]]:
        """Read by ``StageEngine.relay_statistics``."""
        return self.model_runner.hub.plain_statistics()

    def abort_published(self) -> None:
        """See ``CPUARWorker``."""
        self.model_runner.hub.abort_all()

    def diffusion_statistics(self) -> dict[str, Any]:
        """Statistics of the runner, as from ``DiffusersPipelineExecutor``."""
        return self.model_runner.statistics()
