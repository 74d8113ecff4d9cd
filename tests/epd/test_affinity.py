"""Which of several instances is chosen."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_omni.epd.affinity import MAX_LEAD, NUM_PREFIX_TOKENS, InstanceBalance, cache_keys

NAMES = ["P0", "P1", "P2"]


def make_prompt(num_tokens: int, *images: str, first_token: int = 0) -> dict[str, Any]:
    places = [SimpleNamespace(offset=NUM_PREFIX_TOKENS + number) for number in range(len(images))]
    return {
        "prompt_token_ids": [first_token, *range(1, num_tokens)],
        "mm_hashes": {"image": list(images)},
        "mm_placeholders": {"image": places},
    }


async def choose(
    balance: InstanceBalance, work: dict[str, float] | None = None, session: str | None = None, keys: Any = ()
) -> str:
    return await balance.choose(NAMES, "P", work or {}, session, keys)


async def test_turns_go_round() -> None:
    balance = InstanceBalance("llm", "round_robin")
    assert Counter([await choose(balance) for _ in range(6)]) == dict.fromkeys(NAMES, 2)


@pytest.mark.parametrize("policy", ["round_robin", "least_work"])
async def test_each_task_has_turns_of_its_own(policy: str) -> None:
    """Requests of two tasks, one after the other: nobody is left out."""
    balance = InstanceBalance("llm", policy)
    tasks = {"E": ["E0", "E1"], "P": ["PD0", "PD1"]}
    chosen = [await balance.choose(names, task, {}, None, ()) for _ in range(2) for task, names in tasks.items()]
    assert sorted(chosen) == ["E0", "E1", "PD0", "PD1"]


async def test_who_has_least_to_do_is_next() -> None:
    balance = InstanceBalance("llm", "least_work")
    assert await choose(balance, {"P0": 3.5, "P1": 0.5, "P2": 0.75}) == "P1"


async def test_a_session_stays_while_its_instance_lives() -> None:
    balance = InstanceBalance("llm", "affinity")
    first = await choose(balance, session="s")
    assert await choose(balance, {first: 9.0}, session="s") == first
    left = [name for name in NAMES if name != first]
    second = await balance.choose(left, "P", {}, "s", ())
    assert second != first
    assert await choose(balance, session="s") == second


async def test_a_session_has_an_instance_for_each_task() -> None:
    balance = InstanceBalance("llm", "affinity")
    assert await choose(balance, session="s") in NAMES
    assert await balance.choose(["D0"], "D", {}, "s", ()) == "D0"
    assert await choose(balance, session="s") in NAMES


async def test_a_prefix_goes_where_it_was() -> None:
    balance = InstanceBalance("llm", "affinity")
    long, other = make_prompt(3 * NUM_PREFIX_TOKENS), make_prompt(3 * NUM_PREFIX_TOKENS, first_token=9)
    where = await choose(balance, {"P0": 1.0, "P1": 1.0}, keys=cache_keys(long, "PD"))
    assert where == "P2"
    longer = make_prompt(5 * NUM_PREFIX_TOKENS)
    assert await choose(balance, {"P2": 3.0, "P0": 1.0, "P1": 1.0}, keys=cache_keys(longer, "PD")) == "P2"
    assert await choose(balance, {"P2": 3.0, "P0": 1.0}, keys=cache_keys(other, "PD")) == "P1"


async def test_what_a_cache_has_is_not_worth_a_queue() -> None:
    balance = InstanceBalance("llm", "affinity")
    keys = cache_keys(make_prompt(0, "picture"), "E")
    where = await choose(balance, keys=keys)
    busy = dict.fromkeys(NAMES, 1.0) | {where: MAX_LEAD + 1}
    assert await choose(balance, busy, keys=keys) != where


def test_an_encode_is_known_by_its_images() -> None:
    assert cache_keys(make_prompt(200, "a", "b"), "E") == [("image", "a"), ("image", "b")]


@pytest.mark.parametrize("does", ["P", "PD", "EP", "EPD"])
def test_another_image_is_another_prefix_from_where_it_begins(does: str) -> None:
    one, two = (cache_keys(make_prompt(3 * NUM_PREFIX_TOKENS, image), does) for image in "ab")
    assert len(one) == 3
    assert one[-1] == two[-1]
    assert not set(one[:-1]) & set(two)


def test_a_decode_finds_nothing() -> None:
    assert cache_keys(make_prompt(200, "a"), "D") == []
