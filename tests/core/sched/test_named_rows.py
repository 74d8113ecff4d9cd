"""The prefix cache of a stage that reads rows: the real scheduler, with prompts whose ids are all alike."""

from collections.abc import Sequence
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.request import Request

from tests.core.sched.test_cached_rows import BLOCK_SIZE, compute, make_scheduler
from vllm_omni.core.sched.named_rows import NamedRows
from vllm_omni.core.sched.stream import StreamScheduler
from vllm_omni.messages.stage_step import STAGE_ARGS
from vllm_omni.messages.token_names import Part, TokenNames, encode_names

FILLER = 7
IMAGE = Part(5, 6, "an image")


def request_of(request_id: str, names: TokenNames | None, num_prompt: int = 18, num_output: int = 2) -> Request:
    """A prompt of rows, as a talker gets it: named but for its last ones."""
    args: dict[str, Any] = {"payloads": []} | ({} if names is None else {"row_names": encode_names(names)})
    params = SamplingParams(max_tokens=num_output, ignore_eos=True, extra_args={STAGE_ARGS: args})
    return Request(
        request_id, [FILLER] * num_prompt, params, None, block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256)
    )


def hashes_of(request: Request) -> list[bytes]:
    NamedRows(make_scheduler(is_on=False).vllm_config.cache_config, BLOCK_SIZE).add(request)
    return list(request.block_hashes)


def ids(*more: int) -> list[int]:
    return [*range(100, 112), *more]


@pytest.fixture
def scheduler() -> StreamScheduler:
    return make_scheduler(is_on=False)


def test_a_longer_prompt_reads_what_its_first_rows_have_left(scheduler: StreamScheduler) -> None:
    assert compute(scheduler, request_of("a", TokenNames(ids()))) == 0
    assert compute(scheduler, request_of("b", TokenNames(ids(1, 2, 3, 4, 5, 6, 7, 8)), num_prompt=22)) == 12


@pytest.mark.parametrize(
    ("other", "num_cached"),
    [
        (TokenNames([*range(100, 106), 1, *range(107, 112)], [IMAGE]), 4),
        (TokenNames(ids(), [Part(5, 6, "another image")]), 4),
        (TokenNames(ids(), [Part(4, 6, "an image")]), 4),
        (TokenNames(ids(), []), 4),
        (TokenNames(ids(), [IMAGE, Part(8, 1, "more")]), 8),
        (TokenNames(ids(), [IMAGE], salt="a tenant"), 0),
        (TokenNames(ids()[:6], [IMAGE]), 4),
        (None, 0),
    ],
    ids=["ids", "media", "place", "no media", "one more", "salt", "fewer names", "no names"],
)
def test_rows_of_another_name_are_computed(
    scheduler: StreamScheduler, other: TokenNames | None, num_cached: int
) -> None:
    compute(scheduler, request_of("a", TokenNames(ids(), [IMAGE])))
    assert compute(scheduler, request_of("b", other)) == num_cached
    assert compute(scheduler, request_of("c", TokenNames(ids(), [IMAGE]))) == 12


def test_a_request_without_names_shares_nothing(scheduler: StreamScheduler) -> None:
    assert [compute(scheduler, request_of(str(number), None)) for number in range(3)] == [0, 0, 0]


def test_rows_without_a_name_and_the_reply_are_the_requests_own() -> None:
    """With equal codes: what the model reads beside them is another reply."""
    one, other = (request_of(name, TokenNames(ids())) for name in "ab")
    for request in (one, other):
        hashes_of(request)
        request.append_output_token_ids([FILLER] * 6)
    assert len(one.block_hashes) == len(other.block_hashes) == 6
    assert one.block_hashes[:3] == other.block_hashes[:3]
    assert not set(one.block_hashes[3:]) & set(other.block_hashes[3:])


def test_hashes_do_not_depend_on_when_a_block_became_full() -> None:
    request = request_of("a", TokenNames(ids()))
    hashes_of(request)
    for _ in range(9):
        request.append_output_token_ids(FILLER)
    before = list(request.block_hashes)
    assert len(before) == 6
    request.block_hashes.clear()
    request.update_block_hashes()
    assert request.block_hashes == before


def test_a_preempted_request_finds_its_own_blocks(scheduler: StreamScheduler) -> None:
    request = request_of("a", TokenNames(ids()), num_output=8)
    scheduler.add_request(request)
    output = scheduler.schedule()
    for token in (FILLER,) * 4:
        _finish(scheduler, output, token)
        output = scheduler.schedule()
    _finish(scheduler, output, FILLER)
    scheduler.running.remove(request)
    scheduler._preempt_request(request, 0.0)
    (num_computed,) = scheduler.schedule().scheduled_cached_reqs.num_computed_tokens
    assert num_computed == 20  # of 18 + 5, in full blocks


def _finish(scheduler: StreamScheduler, output: Any, token: int) -> None:
    from vllm.v1.outputs import ModelRunnerOutput

    scheduler.update_from_output(output, ModelRunnerOutput(["a"], {"a": 0}, [[token]]))


def test_requests_that_read_no_rows_are_vllms(scheduler: StreamScheduler) -> None:
    def plain(request_id: str, tokens: Sequence[int]) -> Request:
        hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
        return Request(request_id, list(tokens), SamplingParams(max_tokens=2), None, block_hasher=hasher)

    request = plain("a", range(10))
    expected = list(request.block_hashes)
    assert hashes_of(request) == expected
    compute(scheduler, plain("b", range(10)))
    assert compute(scheduler, plain("c", range(12))) == 8


def test_names_leave_the_stage_arguments_once_they_are_read() -> None:
    request = request_of("a", TokenNames(ids()))
    hashes_of(request)
    assert request.sampling_params is not None and request.sampling_params.extra_args is not None
    assert request.sampling_params.extra_args[STAGE_ARGS] == {"payloads": []}
