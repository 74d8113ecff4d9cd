"""The duel's two orders, its victims, and its place in vLLM's offloading manager."""

import hashlib
import inspect
import random
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.kv_offload.base import LookupResult, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus
from vllm.v1.kv_offload.cpu.policies.factory import CachePolicyFactory
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from tests.fuzz import num_cases, seeds
from tests.kv.pool.replay import DUEL, MODULE, make_manager, request_of
from vllm_omni.kv.pool.offload.policy import TinyLFUDuelPolicy
from vllm_omni.kv.pool.policy import EvictionDuel, FrequencyClasses, Order
from vllm_omni.testing.cache_traces import chat_turns, rag_questions


def key_of(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


def keys_of(*numbers: int) -> list[bytes]:
    return [key_of(number) for number in numbers]


def make_duel(capacity: int = 8, pages: Iterable[int] = (), order: Order = Order.RECENCY) -> EvictionDuel:
    duel = EvictionDuel(capacity)
    for number in pages:
        duel.insert(key_of(number))
        duel.access([key_of(number)])
    duel._switch(order)
    return duel


def run_trace(duel: EvictionDuel, requests: Iterable[list[bytes]]) -> float:
    """Use the duel as a tier does; returns the ratio of pages in prefixes that were there."""
    num_hits = num_total = 0
    for chain in requests:
        num_hits += next((place for place, key in enumerate(chain) if key not in duel), len(chain))
        num_total += len(chain)
        missing = [key for key in chain if key not in duel]
        duel.evict(len(missing) + len(duel) - duel.capacity, protected=set(chain))
        for key in missing[: duel.capacity - len(duel)]:
            duel.insert(key)
        duel.access(chain)
    return num_hits / num_total


# -- orders -----------------------------------------------------------------------------------------------------------


def test_by_recency_the_page_used_longest_ago_is_evicted() -> None:
    duel = make_duel(pages=[1, 2, 3])
    duel.access(keys_of(1))
    assert duel.evict(3) == keys_of(2, 3, 1)
    assert len(duel) == 0


def test_by_frequency_the_coldest_page_is_evicted_and_of_those_the_oldest() -> None:
    duel = make_duel(pages=[1, 2, 3, 4], order=Order.FREQUENCY)
    for number, uses in ((1, 9), (2, 1), (3, 3)):
        for _ in range(uses):
            duel.access(keys_of(number))
    duel.insert(key_of(5))
    assert duel.statistics().num_by_class == (2, 1, 1, 1)  # used 0 and 1, 2, 4 and 10 times
    assert duel.evict(5) == keys_of(4, 5, 2, 3, 1)


def test_the_end_of_a_chain_is_evicted_before_its_start() -> None:
    for order in Order:
        duel = make_duel(order=order)
        for number in range(4):
            duel.insert(key_of(number))
        duel.access(keys_of(0, 1, 2, 3))
        assert duel.evict(3) == keys_of(3, 2, 1), order


def test_a_page_that_comes_back_is_as_warm_as_it_was() -> None:
    duel = make_duel(pages=[1, 2], order=Order.FREQUENCY)
    for _ in range(8):
        duel.access(keys_of(1))
    duel.remove(key_of(1))
    duel.insert(key_of(1))
    assert duel.evict(1) == keys_of(2)


def test_pages_become_colder_when_counts_are_halved() -> None:
    classes = FrequencyClasses()
    for number, count in ((1, 1), (2, 2), (3, 4), (4, 15), (5, 3)):
        classes.put(key_of(number), count)
    assert list(classes) == keys_of(1, 2, 5, 3, 4)
    classes.halve()
    assert [len(pages) for pages in classes.lists] == [3, 1, 1, 0]
    assert list(classes) == keys_of(1, 2, 5, 3, 4)
    classes.put(key_of(4), 7)
    classes.put(key_of(2), 7)
    classes.remove(key_of(5))
    assert [classes.pop() for _ in range(4)] == keys_of(1, 3, 4, 2)


# -- victims ----------------------------------------------------------------------------------------------------------


def test_pinned_and_protected_pages_are_no_victims() -> None:
    for order in Order:
        duel = make_duel(pages=[1, 2, 3, 4], order=order)
        duel.pin(key_of(1))
        assert duel.victims(2, protected=set(keys_of(2))) == keys_of(3, 4)
        assert duel.evict(3, protected=set(keys_of(2))) is None
        assert len(duel) == 4, "an eviction that failed has changed something"
        duel.unpin(key_of(1))
        assert duel.evict(3, protected=set(keys_of(2))) == keys_of(1, 3, 4)


def test_no_victims_are_always_found() -> None:
    duel = make_duel()
    assert duel.evict(0) == []
    assert duel.evict(-3) == []
    assert duel.evict(1) is None


@pytest.mark.fuzz
@settings(max_examples=num_cases(1000), deadline=None)
@given(st.data())
def test_random_operations_keep_both_orders_equal(data: st.DataObject) -> None:
    duel, held, pinned = EvictionDuel(6, sample_shift=0), list[int](), set[int]()
    for _ in range(data.draw(st.integers(1, 60))):
        action = data.draw(st.sampled_from("insert access access pin unpin remove evict refresh".split()))
        number = data.draw(st.integers(0, 11))
        if action == "insert" and number not in held and len(held) < 6:
            duel.insert(key_of(number), is_pinned=number % 5 == 0)
            held.append(number)
            pinned |= {number} if number % 5 == 0 else set()
        elif action == "access":
            duel.access(keys_of(*range(number, number + data.draw(st.integers(0, 4)))))
        elif action == "refresh":
            duel.refresh(keys_of(number, number + 1))
        elif action in ("pin", "unpin", "remove") and number in held:
            {"pin": duel.pin, "unpin": duel.unpin, "remove": duel.remove}[action](key_of(number))
            pinned = pinned | {number} if action == "pin" else pinned - {number}
            held = [one for one in held if action != "remove" or one != number]
        elif action == "evict":
            num, free = data.draw(st.integers(0, 3)), set(keys_of(*held)) - set(keys_of(*pinned))
            evicted = duel.evict(num)
            assert (evicted is None) == (num > len(free))
            assert set(evicted or ()) <= free
            held = [one for one in held if key_of(one) not in (evicted or ())]
        duel.check_integrity()
        assert set(duel) == set(keys_of(*held))
        assert duel.statistics().num_pinned == len(pinned)


# -- the duel ---------------------------------------------------------------------------------------------------------


def test_the_order_follows_the_workload_and_comes_back() -> None:
    duel = EvictionDuel(1000)
    orders = []
    for trace in (chat_turns(1500, 1), rag_questions(3000, 1), chat_turns(4000, 2)):
        run_trace(duel, trace)
        orders.append(duel.statistics().order)
    assert orders == [Order.RECENCY, Order.FREQUENCY, Order.RECENCY]


def test_ghosts_are_small_and_of_a_small_tier_not_too_small() -> None:
    for capacity, ghost in ((10, 10), (500, 500), (600, 300), (2047, 511), (2048, 256), (80_000, 10_000)):
        assert EvictionDuel(capacity)._ghost_capacity == ghost


def test_clear_forgets_pages_and_what_was_learned() -> None:
    duel = make_duel(pages=[1, 2], order=Order.FREQUENCY)
    duel.pin(key_of(1))
    duel.clear()
    duel.check_integrity()
    assert len(duel) == 0
    assert duel.statistics().order is Order.RECENCY


def test_a_tier_without_pages_is_rejected() -> None:
    with pytest.raises(ValueError, match="at least 1 page, not 0"):
        EvictionDuel(0)


# -- in vLLM ----------------------------------------------------------------------------------------------------------


def test_vllm_finds_the_policy_by_its_two_options() -> None:
    assert CachePolicyFactory.get_cache_policy_cls(DUEL, MODULE) is TinyLFUDuelPolicy
    assert isinstance(make_manager(4, DUEL)._policy, TinyLFUDuelPolicy)
    assert {"eviction_policy", "cache_policy_module_path"} <= set(
        inspect.getsource(CPUOffloadingSpec.__init__).replace('"', " ").split()
    )


def test_vllms_interface_of_policies_is_the_one_that_is_implemented() -> None:
    """It is marked as experimental: this test fails where an upgrade of vLLM changes it."""
    methods = {
        name: list(inspect.signature(method).parameters)
        for name, method in inspect.getmembers(CachePolicy, inspect.isfunction)
    }
    assert methods == {
        "__init__": ["self", "cache_capacity"],
        "clear": ["self"],
        "evict": ["self", "n", "protected"],
        "get": ["self", "key"],
        "insert": ["self", "key", "chunk"],
        "mark_evictable": ["self", "key"],
        "mark_non_evictable": ["self", "key"],
        "on_request_finished": ["self", "key_groups", "insertion_only_keys", "reused_keys", "req_context"],
        "on_store_miss": ["self", "keys", "req_context"],
        "remove": ["self", "key"],
        "touch": ["self", "keys", "req_context"],
    }
    for name, parameters in methods.items():
        assert list(inspect.signature(getattr(TinyLFUDuelPolicy, name)).parameters) == parameters, name
    assert CachePolicy.__abstractmethods__ == {"get", "insert", "remove", "touch", "evict", "clear"}
    assert [name for name, _ in ChunkStatus._fields_] == ["ref_cnt", "chunk_id"]
    assert list(inspect.signature(CPUOffloadingManager.__init__).parameters)[1:4] == [
        "num_chunks",
        "cache_policy",
        "cache_policy_module_path",
    ]
    assert list(inspect.signature(CachePolicyFactory.get_cache_policy_cls).parameters) == ["name", "module_path"]


def test_a_use_is_counted_once_for_each_request() -> None:
    manager = make_manager(4, DUEL)
    keys = [make_offload_key(key_of(number), 0) for number in range(2)]
    for number in range(3):
        request = request_of(number, keys)
        manager.on_new_request(request)
        stored = manager.prepare_store(keys, request)
        manager.complete_store(stored.keys_to_store, request)
        manager.prepare_load(keys, request)
        manager.complete_load(keys, request)
        manager.on_request_finished(request)
    assert [manager._policy._duel._sketch.estimate(key) for key in keys] == [3, 3]


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", seeds(200))
def test_random_requests_through_vllms_manager(seed: int) -> None:
    """Requests overlap, stores fail, loads are under way while others evict: the counts of manager and policy agree."""
    rng, capacity = random.Random(seed), 12
    manager = make_manager(capacity, DUEL, enable_events=True)
    policy = manager._policy
    open_requests, loading, storing = {}, [], []
    for number in range(150):
        first = rng.randrange(8) * 10
        keys = [make_offload_key(key_of(first + place), place % 2) for place in range(rng.randint(1, 6))]
        request = request_of(number, keys)
        manager.on_new_request(request)
        open_requests[number] = request
        ready = [key for key in keys if manager.lookup(key, request) is LookupResult.HIT]
        if ready and rng.random() < 0.7:
            manager.prepare_load(ready, request)
            loading.append((ready, request))
        stored = manager.prepare_store(keys, request)
        if stored is not None and stored.keys_to_store:
            assert not set(stored.evicted_keys) & {key for held, _ in loading for key in held}, "evicted while read"
            storing.append((stored.keys_to_store, request))
        for waiting, finish in ((loading, manager.complete_load), (storing, None)):
            while len(waiting) > 2 or (waiting and rng.random() < 0.5):
                done, owner = waiting.pop(rng.randrange(len(waiting)))
                if finish is None:
                    manager.complete_store(done, owner, success=rng.random() < 0.9)
                else:
                    finish(done, owner)
        if rng.random() < 0.8:
            manager.on_request_finished(open_requests.pop(rng.choice(list(open_requests))))
        if rng.random() < 0.01 and not loading and not storing:
            manager.reset_cache()
            open_requests.clear()
        policy.check_integrity()
        statistics = policy.statistics()
        assert statistics.num_pages == manager._num_allocated_chunks - len(manager._free_list) <= capacity
        assert statistics.num_pages - statistics.num_pinned == manager._num_evictable_cache_chunks
