"""``RowCache``: the rows that later stages read, kept beside the KV pages of the same tokens.

A token that is found in the prefix cache is not computed, so it has no row of its own to publish. Its row is kept where
its keys and values are: both have one slot, are written in the same step, and are overwritten with the same block. So
rows need no eviction, no hashes and no count of readers: a request that holds the pages of a prefix holds its rows.

A dictionary of rows by block hash, of bounded size, was considered. It would keep rows of blocks that are gone and lack
those of others, so the scheduler would have to be notified of each; it would save memory where few prompts are spoken.
The rows of a 7B thinker take an eighth of its KV cache (7 KiB and 56 KiB a token).

Pages that a KV connector has pulled have no rows (``core.sched.cached_rows``); those of a pool have some
(``kv/pool/offload/spec.py``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, UniformTypeKVCacheSpecs

from vllm_omni.config.kv_pool import ROW_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

ROW_CACHE = "row_cache"
"""Key of ``additional_config`` of an engine that keeps rows if it can, and name of the setting."""


def keeps_rows(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> bool:
    """Whether an engine keeps rows: it is configured to, and has one block table, with a block for every token."""
    parallel = vllm_config.parallel_config
    if not _is_on(vllm_config) or parallel.pipeline_parallel_size > 1 or parallel.decode_context_parallel_size > 1:
        return False
    groups = kv_cache_config.kv_cache_groups
    return len(groups) == 1 and _has_all_tokens(groups[0].kv_cache_spec)


def _is_on(vllm_config: VllmConfig) -> bool:
    is_configured = bool((vllm_config.additional_config or {}).get(ROW_CACHE))
    return is_configured and bool(vllm_config.cache_config.enable_prefix_caching)


def _has_all_tokens(spec: KVCacheSpec) -> bool:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return all(_has_all_tokens(one) for one in spec.kv_cache_specs.values())
    return isinstance(spec, FullAttentionSpec)


# -- memory ------------------------------------------------------------------------------------------------------------


def row_bytes(vllm_config: VllmConfig) -> int:
    """Bytes of the rows of a token in an engine that keeps them, else 0: as wide as the model, and of its dtype."""
    model = vllm_config.model_config
    return model.get_hidden_size() * model.dtype.itemsize if _is_on(vllm_config) else 0


def pool_keeps_rows(vllm_config: VllmConfig) -> bool:
    """Whether all pages that an engine loads are those of a pool that have rows."""
    transfer = vllm_config.kv_transfer_config
    return transfer is not None and bool(transfer.kv_connector_extra_config.get(ROW_BYTES))


def row_cache_bytes(vllm_config: VllmConfig) -> int:
    """Bytes of all rows of an engine that has started; 0: it keeps none."""
    cache = vllm_config.cache_config
    return (cache.num_gpu_blocks or 0) * cache.block_size * row_bytes(vllm_config)


def bytes_with_rows(vllm_config: VllmConfig, specs: Mapping[str, KVCacheSpec], num_bytes: int) -> int:
    """Bytes of a KV cache, and of the rows of its tokens.

    Args:
        specs: of a rank's layers.
    """
    pages, rows = _block_bytes(vllm_config, specs)
    return math.ceil(num_bytes * (pages + rows) / pages) if rows else num_bytes


def bytes_without_rows(vllm_config: VllmConfig, specs: Mapping[str, KVCacheSpec], num_bytes: int) -> int:
    """What of that memory is left for the KV cache: the inverse of ``bytes_with_rows``."""
    pages, rows = _block_bytes(vllm_config, specs)
    return -(-num_bytes * pages // (pages + rows)) if rows else num_bytes


def _block_bytes(vllm_config: VllmConfig, specs: Mapping[str, KVCacheSpec]) -> tuple[int, int]:
    """Bytes of the pages of a block in all layers, and of its rows."""
    if not specs:
        return 0, 0
    block_size = next(iter(specs.values())).block_size
    return sum(spec.page_size_bytes for spec in specs.values()), block_size * row_bytes(vllm_config)


# -- the rows ----------------------------------------------------------------------------------------------------------


class RowCache:
    """The rows of all slots of a KV cache, on the device that computes them.

    Args:
        num_slots: tokens of the KV cache.
        row: any row, for its size and dtype, [1, size].
    """

    def __init__(self, num_slots: int, row: torch.Tensor) -> None:
        # Not initialized: on a CPU, memory is taken when a slot is first written.
        self._rows = row.new_empty((num_slots, *row.shape[1:]))

    @property
    def num_bytes(self) -> int:
        return self._rows.nbytes

    def pages(self, num_blocks: int) -> torch.Tensor:
        """The rows of each block as bytes: the cache itself, [num_blocks, bytes] int8."""
        return self._rows.view(num_blocks, -1).view(torch.int8)

    def write(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Keep the rows of a step.

        Args:
            slots: where the step has put the keys and values of its tokens, [num_tokens] int64, device.
            rows: [num_tokens, size], device.
        """
        self._rows[slots] = rows

    def read(self, block_ids: Sequence[int], block_size: int, start: int, end: int) -> torch.Tensor:
        """The rows of tokens of a request that holds their blocks: a new tensor, [end - start, size], device.

        Args:
            block_ids: of the request, from its first token on.
        """
        tokens = torch.arange(start, end)
        blocks = torch.as_tensor(block_ids, dtype=torch.int64)
        slots = blocks[tokens // block_size] * block_size + tokens % block_size
        return self._rows[slots.to(self._rows.device)]
