"""``PoolOffloadingSpec``: vLLM's offloading of KV pages, on a CPU as on a GPU."""

from __future__ import annotations

from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from vllm_omni.kv.pool.offload.host_copy import HostCopyWorker


class PoolOffloadingSpec(TieringOffloadingSpec):
    """As upstream, whose worker copies by CUDA streams: on a CPU, ``HostCopyWorker`` copies."""

    _copier: HostCopyWorker | None = None

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
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
