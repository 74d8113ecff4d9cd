"""``TinyLFUDuelPolicy``: the pool's eviction policy in vLLM's offloading manager (``kv_connector_extra_config``).

vLLM loads it by ``eviction_policy="TinyLFUDuelPolicy"`` and this module's name as ``cache_policy_module_path``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus, order_request_keys

from vllm_omni.kv.pool.policy import EvictionDuel, PolicyStatistics


class TinyLFUDuelPolicy(CachePolicy):
    """``EvictionDuel`` over vLLM's chunks.

    A use is counted when a request has finished, once for each of its chunks, as vLLM's own policies do.
    """

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self._chunks: dict[OffloadKey, ChunkStatus] = {}
        self._duel = EvictionDuel(
            max(cache_capacity, 1)
        )  # vLLM makes a manager without chunks where layers are unknown

    def get(self, key: OffloadKey) -> ChunkStatus | None:
        return self._chunks.get(key)

    def insert(self, key: OffloadKey, chunk: ChunkStatus) -> None:
        self._chunks[key] = chunk
        self._duel.insert(key, is_pinned=chunk.ref_cnt != 0)

    def remove(self, key: OffloadKey) -> None:
        del self._chunks[key]
        self._duel.remove(key)

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        self._duel.refresh(list(keys))

    def on_store_miss(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Upstream touches them. Here nothing: they are counted when the request finishes."""

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[OffloadKey]],
        insertion_only_keys: set[OffloadKey],
        reused_keys: set[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        self._duel.access(order_request_keys(key_groups, req_context))

    def evict(self, n: int, protected: set[OffloadKey]) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        keys = self._duel.evict(n, protected)
        return None if keys is None else [(OffloadKey(key), self._chunks.pop(OffloadKey(key))) for key in keys]

    def clear(self) -> None:
        self._chunks.clear()
        self._duel.clear()

    def mark_evictable(self, key: OffloadKey) -> None:
        self._duel.unpin(key)

    def mark_non_evictable(self, key: OffloadKey) -> None:
        self._duel.pin(key)

    def statistics(self) -> PolicyStatistics:
        return self._duel.statistics()

    def check_integrity(self) -> None:
        self._duel.check_integrity()
        assert self._duel.statistics().num_pages == len(self._chunks), "the policy's pages are not vLLM's chunks"
