"""Random operations: both implementations answer as the model does, and count what it counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from redis import Redis

from tests.fuzz import ONLY_SEED, num_cases
from tests.kv.pool.directory.builders import World, key, make_memory, make_redis
from tests.kv.pool.directory.model import Model
from vllm_omni.kv.pool.directory import Directory, Match, Member, Outcome, Page, Reason, Replica, Tier
from vllm_omni.kv.pool.directory.redis import RedisServer

FULL_SIZE = 1000
NUM_STEPS = 40

page_keys = st.integers(0, 4).map(key)
key_lists = st.lists(page_keys, max_size=5)
any_member = st.integers(0, 1 << 16)  # taken modulo their number
any_match = st.integers(0, 1 << 16)
seconds = st.sampled_from([0.125, 0.5, 1.0, 3.0])  # multiples of 1/8: exact as floats and as milliseconds
sessions = st.sampled_from(["s", "t"])


@st.composite
def page_lists(draw: st.DrawFn, max_mask: int) -> list[Page]:
    keys = draw(st.lists(page_keys, min_size=1, max_size=5))
    return [
        Page(one, draw(st.integers(0, 2)), 7, draw(st.integers(1, max_mask)), Tier.CPU, draw(st.booleans()))
        for one in keys
    ]


def outcome(keys: list[bytes], reasons: list[Reason | None]) -> Outcome:
    pairs = list(zip(keys, reasons, strict=True))
    return Outcome(
        tuple(one for one, reason in pairs if reason is None),
        {one: reason for one, reason in pairs if reason is not None},
    )


def as_published(key: bytes, replica: Replica) -> tuple[str, Page]:
    return replica.node, Page(key, replica.slot, replica.checksum, replica.mask, replica.tier, replica.is_recomputable)


class Operations(RuleBasedStateMachine):
    """Runs each operation on the model, on memory and on Redis."""

    make_worlds: Callable[[int], list[World]]

    @initialize(num_parts=st.integers(1, 3))
    def start(self, num_parts: int) -> None:
        self.worlds = type(self).make_worlds(num_parts)
        self.model = Model(num_parts, self.worlds[0].clock())
        self.members: list[list[Member]] = []  # for each that joined, as each world calls it
        self.matches: list[list[Match]] = []

    def check(self, expected: Any, ask: Callable[[Directory, int], Any]) -> None:
        for index, world in enumerate(self.worlds):
            found = ask(world.directory, index)
            assert found == expected, f"{type(world.directory).__name__}: {found}, and not {expected}"

    def pick(self, member: int) -> tuple[int, list[Member]]:
        index = member % len(self.members)
        return index, self.members[index]

    @rule(node=st.sampled_from(["a", "b", "c"]), lease_s=seconds)
    def join(self, node: str, lease_s: float) -> None:
        self.model.join(node, lease_s)
        joined = [world.directory.join(node, lease_s) for world in self.worlds]
        self.members.append([one for one in joined if one is not None])

    @rule(by_s=st.sampled_from([0.125, 0.25, 0.375, 0.5, 1.0, 3.0]))
    def advance(self, by_s: float) -> None:
        for world in self.worlds:
            world.clock.advance(by_s)
        self.model.now = self.worlds[0].clock()

    @precondition(lambda self: self.members)
    @rule(member=any_member)
    def renew(self, member: int) -> None:
        index, members = self.pick(member)
        self.check(self.model.renew(index), lambda directory, i: directory.renew(members[i]))

    @precondition(lambda self: self.members)
    @rule(member=any_member)
    def leave(self, member: int) -> None:
        index, members = self.pick(member)
        self.check(self.model.leave(index), lambda directory, i: directory.leave(members[i]))

    @rule()
    def sweep(self) -> None:
        self.check(self.model.sweep(), lambda directory, i: directory.sweep())

    @precondition(lambda self: self.members)
    @rule(member=any_member, keys=key_lists, write_s=seconds)
    def begin_write(self, member: int, keys: list[bytes], write_s: float) -> None:
        index, members = self.pick(member)
        expected = outcome(keys, self.model.begin_write(index, keys, write_s))
        self.check(expected, lambda directory, i: directory.begin_write(members[i], keys, write_s))

    @precondition(lambda self: self.members)
    @rule(member=any_member, keys=key_lists)
    def abandon(self, member: int, keys: list[bytes]) -> None:
        index, members = self.pick(member)
        self.check(self.model.abandon(index, keys), lambda directory, i: directory.abandon(members[i], keys))

    @precondition(lambda self: self.members)
    @rule(member=any_member, data=st.data())
    def publish(self, member: int, data: st.DataObject) -> None:
        index, members = self.pick(member)
        pages = data.draw(page_lists(self.model.full_mask))
        expected = outcome([page.key for page in pages], self.model.publish(index, pages))
        self.check(expected, lambda directory, i: directory.publish(members[i], pages))

    @precondition(lambda self: self.members)
    @rule(member=any_member, keys=key_lists, claim_s=seconds)
    def match_and_claim(self, member: int, keys: list[bytes], claim_s: float) -> None:
        index, members = self.pick(member)
        expected = self.model.match_and_claim(index, keys, claim_s)
        found: list[Match] = []

        def ask(directory: Directory, i: int) -> list[list[tuple[str, Page]]]:
            found.append(directory.match_and_claim(members[i], keys, claim_s))
            return [[as_published(key, one) for one in replicas] for key, replicas in found[-1].pages]

        self.check(expected, ask)
        self.matches.append(found)

    @precondition(lambda self: self.matches)
    @rule(match=any_match)
    def verify(self, match: int) -> None:
        index = match % len(self.matches)
        found = self.matches[index]
        self.check(self.model.verify(index), lambda directory, i: directory.verify(found[i]))

    @precondition(lambda self: self.matches)
    @rule(match=any_match, member=any_member, first=st.integers(0, 2))
    def release(self, match: int, member: int, first: int) -> None:
        index, members = self.pick(member)
        number = match % len(self.matches)
        found = [one._replace(pages=one.pages[first:]) for one in self.matches[number]]
        self.check(
            self.model.release(index, number, first), lambda directory, i: directory.release(members[i], found[i])
        )

    @precondition(lambda self: self.members)
    @rule(member=any_member, keys=key_lists, discard=st.booleans())
    def evict(self, member: int, keys: list[bytes], discard: bool) -> None:
        index, members = self.pick(member)
        expected = outcome(keys, self.model.evict(index, keys, discard))
        self.check(expected, lambda directory, i: directory.evict(members[i], keys, discard=discard))

    @rule(session=sessions, keys=key_lists, keep_s=seconds, at=st.none() | st.integers(0, 4))
    def append_chain(self, session: str, keys: list[bytes], keep_s: float, at: int | None) -> None:
        expected = self.model.append_chain(session, keys, keep_s, at)
        self.check(expected, lambda directory, i: directory.append_chain(session, keys, keep_s=keep_s, at=at))

    @rule(session=sessions)
    def chain(self, session: str) -> None:
        self.check(tuple(self.model.chain(session)), lambda directory, i: directory.chain(session))

    @invariant()
    def counts_are_those_of_the_model(self) -> None:
        if hasattr(self, "model"):
            self.check(self.model.statistics(), lambda directory, i: directory.statistics())

    def teardown(self) -> None:
        for world in getattr(self, "worlds", ()):
            world.directory.check_integrity()


@pytest.mark.fuzz
@pytest.mark.timeout(0)
def test_both_answer_as_the_model_does(redis_server: RedisServer, redis_client: Redis) -> None:
    def make_worlds(num_parts: int) -> list[World]:
        return [make_memory(num_parts), make_redis(redis_server, redis_client, num_parts)]

    machine = type("Operations", (Operations,), {"make_worlds": staticmethod(make_worlds)})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=num_cases(FULL_SIZE),
            stateful_step_count=NUM_STEPS,
            deadline=None,
            database=None,
            derandomize=ONLY_SEED is None,
            suppress_health_check=list(HealthCheck),
        ),
    )
