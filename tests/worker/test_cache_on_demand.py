"""A KV cache takes memory as it is used."""

import pytest
import torch

from vllm_omni.process.proc import anonymous_rss
from vllm_omni.worker.cache_on_demand import CacheOnDemand

SIZE = 256 << 20


def test_a_cache_takes_the_memory_of_what_was_written() -> None:
    before = anonymous_rss()
    with CacheOnDemand():
        cache = torch.zeros(SIZE, dtype=torch.int8, device="cpu")
    assert anonymous_rss() - before < SIZE // 16
    assert (cache.shape, cache.dtype) == ((SIZE,), torch.int8)
    cache[: SIZE // 2] = 1
    assert SIZE // 4 < anonymous_rss() - before < 3 * SIZE // 4
    assert not cache[SIZE // 2 :].any()
    assert cache[: SIZE // 2].all()


def test_its_memory_is_given_back() -> None:
    before = anonymous_rss()
    with CacheOnDemand():
        cache = torch.zeros(SIZE, dtype=torch.int8)
    cache.view(torch.float32).view(2, -1).fill_(1.0)
    del cache
    assert anonymous_rss() - before < SIZE // 16


@pytest.mark.parametrize("made", [torch.zeros(8, dtype=torch.int8), torch.zeros((2, 3)), torch.ones(4)])
def test_other_tensors_are_torchs(made: torch.Tensor) -> None:
    with CacheOnDemand():
        same = torch.zeros(made.shape, dtype=made.dtype) + made
    assert torch.equal(same, made)


def test_upstream_allocates_the_cache_as_it_is_recognized() -> None:
    """``allocate_kv_cache`` calls ``torch.zeros`` with a number of bytes."""
    import inspect

    from vllm.v1.worker.utils import allocate_kv_cache

    assert "torch.zeros(buf_size, dtype=torch.int8, device=device)" in inspect.getsource(allocate_kv_cache)
