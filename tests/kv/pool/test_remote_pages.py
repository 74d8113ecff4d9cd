"""Pages of other hosts: found in a directory, pulled over loopback, and checked. In Redis: test_hosts.py."""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.kv.pool.nodes import PATIENT, Clock, FailingDirectory, Node, make_directory, wait_until
from tests.kv.pool.stores import PAGE_BYTES, flip, key_of, keys_of, page_of, place_of
from vllm_omni.kv.pool.directory import Match, Member
from vllm_omni.kv.pool.remote_pages import LOOKUP_S, Place

LIMITS = PATIENT._replace(lookup_s=LOOKUP_S)


class SlowDirectory(FailingDirectory):
    """Answers lookups when ``gate`` is open, as the directory that it stands before."""

    def __init__(self, behind: FailingDirectory) -> None:
        self.__dict__.update(behind.__dict__)
        self.gate = threading.Event()
        self.num_matches = 0

    def match_and_claim(self, member: Member, keys: Sequence[bytes], claim_s: float) -> Match:
        self.num_matches += 1
        assert self.gate.wait(30.0)
        return super().match_and_claim(member, keys, claim_s)


class World:
    """A holder with pages, and a reader with a slab of its own; their clock and the directory's stand still."""

    def __init__(self, root: Path) -> None:
        self.clock, self.directory_clock = Clock(), Clock()
        self.directory = make_directory(self.directory_clock)
        self.lookups = SlowDirectory(self.directory)
        self.lookups.gate.set()
        self._root = root
        self.holder = self._node("holder")
        self.reader = self._node("reader")
        self.others: list[Node] = []

    def _node(self, name: str, num_slots: int = 8) -> Node:
        return Node(self._root / name, self.directory, num_slots, lookups=self.lookups, limits=LIMITS, clock=self.clock)

    def other(self) -> Node:
        self.others.append(self._node("other"))
        return self.others[-1]

    @property
    def num_claims(self) -> int:
        return self.directory.statistics().num_claims


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.lookups.gate.set()
    for node in (world.reader, world.holder, *world.others):
        node.close()
    world.directory.sweep()
    world.directory.check_integrity()
    assert not any(world.directory.statistics())


# -- finding ----------------------------------------------------------------------------------------------------------


def test_a_page_is_found_and_copied(world: World) -> None:
    world.holder.store(1, 2)
    assert world.reader.found(1, 2) == [True, True]
    assert world.reader.load(1, 2) == [page_of(1), page_of(2)]
    assert (world.reader.pages.num_hits, world.reader.pages.num_failures, world.num_claims) == (2, 0, 0)


def test_all_pages_of_a_request_are_one_question(world: World) -> None:
    world.holder.store(*range(6))
    assert world.reader.found(*range(8)) == [True] * 6 + [False] * 2
    assert world.lookups.num_matches == 1


def test_what_was_answered_is_not_asked_again(world: World) -> None:
    world.holder.store(1)
    world.reader.found(1, 2)
    assert world.reader.found(1, 2) == [True, False] and world.lookups.num_matches == 1


def test_pages_are_found_up_to_the_first_that_is_missing(world: World) -> None:
    world.holder.store(1, 3)
    assert world.reader.found(1, 2, 3) == [True, False, False]


def test_each_chain_is_found_by_itself_in_the_order_of_its_positions(world: World) -> None:
    world.holder.store(1, 2, 5)
    find = world.reader.pages.find
    # As scanned from the end; the last one of the first chain, and of the second, is missing.
    places = {3: Place(0, 2), 2: Place(0, 1), 4: Place(1, 1), 1: Place(0, 0), 5: Place(1, 0)}
    for number, place in places.items():
        find("request", key_of(number), place)
    world.reader.pages.ask()
    wait_until(lambda: find("request", key_of(1), places[1]) is not None)
    found = {number for number, place in places.items() if find("request", key_of(number), place)}
    assert found == {1, 2, 5} and world.lookups.num_matches == 2


def test_pages_that_are_looked_for_during_a_question_are_the_next_one(world: World) -> None:
    world.holder.store(1, 2)
    world.lookups.gate.clear()
    world.reader.find(1)
    world.reader.pages.ask()
    assert world.reader.find(1, 2) == [None, None]
    world.reader.pages.ask()
    world.lookups.gate.set()
    wait_until(lambda: world.reader.find(1) == [True])
    assert world.reader.found(1, 2) == [True, True]
    assert world.reader.pages.num_lookups == 2 and world.num_claims == 2


