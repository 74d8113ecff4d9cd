"""The rows beside a KV cache: found by slot, replaced with their block, and part of the cache's memory."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

from vllm_omni.model_executor.row_cache import (
    ROW_CACHE,
    RowCache,
    bytes_with_rows,
    bytes_without_rows,
    keeps_rows,
    row_bytes,
    row_cache_bytes,
)

BLOCK_SIZE, WIDTH = 4, 3
FULL = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype=torch.float32)
WINDOW = SlidingWindowSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=8)


def rows_of(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers)[:, None].expand(-1, WIDTH).contiguous()


def slots_of(blocks: list[int], start: int, end: int) -> torch.Tensor:
    """As vLLM maps tokens to slots."""
    return torch.tensor([blocks[token // BLOCK_SIZE] * BLOCK_SIZE + token % BLOCK_SIZE for token in range(start, end)])


def make_config(**more: Any) -> Any:
    given = {"is_on": True, "prefix_caching": True, "pipeline": 1, "context": 1} | more
    return SimpleNamespace(
        additional_config={ROW_CACHE: True} if given["is_on"] else None,
        cache_config=SimpleNamespace(
            enable_prefix_caching=given["prefix_caching"], num_gpu_blocks=10, block_size=BLOCK_SIZE
        ),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=given["pipeline"], decode_context_parallel_size=given["context"]
        ),
        model_config=SimpleNamespace(get_hidden_size=lambda: WIDTH, dtype=torch.bfloat16),
    )


def caches_of(*specs: Any) -> KVCacheConfig:
    return KVCacheConfig(10, [], [KVCacheGroupSpec([str(index)], spec) for index, spec in enumerate(specs)])


def test_rows_are_read_in_the_order_of_their_tokens() -> None:
    cache, blocks = RowCache(8 * BLOCK_SIZE, rows_of(0)), [5, 1, 7]
    for start, end in ((0, 6), (6, 7), (7, 12)):  # chunks of a prompt, and a step of its reply
        cache.write(slots_of(blocks, start, end), rows_of(*range(start, end)))
    assert torch.equal(cache.read(blocks, BLOCK_SIZE, 0, 12), rows_of(*range(12)))
    assert torch.equal(cache.read(blocks, BLOCK_SIZE, 3, 9), rows_of(*range(3, 9)))


def test_a_row_that_was_read_does_not_change_with_its_block() -> None:
    cache = RowCache(2 * BLOCK_SIZE, rows_of(0))
    cache.write(slots_of([1], 0, 4), rows_of(1, 2, 3, 4))
    read = cache.read([1], BLOCK_SIZE, 0, 4)
    cache.write(slots_of([1], 0, 4), rows_of(5, 6, 7, 8))
    assert torch.equal(read, rows_of(1, 2, 3, 4))
    assert torch.equal(cache.read([1], BLOCK_SIZE, 0, 4), rows_of(5, 6, 7, 8))


def test_requests_share_the_blocks_of_a_prefix() -> None:
    cache = RowCache(8 * BLOCK_SIZE, rows_of(0))
    cache.write(slots_of([2, 3], 0, 8), rows_of(*range(8)))
    cache.write(slots_of([2, 6], 4, 8), rows_of(40, 41, 42, 43))
    assert torch.equal(cache.read([2, 3], BLOCK_SIZE, 0, 8), rows_of(*range(8)))
    assert torch.equal(cache.read([2, 6], BLOCK_SIZE, 0, 8), rows_of(0, 1, 2, 3, 40, 41, 42, 43))


def test_rows_keep_the_dtype_of_the_model() -> None:
    cache = RowCache(BLOCK_SIZE, rows_of(0).bfloat16())
    assert cache.num_bytes == BLOCK_SIZE * WIDTH * 2
    assert cache.read([0], BLOCK_SIZE, 0, 2).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("config", "specs", "is_kept"),
    [
        ({}, [FULL], True),
        ({"is_on": False}, [FULL], False),
        ({"prefix_caching": False}, [FULL], False),
        ({"pipeline": 2}, [FULL], False),
        ({"context": 2}, [FULL], False),
        ({}, [WINDOW], False),  # blocks that have left the window are not held
        ({}, [FULL, WINDOW], False),
    ],
)
def test_rows_are_kept_where_each_token_has_a_block(config: dict[str, Any], specs: list[Any], is_kept: bool) -> None:
    assert keeps_rows(make_config(**config), caches_of(*specs)) is is_kept


def test_rows_are_part_of_the_memory_of_a_cache() -> None:
    config, specs = make_config(), {"0": FULL, "1": FULL}
    pages = 2 * FULL.page_size_bytes
    assert row_bytes(config) == WIDTH * 2
    assert row_cache_bytes(config) == 10 * BLOCK_SIZE * WIDTH * 2
    assert bytes_with_rows(config, specs, 7 * pages) == 7 * (pages + BLOCK_SIZE * WIDTH * 2)
    for num_bytes in (0, 1, pages - 1, pages, 12345, 7 * pages + 3):
        assert (
            num_bytes <= bytes_without_rows(config, specs, bytes_with_rows(config, specs, num_bytes)) <= num_bytes + 1
        )


def test_an_engine_without_rows_has_its_memory_for_pages() -> None:
    config = make_config(is_on=False)
    assert bytes_with_rows(config, {"0": FULL}, 1000) == bytes_without_rows(config, {"0": FULL}, 1000) == 1000
    assert bytes_with_rows(make_config(), {}, 0) == bytes_without_rows(make_config(), {}, 0) == 0
    assert row_cache_bytes(config) == 0
