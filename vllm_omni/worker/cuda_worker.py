"""The worker of autoregressive stages on CUDA: vLLM's own, whose runner is replaced after ``init_device``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.config import set_current_vllm_config
from vllm.v1.worker.gpu_worker import Worker

from vllm_omni.errors import ConfigError
from vllm_omni.model_executor.rank_memory import (
    RankMemory,
    activation_bytes,
    allocated_bytes,
    no_memory_check,
    report_uncached,
)
from vllm_omni.model_executor.row_cache import bytes_without_rows
from vllm_omni.model_executor.weight_tensors import published_bytes
from vllm_omni.process.shared_weights import LOAD_FORMAT, SHARED_WEIGHTS
from vllm_omni.worker.ar_runner import ARModelRunner

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheSpec


class CUDAARWorker(Worker):
    """Worker of an autoregressive stage on CUDA, with V1's runner (``engine/engine_args.py``)."""

    def init_device(self) -> None:
        with no_memory_check(self.vllm_config):
            super().init_device()
        self.model_runner = ARModelRunner(self.vllm_config, self.device)

    def load_model(self, **kwargs: Any) -> None:
        before = allocated_bytes(self.device)
        super().load_model(**kwargs)
        # Weights that engines share are counted by the one that has loaded them, and are no allocation of torch's.
        self.weight_bytes = max(0, allocated_bytes(self.device) - before) + published_bytes()

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        if SHARED_WEIGHTS in (self.vllm_config.additional_config or {}):
            raise ConfigError(
                f"weights cannot be reloaded with load_format = {LOAD_FORMAT!r}: the other engines of this GPU compute "
                "with the same memory; restart the server, or leave load_format out"
            )
        super().reload_weights(*args, **kwargs)

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        specs = super().get_kv_cache_spec()
        report_uncached(self.vllm_config, self.rank, self.weight_bytes, specs)
        return specs

    @torch.inference_mode()
    def determine_available_memory(self) -> int:
        # Upstream's arithmetic is for pages alone.
        return bytes_without_rows(self.vllm_config, super().get_kv_cache_spec(), self._cache_bytes())

    def _cache_bytes(self) -> int:
        memory = RankMemory.of(self.vllm_config, self.rank)
        if memory is None:
            return super().determine_available_memory()
        # Upstream measures the whole device, on which other stages load at the same time.
        with activation_bytes(self.device) as activations, set_current_vllm_config(self.vllm_config):
            self.model_runner.profile_run()
        return memory.cache_bytes(self.weight_bytes, activations(), super().get_kv_cache_spec())

    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()
        self.model_runner.compile_frames()
        if self.model_config.max_logprobs:  # upstream compiles for the first request with log probabilities
            logprobs = torch.zeros(1, self.model_config.get_vocab_size(), device=self.device)
            token_ids = torch.zeros(1, dtype=torch.int64, device=self.device)
            self.model_runner.sampler.gather_logprobs(logprobs, 1, token_ids)
        return times

    def relay_statistics(self) -> dict[str, dict[str, int]]:
        """See ``CPUARWorker``."""
        return self.model_runner.hub.plain_statistics()

    def release_payloads(self, payloads: list[bytes]) -> None:
        """See ``CPUARWorker``."""
        self.model_runner.hub.release_encoded(payloads)

    def abort_published(self) -> None:
        """See ``CPUARWorker``."""
        self.model_runner.hub.abort_all()
