"""``RankMemory``: a rank of a stage measures itself and takes its share of the device."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_utils import max_memory_usage_bytes
from vllm.v1.kv_cache_interface import KVCacheSpec

from vllm_omni import envs
from vllm_omni.model_executor.row_cache import bytes_with_rows
from vllm_omni.process.host_memory import host_memory
from vllm_omni.process.memory import UNPROFILED_DIVISOR, Device, StageMemory, name_rank
from vllm_omni.process.memory_division import MEMORY, MemoryDivision, MemorySection
from vllm_omni.process.proc import anonymous_rss, reset_peak_rss, transient_rss

UNCHECKED_SHARE = 1e-9
AUTO_LENGTH = -1  # of max_model_len: vLLM chooses what fits


class RankMemory:
    """Of the process that loads the model."""

    def __init__(self, vllm_config: VllmConfig, rank: int) -> None:
        tether = vllm_config.additional_config
        self._section = section = msgspec.convert(tether[MEMORY], MemorySection)
        rank %= vllm_config.parallel_config.local_world_size  # among those of this host
        self._device = section.devices[rank]
        self._name = name_rank(tether.stage, rank, len(section.devices))
        self._division = MemoryDivision(tether.directory, self._device, section.ranks[self._device], section.division)
        self._vllm_config = vllm_config

    @classmethod
    def of(cls, vllm_config: VllmConfig, rank: int = 0) -> RankMemory | None:
        """None for an engine that shares its device with no other: it was not started by a server."""
        return cls(vllm_config, rank) if MEMORY in (vllm_config.additional_config or {}) else None

    def report(self, weights: int) -> None:
        """Publish the needs of a stage without a KV cache, which takes no share."""
        self._publish(weights=weights, activations=weights // UNPROFILED_DIVISOR)

    def cache_bytes(self, weights: int, activations: int, specs: Mapping[str, KVCacheSpec]) -> int:
        """Publish this rank's needs, wait for the others, and return the bytes of its cache.

        Raises:
            DoesNotFit, DeadlineExceeded: see ``MemoryDivision.share_of``.
        """
        cache = configured_cache(
            self._vllm_config, specs, self._section.memory_share, self._now().total, weights + activations
        )
        smallest, largest = cache_bounds(self._vllm_config, specs)
        self._publish(
            weights=weights,
            activations=activations,
            cache_min=smallest,
            cache_max=largest,
            cache=cache,
            max_model_len=self._vllm_config.model_config.max_model_len,
            max_num_seqs=self._vllm_config.scheduler_config.max_num_seqs,
            dtype=dtype_name(self._vllm_config),
        )
        return self._division.share_of(self._name, self._now, envs.VLLM_OMNI_STAGE_READY_TIMEOUT_S)

    def _publish(self, **needs: Any) -> None:
        self._division.publish(StageMemory(stage=self._name, **needs))

    def _now(self) -> Device:
        return current_device(self._device)


def report_uncached(vllm_config: VllmConfig, rank: int, weights: int, specs: Mapping[str, KVCacheSpec]) -> None:
    """Report the memory of a rank without KV cache, which vLLM does not ask for what it can allocate."""
    memory = None if specs else RankMemory.of(vllm_config, rank)
    if memory is not None:
        memory.report(weights)


def dtype_name(vllm_config: VllmConfig) -> str:
    return str(vllm_config.model_config.dtype).removeprefix("torch.")


def current_device(name: str, ordinal: int | None = None) -> Device:
    """Read the memory of a device, or of the host ("cpu").

    Args:
        ordinal: of an accelerator, as this process sees it; default: the one that it uses.
    """
    if name == "cpu":
        host = host_memory()
        return Device(name=name, total=host.total, free=host.available, is_host=True)
    free, total = torch.accelerator.get_memory_info(ordinal)
    return Device(name=name, total=total, free=free)


def parameter_bytes(modules: Iterable[nn.Module]) -> int:
    """Bytes of the parameters; those that are shared count once."""
    storages = [one.untyped_storage() for module in modules for one in module.parameters()]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def cache_bounds(vllm_config: VllmConfig, specs: Mapping[str, KVCacheSpec]) -> tuple[int, int]:
    """Bytes for one request of ``max_model_len``, and for ``max_num_seqs`` of them, on one rank, with kept rows.

    Args:
        specs: of the rank's layers.
    """
    if not specs:
        return 0, 0
    block = bytes_with_rows(vllm_config, specs, bytes_per_block(specs))  # vLLM keeps one block empty
    request = bytes_with_rows(vllm_config, specs, max_memory_usage_bytes(vllm_config, specs.values()))
    is_auto = vllm_config.model_config.original_max_model_len == AUTO_LENGTH
    return 2 * block if is_auto else block + request, block + vllm_config.scheduler_config.max_num_seqs * request


def bytes_per_block(specs: Mapping[str, KVCacheSpec]) -> int:
    return sum(spec.page_size_bytes for spec in specs.values())


def configured_cache(
    vllm_config: VllmConfig, specs: Mapping[str, KVCacheSpec], memory_share: float | None, total: int, loaded: int
) -> int | None:
    """The cache that the configuration sizes: in blocks, in bytes, or as what is left of a share of the device.

    Args:
        memory_share: ``gpu_memory_utilization``, if it is configured.
        total: bytes of the device.
        loaded: bytes of weights and activations.
    """
    cache = vllm_config.cache_config
    if cache.num_gpu_blocks_override is not None:
        return cache.num_gpu_blocks_override * bytes_with_rows(vllm_config, specs, bytes_per_block(specs))
    if cache.kv_cache_memory_bytes is not None:
        return cache.kv_cache_memory_bytes
    return None if memory_share is None else int(total * memory_share) - loaded


def allocated_bytes(device: torch.device) -> int:
    """What this process has allocated on a device; on a CPU, its resident memory without files."""
    return anonymous_rss() if device.type == "cpu" else torch.accelerator.memory_allocated(device)


@contextmanager
def activation_bytes(device: torch.device) -> Iterator[Callable[[], int]]:
    """Measure the most that a block allocates beside what it leaves allocated; the result may be read after it.

    Only this process is measured. On a CPU it is 0 where the kernel does not let a process reset its peak.
    """
    measured = 0
    if device.type == "cpu":
        can_measure = reset_peak_rss()
        yield lambda: measured
        measured = transient_rss() if can_measure else 0
        return
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats(device)
    yield lambda: measured
    gc.collect()
    torch.accelerator.empty_cache()
    measured = torch.accelerator.max_memory_allocated(device) - torch.accelerator.memory_allocated(device)


@contextmanager
def no_memory_check(vllm_config: VllmConfig) -> Iterator[None]:
    """Skip vLLM's check of the memory that is free when a worker starts: it is for an engine alone on its device."""
    cache = vllm_config.cache_config
    share = cache.gpu_memory_utilization
    if MEMORY in (vllm_config.additional_config or {}):
        cache.gpu_memory_utilization = UNCHECKED_SHARE
    try:
        yield
    finally:
        cache.gpu_memory_utilization = share
