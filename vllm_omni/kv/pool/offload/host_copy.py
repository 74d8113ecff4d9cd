"""``HostCopyWorker``: copies KV pages between a CPU worker's cache and vLLM's region of offloaded chunks.

Upstream copies by CUDA streams alone. The rest of its offloading (lookup, eviction, tiers, region) runs anywhere.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

import torch
from torch import Tensor
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    CanonicalPageMapping,
    CopyRun,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion


class Pages(NamedTuple):
    """Fragments of a layer's pages on both sides."""

    blocks: Tensor  # [num_blocks, num_fragments, fragment_size] int8, in the worker's KV cache
    chunks: Tensor  # [num_chunks, blocks_per_chunk, num_fragments, fragment_size] int8, in the region
    mapping: CanonicalPageMapping | None  # None: the chunk has the page as the worker does

    @property
    def num_bytes(self) -> int:
        """Of a block."""
        return self.blocks[0].numel()


class Place(NamedTuple):
    """Where a block lies in the region."""

    chunk: int
    position: int  # of the block within the chunk


class HostCopyWorker(OffloadingWorker):
    """Copies in the order of submission, in one thread beside the model's.

    A block's pages do not change while it is copied: it is full, and upstream waits (``wait``) before it is reused.

    Args:
        kv_caches: of the worker.
        blocks_per_chunk: of the region.
        region: owned by this worker from here on.
        canonical_layout: chunks have the layout of no parallelism, which any number of ranks can read.
    """

    def __init__(
        self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int, region: SharedOffloadRegion, canonical_layout: bool
    ) -> None:
        self._region = region
        self._blocks_per_chunk = blocks_per_chunk
        self._groups = list(_pages(kv_caches, blocks_per_chunk, region, canonical_layout))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv_copy")
        self._running: dict[int, Future[TransferResult]] = {}  # by job, in order of submission

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        """Copy blocks into chunks."""
        return self._submit(job_id, src_spec, dst_spec, is_store=True)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        """Copy chunks into blocks."""
        return self._submit(job_id, dst_spec, src_spec, is_store=False)

    def _submit(self, job_id: int, blocks: GPULoadStoreSpec, chunks: LoadStoreSpec, *, is_store: bool) -> bool:
        assert isinstance(chunks, BlockIDsLoadStoreSpec)
        self._running[job_id] = self._thread.submit(self._copy, job_id, blocks, chunks, is_store)
        return True

    def get_finished(self) -> list[TransferResult]:
        done = [job_id for job_id, future in self._running.items() if future.done()]
        return [self._running.pop(job_id).result() for job_id in done]

    def wait(self, job_ids: set[int]) -> None:
        wait([self._running[one] for one in job_ids if one in self._running])

    def shutdown(self) -> None:
        self._thread.shutdown()
        self._running.clear()
        self._groups.clear()  # views of the region
        self._region.cleanup()

    @torch.inference_mode()  # as the worker's caches are made
    def _copy(
        self, job_id: int, blocks: GPULoadStoreSpec, chunks: BlockIDsLoadStoreSpec, is_store: bool
    ) -> TransferResult:
        started_at, num_bytes = time.perf_counter(), 0
        ids, chunk_ids = iter(blocks.block_ids.tolist()), iter(chunks.block_ids.tolist())
        for layers, size, first in zip(self._groups, blocks.group_sizes, blocks.block_indices, strict=True):
            for place in self._places(chunk_ids, first % self._blocks_per_chunk, size):
                block_id = next(ids)
                for pages in layers:
                    num_bytes += self._copy_pages(pages, block_id, place, is_store)
        return TransferResult(job_id, True, num_bytes, time.perf_counter() - started_at)

    def _places(self, chunk_ids: Iterator[int], start: int, size: int) -> Iterator[Place]:
        """The places of a group's blocks: of successive chunks, from a block of the first on."""
        chunk = -1
        for number in range(start, start + size):
            index = number % self._blocks_per_chunk
            if index == 0 or number == start:
                chunk = next(chunk_ids)
            yield Place(chunk, index)

    def _copy_pages(self, pages: Pages, block_id: int, place: Place, is_store: bool) -> int:
        here, there = pages.blocks[block_id], pages.chunks[place.chunk, place.position]
        if not is_store:
            here.copy_(there)
        elif pages.mapping is None or pages.mapping.is_writer(place.chunk * self._blocks_per_chunk + place.position):
            there.copy_(here)
        else:
            return 0  # another rank has the same bytes, and writes them
        return pages.num_bytes


def _pages(
    kv_caches: CanonicalKVCaches, blocks_per_chunk: int, region: SharedOffloadRegion, canonical_layout: bool
) -> Iterator[list[Pages]]:
    """The layers of each group."""
    sizes = [0] * len(kv_caches.tensors)  # bytes of a block in a chunk
    for refs in kv_caches.group_data_refs:
        for ref in refs:
            size = kv_caches.tensors[ref.tensor_idx].page_size_bytes
            if canonical_layout:
                assert ref.mapping is not None, "checked when the spec makes the worker"
                size = ref.mapping.canonical_page_size_bytes
            sizes[ref.tensor_idx] = max(sizes[ref.tensor_idx], size)
    make_view = region.create_next_canonical_view if canonical_layout else region.create_next_worker_view
    chunks = [make_view(size * blocks_per_chunk) for size in sizes]
    for refs in kv_caches.group_data_refs:
        layers = []
        for ref in refs:
            block, chunk, size = kv_caches.tensors[ref.tensor_idx].tensor, chunks[ref.tensor_idx], sizes[ref.tensor_idx]
            mapping = ref.mapping if canonical_layout else None
            whole = CopyRun(0, 0, ref.page_size_bytes, 1, ref.page_size_bytes, ref.page_size_bytes)
            for run in (whole,) if mapping is None else mapping.runs:
                layers.append(
                    Pages(
                        block.view(torch.int8).as_strided(
                            (block.shape[0], run.num_fragments, run.fragment_size),
                            (block.stride(0) * block.element_size(), run.local_stride, 1),
                            block.storage_offset() * block.element_size() + run.local_offset,
                        ),
                        chunk.as_strided(
                            (chunk.shape[0], blocks_per_chunk, run.num_fragments, run.fragment_size),
                            (chunk.stride(0), size, run.canonical_stride, 1),
                            chunk.storage_offset() + run.canonical_offset,
                        ),
                        mapping,
                    )
                )
        yield layers
