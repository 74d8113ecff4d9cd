"""A slab and the directory that is told what it holds."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.kv.pool.nodes import Clock, FailingDirectory, Node, make_directory, wait_until
from tests.kv.pool.stores import flip, key_of, keys_of, load, page_of, place_of
from vllm_omni.kv.pool.directory import Member
from vllm_omni.kv.pool.directory.base import Match, Outcome


class World:
    """A directory, nodes, and a reader that is none of them."""

    def __init__(self, root: Path) -> None:
        self.clock = Clock()
        self.directory = make_directory(self.clock)
        self._root = root
        self.nodes: list[Node] = []
        reader = self.directory.join("reader", 3600.0)
        assert isinstance(reader, Member)
        self.reader = reader

    def node(self, num_slots: int = 4, name: str = "a") -> Node:
        self.nodes.append(Node(self._root / name, self.directory, num_slots, clock=self.clock))
        return self.nodes[-1]

    def claim(self, *numbers: int) -> Match:
        return self.directory.match_and_claim(self.reader, keys_of(*numbers), 3600.0)

    def published(self, *numbers: int) -> list[bool]:
        matches = [self.claim(number) for number in numbers]
        for match in matches:
            self.directory.release(self.reader, match)
        return [bool(match.pages) for match in matches]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    for node in world.nodes:
        node.close()
    world.directory.leave(world.reader)
    world.directory.sweep()
    world.directory.check_integrity()
    assert not any(world.directory.statistics())


def test_what_is_stored_is_published_with_its_place(world: World) -> None:
    node = world.node()
    node.store(1, 2)
    location = node.slab.locate(key_of(2))
    assert location is not None
    ((_, (replica,)),) = world.claim(2).pages
    assert (replica.node, replica.slot, replica.checksum) == (node.relay.name, location.slot, location.checksum)


def test_it_is_published_by_a_thread(world: World) -> None:
    node = world.node()
    assert node.slab.store(key_of(1), page_of(1))
    node.announcer.announce([key_of(1)])
    wait_until(lambda: world.published(1) == [True])


def test_pages_of_an_adopted_slab_are_published_at_the_start(world: World) -> None:
    node = world.node()
    node.store(1)
    node.close()
    world.nodes.clear()
    assert world.published(1) == [False], "its engine has ended"
    world.node().publish()
    assert world.published(1) == [True]


def test_more_pages_than_one_call_takes_are_published(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_omni.kv.pool.announcer.BATCH_PAGES", 2)
    world.node(num_slots=8).store(*range(7))
    assert world.published(*range(7)) == [True] * 7


def test_an_evicted_page_is_withdrawn(world: World) -> None:
    node = world.node(num_slots=2)
    node.store(1, 2)
    node.store(3)
    evicted = [number for number in (1, 2) if key_of(number) not in node.slab]
    assert evicted and world.published(*evicted) == [False] * len(evicted) and world.published(3) == [True]


def test_a_page_that_was_withdrawn_to_be_evicted_is_not_withdrawn_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = world.node(num_slots=1)
    discarded: list[bool] = []
    evict = world.directory.evict

    def noted(member: Member, keys: Sequence[bytes], *, discard: bool = False) -> Outcome:
        discarded.append(discard)
        return evict(member, keys, discard=discard)

    monkeypatch.setattr(world.directory, "evict", noted)
    node.store(1, 2)
    assert discarded == [False]


def test_a_page_that_a_reader_has_claimed_stays(world: World) -> None:
    node = world.node(num_slots=2)
    node.store(1, 2)
    match = world.claim(1)
    assert node.store(3) == [True] and [key_of(number) in node.slab for number in (1, 2, 3)] == [True, False, True]
    world.directory.release(world.reader, match)
    match = world.claim(1), world.claim(3)
    assert node.store(4) == [False], "all others are being read"
    for one in match:
        world.directory.release(world.reader, one)
    assert node.store(4) == [True]


def test_a_page_that_was_evicted_before_it_was_published_never_is(world: World) -> None:
    node = world.node(num_slots=1)
    world.directory.is_away = True
    node.store(1)
    world.directory.is_away = False
    assert node.slab.store(key_of(2), page_of(2))
    node.publish()
    assert world.published(1) == [False]


def test_a_damaged_page_is_withdrawn_and_published_again_once_it_is_right(world: World) -> None:
    node = world.node()
    node.store(1)
    flip(*place_of(node.slab, key_of(1)))
    assert load(node.slab, 1) is None
    node.publish()
    assert world.published(1) == [False]
    node.store(1)
    assert world.published(1) == [True]


def test_a_damaged_page_with_a_reader_is_withdrawn_when_it_has_none(world: World) -> None:
    node = world.node()
    node.store(1)
    match = world.claim(1)
    flip(*place_of(node.slab, key_of(1)))
    load(node.slab, 1)
    node.store(1)
    world.directory.release(world.reader, match)
    node.publish()
    ((_, (replica,)),) = world.claim(1).pages
    location = node.slab.locate(key_of(1))
    assert location is not None and replica.checksum == location.checksum and replica.slot == location.slot


def test_a_page_that_is_used_while_it_may_be_evicted_is_published_again(world: World) -> None:
    node = world.node()
    node.store(1)
    assert node.announcer.may_evict(keys_of(1)) == {key_of(1)} and world.published(1) == [False]
    node.announcer.on_kept(keys_of(1))
    node.publish()
    assert world.published(1) == [True]


def test_a_page_is_not_published_while_it_is_about_to_be_evicted(world: World) -> None:
    node = world.node()
    node.store(1)
    node.announcer.may_evict(keys_of(1))
    node.announcer.announce(keys_of(1))
    node.publish()
    assert world.published(1) == [False]


def test_what_a_directory_that_is_away_was_not_told_is_published_later(world: World) -> None:
    node = world.node()
    world.directory.is_away = True
    node.store(1)
    assert world.published(1) == [False]
    world.directory.is_away = False
    node.publish()
    assert world.published(1) == [True]


def test_a_full_slab_keeps_its_pages_while_the_directory_is_away(world: World) -> None:
    node = world.node(num_slots=1)
    node.store(1)
    world.directory.is_away = True
    assert node.store(2) == [False], "a reader may be about to copy the first one"
    assert load(node.slab, 1) == page_of(1)


def test_after_a_lost_lease_all_pages_are_published_again(world: World) -> None:
    node = world.node()
    node.store(1, 2)
    assert node.announcer.member is not None
    world.directory.leave(node.announcer.member)
    assert world.published(1, 2) == [False, False]
    wait_until(lambda: world.published(1, 2) == [True, True])  # the thread of the lease has noticed


def test_keys_of_another_length_are_left_out(world: World) -> None:
    node = world.node()
    assert node.slab.store(b"short-key-of-another-hash", page_of(0))
    node.announcer.announce([b"short-key-of-another-hash"])
    node.store(1)
    assert world.published(1) == [True]


@pytest.mark.parametrize("failing", ["publish", "evict"])
def test_after_an_error_pages_are_published_nevertheless(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failing: str
) -> None:
    node = world.node()
    whole: Callable[..., object] = getattr(world.directory, failing)
    calls = []

    def fail_once(*args: object, **options: object) -> object:
        calls.append(args)
        if len(calls) == 1:
            raise RuntimeError("broken")
        return whole(*args, **options)

    assert node.slab.store(key_of(1), page_of(1))
    monkeypatch.setattr(FailingDirectory, failing, lambda self, *args, **options: fail_once(*args, **options))
    node.announcer.on_evicted(keys_of(6))
    node.announcer.announce(keys_of(1))
    wait_until(lambda: world.published(1) == [True])
    assert "could not be published" in caplog.text and node.relay.token.hex() not in caplog.text
