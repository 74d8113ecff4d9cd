"""The contract of ``Directory``, for each implementation."""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.kv.pool.directory.builders import World, key, keys, nodes_of, page, pages, replica_of
from vllm_omni.kv.pool.directory import Directory, Event, Match, Member, Outcome, Page, Reason, Tier
from vllm_omni.kv.pool.directory.base import MAX_CHAIN_PAGES, MAX_MATCH_PAGES

LEASE_S = 3.0
CLAIM_S = 1.0


def join(world: World, *nodes: str) -> list[Member]:
    members = [world.directory.join(node, LEASE_S) for node in nodes]
    assert None not in members
    return [one for one in members if one is not None]


def match(world: World, member: Member, *numbers: int, claim_s: float = CLAIM_S) -> Match:
    return world.directory.match_and_claim(member, keys(*numbers), claim_s)


def all_kept(reason: Reason, *numbers: int) -> Outcome:
    return Outcome((), dict.fromkeys(keys(*numbers), reason))


def all_done(*numbers: int) -> Outcome:
    return Outcome(tuple(keys(*numbers)), {})


# --- members


def test_a_node_that_joins_again_has_a_higher_epoch(world: World) -> None:
    first, other, again = join(world, "a", "b", "a")
    assert first.epoch < other.epoch < again.epoch


def test_pages_of_an_earlier_epoch_are_not_matched(world: World) -> None:
    a, b = join(world, "a", "b")
    world.directory.publish(a, pages(1))
    (again,) = join(world, "a")
    assert match(world, b, 1).pages == match(world, again, 1).pages == ()
    world.directory.publish(again, pages(1, slot=7))
    assert replica_of(match(world, b, 1)).slot == 7


def test_an_earlier_epoch_can_do_nothing(world: World) -> None:
    old, b = join(world, "a", "b")
    world.directory.publish(b, pages(1))
    world.directory.publish(old, pages(2))
    join(world, "a")
    assert not world.directory.renew(old)
    assert match(world, old, 1).pages == ()
    assert world.directory.publish(old, pages(1, 3)) == all_kept(Reason.LOST, 1, 3)
    assert world.directory.begin_write(old, keys(1), 1.0) == all_kept(Reason.LOST, 1)
    assert world.directory.evict(old, keys(2)) == all_kept(Reason.LOST, 2)
    world.directory.leave(old)
    assert world.directory.statistics().num_members == 2


def test_a_lease_ends_unless_it_is_renewed(world: World) -> None:
    a, b = join(world, "a", "b")
    world.directory.publish(a, pages(1))
    world.clock.advance(LEASE_S - 0.001)
    assert world.directory.renew(b)
    assert match(world, b, 1).pages
    world.clock.advance(0.001)
    assert match(world, b, 1).pages == ()
    assert not world.directory.renew(a)
    assert world.directory.renew(b)


def test_pages_of_a_member_that_leaves_are_not_matched(world: World) -> None:
    a, b = join(world, "a", "b")
    world.directory.publish(a, pages(1))
    world.directory.leave(a)
    world.directory.leave(a)
    assert match(world, b, 1).pages == ()
    assert not world.directory.renew(a)


def test_sweeping_removes_what_former_members_held_in_steps(world: World) -> None:
    a, b, c, d = join(world, "a", "b", "c", "d")
    world.directory.publish(a, pages(1, 2, 3))
    world.directory.publish(b, pages(1, 4))
    world.directory.publish(c, pages(5))
    world.directory.publish(d, pages(5))
    world.directory.leave(a)  # leaves, joins again, expires; d stays
    join(world, "b")
    world.clock.advance(LEASE_S / 2)
    world.directory.renew(d)
    world.clock.advance(LEASE_S / 2)
    assert world.directory.statistics().num_stale == 6
    assert [world.directory.sweep(4), world.directory.sweep(4), world.directory.sweep(4)] == [4, 2, 0]
    statistics = world.directory.statistics()
    assert (statistics.num_members, statistics.num_stale, statistics.num_replicas) == (1, 0, 1)


# --- matching


def test_the_longest_prefix_is_matched(world: World) -> None:
    a, b = join(world, "a", "b")
    world.directory.publish(a, pages(1, 2, 4))
    assert [one for one, _ in match(world, b, 1, 2, 3, 4).pages] == keys(1, 2)
    assert match(world, b, 3, 1).pages == ()
    assert match(world, b).pages == ()


