"""Which of several instances is chosen. What they hold: tests/epd/test_held_pages.py."""

from collections import Counter

import pytest

from vllm_omni.config.epd import Balance, Tasks
from vllm_omni.epd.balance import MAX_SESSIONS, InstanceBalance

NAMES = ["P0", "P1", "P2"]


def choose(
    balance: InstanceBalance,
    work: dict[str, float] | None = None,
    session: str | None = None,
    saved: dict[str, float] | None = None,
) -> str:
    return balance.choose(NAMES, Tasks.P, work or {}, session, saved).instance


def test_round_robin() -> None:
    balance = InstanceBalance("round_robin")
    assert Counter(choose(balance) for _ in range(6)) == dict.fromkeys(NAMES, 2)


def test_tasks_are_balanced_independently() -> None:
    """Requests of two tasks alternate: no instance stays idle."""
    names = {Tasks.E: ["E0", "E1"], Tasks.P: ["PD0", "PD1"]}
    for policy in ("round_robin", "least_work"):
        balance = InstanceBalance(policy)
        chosen = [balance.choose(names[task], task, {}).instance for _ in range(2) for task in names]
        assert sorted(chosen) == ["E0", "E1", "PD0", "PD1"], policy


def test_the_instance_with_least_work_is_chosen() -> None:
    assert choose(InstanceBalance("least_work"), {"P0": 3.5, "P1": 0.5, "P2": 0.75}) == "P1"


@pytest.mark.parametrize("policy", ["affinity", "session"])
def test_a_session_stays_while_its_instance_runs(policy: Balance) -> None:
    balance = InstanceBalance(policy)
    first = choose(balance, session="s")
    assert choose(balance, {first: 9.0}, session="s") == first
    left = [name for name in NAMES if name != first]
    second = balance.choose(left, Tasks.P, {}, "s").instance
    assert second != first
    assert choose(balance, session="s") == second


def test_a_session_has_an_instance_for_each_task() -> None:
    balance = InstanceBalance("affinity")
    first = choose(balance, session="s")
    assert balance.choose(["D0"], Tasks.D, {}, "s").instance == "D0"
    assert choose(balance, {first: 9.0}, session="s") == first


def test_only_so_many_sessions_are_remembered() -> None:
    balance = InstanceBalance("affinity")
    first = choose(balance, session="first")
    for number in range(MAX_SESSIONS):
        balance.choose(["P0"], Tasks.P, {}, str(number))
    assert choose(balance, {first: 1.0}, session="first") != first


def test_work_that_a_cache_saves_is_weighed_against_work_that_waits() -> None:
    balance = InstanceBalance("affinity")
    work = {"P0": 1000.0, "P1": 400.0, "P2": 500.0}
    assert choose(balance, work, saved={"P0": 500.0}) == "P1"
    assert choose(balance, work, saved={"P0": 601.0}) == "P0"
    assert choose(balance, work, saved={"P0": 601.0, "P2": 102.0}) == "P2"


def test_what_is_held_elsewhere_outweighs_a_session() -> None:
    balance = InstanceBalance("affinity")
    first = choose(balance, session="s")
    other = next(name for name in NAMES if name != first)
    assert choose(balance, session="s", saved={other: 64.0}) == other
    assert choose(balance, session="s") == other


@pytest.mark.parametrize(
    ("policy", "saved", "reasons"),
    [
        ("least_work", {"P0": 9.0}, ["load", "load"]),
        ("round_robin", {"P0": 9.0}, ["order", "order"]),
        ("session", {"P0": 9.0}, ["load", "session"]),
        ("affinity", {"P0": 9.0}, ["pages", "pages"]),
        ("affinity", {"P0": 0.5}, ["load", "load"]),
        ("affinity", {}, ["load", "session"]),
    ],
)
def test_the_reason_is_what_decided(policy: Balance, saved: dict[str, float], reasons: list[str]) -> None:
    balance, work = InstanceBalance(policy), {"P0": 1.0}
    assert [balance.choose(NAMES, Tasks.P, work, "s", saved).reason for _ in range(2)] == reasons
