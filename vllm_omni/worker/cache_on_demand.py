"""``CacheOnDemand``: a KV cache on a CPU takes memory as it is used, not all of it at the start."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from vllm import envs
from vllm.config import CacheConfig

LEAST_BYTES = 1 << 20


def is_sized(cache: CacheConfig) -> bool:
    """Whether the user has given the cache's size, in bytes, blocks or by ``VLLM_CPU_KVCACHE_SPACE``.

    A size that the stages have divided among themselves is taken at the start: another server that starts on this
    machine must not count on it.
    """
    sizes = cache.kv_cache_memory_bytes, cache.num_gpu_blocks_override, envs.VLLM_CPU_KVCACHE_SPACE
    return any(size is not None for size in sizes)


class CacheOnDemand(TorchFunctionMode):
    """Inside, large ``torch.zeros`` of bytes on the CPU are pages that the kernel gives when they are first written.

    Upstream allocates the cache with ``torch.zeros``, which writes all of it: a gigabyte of resident memory for each
    engine, whether requests need it or not.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        is_large = func is torch.zeros and len(args) == 1 and isinstance(args[0], int) and args[0] >= LEAST_BYTES
        is_bytes = given.get("dtype") is torch.int8 and torch.device(given.get("device", "cpu")).type == "cpu"
        if is_large and is_bytes:
            pages = mmap.mmap(-1, args[0], flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            return torch.frombuffer(pages, dtype=torch.int8)
        return func(*args, **given)