def test_a_match_says_where_each_page_is(world: World) -> None:
    (a,) = join(world, "a")
    there = Page(key(1), (1 << 53) - 1, (1 << 64) - 1, 1, Tier.DISK, False)
    world.directory.publish(a, [there])
    replica = replica_of(match(world, a, 1))
    assert (replica.node, replica.epoch, replica.mask) == ("a", a.epoch, 1)
    assert (replica.slot, replica.checksum, replica.tier) == (there.slot, there.checksum, Tier.DISK)
    assert replica.is_recomputable is False


def test_the_callers_own_replica_is_preferred(world: World) -> None:
    a, b, c = join(world, "a", "b", "c")
    world.directory.publish(a, pages(1, 2, 3))
    world.directory.publish(b, pages(1))
    assert nodes_of(match(world, b, 1, 2)) == [["b"], ["a"]]
    assert nodes_of(match(world, c, 1, 2)) == [["a"], ["a"]]


def test_the_node_that_holds_more_of_the_prefix_is_preferred_then_the_first_by_name(world: World) -> None:
    c, b, a, reader = join(world, "c", "b", "a", "reader")
    world.directory.publish(c, pages(1, 2, 3))
    world.directory.publish(b, pages(1, 2, 4, 5))  # 4 and 5 are no part of the prefix
    world.directory.publish(a, pages(1, 2, 4, 5))
    assert nodes_of(match(world, reader, 1, 2, 3)) == [["c"], ["c"], ["c"]]
    assert nodes_of(match(world, reader, 1, 2)) == [["a"], ["a"]]


def test_partial_replicas_are_combined(halves: World) -> None:
    a, b, reader = join(halves, "a", "b", "reader")
    halves.directory.publish(a, pages(1, 2, mask=1))
    halves.directory.publish(b, pages(1, mask=2))
    assert nodes_of(match(halves, reader, 1, 2)) == [["a", "b"]]


def test_no_more_replicas_are_picked_than_add_parts(halves: World) -> None:
    a, b, c, reader = join(halves, "a", "b", "c", "reader")
    halves.directory.publish(a, pages(1, mask=1))
    halves.directory.publish(b, pages(1, mask=1))
    halves.directory.publish(c, pages(1, mask=3))
    assert nodes_of(match(halves, reader, 1)) == [["c"]]
    assert nodes_of(match(halves, b, 1)) == [["b", "c"]]


def test_a_page_of_32_parts_is_covered_by_its_parts(make_world: Callable[[int], World]) -> None:
    world = make_world(32)
    a, b = join(world, "a", "b")
    world.directory.publish(a, [page(1, mask=0x7FFFFFFF), page(2, mask=0x7FFFFFFF), page(3, mask=0xFFFFFFFF)])
    assert match(world, b, 1).pages == ()
    world.directory.publish(b, pages(1, 2, mask=0x80000000))
    assert nodes_of(match(world, b, 1, 2, 3)) == [["b", "a"], ["b", "a"], ["a"]]


def test_a_long_prefix_is_matched_up_to_a_limit(world: World) -> None:
    (a,) = join(world, "a")
    numbers = range(MAX_MATCH_PAGES + 1)
    assert len(world.directory.publish(a, pages(*numbers)).done) == len(numbers)
    found = match(world, a, *numbers)
    assert len(found.pages) == MAX_MATCH_PAGES
    assert all(world.directory.verify(found))
    world.directory.release(a, found)
    assert world.directory.statistics().num_claims == 0
    assert len(world.directory.evict(a, keys(*numbers)).done) == len(numbers)


# --- claims


def test_a_claimed_replica_is_not_evicted_until_it_is_released(world: World) -> None:
    a, b = join(world, "a", "b")
    world.directory.publish(a, pages(1, 2))
    found = match(world, b, 1)
    assert world.directory.statistics().num_claims == 1
    assert world.directory.evict(a, keys(1, 2)) == Outcome((key(2),), {key(1): Reason.IN_USE})
    world.directory.release(b, found)
    assert world.directory.statistics().num_claims == 0
    assert world.directory.evict(a, keys(1)) == all_done(1)
    assert match(world, b, 1).pages == ()


