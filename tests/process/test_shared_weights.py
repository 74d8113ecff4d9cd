"""A file of weights that several processes map: who writes it, who waits, and what remains."""

import errno
import multiprocessing
import os
import stat
import threading
from collections.abc import Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from tests.cases import rejected
from tests.process.programs import LIFE_S, sleep, wait_for
from vllm_omni.errors import ConfigError
from vllm_omni.process.leftovers import find_leftovers
from vllm_omni.process.run_directory import RunDirectory, blocks_of
from vllm_omni.process.shared_weights import ALIGNMENT, TensorPlace, WeightsFile, num_bytes_of, place_tensors
from vllm_omni.process.stage_processes import StageProcesses
from vllm_omni.process.tether import ServerTether

BYTES = bytes(range(200))
PLACES = {"a": TensorPlace("uint8", [100], 0, 100), "b": TensorPlace("uint8", [72], 128, 72)}


def publish(weights: WeightsFile) -> None:
    with weights.claim() as must_load:
        assert must_load
        weights.write(PLACES, [("a", memoryview(BYTES)[:100]), ("b", memoryview(BYTES)[128:])])


@pytest.fixture
def weights(directory: RunDirectory) -> WeightsFile:
    return WeightsFile(directory.path, "0123")


def has_waiter() -> bool:
    """Whether a thread of this process waits for a lock of a file (proc_locks(5))."""
    waiting = (line.split() for line in Path("/proc/locks").read_text().splitlines() if "-> FLOCK" in line)
    return any(fields[5] == str(os.getpid()) for fields in waiting)


# -- the file ----------------------------------------------------------------------------------------------------------


def test_tensors_have_places_of_their_own_at_whole_cache_lines() -> None:
    places = place_tensors({"a": ("float32", [25], 100), "b": ("bfloat16", [2, 3], 12), "c": ("int8", [0], 0)})
    assert [places[name].offset for name in "abc"] == [0, 128, 192]
    assert all(place.offset % ALIGNMENT == 0 for place in places.values())
    assert num_bytes_of(places) == 192 and num_bytes_of({}) == 0


def test_what_is_written_is_mapped(weights: WeightsFile) -> None:
    assert not weights.is_published()
    publish(weights)
    places, data = weights.map()
    assert weights.is_published() and places == PLACES
    assert bytes(data) == BYTES[:100] + bytes(28) + BYTES[128:]


def test_a_write_to_a_mapping_is_seen_in_no_other(weights: WeightsFile) -> None:
    publish(weights)
    (_, one), (_, other) = weights.map(), weights.map()
    one[5] = 77
    assert other[5] == 5 and weights.map()[1][5] == 5


def test_a_mapping_outlives_the_file(weights: WeightsFile, directory: RunDirectory) -> None:
    publish(weights)
    _, data = weights.map()
    directory.remove()
    assert not weights.path.exists() and bytes(data[:100]) == BYTES[:100]


def test_only_its_user_can_read_it(weights: WeightsFile) -> None:
    publish(weights)
    assert stat.S_IMODE(weights.path.stat().st_mode) == 0o600


def test_a_link_is_not_followed(weights: WeightsFile, tmp_path: Path) -> None:
    weights.path.symlink_to(tmp_path / "other")
    (tmp_path / "other").write_bytes(bytes(4096))
    with pytest.raises(OSError, match="symbolic link"):
        weights.map()


# -- room --------------------------------------------------------------------------------------------------------------


def test_more_than_shared_memory_holds_is_rejected_before_it_is_loaded(weights: WeightsFile) -> None:
    weights.check_room(1)
    with rejected(ConfigError, "/dev/shm has no room for 1048576.0 GiB of weights: enlarge it", 1 << 50):
        weights.check_room(1 << 50)


