"""``PoolTier`` under the calls that vLLM's manager makes. With engines: tests/e2e/test_kv_pool.py."""

import inspect
from pathlib import Path

import pytest
from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

from tests.kv.pool.offload.builders import PAGE_BYTES, World, make_checkpoint, make_spec
from tests.kv.pool.stores import key_of, page_of
from vllm_omni.errors import ConfigError
from vllm_omni.kv.pool.offload import tier as tier_module
from vllm_omni.kv.pool.offload.tier import PoolTier, pool_layout

PAGES = {key_of(number): page_of(number, PAGE_BYTES) for number in range(3)}
FIRST, SECOND, THIRD = PAGES


def looked_up(world: World, *keys: bytes) -> list[LookupResult]:
    found = [world.tier.lookup(key, world.request("request", *keys)) for key in keys]
    world.tier.on_schedule_end(None)
    return found


def test_pages_come_back_as_they_were_stored(tmp_path: Path) -> None:
    world = World(tmp_path)
    assert looked_up(world, FIRST) == [LookupResult.MISS]
    stored = world.store(PAGES)
    assert stored.success and stored.transfer_bytes == 3 * PAGE_BYTES
    assert looked_up(world, *PAGES) == [LookupResult.HIT] * 3
    result = world.load(THIRD, FIRST)
    assert result.success and (world.page(0), world.page(1)) == (PAGES[THIRD], PAGES[FIRST])
    world.tier.shutdown()


def test_the_next_tier_of_the_same_weights_has_them(tmp_path: Path) -> None:
    for index in range(2):
        world = World(tmp_path)
        assert looked_up(world, FIRST) == [LookupResult.HIT if index else LookupResult.MISS]
        if not index:
            world.store(PAGES)
        world.tier.shutdown()


def test_a_tier_beside_it_reads_them_without_a_copy_of_its_own(tmp_path: Path) -> None:
    one, other = World(tmp_path), World(tmp_path)
    one.store(PAGES)
    assert looked_up(other, *PAGES) == [LookupResult.HIT] * 3
    assert other.load(*PAGES).success and other.page(1) == PAGES[SECOND]
    assert len(other.tier._stores[0]) == 0
    for world in (one, other):
        world.tier.shutdown()


def test_pages_of_the_disk_are_put_into_memory_when_they_are_read(tmp_path: Path) -> None:
    options = {"disk": str(tmp_path / "disk"), "disk_bytes": 1 << 20}
    world = World(tmp_path, **options)
    world.store(PAGES)
    world.tier.shutdown()
    for slab in (tmp_path / "slabs").iterdir():
        slab.unlink()
    world = World(tmp_path, **options)
    assert looked_up(world, *PAGES) == [LookupResult.HIT] * 3
    assert world.load(*PAGES).success and world.page(2) == PAGES[THIRD]
    assert [key in world.tier._stores[0] for key in PAGES] == [True] * 3
    world.tier.shutdown()


def test_a_load_keeps_what_stands_before_a_page_that_is_gone(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.store(PAGES)
    world.tier._stores[0].remove([SECOND])
    result = world.load(*PAGES)
    assert not result.success and result.successful_keys == (FIRST,)
    assert looked_up(world, SECOND) == [LookupResult.MISS]
    world.tier.shutdown()


def test_a_use_is_counted_when_the_request_ends(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.store(PAGES)
    world.tier.on_request_finished(world.request("request", *PAGES))
    world.tier._stores[0].check_integrity()
    world.tier.shutdown()


def test_stores_that_pile_up_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_module, "MAX_QUEUED_STORES", 0)
    world = World(tmp_path)
    result = world.store(PAGES)
    assert result.success and result.transfer_bytes == 0 and looked_up(world, FIRST) == [LookupResult.MISS]
    world.tier.shutdown()


def test_a_transfer_that_fails_unexpectedly_ends_as_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path)
    world.store(PAGES)
    monkeypatch.setattr(world.tier, "_load_page", lambda *args: 1 / 0)
    assert not world.load(FIRST).success
    world.tier.shutdown()


def test_pages_are_named_by_weights_and_stage(tmp_path: Path) -> None:
    one, same, other = (
        make_spec(make_checkpoint(tmp_path / name, value))
        for name, value in (("one", 0.0), ("same", 0.0), ("two", 1.0))
    )
    layouts = [pool_layout(spec, stage, 4096) for spec, stage in ((one, "a"), (same, "a"), (other, "a"), (one, "b"))]
    assert layouts[0] == layouts[1] and len(set(layouts)) == 3


def test_a_checkpoint_without_weights_has_no_pool(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no safetensors files"):
        pool_layout(make_spec(tmp_path), "language", 4096)


def test_vllm_s_interface_of_tiers_is_the_one_that_this_tier_implements() -> None:
    """It is experimental: whatever a new version adds must be looked at."""
    abstract = {"lookup", "submit_store", "submit_load", "get_finished_jobs", "on_new_request", "drain_jobs"}
    assert set(SecondaryTierManager.__abstractmethods__) == abstract
    optional = {"touch", "on_request_finished", "serve_external_requests", "on_schedule_end", "shutdown", "get_stats"}
    optional |= {"has_pending_work", "take_events", "build_metric_definitions"}
    public = {name for name in vars(SecondaryTierManager) if callable(getattr(SecondaryTierManager, name))}
    assert {name for name in public if not name.startswith("_")} == abstract | optional
    given = list(inspect.signature(SecondaryTierManager.__init__).parameters)
    assert list(inspect.signature(PoolTier.__init__).parameters)[: len(given)] == given


def test_each_medium_is_counted_once_and_under_a_defined_name(tmp_path: Path) -> None:
    options = {"disk": str(tmp_path / "disk"), "disk_bytes": 1 << 20}
    one, other = World(tmp_path, **options), World(tmp_path, **options)
    one.store(PAGES)
    one.load(FIRST)
    other.tier.lookup(FIRST, other.request("request"))
    other.load(FIRST)
    stats = one.tier.get_stats()
    assert stats is not None and one.tier.get_stats() is None, "a second later"
    data = stats.reduce()
    assert data["vllm:kv_pool_stored:('memory',)"] == data["vllm:kv_pool_stored:('disk',)"] == 3
    assert data["vllm:kv_pool_hits:('memory',)"] == 1 and data["vllm:kv_pool_pages:('disk',)"] == 3
    of_other = other.tier.get_stats()
    assert of_other is not None and of_other.reduce()["vllm:kv_pool_hits:('peer',)"] == 1
    assert {name.split(":(")[0] for name in data} <= PoolTier.build_metric_definitions({}).keys()
    one.load(FIRST)
    again = one.tier.get_stats()
    assert again is not None and again.reduce()["vllm:kv_pool_hits:('memory',)"] == 1, "reads are reported at once"
    for world in (one, other):
        world.tier.shutdown()