def test_a_claim_protects_the_replica_that_is_read_and_no_other(world: World) -> None:
    a, b, reader = join(world, "a", "b", "reader")
    world.directory.publish(a, pages(1))
    world.directory.publish(b, pages(1))
    match(world, reader, 1)
    assert world.directory.evict(a, keys(1)) == all_kept(Reason.IN_USE, 1)
    assert world.directory.evict(b, keys(1)) == all_done(1)


def test_claims_of_the_same_page_end_one_by_one(world: World) -> None:
    a, b = join(world, "a", "b")
    world.directory.publish(a, pages(1))
    one, other = match(world, b, 1), match(world, b, 1)
    world.directory.release(b, one)
    world.directory.release(b, one)
    assert world.directory.evict(a, keys(1)) == all_kept(Reason.IN_USE, 1)
    world.directory.release(b, other)
    assert world.directory.evict(a, keys(1)) == all_done(1)


def test_a_claim_is_released_by_its_own_member_alone(world: World) -> None:
    a, b = join(world, "a", "b")
    world.directory.publish(a, pages(1))
    found = match(world, b, 1)
    world.directory.release(a, found)
    assert world.directory.evict(a, keys(1)) == all_kept(Reason.IN_USE, 1)


def test_some_pages_of_a_match_can_be_released_before_the_others(world: World) -> None:
    a, b = join(world, "a", "b")
    world.directory.publish(a, pages(1, 2))
    found = match(world, b, 1, 2)
    world.directory.release(b, found._replace(pages=found.pages[1:]))
    assert world.directory.evict(a, keys(1, 2)) == Outcome((key(2),), {key(1): Reason.IN_USE})


def test_a_claim_expires(world: World) -> None:
    a, b = join(world, "a", "b")
    world.directory.publish(a, pages(1))
    match(world, b, 1, claim_s=0.5)
    world.clock.advance(0.499)
    assert world.directory.evict(a, keys(1)) == all_kept(Reason.IN_USE, 1)
    world.clock.advance(0.001)
    assert world.directory.statistics().num_claims == 0
    assert world.directory.evict(a, keys(1)) == all_done(1)


def test_a_shorter_claim_does_not_shorten_another(world: World) -> None:
    a, b = join(world, "a", "b")
    world.directory.publish(a, pages(1))
    match(world, b, 1, claim_s=2.0)
    match(world, b, 1, claim_s=0.1)
    world.clock.advance(1.9)
    assert world.directory.evict(a, keys(1)) == all_kept(Reason.IN_USE, 1)


@pytest.mark.parametrize("end", ["leaves", "joins again", "expires"])
def test_claims_end_with_their_member(world: World, end: str) -> None:
    a, b = join(world, "a", "b")
    world.directory.publish(a, pages(1))
    world.clock.advance(LEASE_S / 2)
    world.directory.renew(a)
    match(world, b, 1, claim_s=60.0)
    assert world.directory.evict(a, keys(1)) == all_kept(Reason.IN_USE, 1)
    if end == "leaves":
        world.directory.leave(b)
    elif end == "joins again":
        join(world, "b")
    else:
        world.clock.advance(LEASE_S / 2)
    assert world.directory.statistics().num_claims == 0
    assert world.directory.evict(a, keys(1)) == all_done(1)


def test_verify_finds_what_changed_after_a_claim_expired(world: World) -> None:
    a, b = join(world, "a", "b")
    world.directory.publish(a, pages(1, 2, 3, 4))
    found = match(world, b, 1, 2, 3, 4)
    assert world.directory.verify(found) == [True] * 4
    world.clock.advance(CLAIM_S)
    assert world.directory.verify(found) == [True] * 4
    world.directory.evict(a, keys(1))
    world.directory.begin_write(a, keys(2), 1.0)
    world.directory.publish(a, pages(3, slot=9))
    assert world.directory.verify(found) == [False, False, False, True]


def test_verify_finds_that_a_page_was_evicted_and_published_again_in_the_same_place(world: World) -> None:
    a, b = join(world, "a", "b")
    world.directory.publish(a, pages(1))
    found = match(world, b, 1)
    world.clock.advance(CLAIM_S)
    world.directory.evict(a, keys(1))
    world.directory.publish(a, pages(1))
    assert world.directory.verify(found) == [False]


