"""``WorkerlessExecutor``: base of executors whose model runs in the engine core's own process.

From: vLLM-Omni design document, section 9.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import cached_property
from typing import Any

from torch import nn
from vllm.profiler.wrapper import WorkerProfiler, create_worker_profiler
from vllm.tasks import SupportedTask
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.abstract import Executor
from vllm.v1.outputs import ModelRunnerOutput

from vllm_omni.model_executor.rank_memory import RankMemory, parameter_bytes
from vllm_omni.model_executor.step_threads import StepThreads
from vllm_omni.relay.hub import process_hub

# Calls without an effect here: there is no such state, or no other process that holds it.
_NOTHING_TO_DO = frozenset(
    ["reset_mm_cache", "reset_encoder_cache", "shutdown", "synchronize_device", "update_max_model_len"]
)


class WorkerlessExecutor(Executor):
    """Loads a model and runs its steps.

    A failed request is answered with its error; only the loss of the process fails the engine.
    """

    supports_pp = False

    def _init_executor(self) -> None:
        self.hub = process_hub(self.vllm_config.additional_config)
        self.hub.prepare()
        self._load_model()
        if (memory := RankMemory.of(self.vllm_config)) is not None:
            memory.report(parameter_bytes(self._networks()) + self._num_state_bytes())
        self._profiler: WorkerProfiler | None = None
        if self.vllm_config.device_config.device_type == "cpu":
            # Its long steps would delay the short steps of other stages.
            StepThreads(self.vllm_config.additional_config).set_for(0)

    @abstractmethod
    def _load_model(self) -> None: ...

    @abstractmethod
    def _networks(self) -> Iterable[nn.Module]:
        """The loaded model's."""

    def _num_state_bytes(self) -> int:
        """Bytes that the model has reserved for requests."""
        return 0

    @abstractmethod
    def _execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Run one complete step; a step without requests reports those that have ended."""

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        if self._profiler is not None and scheduler_output.total_num_scheduled_tokens:
            self._profiler.step()
        output = self._execute(scheduler_output)
        if not non_block:
            return output
        future: Future[ModelRunnerOutput] = Future()
        future.set_result(output)
        return future

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Answer a call in place of a worker.

        Raises:
            ValueError: the call is not supported without workers.
        """
        if method == "relay_statistics":
            return self.hub.plain_statistics()
        if method == "release_payloads":
            return self.hub.release_encoded(*args)
        if method == "abort_published":
            return self.hub.abort_all()
        if method in _NOTHING_TO_DO:
            return None
        raise ValueError(f"this stage has no workers to call {method!r} on")

    # -- vLLM's interface of executors --------------------------------------------------------------------------------

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
    ) -> Any:
        """Answer the calls that need no workers; reject the others."""
        if not isinstance(method, str):
            raise ValueError(f"this stage has no workers to call {method!r} on")
        answers = [self._call(method, *args, **(kwargs or {}))]
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
        """Profile as upstream's workers do: from the next step on, to a trace file in the configured directory."""
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
        return [["NHD"]]  # vLLM asserts that every worker has one, even without a cache

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
