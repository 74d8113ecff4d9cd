import random

import pytest

from vllm_omni.errors import PoolExhausted
from vllm_omni.relay.pool import Block, BufferPool


def make_pool(num_chunks=8):
    return BufferPool(num_chunks * 16, chunk_bytes=16)


def test_blocks_do_not_overlap_and_start_at_chunks():
    pool = make_pool()
    assert [pool.allocate(n).offset for n in (1, 16, 17)] == [0, 16, 32]
    pool.check_integrity()


def test_block_is_free_when_its_last_reference_goes():
    pool = make_pool(1)
    block = pool.allocate(16)
    pool.add_ref(block)
    pool.free(block)
    with pytest.raises(PoolExhausted, match="16 of 16 bytes are in use"):
        pool.allocate(1)
    pool.free(block)
    assert pool.allocate(1).offset == 0


def test_neighbours_that_become_free_are_one_run():
    pool = make_pool(3)
    blocks = [pool.allocate(16) for _ in range(3)]
    for block in (blocks[0], blocks[2], blocks[1]):
        pool.free(block)
        pool.check_integrity()
    assert pool.allocate(48) == Block(0, 48)


def test_exhausted_pool_is_left_as_it_was():
    pool = make_pool(4)
    pool.free(pool.allocate(16, cache_key="idle"))
    kept = pool.allocate(32)
    before = pool.statistics()
    with pytest.raises(PoolExhausted):
        pool.allocate(48)
    assert pool.statistics() == before
    assert pool.borrow("idle") is not None
    pool.free(kept)


def test_cached_block_is_borrowed_by_several_at_once():
    pool = make_pool()
    block = pool.allocate(20, cache_key="image")
    assert pool.borrow("image") == pool.borrow("image") == block
    for _ in range(3):
        pool.free(block)
    assert pool.statistics().num_idle == 1
    assert pool.borrow("image") == block
    assert pool.statistics().num_idle == 0


def test_unknown_key_is_nothing():
    assert make_pool().borrow("image") is None


def test_idle_blocks_go_for_room_the_longest_unused_first():
    pool = make_pool(2)
    for key in "ab":
        pool.free(pool.allocate(16, cache_key=key))
    pool.free(pool.borrow("a"))
    pool.allocate(16)
    assert pool.borrow("b") is None
    assert pool.borrow("a") is not None
    assert pool.statistics().num_evicted == 1


def test_block_in_use_is_never_evicted():
    pool = make_pool(2)
    pool.allocate(16, cache_key="a")
    with pytest.raises(PoolExhausted):
        pool.allocate(32)
    assert pool.borrow("a") is not None


def test_name_that_is_taken_again_leads_to_the_new_block():
    pool = make_pool()
    old = pool.allocate(16, cache_key="a")
    new = pool.allocate(16, cache_key="a")
    assert pool.borrow("a") == new
    pool.free(old)
    assert pool.statistics().num_blocks == 1
    pool.check_integrity()


def test_byte_leads_to_its_block():
    pool = make_pool()
    one, two = pool.allocate(20), pool.allocate(16)
    assert pool.find_alloc_by_ptr(0) == pool.find_alloc_by_ptr(19) == one
    assert pool.find_alloc_by_ptr(20) is None  # of its chunk, but not asked for
    assert pool.find_alloc_by_ptr(two.offset + 5) == two
    assert pool.find_alloc_by_ptr(two.offset + 16) is None
    assert pool.find_alloc_by_ptr(-1) is None


def test_freeing_too_often_is_refused():
    pool = make_pool()
    block = pool.allocate(16)
    pool.free(block)
    with pytest.raises(ValueError, match="freed as often as it was taken"):
        pool.free(block)


@pytest.mark.parametrize("num_bytes, chunk_bytes", [(0, 16), (8, 16), (40, 16), (16, 0)])
def test_pool_of_a_wrong_size_is_refused(num_bytes, chunk_bytes):
    with pytest.raises(ValueError, match="must be a multiple of its chunks"):
        BufferPool(num_bytes, chunk_bytes)


@pytest.mark.parametrize("num_bytes", [0, -1])
def test_block_of_no_bytes_is_refused(num_bytes):
    with pytest.raises(ValueError, match="at least 1 byte"):
        make_pool().allocate(num_bytes)


@pytest.mark.parametrize("seed", range(20))
def test_random_use_loses_and_doubles_nothing(seed):
    rng = random.Random(seed)
    pool, held = make_pool(32), []
    for _ in range(400):
        what = rng.random()
        if what < 0.4:
            key = rng.choice([None, *"abcdef"])
            num_bytes = rng.randint(1, 130)
            can = pool.can_allocate(num_bytes)
            try:
                held.append(pool.allocate(num_bytes, cache_key=key))
                assert can
            except PoolExhausted:
                assert not can
        elif what < 0.5 and (block := pool.borrow(rng.choice("abcdef"))) is not None:
            held.append(block)
        elif held:
            block = held.pop(rng.randrange(len(held)))
            assert pool.find_alloc_by_ptr(block.offset) == block
            pool.free(block)
        pool.check_integrity()
    for block in held:
        pool.free(block)
    pool.check_integrity()
    assert pool.statistics().num_bytes_used == 0