def test_verify_needs_all_parts_of_a_page(halves: World) -> None:
    a, b, reader = join(halves, "a", "b", "reader")
    halves.directory.publish(a, pages(1, 2, mask=1))
    halves.directory.publish(b, pages(1, 2, mask=2))
    found = match(halves, reader, 1, 2)
    halves.clock.advance(CLAIM_S)
    halves.directory.evict(b, keys(1))
    assert halves.directory.verify(found) == [False, True]


@pytest.mark.parametrize("end", ["leaves", "joins again", "expires"])
def test_verify_finds_that_the_holder_is_gone(world: World, end: str) -> None:
    a, b = join(world, "a", "b")
    world.directory.publish(a, pages(1))
    found = match(world, b, 1)
    if end == "leaves":
        world.directory.leave(a)
    elif end == "joins again":
        world.directory.publish(join(world, "a")[0], pages(1))
    else:
        world.clock.advance(LEASE_S)
    assert world.directory.verify(found) == [False]


# --- publishing and writing


def test_a_moved_page_is_matched_at_its_new_place(world: World) -> None:
    a, b = join(world, "a", "b")
    world.directory.publish(a, pages(1))
    assert world.directory.publish(a, pages(1, slot=5, tier=Tier.DISK)) == all_done(1)
    replica = replica_of(match(world, b, 1))
    assert (replica.slot, replica.tier) == (5, Tier.DISK)
    assert world.directory.statistics().num_replicas == 1


def test_a_page_with_readers_is_not_moved(world: World) -> None:
    a, b = join(world, "a", "b")
    world.directory.publish(a, pages(1, slot=4))
    found = match(world, b, 1)
    assert world.directory.publish(a, pages(1, slot=5)) == all_kept(Reason.IN_USE, 1)
    assert world.directory.verify(found) == [True]
    world.directory.release(b, found)
    assert world.directory.publish(a, pages(1, slot=5)) == all_done(1)


def test_publishing_the_same_again_changes_nothing(world: World) -> None:
    a, b = join(world, "a", "b")
    world.directory.publish(a, pages(1))
    found = match(world, b, 1)
    assert world.directory.publish(a, pages(1)) == all_done(1)
    assert world.directory.verify(found) == [True]


def test_one_member_writes_a_page(world: World) -> None:
    a, b = join(world, "a", "b")
    assert world.directory.begin_write(a, keys(1), 1.0) == all_done(1)
    assert world.directory.begin_write(b, keys(1, 2), 1.0) == Outcome((key(2),), {key(1): Reason.BEING_WRITTEN})
    assert world.directory.begin_write(a, keys(1), 1.0) == all_done(1)
    assert world.directory.statistics().num_writes == 2


def test_publishing_ends_the_members_own_write(world: World) -> None:
    a, b = join(world, "a", "b")
    world.directory.begin_write(a, keys(1, 2), 1.0)
    world.directory.publish(b, pages(1, 2))
    assert world.directory.statistics().num_writes == 2
    world.directory.publish(a, pages(1))
    assert world.directory.statistics().num_writes == 1
    assert world.directory.begin_write(b, keys(1), 1.0) == all_done(1)


def test_an_abandoned_write_lets_others_write(world: World) -> None:
    a, b = join(world, "a", "b")
    world.directory.begin_write(a, keys(1), 1.0)
    world.directory.abandon(b, keys(1))
    assert world.directory.begin_write(b, keys(1), 1.0) == all_kept(Reason.BEING_WRITTEN, 1)
    world.directory.abandon(a, keys(1, 2))
    assert world.directory.begin_write(b, keys(1), 1.0) == all_done(1)


@pytest.mark.parametrize("end", ["is late", "joins again", "leaves"])
def test_a_write_ends_with_its_time_or_its_member(world: World, end: str) -> None:
    a, b = join(world, "a", "b")
    world.directory.begin_write(a, keys(1), 1.0)
    if end == "is late":
        world.clock.advance(1.0)
    elif end == "joins again":
        join(world, "a")
    else:
        world.directory.leave(a)
    assert world.directory.statistics().num_writes == 0
    assert world.directory.begin_write(b, keys(1), 1.0) == all_done(1)


def test_writing_a_page_ends_the_members_own_replica(world: World) -> None:
    a, b = join(world, "a", "b")
    world.directory.publish(a, pages(1))
    world.directory.publish(b, pages(1))
    world.directory.begin_write(a, keys(1), 1.0)
    assert nodes_of(match(world, b, 1)) == nodes_of(match(world, a, 1)) == [["b"]]
    world.directory.abandon(a, keys(1))
    assert nodes_of(match(world, a, 1)) == [["b"]]


