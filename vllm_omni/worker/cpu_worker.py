"""The worker of autoregressive stages on the CPU: vLLM's own, whose runner is replaced after ``init_device``.

Importing vLLM's module replaces events, streams and the memory of devices in torch (``v1/worker/cpu/shm.py``): a
process that computes on another platform must not import this one.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from multiprocessing import parent_process
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_omni.errors import ConfigError
from vllm_omni.model_executor.rank_memory import (
    RankMemory,
    activation_bytes,
    allocated_bytes,
    no_memory_check,
    report_uncached,
)
from vllm_omni.model_executor.row_cache import bytes_without_rows
from vllm_omni.model_executor.step_threads import StepThreads
from vllm_omni.model_executor.weight_tensors import published_bytes
from vllm_omni.vllm_patches import (
    quiet_groups_of_one_rank,
    replace_zero_experts,
    torch_kernels_for_encoders,
    uncompiled_logprob_ranks,
    uncompiled_vocabulary_masks,
)
from vllm_omni.worker.ar_runner import ARModelRunner
from vllm_omni.worker.cache_on_demand import CacheOnDemand, is_sized
from vllm_omni.worker.encoders import ThreadedEncoder
from vllm_omni.worker.zero_experts import choose_experts, scale_by_zero_experts

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheSpec


NICENESS = 10  # where all cores are busy, a tenth of the time of normal processes

NUM_ENCODES_BESIDE = 8
NUM_TOKENS_BESIDE = 16


def generates_no_reply(config: VllmConfig) -> bool:
    """Whether the engine only encodes or prefills for other engines, which pull what it computes."""
    kv = config.kv_transfer_config
    return config.is_mm_encoder_only or (kv is not None and kv.kv_role == "kv_producer")


def _are_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal up to the order of summation."""
    return torch.allclose(one, other, rtol=0.0, atol=1e-6 * max(1.0, other.abs().max().item()))


class CPUARModelRunner(ARModelRunner, CPUModelRunner):
    """``ARModelRunner`` over the CPU's V1 runner."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.step_threads = StepThreads(self.vllm_config.additional_config)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        with torch_kernels_for_encoders() if self.encodes_in_thread else nullcontext():
            super().load_model(*args, **kwargs)

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        with CacheOnDemand() if is_sized(self.cache_config) else nullcontext():
            super().initialize_kv_cache(*args, **kwargs)

    @torch.inference_mode()
    def check_encode_in_thread(self) -> None:
        """Compare an encode beside forwards of the language model with each of them alone.

        Raises:
            ConfigError: the results differ.
        """
        assert self.mm_budget is not None
        inputs = self._get_mm_dummy_batch(self.mm_budget.get_modality_with_max_tokens(), 1)
        num_tokens = min(NUM_TOKENS_BESIDE, self.max_num_tokens)
        generator = torch.Generator().manual_seed(0)  # the process's own generator is for the requests
        self.inputs_embeds.gpu[:num_tokens].normal_(generator=generator)

        def encode() -> torch.Tensor:
            return torch.cat([one.flatten() for one in self.model.embed_multimodal(**inputs)])

        def forward() -> torch.Tensor:
            hidden: torch.Tensor = self._dummy_run(num_tokens, force_attention=True)[0].clone()
            return hidden

        for name, values in inputs.items():
            if isinstance(values, torch.Tensor) and values.is_floating_point():
                inputs[name] = torch.empty_like(values).normal_(generator=generator)
        image, hidden_alone = encode(), forward()
        encoder, are_same = ThreadedEncoder(), True
        images: list[torch.Tensor] = []
        encoder.start(lambda: images.extend(encode() for _ in range(NUM_ENCODES_BESIDE)))
        while not encoder.poll().has_ended:
            are_same &= _are_close(forward(), hidden_alone)
        encoder.close()
        if not are_same or not all(_are_close(one, image) for one in images):
            raise ConfigError(
                "epd.encode_in = 'thread': this model's image encoder and its language model compute other numbers "
                "beside each other than alone: give 'slices'"
            )
        self.inputs_embeds.gpu[:num_tokens].zero_()

    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        self.step_threads.set_for(scheduler_output.total_num_scheduled_tokens)
        return super().execute_model(scheduler_output, *args, **kwargs)


class CPUARWorker(CPUWorker):
    """Worker of an autoregressive stage on the CPU."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        with no_memory_check(vllm_config):
            super().__init__(vllm_config, *args, **kwargs)

    def init_device(self) -> None:
        uncompiled_logprob_ranks()
        uncompiled_vocabulary_masks()
        replace_zero_experts(choose_experts, scale_by_zero_experts)
        with quiet_groups_of_one_rank():
            super().init_device()
        # Upstream makes its own runner in init_device and loads weights later, so it holds none when it is replaced.
        self.model_runner = CPUARModelRunner(self.vllm_config, self.device)
        if generates_no_reply(self.vllm_config) and parent_process() is not None:
            # Instances that must keep gaps between tokens may compute on the same cores. This lowers the priority of
            # the computing thread and of those that it starts; never in the user's own process.
            os.nice(NICENESS)

    def load_model(self, **kwargs: Any) -> None:
        before = allocated_bytes(self.device)
        super().load_model(**kwargs)
        # Weights that engines share belong to the one that has written them, and are in no process's own memory.
        self.weight_bytes = max(0, allocated_bytes(self.device) - before) + published_bytes()

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        specs = super().get_kv_cache_spec()
        report_uncached(self.vllm_config, self.rank, self.weight_bytes, specs)
        return specs

    def determine_available_memory(self) -> int:
        # Upstream's arithmetic is for pages alone.
        return bytes_without_rows(self.vllm_config, super().get_kv_cache_spec(), self._cache_bytes())

    def _cache_bytes(self) -> int:
        memory = RankMemory.of(self.vllm_config, self.rank)
        if memory is None:
            return super().determine_available_memory()
        # Upstream warms up, then takes a share of the machine for this engine alone.
        with activation_bytes(self.device) as activations:
            if self._should_warm_up_model():
                self.model_runner.warming_up_model()
        return memory.cache_bytes(self.weight_bytes, activations(), super().get_kv_cache_spec())

    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()
        self.model_runner.compile_frames()
        if self.model_runner.encodes_in_thread:
            self.model_runner.check_encode_in_thread()
        return times

    def relay_statistics(self) -> dict[str, dict[str, int]]:
        """Statistics of this rank's relays, by backend, for ``StageEngine.relay_statistics``."""
        return self.model_runner.hub.plain_statistics()

    def release_payloads(self, payloads: list[bytes]) -> None:
        """Release what this rank has published, for the front end."""
        self.model_runner.hub.release_encoded(payloads)

    def abort_published(self) -> None:
        """Take back what this rank has published, for ``HostedEngine``: no front end knows of it."""
        self.model_runner.hub.abort_all()
