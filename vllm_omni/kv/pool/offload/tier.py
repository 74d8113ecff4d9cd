"""``PoolTier``: vLLM's secondary tier of KV pages, in a slab of shared memory and on disk behind it.

Pages survive their engine: the next one adopts the slab, and after a restart of the host the segment on disk. All
decisions are made on the scheduler's thread, from tables in memory; copies are made by threads of the tier's own, and
so are calls of the directory of other hosts.

From: Omni-Flow section 4.1, Global Params Pool.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.cpu.policies.base import order_request_keys
from vllm.v1.kv_offload.file_mapper import FileMapper
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from vllm_omni.kv.pool.checkpoint import checkpoint_digest
from vllm_omni.kv.pool.directory.layout import layout_id
from vllm_omni.kv.pool.disk import DiskPages
from vllm_omni.kv.pool.host_peers import HostPeers
from vllm_omni.kv.pool.offload.tier_metrics import TierMetrics, definitions
from vllm_omni.kv.pool.ownership import slab_directory
from vllm_omni.kv.pool.remote_pages import FoundPage, Place
from vllm_omni.kv.pool.slab import Slab
from vllm_omni.kv.pool.store import PageStore
from vllm_omni.process.tether import stage_sections
from vllm_omni.relay.hub import unpack_options
from vllm_omni.relay.secret import Secret

if TYPE_CHECKING:
    from vllm_omni.kv.pool.hosts import Hosts

logger = logging.getLogger(__name__)

NUM_READERS = 2  # threads that load pages
NUM_PULLERS = 2  # threads that load pages of other hosts, too
MAX_QUEUED_STORES = 64  # jobs; further ones are dropped, so that a slow disk holds no chunks of the engine back


_RESULTS = {True: LookupResult.HIT, False: LookupResult.MISS, None: LookupResult.RETRY}


class PoolTier(SecondaryTierManager):
    """Pages of all requests by the hash of their tokens and of everything before them.

    A page is written to the slab, and then to the disk. One that is asked for is read from the slab, from the slab of
    another engine of this host, from the disk, or from another host, and after the last two also put into the slab. A
    damaged page is a miss, and is recomputed.

    Args:
        stage: part of the pages' identity, as stages of one checkpoint have other weights.
        memory_bytes: of the slab; 0: none.
        identity: part of it, too: of all else that pages depend on beside the weights (``engine/pool_args.py``).
        disk: directory of the pages on disk; "": none.
        disk_bytes: of this engine's segment there.
        directory: of the slabs; "": in shared memory.
        redis: URL of the directory of several hosts, which read this slab where the stage's relays listen; "": pages of
            other hosts are not read.
        token_file: of the secret of these hosts; "": that of the deployment, if it has one.

    Raises:
        ConfigError: no room for a page, or a directory that cannot be used.
        RelayError: the address cannot be listened at.
    """

    medium: ClassVar[Medium] = Medium.CPU

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        *,
        stage: str,
        memory_bytes: int,
        identity: str = "",
        revision: str = "",
        disk: str = "",
        disk_bytes: int = 0,
        directory: str = "",
        redis: str = "",
        token_file: str = "",
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self._bytes = primary_kv_view.cast("B")
        layout = pool_layout(offloading_spec, f"{stage} {identity}", self.block_size_bytes, revision or None)
        slabs = Path(directory) if directory else slab_directory()
        self._slab = self._disk = None
        relay = unpack_options(stage_sections())
        self._hosts = _hosts(redis, layout, token_file or relay.secret_file) if redis else None
        if memory_bytes:
            num_slots = max(1, memory_bytes // self.block_size_bytes)
            self._slab = Slab(layout, self.block_size_bytes, num_slots, directory=slabs, **_asked(self._hosts))
        if disk:
            self._disk = DiskPages(Path(disk), layout, self.block_size_bytes, disk_bytes)
        self._stores: list[PageStore] = [store for store in (self._slab, self._disk) if store is not None]
        self._peers = HostPeers(slabs, layout, self._slab.path if self._slab is not None else None)
        self._are_peers_read = False  # in this iteration of the scheduler
        if self._hosts is not None:
            assert self._slab is not None, "the configuration was checked"
            self._hosts.start(self._slab, relay.host)
        self._remote = None if self._hosts is None else self._hosts.pages
        media = {"memory": self._slab, "disk": self._disk}
        self._metrics = TierMetrics(
            {name: store for name, store in media.items() if store is not None}, self._peers, self._remote
        )
        self._readers = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="kv_pool_read")
        self._pullers = ThreadPoolExecutor(NUM_PULLERS, thread_name_prefix="kv_pool_pull")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="kv_pool_write")
        self._jobs: set[Future[None]] = set()
        self._finished: SimpleQueue[JobResult] = SimpleQueue()
        self._num_stores = 0  # jobs that have not ended
        self._lock = threading.Lock()

    # -- what the scheduler asks --------------------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if any(key in store for store in self._stores):
            return LookupResult.HIT
        if not self._are_peers_read:
            self._peers.update()
            self._are_peers_read = True
        if key in self._peers:
            return LookupResult.HIT
        if self._remote is None:
            return LookupResult.MISS
        place = Place(get_offload_group_idx(key), req_context.get_offload_key_position(key) or 0)
        return _RESULTS[self._remote.find(req_context.req_id, key, place)]

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._are_peers_read = False
        if self._remote is not None:
            self._remote.ask()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Count the use of the request's pages, in the order of its tokens."""
        if self._remote is not None:
            self._remote.forget(req_context.req_id)
        keys: Sequence[bytes] = order_request_keys([list(req_context._offload_key_positions)], req_context)
        for store in self._stores:
            store.access(keys)

    # -- transfers ----------------------------------------------------------------------------------------------------

    def submit_store(self, job_metadata: TransferJob) -> None:
        with self._lock:
            is_dropped = self._num_stores >= MAX_QUEUED_STORES
            self._num_stores += not is_dropped
        if is_dropped:
            self._finished.put(JobResult(job_metadata.job_id, success=True, transfer_bytes=0))
        else:
            self._submit(self._writer, self._store, job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        found: list[FoundPage] = []
        if self._remote is not None:
            missing = [key for key in job_metadata.keys if not self._is_here(key)]
            found = self._remote.take(job_metadata.req_context.req_id, missing)
        # Those that wait for another host do not hold others back.
        threads = self._pullers if found else self._readers
        self._submit(threads, partial(self._load, found=found), job_metadata)

    def _is_here(self, key: bytes) -> bool:
        return any(key in store for store in self._stores) or key in self._peers

    def _submit(self, threads: ThreadPoolExecutor, run: Callable[[TransferJob], JobResult], job: TransferJob) -> None:
        future = threads.submit(self._finish, run, job)
        with self._lock:
            self._jobs = {one for one in self._jobs if not one.done()} | {future}

    def _finish(self, run: Callable[[TransferJob], JobResult], job: TransferJob) -> None:
        started_at = time.perf_counter()
        try:
            result = run(job)
        except Exception:
            logger.exception("a transfer of %d cached pages failed", len(job.keys))
            result = JobResult(job.job_id, success=False)
        result.transfer_time = time.perf_counter() - started_at
        self._finished.put(result)

    def _page(self, chunk: int) -> memoryview:
        return self._bytes[chunk * self.block_size_bytes :][: self.block_size_bytes]

    def _store(self, job: TransferJob) -> JobResult:
        try:
            num_stored = 0
            for key, chunk in zip(job.keys, job.chunk_ids.tolist(), strict=True):
                num_stored += self._put(key, self._page(chunk))
                num_stored += self._disk is not None and self._disk.store(key, self._page(chunk))
        finally:
            with self._lock:
                self._num_stores -= 1
        return JobResult(job.job_id, True, transfer_bytes=num_stored * self.block_size_bytes)

    def _put(self, key: bytes, page: memoryview) -> bool:
        """Write a page into the slab, if there is one."""
        is_stored = self._slab is not None and self._slab.store(key, page)
        if is_stored and self._hosts is not None:
            self._hosts.announcer.announce([key])
        return is_stored

    def _load(self, job: TransferJob, found: Sequence[FoundPage]) -> JobResult:
        pages = {key: self._page(chunk) for key, chunk in zip(job.keys, job.chunk_ids.tolist(), strict=True)}
        remote = {OffloadKey(page.key): (page, pages[OffloadKey(page.key)]) for page in found}
        local = [key for key in pages if key not in remote]
        loaded = [*self._load_local(local, pages), *self._load_remote(list(remote.values()))]
        is_whole, num_bytes = len(loaded) == len(pages), len(loaded) * self.block_size_bytes
        return JobResult(job.job_id, is_whole, None if is_whole else tuple(loaded), transfer_bytes=num_bytes)

    def _load_local(self, keys: Sequence[OffloadKey], pages: Mapping[OffloadKey, memoryview]) -> list[OffloadKey]:
        """Read pages of this host, up to the first that is gone: those behind it are of no use."""
        seconds: defaultdict[str, float] = defaultdict(float)
        loaded = []
        for key in keys:
            started_at = time.perf_counter()
            medium = self._load_page(key, pages[key])
            if medium is None:
                break
            seconds[medium] += time.perf_counter() - started_at
            loaded.append(key)
        self._metrics.reads.extend(seconds.items())
        return loaded

    def _load_page(self, key: bytes, into: memoryview) -> str | None:
        """Read a page; returns the medium that had it."""
        if self._slab is not None and key in self._slab and self._slab.load(key, into) is not None:
            return "memory"
        if self._peers.load(key, into):
            return "peer"
        if self._disk is None or self._disk.load(key, into) is None:
            return None
        self._put(key, into)
        return "disk"

    def _load_remote(self, wanted: Sequence[tuple[FoundPage, memoryview]]) -> list[OffloadKey]:
        if self._remote is None or not wanted:
            return []
        started_at = time.perf_counter()
        loaded = self._remote.load(wanted)
        if loaded:
            self._metrics.reads.append(("remote", time.perf_counter() - started_at))
        for page, into in wanted[: len(loaded)]:
            self._put(page.key, into)
        return [OffloadKey(key) for key in loaded]

    def get_finished_jobs(self) -> Iterable[JobResult]:
        results = []
        while True:
            try:
                results.append(self._finished.get_nowait())
            except Empty:
                return results

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        return definitions()

    def get_stats(self) -> OffloadingConnectorStats | None:
        return self._metrics.take()

    def drain_jobs(self) -> None:
        with self._lock:
            jobs = set(self._jobs)
        wait(jobs)

    def shutdown(self) -> None:
        for threads in (self._writer, self._readers, self._pullers):
            threads.shutdown()
        if self._hosts is not None:
            self._hosts.close()
        self._bytes.release()
        for store in self._stores:
            store.close()
        self._peers.close()


def pool_layout(spec: OffloadingSpec, stage: str, page_bytes: int, revision: str | None = None) -> str:
    """Id of the pages of a stage: of its weights, and of all that their bytes depend on."""
    mapper = FileMapper.from_offloading_spec("", spec, spec.blocks_per_chunk, parallel_agnostic=True)
    fields = {name: value for name, value in mapper.fields.items() if name != "model_name"}  # a path
    checkpoint = checkpoint_digest(spec.config.model.name, revision)
    return layout_id({**fields, "stage": stage, "page_bytes": page_bytes}, checkpoint=checkpoint)


def _hosts(url: str, layout: str, token_file: str) -> Hosts:
    from vllm_omni.kv.pool.hosts import Hosts  # needs redis

    return Hosts(url, layout, secret=Secret.read(token_file) if token_file else None)


def _asked(hosts: Hosts | None) -> dict[str, Callable[[Sequence[bytes]], Any]]:
    """What a slab asks and reports to."""
    if hosts is None:
        return {}
    asked = hosts.announcer
    return {"may_evict": asked.may_evict, "on_evicted": asked.on_evicted, "on_kept": asked.on_kept}