def test_a_page_with_readers_is_not_written(world: World) -> None:
    a, b = join(world, "a", "b")
    world.directory.publish(a, pages(1))
    found = match(world, b, 1)
    assert world.directory.begin_write(a, keys(1), 1.0) == all_kept(Reason.IN_USE, 1)
    assert world.directory.verify(found) == [True]


# --- evicting


def test_only_held_pages_are_evicted(world: World) -> None:
    a, b = join(world, "a", "b")
    world.directory.publish(b, pages(1))
    assert world.directory.evict(a, keys(1, 2)) == all_kept(Reason.NOT_HELD, 1, 2)


def test_a_page_that_is_being_written_is_not_evicted(world: World) -> None:
    a, b = join(world, "a", "b")
    world.directory.publish(a, pages(1))
    world.directory.begin_write(b, keys(1), 1.0)
    assert world.directory.evict(a, keys(1)) == all_kept(Reason.BEING_WRITTEN, 1)
    world.clock.advance(1.0)
    assert world.directory.evict(a, keys(1)) == all_done(1)


def test_the_last_copy_of_what_cannot_be_recomputed_is_not_evicted(world: World) -> None:
    a, b = join(world, "a", "b")
    world.directory.publish(a, pages(1, is_recomputable=False))
    assert world.directory.evict(a, keys(1)) == all_kept(Reason.LAST_COPY, 1)
    world.directory.publish(b, pages(1, is_recomputable=False))
    assert world.directory.evict(a, keys(1)) == all_done(1)
    assert world.directory.evict(b, keys(1)) == all_kept(Reason.LAST_COPY, 1)
    assert world.directory.evict(b, keys(1), discard=True) == all_done(1)


def test_a_copy_of_a_dead_member_is_none(world: World) -> None:
    a, b = join(world, "a", "b")
    world.directory.publish(a, pages(1, is_recomputable=False))
    world.directory.publish(b, pages(1, is_recomputable=False))
    world.directory.leave(b)
    assert world.directory.evict(a, keys(1)) == all_kept(Reason.LAST_COPY, 1)


def test_the_last_copy_of_each_part_is_kept(halves: World) -> None:
    a, b, c = join(halves, "a", "b", "c")
    halves.directory.publish(a, pages(1, mask=3, is_recomputable=False))
    halves.directory.publish(b, pages(1, mask=1, is_recomputable=False))
    assert halves.directory.evict(a, keys(1)) == all_kept(Reason.LAST_COPY, 1)
    halves.directory.publish(c, pages(1, mask=2, is_recomputable=False))
    assert halves.directory.evict(a, keys(1)) == all_done(1)
    assert halves.directory.evict(b, keys(1)) == all_kept(Reason.LAST_COPY, 1)


def test_discarding_does_not_ignore_readers_and_writers(world: World) -> None:
    a, b = join(world, "a", "b")
    world.directory.publish(a, pages(1, 2))
    match(world, b, 1)
    world.directory.begin_write(b, keys(2), 1.0)
    outcome = world.directory.evict(a, keys(1, 2), discard=True)
    assert outcome == Outcome((), {key(1): Reason.IN_USE, key(2): Reason.BEING_WRITTEN})


# --- sessions


def test_a_chain_grows_by_turns(world: World) -> None:
    (a,) = join(world, "a")
    world.directory.publish(a, pages(1, 2, 3))
    assert world.directory.chain("s") == ()
    assert world.directory.append_chain("s", keys(1, 2), keep_s=60) == 2
    assert world.directory.append_chain("s", keys(3), keep_s=60) == 3
    assert world.directory.append_chain("other", keys(3), keep_s=60) == 1
    assert world.directory.chain("s") == tuple(keys(1, 2, 3))


def test_a_turn_replaces_the_tail_of_a_chain(world: World) -> None:
    (a,) = join(world, "a")
    world.directory.publish(a, pages(1, 2, 3, 4))
    world.directory.append_chain("s", keys(1, 2, 3), keep_s=60)
    assert world.directory.append_chain("s", keys(4), keep_s=60, at=1) == 2
    assert world.directory.chain("s") == tuple(keys(1, 4))
    assert world.directory.append_chain("s", keys(2), keep_s=60, at=0) == 1
    assert world.directory.chain("s") == tuple(keys(2))


