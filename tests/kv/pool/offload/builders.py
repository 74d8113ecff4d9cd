"""A tier of the pool as vLLM makes it, for a small model that does not exist."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from vllm.v1.kv_offload.base import ReqContext
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import TransferJob

from vllm_omni.kv.pool.offload.spec import PoolOffloadingSpec
from vllm_omni.kv.pool.offload.tier import PoolTier

PAGE_BYTES = 4096
NUM_CHUNKS = 8


def make_checkpoint(path: Path, value: float = 0.0) -> Path:
    path.mkdir(exist_ok=True)
    save_file({"weight": torch.full((64,), value)}, path / "model.safetensors")
    return path


def make_spec(model: Path, **extra: Any) -> PoolOffloadingSpec:
    parallel = OffloadingParallelConfig(
        rank=0,
        world_size=1,
        tp_size=1,
        pp_size=1,
        pcp_size=1,
        dcp_size=1,
        data_parallel_index=0,
        data_parallel_size=1,
        data_parallel_rank_local=0,
        is_parallelism_agnostic=False,
    )
    return PoolOffloadingSpec(
        OffloadingConfig(
            groups=(OffloadingGroupConfig(32, ("layer",), 0),),
            worker_kv_bytes_per_block=PAGE_BYTES,
            enable_kv_cache_events=False,
            extra_config={"cpu_bytes_to_use": NUM_CHUNKS * PAGE_BYTES, **extra},
            engine_id="engine",
            model=OffloadingModelConfig(str(model), "float32"),
            cache=OffloadingCacheConfig(32, 1),
            parallel=parallel,
            replicated_layout=False,
            canonical_layout=False,
            kv_cache_layout="LBHNC",
        )
    )


class World:
    """A tier, and the region of chunks that it copies from and to."""

    def __init__(self, root: Path, stage: str = "language", **options: Any) -> None:
        root.mkdir(exist_ok=True)
        self.model = make_checkpoint(root / "model")
        self.chunks = np.zeros((NUM_CHUNKS, PAGE_BYTES), np.int8)
        given = {"memory_bytes": 4 * PAGE_BYTES, "directory": str(root / "slabs"), **options}
        self.tier = PoolTier(make_spec(self.model), memoryview(self.chunks), "PoolTier", stage=stage, **given)
        self.num_jobs = 0

    def request(self, request_id: str, *keys: bytes) -> ReqContext:
        context = ReqContext(request_id)
        for position, key in enumerate(keys):
            context.set_offload_key_position(key, position)
        return context

    def _job(self, keys: tuple[bytes, ...], is_promotion: bool, request_id: str = "request") -> TransferJob:
        self.num_jobs += 1
        return TransferJob(self.num_jobs, keys, np.arange(len(keys)), is_promotion, self.request(request_id))

    def store(self, pages: dict[bytes, bytes]) -> Any:
        """Write pages into the first chunks, and store them from there."""
        for chunk, page in enumerate(pages.values()):
            self.chunks[chunk] = np.frombuffer(page, np.int8)
        self.tier.submit_store(self._job(tuple(pages), is_promotion=False))
        self.tier.drain_jobs()
        (result,) = self.tier.get_finished_jobs()
        return result

    def load(self, *keys: bytes, request_id: str = "request") -> Any:
        """Load pages into the first chunks."""
        self.chunks[:] = 0
        self.tier.submit_load(self._job(keys, is_promotion=True, request_id=request_id))
        self.tier.drain_jobs()
        (result,) = self.tier.get_finished_jobs()
        return result

    def page(self, chunk: int) -> bytes:
        return self.chunks[chunk].tobytes()
