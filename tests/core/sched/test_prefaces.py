"""Texts in front of pictures, and sizes that requests choose, in the scheduler's requests."""

from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request, RequestStatus

from vllm_omni.core.sched.prefaces import Prefaces
from vllm_omni.messages.canvas_step import Tail
from vllm_omni.unified.plan import ImagePlan
from vllm_omni.unified.preface import Preface

NUM_PROMPT, BLOCK_SIZE, MAX_MODEL_LEN = 10, 4, 64
TEXT, EOS, END, ANSWER, START = 50, 5, 4, 6, 7
FIRST_SIZE, GRIDS = 20, ((1, 4), (2, 2), (4, 1))
SIZES: dict[str, Any] = {"first_size": FIRST_SIZE, "grids": GRIDS, "default_size": 1}
TEXT_FIRST: dict[str, Any] = {"stops": (EOS, END), "kept": (END,), "end": (END,), "behind": (ANSWER, START)}

init_none_hash(sha256)


def make_request(*tokens: int, request_id: str = "a", max_tokens: int = 40) -> Request:
    """A request that runs, with tokens behind its prompt."""
    hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
    request = Request(
        request_id, list(range(NUM_PROMPT)), SamplingParams(max_tokens=max_tokens), None, block_hasher=hasher
    )
    request.status = RequestStatus.RUNNING
    for token in tokens:
        request.append_output_token_ids(token)
    return request


class World:
    """Requests with prefaces, and the pictures that they start."""

    def __init__(self, request: Request, **preface: Any) -> None:
        self.request = request
        self.started: list[ImagePlan] = []
        self.prefaces = Prefaces(lambda _, plan: self.started.append(plan), MAX_MODEL_LEN)
        self.plan = ImagePlan((2, 2), num_markers=1, mask=9, masked=((1, 4),), preface=Preface(**preface))
        self.prefaces.add(request, self.plan)

    def write(self, token: int, status: RequestStatus = RequestStatus.RUNNING) -> tuple[list[int], bool]:
        """The request samples a token; upstream says whether it ends with that."""
        self.request.append_output_token_ids(token)
        self.request.status = status
        return self.prefaces.note_tokens(self.request, [token], has_stopped=status != RequestStatus.RUNNING)

    def take(self) -> Tail | None:
        return self.prefaces.take(["a", "other"]).get("a")

    @property
    def output(self) -> list[int]:
        return list(self.request.output_token_ids)


def test_tokens_behind_a_text_take_the_place_of_what_ended_it() -> None:
    for last in (END, EOS):
        world = World(make_request(), **TEXT_FIRST)
        assert world.write(TEXT) == ([TEXT], False) and world.take() is None
        assert world.write(last) == ([END], False)
        assert world.output == [TEXT, END, ANSWER, START]
        assert world.prefaces and world.take() == Tail(NUM_PROMPT + 1, (END, ANSWER, START))
        assert not world.prefaces
        (plan,) = world.started
        assert plan.masked == ((1, 4), (NUM_PROMPT, NUM_PROMPT + 1)) and plan.grid == (2, 2)
        assert world.request.status == RequestStatus.RUNNING


def test_a_text_that_is_cut_off_keeps_its_last_token() -> None:
    world = World(make_request(), **TEXT_FIRST)
    world.write(TEXT)
    assert world.write(TEXT + 1, RequestStatus.FINISHED_LENGTH_CAPPED) == ([TEXT + 1], False)
    assert world.output == [TEXT, TEXT + 1, END, ANSWER, START]
    assert world.take() == Tail(NUM_PROMPT + 1, (TEXT + 1, END, ANSWER, START))
    assert world.started[0].masked[-1] == (NUM_PROMPT, NUM_PROMPT + 2)


def test_the_token_behind_a_text_chooses_the_size_and_is_no_answer() -> None:
    for token, index in ((FIRST_SIZE + 2, 2), (FIRST_SIZE, 0), (TEXT, 1)):
        world = World(make_request(), **TEXT_FIRST, **SIZES)
        world.write(END)
        assert not world.started and world.take() is not None
        assert world.write(token, RequestStatus.FINISHED_STOPPED) == ([], False)
        assert world.take() == Tail(NUM_PROMPT + 3, (FIRST_SIZE + index,), GRIDS[index])
        assert world.output == [END, ANSWER, START, FIRST_SIZE + index]
        assert world.started[0].grid == GRIDS[index]
        assert world.write(TEXT) == ([TEXT], False), "the picture has started"


def test_a_size_alone_is_the_first_token() -> None:
    world = World(make_request(), **SIZES)
    assert world.write(FIRST_SIZE + 2) == ([], False)
    assert world.started[0].grid == GRIDS[2]
    assert world.started[0].masked == ((1, 4),)


@pytest.mark.parametrize("num_text", range(1, 6))
def test_pages_are_hashed_as_those_of_the_same_tokens(num_text: int) -> None:
    world = World(make_request(), **TEXT_FIRST)
    for _ in range(num_text):
        world.write(TEXT)
    world.write(EOS, RequestStatus.FINISHED_STOPPED)
    expected = make_request(*[TEXT] * num_text, END, ANSWER, START)
    assert list(world.request.all_token_ids) == list(expected.all_token_ids)
    assert world.request.block_hashes == expected.block_hashes


def test_a_text_leaves_room_for_its_picture() -> None:
    world = World(make_request(max_tokens=1000), **TEXT_FIRST, **SIZES)
    more = len((END, ANSWER, START)) + 1 + world.plan.num_canvas_tokens + 1
    assert world.request.max_tokens == MAX_MODEL_LEN - NUM_PROMPT - more


def test_requests_that_end_leave_nothing() -> None:
    for num_tokens in range(3):
        world = World(make_request(), **TEXT_FIRST, **SIZES)
        for token in (TEXT, END, TEXT)[:num_tokens]:
            world.write(token)
        world.prefaces.end(())
        assert not world.prefaces and world.take() is None
        assert world.write(END) == ([END], False) and not world.started


def test_other_requests_have_their_tokens() -> None:
    world = World(make_request(), **TEXT_FIRST)
    other = make_request(EOS, request_id="b")
    assert world.prefaces.note_tokens(other, [EOS], has_stopped=True) == ([EOS], True)