def test_a_prefix_longer_than_one_call_is_found(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_omni.kv.pool.remote_pages.MAX_MATCH_PAGES", 2)
    world.holder.store(*range(5))
    assert world.reader.found(*range(7)) == [True] * 5 + [False] * 2 and world.lookups.num_matches == 3


def test_own_pages_are_not_pulled(world: World) -> None:
    world.reader.store(1)
    assert world.reader.found(1) == [False] and world.num_claims == 0


def test_a_request_that_ends_releases_what_it_has_found(world: World) -> None:
    world.holder.store(1, 2)
    world.reader.found(1, 2)
    assert world.num_claims == 2
    world.reader.pages.forget("request")
    wait_until(lambda: world.num_claims == 0)


def test_a_claim_ends_by_itself(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_omni.kv.pool.remote_pages.CLAIM_S", 1.0)  # shorter than a lease
    world.holder.store(1)
    world.reader.found(1)
    assert world.num_claims == 1
    world.directory_clock.now += 1.0
    assert world.num_claims == 0


# -- a directory that is slow, or away --------------------------------------------------------------------------------


def test_an_answer_that_does_not_come_in_time_is_a_miss(world: World) -> None:
    world.holder.store(1)
    world.lookups.gate.clear()
    assert world.reader.find(1) == [None]
    world.reader.pages.ask()
    world.clock.now += LOOKUP_S * 0.9
    assert world.reader.find(1) == [None]
    world.clock.now += LOOKUP_S * 0.2
    assert world.reader.find(1) == [False]
    assert (world.reader.pages.num_lookups, world.reader.pages.num_late) == (1, 1)


def test_what_a_late_answer_has_claimed_is_released(world: World) -> None:
    world.holder.store(1)
    world.lookups.gate.clear()
    world.reader.find(1)
    world.reader.pages.ask()
    wait_until(lambda: world.lookups.num_matches == 1)
    world.clock.now += LOOKUP_S * 2
    assert world.reader.find(1) == [False]
    world.lookups.gate.set()
    world.reader.pages.close()  # waits for the thread
    assert world.num_claims == 0


def test_a_question_of_a_request_that_has_ended_claims_nothing(world: World) -> None:
    world.holder.store(1)
    world.lookups.gate.clear()
    world.reader.find(1)
    world.reader.pages.ask()
    world.reader.pages.forget("request")
    world.lookups.gate.set()
    world.reader.pages.close()
    assert world.num_claims == 0


def test_an_answer_that_came_while_the_scheduler_was_busy_counts(world: World) -> None:
    world.holder.store(1)
    world.reader.find(1)
    world.reader.pages.ask()
    wait_until(lambda: world.num_claims == 1)
    world.clock.now += LOOKUP_S * 10
    wait_until(lambda: world.reader.find(1) != [None])
    assert world.reader.find(1) == [True] and world.reader.pages.num_late == 0


def test_a_directory_that_is_away_is_not_asked(world: World) -> None:
    world.holder.store(1)
    world.lookups.is_away = True
    assert world.reader.find(1) == [False]
    world.reader.pages.ask()
    assert world.reader.pages.num_lookups == 0
    world.lookups.is_away = False
    assert world.reader.found(1) == [True]


def test_an_error_of_the_directory_is_a_miss(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.lookups.match_and_claim = lambda *args: 1 / 0  # type: ignore[assignment,method-assign]
    assert world.reader.found(1) == [False] and "could not be asked" in caplog.text


def test_copies_that_the_directory_cannot_confirm_are_not_used(world: World) -> None:
    world.holder.store(1)
    world.reader.found(1)
    world.lookups.is_away = True
    assert world.reader.load(1) == [None]
    assert (world.reader.pages.num_hits, world.reader.pages.num_damaged, world.reader.pages.num_failures) == (0, 0, 1)


# -- copying ----------------------------------------------------------------------------------------------------------


def test_a_page_is_loaded_once_by_a_request(world: World) -> None:
    world.holder.store(1)
    world.reader.found(1)
    assert world.reader.load(1) == [page_of(1)]
    assert world.reader.find(1) == [False], "one that failed is recomputed"
    assert world.reader.found(1, request_id="another") == [True]


def test_a_page_that_is_evicted_meanwhile_is_not_used(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_omni.kv.pool.remote_pages.CLAIM_S", 1.0)  # shorter than a lease
    world.holder.store(*range(8))
    world.reader.found(0, 1, 2)
    world.directory_clock.now += 1.0
    world.holder.store(*range(8, 24))
    assert world.holder.slab.locate(key_of(1)) is None
    assert world.reader.load(0, 1, 2) == [None] * 3
    assert world.reader.pages.num_damaged == 1


def test_a_claim_keeps_a_page_until_it_is_copied(world: World) -> None:
    world.holder.store(*range(8))
    world.reader.found(0, 1, 2)
    world.holder.store(*range(8, 24))
    assert world.reader.load(0, 1, 2) == [page_of(0), page_of(1), page_of(2)]


@pytest.mark.parametrize("pages_at_once", [1, 3])
def test_a_damaged_page_and_those_behind_it_are_not_used(
    world: World, monkeypatch: pytest.MonkeyPatch, pages_at_once: int
) -> None:
    monkeypatch.setattr(world.reader.pages, "_limits", LIMITS._replace(pull_bytes=pages_at_once * PAGE_BYTES))
    world.holder.store(1, 2, 3)
    flip(*place_of(world.holder.slab, key_of(2)))
    world.reader.found(1, 2, 3)
    assert world.reader.load(1, 2, 3) == [page_of(1), None, None]
    assert (world.reader.pages.num_hits, world.reader.pages.num_damaged, world.num_claims) == (1, 1, 0)


def test_a_slot_that_another_page_has_taken_is_not_used_although_the_directory_stands_by_it(world: World) -> None:
    world.holder.store(1)
    location = world.holder.slab.locate(key_of(1))
    assert location is not None
    world.holder.slab._file.write(location.slot, memoryview(page_of(2)))
    world.reader.found(1)
    assert world.reader.load(1) == [None] and world.reader.pages.num_damaged == 1


def test_pages_of_several_nodes_are_put_together(world: World) -> None:
    other = world.other()
    world.holder.store(1, 2)
    other.store(3, 4, 5)
    assert world.reader.found(1, 2, 3, 4, 5) == [True] * 5
    assert world.reader.load(1, 2, 3, 4, 5) == [page_of(number) for number in range(1, 6)]


def test_no_more_than_the_limit_is_in_flight(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    pulls: list[int] = []
    pull = world.reader.relay.pull

    def counted(source: str, slots: Sequence[int], timeout_s: float) -> list:
        pulls.append(len(slots))
        return pull(source, slots, timeout_s)

    monkeypatch.setattr(world.reader.relay, "pull", counted)
    monkeypatch.setattr(world.reader.pages, "_limits", LIMITS._replace(pull_bytes=2 * PAGE_BYTES + 1))
    world.holder.store(*range(5))
    world.reader.found(*range(5))
    assert world.reader.load(*range(5)) == [page_of(number) for number in range(5)] and pulls == [2, 2, 1]


def test_a_node_that_fails_is_left_alone_for_a_while(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.holder.store(1, 2)
    world.reader.found(1, 2)
    world.holder.relay.close()
    assert world.reader.load(1) == [None] and world.reader.pages.num_failures == 1
    assert world.reader.find(2) == [False] and world.reader.load(2) == [None]
    assert world.reader.pages.num_failures == 1, "it was not tried"
    assert f"No pages are read from {world.holder.relay.address} for a while" in caplog.text
    assert world.holder.relay.token.hex() not in caplog.text
    world.clock.now += LIMITS.back_off_s
    assert world.reader.found(1, request_id="another") == [True]
    assert world.reader.load(1, request_id="another") == [None] and world.reader.pages.num_failures == 2


def test_other_nodes_are_read_while_one_is_left_alone(world: World) -> None:
    other = world.other()
    world.holder.store(1)
    other.store(2)
    world.holder.relay.close()
    world.reader.found(1, 2)
    assert world.reader.load(1) == [None] and world.reader.load(2) == [page_of(2)]


def test_keys_of_another_length_are_misses(world: World) -> None:
    assert world.reader.pages.find("request", b"short", Place(0, 0)) is False
    assert world.reader.found(1) == [False]
    assert world.reader.pages.find("request", b"short", Place(0, 0)) is False


def test_what_was_not_found_cannot_be_taken(world: World) -> None:
    assert world.reader.pages.take("unknown", keys_of(1)) == []
    world.reader.found(1)
    assert world.reader.pages.take("request", keys_of(1)) == []
    world.reader.pages.forget("unknown")
