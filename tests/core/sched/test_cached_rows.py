"""How much of the prefix cache a request may read whose rows another stage reads."""

from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import KVCacheBlock, get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from tests import text_model
from vllm_omni.core.sched.cached_rows import CachedRows
from vllm_omni.core.sched.stream import StreamScheduler
from vllm_omni.messages.stage_step import STAGE_ARGS
from vllm_omni.model_executor.row_cache import ROW_CACHE

BLOCK_SIZE = 4
PUBLISHES = {"publish": True, "cached_rows": True}


def make_request(request_id: str, num_prompt: int, args: dict[str, Any] | None) -> Request:
    params = SamplingParams(max_tokens=2, extra_args={STAGE_ARGS: args} if args else None)
    params.skip_reading_prefix_cache = bool(args)
    hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
    return Request(request_id, list(range(num_prompt)), params, None, block_hasher=hasher)


def make_scheduler(*, is_on: bool) -> StreamScheduler:
    init_none_hash(sha256)
    config = text_model.make_config(num_layers=1, num_heads=1, head_size=8, vocab_size=16, block_size=BLOCK_SIZE)
    config.cache_config.num_gpu_blocks = 32
    config.cache_config.enable_prefix_caching = True
    config.scheduler_config.async_scheduling = False
    config.additional_config = {ROW_CACHE: True} if is_on else {}
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype=torch.float32)
    return StreamScheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(32, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
    )


def compute(scheduler: StreamScheduler, request: Request) -> int:
    """Run a request to its end; returns how many tokens of its first step were not computed."""
    scheduler.add_request(request)
    num_cached = None
    while request.request_id in scheduler.requests:
        output = scheduler.schedule()
        if num_cached is None:
            (new,) = output.scheduled_new_reqs
            num_cached = new.num_computed_tokens
        ids = list(output.num_scheduled_tokens)
        scheduler.update_from_output(
            output, ModelRunnerOutput(ids, {one: index for index, one in enumerate(ids)}, [[1] for _ in ids])
        )
    assert num_cached is not None
    return num_cached


@pytest.mark.parametrize("first", [None, PUBLISHES])
def test_a_request_that_publishes_reads_what_any_request_has_computed(first: dict[str, Any] | None) -> None:
    scheduler = make_scheduler(is_on=True)
    assert compute(scheduler, make_request("a", 10, first)) == 0
    assert compute(scheduler, make_request("b", 14, PUBLISHES)) == 8


def test_without_kept_rows_it_computes_its_whole_prompt() -> None:
    scheduler = make_scheduler(is_on=False)
    compute(scheduler, make_request("a", 10, PUBLISHES))
    assert compute(scheduler, make_request("b", 14, PUBLISHES)) == 0


def test_a_request_that_must_compute_its_prompt_does() -> None:
    """One with log probabilities of its prompt, for example."""
    scheduler = make_scheduler(is_on=True)
    compute(scheduler, make_request("a", 10, PUBLISHES))
    assert compute(scheduler, make_request("b", 14, {"publish": True})) == 0


# -- blocks that a connector has loaded --------------------------------------------------------------------------------


class Blocks:
    """The blocks of one request, of which some are full."""

    def __init__(self, *hashes: bytes | None) -> None:
        self.blocks = [KVCacheBlock(index) for index in range(len(hashes))]
        for block, content in zip(self.blocks, hashes, strict=True):
            block._block_hash = content  # type: ignore[assignment]

    def holds(self, index: int, content: bytes | None) -> None:
        self.blocks[index]._block_hash = content  # type: ignore[assignment]


@pytest.fixture
def rows() -> CachedRows:
    return CachedRows(BLOCK_SIZE, is_on=True, has_connector=True)


def test_a_hit_ends_in_front_of_what_was_loaded(rows: CachedRows) -> None:
    request, own = make_request("a", 20, None), Blocks(b"0", b"1", b"2", b"3")
    rows.note_own(request, 8)
    rows.note_loaded(request, own.blocks, 16)
    assert rows.num_tokens_with_rows(own.blocks) == 8
    assert rows.num_tokens_with_rows(own.blocks[:2]) == 8


def test_a_block_that_is_used_again_has_its_rows(rows: CachedRows) -> None:
    request, own = make_request("a", 20, None), Blocks(b"0", b"1", b"2", b"3")
    rows.note_loaded(request, own.blocks, 16)
    own.holds(0, b"other")
    assert rows.num_tokens_with_rows(own.blocks) == 4
    own.holds(0, b"0")  # it may have been loaded again
    assert rows.num_tokens_with_rows(own.blocks) == 0


def test_a_block_that_was_loaded_in_part_lacks_rows_once_it_is_full(rows: CachedRows) -> None:
    request, own = make_request("a", 20, None), Blocks(b"0", None)
    rows.note_own(request, 4)
    rows.note_loaded(request, own.blocks, 6)
    own.holds(1, b"filled")
    assert rows.num_tokens_with_rows(own.blocks) == 4
    rows.release(request)
    assert rows.num_tokens_with_rows(own.blocks) == 4
    own.holds(1, b"other")
    assert rows.num_tokens_with_rows(own.blocks) == 8


def test_a_block_that_was_never_filled_is_forgotten(rows: CachedRows) -> None:
    request, own = make_request("a", 20, None), Blocks(b"0", None)
    rows.note_own(request, 4)
    rows.note_loaded(request, own.blocks, 6)
    rows.release(request)
    own.holds(1, b"of another request")
    assert rows.num_tokens_with_rows(own.blocks) == 8


def test_what_a_failed_load_leaves_is_computed_and_has_rows(rows: CachedRows) -> None:
    """vLLM reports no tokens, frees the blocks and starts anew."""
    request = make_request("a", 20, None)
    rows.note_own(request, 4)
    rows.note_loaded(request, [], 0)
    rows.release(request)
    assert rows.num_tokens_with_rows(Blocks(b"0", b"1").blocks) == 8