def test_shared_memory_that_is_full_is_reported_and_nothing_is_left(
    weights: WeightsFile, directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pwrite(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", pwrite)
    with rejected(ConfigError, "has no room for 200 B of weights", 200):
        publish(weights)
    assert not blocks_of(directory.path)


# -- who loads ---------------------------------------------------------------------------------------------------------


def test_no_one_waits_for_weights_that_are_published(weights: WeightsFile) -> None:
    publish(weights)
    with weights.claim() as one, weights.claim() as other:
        assert (one, other) == (False, False)


def test_weights_of_another_key_are_claimed_at_the_same_time(weights: WeightsFile, directory: RunDirectory) -> None:
    with weights.claim() as one, WeightsFile(directory.path, "4567").claim() as other:
        assert (one, other) == (True, True)


@pytest.fixture
def waiter(weights: WeightsFile) -> Iterator[tuple[threading.Thread, list[bool]]]:
    """A thread that claims the weights, and what it gets."""
    got: list[bool] = []

    def claim() -> None:
        with weights.claim() as must_load:
            got.append(must_load)

    thread = threading.Thread(target=claim)
    yield thread, got
    thread.join()


def test_others_wait_until_the_first_has_written(
    weights: WeightsFile, waiter: tuple[threading.Thread, list[bool]]
) -> None:
    thread, got = waiter
    with weights.claim() as must_load:
        assert must_load
        thread.start()
        wait_for(has_waiter)
        weights.write(PLACES, [])
        assert not got
    thread.join()
    assert got == [False]


def test_the_next_one_loads_if_the_first_fails(
    weights: WeightsFile, waiter: tuple[threading.Thread, list[bool]]
) -> None:
    thread, got = waiter
    with pytest.raises(ArithmeticError), weights.claim():
        thread.start()
        wait_for(has_waiter)
        raise ArithmeticError
    thread.join()
    assert got == [True]


def load_for_ever(directory: Path, loading: Connection) -> None:
    weights = WeightsFile(directory, "0123")
    with weights.claim():

        def tensors() -> Iterator[tuple[str, memoryview]]:
            yield "a", memoryview(BYTES)[:100]
            loading.send(True)
            loading.poll(LIFE_S)

        weights.write(PLACES, tensors())


def test_the_next_one_loads_if_the_first_is_killed_while_it_writes(
    weights: WeightsFile, directory: RunDirectory, waiter: tuple[threading.Thread, list[bool]]
) -> None:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=load_for_ever, args=(directory.path, there))
    process.start()
    here.recv()
    thread, got = waiter
    thread.start()
    wait_for(has_waiter)
    process.kill()
    process.join()
    thread.join()
    assert got == [True] and not weights.is_published()
    publish(weights)
    assert blocks_of(directory.path) == [weights.path], "what the other one had written is gone"


# -- the end -----------------------------------------------------------------------------------------------------------


def test_the_file_is_removed_with_the_server(
    weights: WeightsFile, directory: RunDirectory, capfd: pytest.CaptureFixture[str]
) -> None:
    publish(weights)
    directory.remove()
    assert not weights.path.exists()
    resource_tracker.ensure_running()
    assert "Traceback" not in capfd.readouterr().err  # the tracker is not asked to forget what it does not know


def test_the_file_of_a_killed_server_is_a_leftover_of_its_directory(tmp_path: Path) -> None:
    directory = tmp_path / f"vllm-omni-{tmp_path.name[:8]}x"
    directory.mkdir()
    (directory / "owner").touch()
    publish(weights := WeightsFile(directory, "0123"))
    try:
        ((leftover,), _) = find_leftovers(tmp_path, (directory / "owner").stat().st_mtime + 60)
        assert leftover.blocks == (weights.path,) and leftover.num_bytes >= weights.path.stat().st_size
    finally:
        weights.path.unlink()


def map_and_sleep(tether: ServerTether, mapped: Connection) -> None:
    _, data = WeightsFile(tether.directory, "0123").map()
    mapped.send(len(data))
    sleep(tether)


def test_a_stage_that_ends_leaves_them_to_the_others(weights: WeightsFile, directory: RunDirectory) -> None:
    publish(weights)
    here, there = multiprocessing.Pipe()
    tether = ServerTether(directory.path, "talker/0")
    process = multiprocessing.get_context("spawn").Process(target=map_and_sleep, args=(tether, there), daemon=True)
    process.start()
    here.recv()
    processes = StageProcesses(tether)
    processes.note()
    processes.end()
    process.join()
    assert weights.is_published()
