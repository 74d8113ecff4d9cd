import random

import pytest

from tests.fuzz import seeds
from vllm_omni.errors import PoolExhausted
from vllm_omni.relay.pool import Block, BufferPool


def make_pool(num_chunks=8):
    return BufferPool(num_chunks * 16, chunk_bytes=16)


def test_blocks_do_not_overlap_and_start_at_chunks():
    pool = make_pool()
    assert [pool.allocate(n).offset for n in (1, 16, 17)] == [0, 16, 32]
    pool.check_integrity()


def test_a_freed_block_is_allocated_again():
    pool = make_pool(1)
    block = pool.allocate(16)
    with pytest.raises(PoolExhausted, match="16 of 16 bytes are in use"):
        pool.allocate(1)
    pool.free(block)
    assert pool.allocate(1).offset == 0


def test_freed_neighbours_are_joined():
    pool = make_pool(3)
    blocks = [pool.allocate(16) for _ in range(3)]
    for block in (blocks[0], blocks[2], blocks[1]):
        pool.free(block)
        pool.check_integrity()
    assert pool.allocate(48) == Block(0, 48)


def test_an_exhausted_pool_is_unchanged():
    pool = make_pool(4)
    kept = pool.allocate(32)
    before = pool.statistics()
    with pytest.raises(PoolExhausted) as error:
        pool.allocate(48)
    assert not error.value.is_final
    with pytest.raises(PoolExhausted) as error:
        pool.allocate(65)
    assert error.value.is_final
    assert pool.statistics() == before
    pool.free(kept)


def test_a_block_is_found_by_its_bytes():
    pool = make_pool()
    one, two = pool.allocate(20), pool.allocate(16)
    assert pool.find_block(0) == pool.find_block(19) == one
    assert pool.find_block(20) is None  # in its chunk, but not requested
    assert pool.find_block(two.offset + 5) == two
    assert pool.find_block(two.offset + 16) is None
    assert pool.find_block(-1) is None


def test_freeing_twice_is_rejected():
    pool = make_pool()
    block = pool.allocate(16)
    pool.free(block)
    with pytest.raises(ValueError, match="it was freed before"):
        pool.free(block)


def test_invalid_sizes_are_rejected():
    for num_bytes, chunk_bytes in ((0, 16), (8, 16), (40, 16), (16, 0)):
        with pytest.raises(ValueError, match="must be a multiple of its chunks"):
            BufferPool(num_bytes, chunk_bytes)
    for num_bytes in (0, -1):
        with pytest.raises(ValueError, match="at least 1 byte"):
            make_pool().allocate(num_bytes)


@pytest.mark.fuzz
def test_random_use_loses_no_chunk_and_uses_none_twice():
    for seed in seeds(50):
        rng = random.Random(seed)
        pool, held = make_pool(32), []
        for _ in range(400):
            if rng.random() < 0.5:
                num_bytes = rng.randint(1, 130)
                can = pool.can_allocate(num_bytes)
                try:
                    held.append(pool.allocate(num_bytes))
                    assert can, f"FUZZ_SEED={seed}"
                except PoolExhausted:
                    assert not can, f"FUZZ_SEED={seed}"
            elif held:
                block = held.pop(rng.randrange(len(held)))
                assert pool.find_block(block.offset) == block, f"FUZZ_SEED={seed}"
                pool.free(block)
            pool.check_integrity()
        for block in held:
            pool.free(block)
        pool.check_integrity()
        assert pool.statistics().num_bytes_used == 0, f"FUZZ_SEED={seed}"
