"""``PoolOffloadingSpec``: vLLM's offloading of KV pages, on a CPU as on a GPU, with the rows of their tokens."""

from __future__ import annotations

from dataclasses import replace

import torch
from vllm.distributed.kv_transfer.kv_connector.base import KVConnectorBase
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor, OffloadingWorker
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from vllm_omni.config.kv_pool import ROW_BYTES
from vllm_omni.kv.pool.offload.host_copy import HostCopyWorker


class PoolOffloadingSpec(TieringOffloadingSpec):
    """As upstream, whose worker copies by CUDA streams: on a CPU, ``HostCopyWorker`` copies.

    Attributes:
        rows: what a rank keeps for the blocks beside its KV cache (``RowCache``), [num_blocks, bytes] int8; it is set
            before the caches are registered, by ranks that keep rows.
    """

    rows: torch.Tensor | None = None
    _copier: HostCopyWorker | None = None

    def __init__(self, config: OffloadingConfig) -> None:
        num_bytes = config.worker_kv_bytes_per_block
        num_bytes += config.extra_config.get(ROW_BYTES, 0) * config.groups[0].tokens_per_block
        super().__init__(replace(config, worker_kv_bytes_per_block=num_bytes))

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self.rows is not None:
            kv_caches = with_rows(kv_caches, self.rows)
        if not current_platform.is_cpu():
            return super().get_worker(kv_caches)
        if self._copier is None:
            if self.config.canonical_layout:
                self._validate_canonical_refs(kv_caches)
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            try:
                self._copier = HostCopyWorker(kv_caches, self.blocks_per_chunk, region, self.config.canonical_layout)
            except Exception:
                region.cleanup()
                raise
        return self._copier


def keep_rows(connector: KVConnectorBase, rows: torch.Tensor) -> None:
    """Have a worker's connector copy rows with the pages of their tokens, if those of its pool have room for them.

    Args:
        rows: see ``PoolOffloadingSpec``.
    """
    worker = connector.connector_worker if isinstance(connector, OffloadingConnector) else None
    if worker is not None and worker.spec.extra_config.get(ROW_BYTES):
        assert isinstance(worker.spec, PoolOffloadingSpec)
        worker.spec.rows = rows


def with_rows(kv_caches: CanonicalKVCaches, rows: torch.Tensor) -> CanonicalKVCaches:
    """A rank's caches, with rows as one more layer of the only group: engines with several keep none."""
    (refs,) = kv_caches.group_data_refs
    num_bytes = rows.shape[1]
    ref = CanonicalKVCacheRef(len(kv_caches.tensors), num_bytes)
    return CanonicalKVCaches([*kv_caches.tensors, CanonicalKVCacheTensor(rows, num_bytes)], [[*refs, ref]])
