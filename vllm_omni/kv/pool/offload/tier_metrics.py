"""What a tier has done, as metrics of vLLM's offloading connector: by medium, beside upstream's own by tier."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
)

from vllm_omni.kv.pool.host_peers import HostPeers
from vllm_omni.kv.pool.remote_pages import RemotePages
from vllm_omni.kv.pool.store import PageStore

EVERY_S = 1.0  # upstream asks in each iteration of the scheduler
MAX_READS = 1 << 14  # that are kept until they are reported
PAGES = "vllm:kv_pool_pages"
SECONDS = "vllm:kv_pool_read_seconds"
BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
LOOKUPS = "vllm:kv_pool_lookups"
COUNTERS = {  # of a store -> name of the metric, and what it counts
    "hits": ("vllm:kv_pool_hits", "Pages that were read"),
    "stored": ("vllm:kv_pool_stored", "Pages that were written"),
    "dropped": ("vllm:kv_pool_dropped", "Pages that were not written, as all others were in use or the medium failed"),
    "evicted": ("vllm:kv_pool_evicted", "Pages that were evicted for others"),
    "corrupt": ("vllm:kv_pool_corrupt", "Pages that were damaged when they were read, and are recomputed"),
    "failures": ("vllm:kv_pool_failures", "Errors of the medium"),
}


def definitions() -> dict[str, OffloadingMetricMetadata]:
    """Metrics by name, with the label ``medium``: memory, disk, peer (memory of another engine) or remote (host)."""
    made: dict[str, OffloadingMetricMetadata] = {
        name: OffloadingCounterMetadata(f"{said}, by medium.", ("medium",)) for name, said in COUNTERS.values()
    }
    made[PAGES] = OffloadingGaugeMetadata("Pages in the pool, by medium.", ("medium",))
    said = "Seconds in which the pages of one transfer were read, by medium."
    made[SECONDS] = OffloadingHistogramMetadata(said, ("medium",), BUCKETS_S)
    said = "Lookups in the directory of other hosts: all, and those that were late, so that pages were recomputed."
    made[LOOKUPS] = OffloadingCounterMetadata(said, ("outcome",))
    return made


class TierMetrics:
    """Counts since the last report, of the stores of a tier, of its peers and of other hosts."""

    def __init__(
        self,
        stores: Mapping[str, PageStore],
        peers: HostPeers,
        remote: RemotePages | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.reads: deque[tuple[str, float]] = deque(maxlen=MAX_READS)  # medium, seconds; any thread appends
        self._stores = stores
        self._peers = peers
        self._remote = remote
        self._clock = clock
        self._due_at = 0.0
        self._reported: dict[tuple[str, str], int] = {}  # metric, label -> value

    def take(self) -> OffloadingConnectorStats | None:
        """What has changed since the last report; None until a report is due.

        Pages that were read are reported at once: an engine that is idle afterwards is not asked again.
        """
        if not self.reads and self._clock() < self._due_at:
            return None
        self._due_at = self._clock() + EVERY_S
        stats = OffloadingConnectorStats()
        for medium, store in self._stores.items():
            counts = store.counts()
            for key, (name, _) in COUNTERS.items():
                self._count(stats, name, medium, counts.get(key, 0))
            stats.set_gauge(PAGES, len(store), (medium,))
        self._count(stats, COUNTERS["hits"][0], "peer", self._peers.num_hits)
        self._count(stats, COUNTERS["corrupt"][0], "peer", self._peers.num_damaged)
        if (remote := self._remote) is not None:
            for key, value in (
                ("hits", remote.num_hits),
                ("corrupt", remote.num_damaged),
                ("failures", remote.num_failures),
            ):
                self._count(stats, COUNTERS[key][0], "remote", value)
            self._count(stats, LOOKUPS, "asked", remote.num_lookups)
            self._count(stats, LOOKUPS, "late", remote.num_late)
        while self.reads:
            medium, seconds = self.reads.popleft()
            stats.observe_histogram(SECONDS, seconds, (medium,))
        return stats

    def _count(self, stats: Any, name: str, label: str, value: int) -> None:
        before = self._reported.get((name, label), 0)
        if value > before:
            stats.increase_counter(name, value - before, (label,))
        self._reported[name, label] = value
