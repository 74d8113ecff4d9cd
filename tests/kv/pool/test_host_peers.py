"""What other engines' slabs on one host hold, and what of it can be read."""

from pathlib import Path

import pytest

from tests.kv.pool.stores import LAYOUT, PAGE_BYTES, fill, key_of, make_slab, page_of
from vllm_omni.kv.pool.host_peers import LOOK_EVERY_S, HostPeers


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def peers(tmp_path: Path, clock: Clock) -> HostPeers:
    return HostPeers(tmp_path / "slabs", LAYOUT, None, clock)


def loaded(peers: HostPeers, number: int) -> bytes | None:
    into = memoryview(bytearray(PAGE_BYTES))
    return bytes(into) if peers.load(key_of(number), into) else None


def test_a_page_is_found_once_it_is_written(tmp_path: Path, peers: HostPeers) -> None:
    with make_slab(tmp_path) as slab:
        peers.update()
        assert key_of(1) not in peers and loaded(peers, 1) is None
        fill(slab, 1)
        assert key_of(1) not in peers
        peers.update()
        assert key_of(1) in peers and loaded(peers, 1) == page_of(1)


def test_a_page_that_was_evicted_is_no_longer_found(tmp_path: Path, peers: HostPeers) -> None:
    with make_slab(tmp_path, num_slots=2) as slab:
        fill(slab, 1, 2)
        peers.update()
        fill(slab, 3, 4)
        assert loaded(peers, 1) is None and loaded(peers, 2) is None, "the slots have other pages by now"
        peers.update()
        assert [key_of(number) in peers for number in (1, 2, 3, 4)] == [False, False, True, True]
        assert loaded(peers, 4) == page_of(4)


def test_the_slab_of_an_engine_that_has_ended_is_read(tmp_path: Path, peers: HostPeers) -> None:
    with make_slab(tmp_path) as slab:
        fill(slab, 1)
    peers.update()
    assert loaded(peers, 1) == page_of(1)


def test_the_engine_s_own_slab_and_those_of_other_layouts_are_no_peers(tmp_path: Path, clock: Clock) -> None:
    with make_slab(tmp_path) as own, make_slab(tmp_path, layout="layout.2") as other:
        fill(own, 1)
        fill(other, 2)
        peers = HostPeers(tmp_path / "slabs", LAYOUT, own.path, clock)
        peers.update()
        assert key_of(1) not in peers and key_of(2) not in peers


def test_slabs_are_looked_for_now_and_then(tmp_path: Path, peers: HostPeers, clock: Clock) -> None:
    peers.update()
    with make_slab(tmp_path) as slab:
        fill(slab, 1)
        peers.update()
        assert key_of(1) not in peers
        clock.now += LOOK_EVERY_S
        peers.update()
        assert key_of(1) in peers
        slab.destroy()
    clock.now += LOOK_EVERY_S
    peers.update()
    assert key_of(1) not in peers


def test_a_damaged_page_is_counted_and_not_found_again(tmp_path: Path, peers: HostPeers) -> None:
    with make_slab(tmp_path) as slab:
        fill(slab, 1)
        location = slab.locate(key_of(1))
        assert location is not None
        with slab.path.open("r+b") as file:
            file.seek(slab.path.stat().st_size - slab.num_slots * PAGE_BYTES + location.slot * PAGE_BYTES)
            file.write(b"damage")
        peers.update()
        assert loaded(peers, 1) is None and peers.num_damaged == 1
        assert key_of(1) not in peers
