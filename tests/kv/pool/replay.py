"""Runs a trace of prompts through vLLM's own offloading manager, with any of its eviction policies."""

import time
from collections.abc import Iterable
from typing import NamedTuple

from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy

DUEL = "TinyLFUDuelPolicy"
MODULE = "vllm_omni.kv.pool.offload.policy"


class Replay(NamedTuple):
    hit_ratio: float  # pages of prefixes that were found, of all pages
    us_per_page: float  # of the manager and its policy
    policy: CachePolicy


def make_manager(num_pages: int, policy: str, **options: object) -> CPUOffloadingManager:
    return CPUOffloadingManager(num_pages, policy, MODULE if policy == DUEL else None, **options)


def request_of(number: int, keys: list[OffloadKey]) -> ReqContext:
    """A request as the connector's scheduler describes it."""
    request = ReqContext(str(number))
    for place, key in enumerate(keys):
        request.set_offload_key_position(key, place)
    return request


def replay(requests: Iterable[list[bytes]], num_pages: int, policy: str) -> Replay:
    """Look each prompt up, load the prefix that is there, store the rest, and finish the request."""
    manager = make_manager(num_pages, policy)
    num_hits = num_total = 0
    spent_s = 0.0
    for number, chain in enumerate(requests):
        keys = [make_offload_key(page, 0) for page in chain]
        request = request_of(number, keys)
        start_s = time.perf_counter()
        manager.on_new_request(request)
        is_hit = (manager.lookup(key, request) is LookupResult.HIT for key in keys)
        num = next((place for place, hit in enumerate(is_hit) if not hit), len(keys))
        manager.prepare_load(keys[:num], request)
        manager.complete_load(keys[:num], request)
        stored = manager.prepare_store(keys[num:], request)
        if stored is not None:
            manager.complete_store(stored.keys_to_store, request)
        manager.on_request_finished(request)
        spent_s += time.perf_counter() - start_s
        num_hits += num
        num_total += len(keys)
    return Replay(num_hits / num_total, spent_s / num_total * 1e6, manager._policy)
