"""Pages between a worker's KV cache and the region of chunks, in both directions and layouts."""

import secrets
from collections.abc import Iterator

import pytest
import torch
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CanonicalPageMapping,
    CopyRun,
    GPULoadStoreSpec,
    OffloadingWorker,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

from vllm_omni.kv.pool.offload.host_copy import HostCopyWorker
from vllm_omni.kv.pool.offload.spec import with_rows
from vllm_omni.model_executor.row_cache import RowCache

NUM_BLOCKS, NUM_CHUNKS = 6, 4
PAGE = 64  # bytes of a layer's block


def caches(num_layers: int = 2, mapping: CanonicalPageMapping | None = None) -> CanonicalKVCaches:
    """Layers in one allocation, whose bytes are all different."""
    memory = torch.arange(num_layers * NUM_BLOCKS * PAGE, dtype=torch.int64).to(torch.int8)
    tensors = [
        CanonicalKVCacheTensor(memory.view(num_layers, NUM_BLOCKS, PAGE)[layer], PAGE) for layer in range(num_layers)
    ]
    refs = [CanonicalKVCacheRef(layer, PAGE, mapping) for layer in range(num_layers)]
    return CanonicalKVCaches(tensors, [refs])


@pytest.fixture
def region() -> Iterator[SharedOffloadRegion]:
    made = SharedOffloadRegion(secrets.token_hex(8), NUM_CHUNKS, 0, 4096, 4096)
    yield made
    made.cleanup()


def transfer(worker: HostCopyWorker, blocks: list[int], chunks: list[int], first: int = 0, *, is_load: bool) -> None:
    here, there = GPULoadStoreSpec(blocks, [len(blocks)], [first]), BlockIDsLoadStoreSpec(chunks)
    assert worker.submit_load(1, there, here) if is_load else worker.submit_store(1, here, there)
    worker.wait({1})
    (result,) = worker.get_finished()
    assert result.success and result.job_id == 1


def test_blocks_come_back_into_other_places(region: SharedOffloadRegion) -> None:
    kv = caches()
    before = [tensor.tensor.clone() for tensor in kv.tensors]
    worker = HostCopyWorker(kv, 1, region, canonical_layout=False)
    transfer(worker, [4, 1], [3, 0], is_load=False)
    transfer(worker, [0, 5], [3, 0], is_load=True)
    for tensor, old in zip(kv.tensors, before, strict=True):
        assert torch.equal(tensor.tensor[0], old[4]) and torch.equal(tensor.tensor[5], old[1])
        assert torch.equal(tensor.tensor[1:5], old[1:5])
    worker.shutdown()


def test_rows_travel_with_the_pages_of_their_tokens(region: SharedOffloadRegion) -> None:
    kv, cache = caches(), RowCache(NUM_BLOCKS * 4, torch.zeros(1, 8, dtype=torch.bfloat16))
    rows = torch.randn(NUM_BLOCKS * 4, 8).bfloat16()  # 4 tokens a block
    cache.write(torch.arange(len(rows)), rows)
    worker = HostCopyWorker(with_rows(kv, cache.pages(NUM_BLOCKS)), 1, region, canonical_layout=False)
    transfer(worker, [4, 1], [3, 0], is_load=False)
    transfer(worker, [0, 5], [3, 0], is_load=True)
    assert torch.equal(cache.read([0, 5], 4, 0, 8), torch.cat([rows[16:20], rows[4:8]]))
    assert torch.equal(kv.tensors[1].tensor[0], kv.tensors[1].tensor[4])
    worker.shutdown()


def test_a_transfer_may_start_within_a_chunk_of_several_blocks(region: SharedOffloadRegion) -> None:
    kv = caches()
    before = [tensor.tensor.clone() for tensor in kv.tensors]
    worker = HostCopyWorker(kv, 2, region, canonical_layout=False)
    transfer(worker, [0, 1, 2, 3], [1, 2], is_load=False)  # chunk 1: blocks 0 and 1; chunk 2: blocks 2 and 3
    transfer(worker, [4, 5], [1, 2], first=1, is_load=True)  # the second block of chunk 1, the first of chunk 2
    for tensor, old in zip(kv.tensors, before, strict=True):
        assert torch.equal(tensor.tensor[4], old[1]) and torch.equal(tensor.tensor[5], old[2])
    worker.shutdown()


def test_ranks_of_other_sizes_read_pages_of_the_canonical_layout(region: SharedOffloadRegion) -> None:
    """Two ranks with half of the heads each write what one rank with all of them reads."""
    half = PAGE // 2
    for rank in range(2):
        run = CopyRun(0, rank * 16, 16, half // 16, 16, 32)  # heads of a token lie beside each other
        mapping = CanonicalPageMapping(PAGE, half, (run,), 1, 0, True)
        memory = torch.full((NUM_BLOCKS, half), rank + 1, dtype=torch.int8)
        kv = CanonicalKVCaches([CanonicalKVCacheTensor(memory, half)], [[CanonicalKVCacheRef(0, half, mapping)]])
        region._canonical_offset = 0
        transfer(HostCopyWorker(kv, 1, region, canonical_layout=True), [2], [1], is_load=False)
    whole = CanonicalPageMapping(PAGE, PAGE, (CopyRun(0, 0, PAGE, 1, PAGE, PAGE),), 1, 0, True)
    kv = caches(1, whole)
    region._canonical_offset = 0
    transfer(HostCopyWorker(kv, 1, region, canonical_layout=True), [3], [1], is_load=True)
    assert kv.tensors[0].tensor[3].tolist() == ([1] * 16 + [2] * 16) * 2


def test_ranks_with_the_same_bytes_take_turns_in_writing_them(region: SharedOffloadRegion) -> None:
    run = CopyRun(0, 0, PAGE, 1, PAGE, PAGE)
    kv = caches(1, CanonicalPageMapping(PAGE, PAGE, (run,), 2, 1, True))
    worker = HostCopyWorker(kv, 1, region, canonical_layout=True)
    transfer(worker, [1, 2], [0, 1], is_load=False)
    chunks = region.base_tensor.view(NUM_CHUNKS, 4096)
    assert not chunks[0, :PAGE].any(), "chunk 0 is the other rank's"
    assert torch.equal(chunks[1, :PAGE], kv.tensors[0].tensor[2])
    worker.shutdown()


def test_vllm_s_interface_of_workers_is_the_one_that_is_implemented() -> None:
    """It is experimental: whatever a new version adds must be looked at."""
    assert set(OffloadingWorker.__abstractmethods__) == {"submit_store", "submit_load", "get_finished", "wait"}
    assert {name for name in vars(OffloadingWorker) if not name.startswith("_")} == {
        *OffloadingWorker.__abstractmethods__,
        "shutdown",
    }
