"""Which of several instances is chosen."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_omni.config.epd import Balance, Tasks
from vllm_omni.epd.balance import MAX_KNOWN, MAX_LEAD, NUM_PREFIX_TOKENS, InstanceBalance, cache_keys

NAMES = ["P0", "P1", "P2"]


def make_prompt(num_tokens: int, *images: str, first_token: int = 0) -> dict[str, Any]:
    places = [SimpleNamespace(offset=NUM_PREFIX_TOKENS + number) for number in range(len(images))]
    return {
        "prompt_token_ids": [first_token, *range(1, num_tokens)],
        "mm_hashes": {"image": list(images)},
        "mm_placeholders": {"image": places},
    }


def choose(
    balance: InstanceBalance, work: dict[str, float] | None = None, session: str | None = None, keys: Any = ()
) -> str:
    return balance.choose(NAMES, Tasks.P, work or {}, session, keys)


def test_round_robin() -> None:
    balance = InstanceBalance("round_robin")
    assert Counter(choose(balance) for _ in range(6)) == dict.fromkeys(NAMES, 2)


def test_tasks_are_balanced_independently() -> None:
    """Requests of two tasks alternate: no instance stays idle."""
    names = {Tasks.E: ["E0", "E1"], Tasks.P: ["PD0", "PD1"]}
    for policy in ("round_robin", "least_work"):
        balance = InstanceBalance(policy)
        chosen = [balance.choose(names[task], task, {}) for _ in range(2) for task in names]
        assert sorted(chosen) == ["E0", "E1", "PD0", "PD1"], policy


def test_the_instance_with_least_work_is_chosen() -> None:
    assert choose(InstanceBalance("least_work"), {"P0": 3.5, "P1": 0.5, "P2": 0.75}) == "P1"


@pytest.mark.parametrize("policy", ["affinity", "session"])
def test_a_session_stays_while_its_instance_runs(policy: Balance) -> None:
    balance = InstanceBalance(policy)
    first = choose(balance, session="s")
    assert choose(balance, {first: 9.0}, session="s") == first
    left = [name for name in NAMES if name != first]
    second = balance.choose(left, Tasks.P, {}, "s")
    assert second != first
    assert choose(balance, session="s") == second


def test_a_session_has_an_instance_for_each_task() -> None:
    balance = InstanceBalance("affinity")
    first = choose(balance, session="s")
    assert balance.choose(["D0"], Tasks.D, {}, "s") == "D0"
    assert choose(balance, {first: 9.0}, session="s") == first


def test_only_so_many_sessions_are_remembered() -> None:
    balance = InstanceBalance("affinity")
    first = choose(balance, session="first")
    for number in range(MAX_KNOWN):
        balance.choose(["P0"], Tasks.P, {}, str(number))
    assert choose(balance, {first: 1.0}, session="first") != first


def test_a_prefix_goes_to_the_instance_that_had_it() -> None:
    balance = InstanceBalance("affinity")
    long, other = make_prompt(3 * NUM_PREFIX_TOKENS), make_prompt(3 * NUM_PREFIX_TOKENS, first_token=9)
    assert choose(balance, {"P0": 1.0, "P1": 1.0}, keys=cache_keys(long, Tasks.PD)) == "P2"
    longer = make_prompt(5 * NUM_PREFIX_TOKENS)
    assert choose(balance, {"P2": 3.0, "P0": 1.0, "P1": 1.0}, keys=cache_keys(longer, Tasks.PD)) == "P2"
    assert choose(balance, {"P2": 3.0, "P0": 1.0}, keys=cache_keys(other, Tasks.PD)) == "P1"


def test_a_cache_does_not_outweigh_a_queue() -> None:
    balance = InstanceBalance("affinity")
    keys = cache_keys(make_prompt(0, "picture"), Tasks.E)
    had = choose(balance, keys=keys)
    busy = dict.fromkeys(NAMES, 1.0) | {had: MAX_LEAD + 1}
    assert choose(balance, busy, keys=keys) != had


def test_cache_keys_of_an_encode_are_its_images() -> None:
    assert cache_keys(make_prompt(200, "a", "b"), Tasks.E) == [("image", "a"), ("image", "b")]


def test_another_image_is_another_prefix_from_the_chunk_in_which_it_starts() -> None:
    for tasks in (Tasks.P, Tasks.PD, Tasks.EP, Tasks.EPD):
        one, two = (cache_keys(make_prompt(3 * NUM_PREFIX_TOKENS, image), tasks) for image in "ab")
        assert len(one) == 3, tasks
        assert one[-1] == two[-1], tasks
        assert not set(one[:-1]) & set(two), tasks


def test_a_decode_has_no_cache_keys() -> None:
    assert cache_keys(make_prompt(200, "a"), Tasks.D) == []