def test_nothing_is_appended_behind_a_hole(world: World) -> None:
    (a,) = join(world, "a")
    world.directory.publish(a, pages(1, 2))
    world.directory.append_chain("s", keys(1), keep_s=60)
    assert world.directory.append_chain("s", keys(2), keep_s=60, at=2) == 1
    assert world.directory.chain("s") == (key(1),)


def test_a_chain_is_cut_before_a_page_that_is_gone(world: World) -> None:
    a, b = join(world, "a", "b")
    world.directory.publish(a, pages(1, 2, 3))
    world.directory.publish(b, pages(2))
    world.directory.append_chain("s", keys(1, 2, 3), keep_s=60)
    world.directory.evict(a, keys(2))
    assert world.directory.chain("s") == tuple(keys(1, 2, 3))
    world.directory.leave(b)
    assert world.directory.chain("s") == (key(1),)
    world.directory.publish(a, pages(2))
    assert world.directory.append_chain("s", keys(2), keep_s=60) == 2
    assert world.directory.chain("s") == tuple(keys(1, 2))


def test_a_long_chain_is_read_whole_and_bounded(world: World) -> None:
    (a,) = join(world, "a")
    world.directory.publish(a, pages(*range(600)))
    world.directory.append_chain("s", keys(*range(600)), keep_s=60)
    assert world.directory.chain("s") == tuple(keys(*range(600)))
    assert world.directory.append_chain("s", [key(1)] * MAX_CHAIN_PAGES, keep_s=60) == MAX_CHAIN_PAGES
    world.directory.evict(a, keys(300))
    assert world.directory.chain("s") == tuple(keys(*range(300)))


def test_a_chain_expires_unless_it_is_used(world: World) -> None:
    world.directory.join("a", 100.0)
    (a,) = [world.directory.join("a", 100.0)]
    assert a is not None
    world.directory.publish(a, pages(1))
    world.directory.append_chain("s", keys(1), keep_s=5)
    world.clock.advance(4)
    assert world.directory.chain("s") == (key(1),)
    world.clock.advance(4)
    assert world.directory.append_chain("s", keys(1), keep_s=5) == 2
    world.clock.advance(4)
    assert world.directory.statistics().num_chains == 1
    world.clock.advance(1)
    assert world.directory.statistics().num_chains == 0
    assert world.directory.chain("s") == ()
    assert world.directory.append_chain("s", keys(1), keep_s=5) == 1


# --- events


def test_subscribers_of_a_layout_receive_published_pages(world: World) -> None:
    a, b = join(world, "a", "b")
    world.directory.publish(a, pages(1))
    subscription = world.directory.subscribe()
    world.directory.publish(a, pages(1, 2, 3))
    world.directory.append_chain("s", keys(1), keep_s=60)
    world.directory.publish(b, pages(1))
    assert subscription.get(10) == Event("a", None, tuple(keys(2, 3)))
    assert subscription.get(10) == Event("b", None, tuple(keys(1)))
    assert subscription.get(0) is None


def test_subscribers_of_a_session_receive_its_pages_alone(world: World) -> None:
    (a,) = join(world, "a")
    subscription = world.directory.subscribe("s")
    world.directory.publish(a, pages(1, 2))
    world.directory.append_chain("other", keys(1), keep_s=60)
    world.directory.append_chain("s", keys(1, 2), keep_s=60)
    assert subscription.get(10) == Event(None, "s", tuple(keys(1, 2)))
    assert subscription.get(0) is None


def test_a_full_queue_drops_its_oldest_events_and_counts_them(world: World) -> None:
    (a,) = join(world, "a")
    subscription, other = world.directory.subscribe(max_events=2), world.directory.subscribe()
    for number in range(5):
        world.directory.publish(a, pages(number))
    assert [other.get(10) for _ in range(5)][-1] == Event("a", None, (key(4),))
    assert [subscription.get(10), subscription.get(10), subscription.get(0)] == [
        Event("a", None, (key(3),)),
        Event("a", None, (key(4),)),
        None,
    ]
    assert (subscription.num_lost, other.num_lost) == (3, 0)


