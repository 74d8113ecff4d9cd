"""Workers of autoregressive stages: vLLM's own, with our runner put in after ``init_device``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from vllm_omni.model_executor.step_threads import StepThreads
from vllm_omni.worker.ar_runner import ARModelRunner

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class CPUARModelRunner(ARModelRunner, CPUModelRunner):
    """``ARModelRunner`` over the CPU's V1 runner."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.step_threads = StepThreads(self.vllm_config.additional_config)

    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        self.step_threads.take(scheduler_output.total_num_scheduled_tokens)
        return super().execute_model(scheduler_output, *args, **kwargs)


class CPUARWorker(CPUWorker):
    """Worker of an autoregressive stage on the CPU."""

    def init_device(self) -> None:
        super().init_device()
        # Upstream builds its own runner in init_device and loads weights later, so replacing it here costs no weights.
        self.model_runner = CPUARModelRunner(self.vllm_config, self.device)

    def relay_statistics(self) -> dict[str, dict[str, int]]:
        """Of this rank's relays, by backend; asked for by ``StageEngine.relay_statistics``."""
        return self.model_runner.hub.plain_statistics()


class CUDAARWorker(Worker):
    """Worker of an autoregressive stage on CUDA, with V1's runner (``engine/stage.py``). Not run on a GPU yet."""

    def init_device(self) -> None:
        super().init_device()
        self.model_runner = ARModelRunner(self.vllm_config, self.device)

    def relay_statistics(self) -> dict[str, dict[str, int]]:
        """See ``CPUARWorker``."""
        return self.model_runner.hub.plain_statistics()
