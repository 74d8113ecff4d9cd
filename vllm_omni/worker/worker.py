"""Workers of autoregressive stages: vLLM's own, with our runner put in after ``init_device``."""

from __future__ import annotations

from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from vllm_omni.worker.ar_runner import ARModelRunner


class CPUARModelRunner(ARModelRunner, CPUModelRunner):
    """``ARModelRunner`` over the CPU's V1 runner."""


class CPUARWorker(CPUWorker):
    """Worker of an autoregressive stage on the CPU."""

    def init_device(self) -> None:
        super().init_device()
        # Upstream builds its own runner in init_device and loads weights later, so replacing it here costs no weights.
        self.model_runner = CPUARModelRunner(self.vllm_config, self.device)


class CUDAARWorker(Worker):
    """Worker of an autoregressive stage on CUDA, with V1's runner (``engine/stage.py``). Not run on a GPU yet."""

    def init_device(self) -> None:
        super().init_device()
        self.model_runner = ARModelRunner(self.vllm_config, self.device)