def test_a_closed_subscription_receives_nothing(world: World) -> None:
    (a,) = join(world, "a")
    subscription, other = world.directory.subscribe(), world.directory.subscribe()
    subscription.close()
    subscription.close()
    world.directory.publish(a, pages(1))
    assert other.get(10) is not None
    assert subscription.get() is None


def test_closing_a_directory_wakes_its_readers(world: World) -> None:
    subscription = world.directory.subscribe()
    world.directory.close()
    assert subscription.get() is None


# --- as a whole


def test_counters_are_zero_after_everything_was_released(world: World) -> None:
    a, b = join(world, "a", "b")
    world.directory.begin_write(a, keys(1, 2, 9), 1.0)
    world.directory.publish(a, pages(1, 2))
    world.directory.abandon(a, keys(9))
    world.directory.publish(b, pages(2, 3))
    found = match(world, b, 1, 2, 3)
    world.directory.append_chain("s", keys(1, 2, 3), keep_s=1.0)
    assert world.directory.statistics() == (2, 3, 4, 0, 3, 0, 1)
    world.directory.release(b, found)
    world.directory.evict(a, keys(1, 2))
    world.directory.evict(b, keys(2, 3))
    world.directory.leave(a)
    world.directory.leave(b)
    world.clock.advance(1.0)
    assert world.directory.statistics() == (0,) * 7


def test_threads_share_a_directory(world: World) -> None:
    members = join(world, *"abcd")

    def work(member: Member) -> None:
        rng = random.Random(member.node)
        for _ in range(100):
            numbers = rng.sample(range(8), 4)
            world.directory.publish(member, pages(*numbers))
            found = match(world, member, *numbers)
            assert len(found.pages) == 4
            assert all(world.directory.verify(found))
            world.directory.release(member, found)
            world.directory.evict(member, keys(*numbers))

    with ThreadPoolExecutor() as pool:
        list(pool.map(work, members))
    for member in members:
        world.directory.evict(member, keys(*range(8)))
    assert world.directory.statistics() == (4, 0, 0, 0, 0, 0, 0)


Call = Callable[[Directory, Member], Any]
WRONG: dict[str, Call] = {
    "a key of 3 bytes": lambda d, a: d.match_and_claim(a, [b"abc"], 1.0),
    "a key of 0 bytes": lambda d, a: d.append_chain("s", [b""], keep_s=1.0),
    "a key of 9 bytes": lambda d, a: d.evict(a, [b"123456789"]),
    "a key of 4 bytes": lambda d, a: d.begin_write(a, [b"1234"], 1.0),
    "a key of 5 bytes": lambda d, a: d.abandon(a, [b"12345"]),
    "mask 0x2: must have some of the bits 0x1": lambda d, a: d.publish(a, pages(1, mask=2)),
    "mask 0x0": lambda d, a: d.publish(a, pages(1, mask=0)),
    "slot -1": lambda d, a: d.publish(a, pages(1, slot=-1)),
    "checksum 18446744073709551616": lambda d, a: d.publish(a, pages(1, checksum=1 << 64)),
    "'': must be 1 to 128 bytes": lambda d, a: d.join("", 1.0),
    "a{129}': must be 1 to 128 bytes": lambda d, a: d.join("a" * 129, 1.0),
    "s.{43}': must be 1 to 128 bytes": lambda d, a: d.append_chain("s" + 43 * "€", [], keep_s=1.0),
    "0 s: must be more than 0": lambda d, a: d.join("b", 0),
    "-1 s: must be more than 0": lambda d, a: d.match_and_claim(a, keys(1), -1),
    "nan s: must be more than 0": lambda d, a: d.begin_write(a, keys(1), float("nan")),
    "1e.09 s: must be more than 0 and at most 604800": lambda d, a: d.append_chain("s", [], keep_s=1e9),
    "'': must be 1 to 128": lambda d, a: d.chain(""),
    "a chain cannot be cut at -1": lambda d, a: d.append_chain("s", [], keep_s=1.0, at=-1),
    "a queue of 0 events": lambda d, a: d.subscribe(max_events=0),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_argument_is_rejected(world: World, message: str) -> None:
    (a,) = join(world, "a")
    message, call = message.replace("1e.09", "1000000000.0"), WRONG[message]
    with pytest.raises(ValueError, match=message):
        call(world.directory, a)
