"""Descriptors that a server holds for its engines: who gets them, and when they are closed."""

import multiprocessing
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_omni.process.block_holder import BlockHolder, fetch, hand_over
from vllm_omni.process.run_directory import RunDirectory


@pytest.fixture
def holder(directory: RunDirectory) -> Iterator[BlockHolder]:
    made = BlockHolder(directory.path)
    yield made
    made.close()


def hand_over_bytes(directory: Path, name: str, data: bytes) -> None:
    descriptor = os.memfd_create("block-of-this-test")
    os.write(descriptor, data)
    hand_over(directory, name, descriptor)
    os.close(descriptor)


def fetch_bytes(directory: Path, name: str) -> bytes:
    descriptor = fetch(directory, name)
    data = os.pread(descriptor, 100, 0)
    os.close(descriptor)
    return data


def num_blocks() -> int:
    """Descriptors of this process's memory files."""
    links = [Path(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    return sum(link.is_symlink() and "memfd:block-of-this-test" in os.readlink(link) for link in links)


def test_a_block_outlives_the_process_that_made_it(holder: BlockHolder, directory: RunDirectory) -> None:
    args = (directory.path, "one", b"weights")
    process = multiprocessing.get_context("spawn").Process(target=hand_over_bytes, args=args)
    process.start()
    process.join()
    assert process.exitcode == 0 and fetch_bytes(directory.path, "one") == b"weights"
    assert fetch_bytes(directory.path, "one") == b"weights", "it is still held"


def test_a_new_block_takes_the_place_of_one_with_its_name(holder: BlockHolder, directory: RunDirectory) -> None:
    hand_over_bytes(directory.path, "one", b"old")
    hand_over_bytes(directory.path, "other", b"other")
    hand_over_bytes(directory.path, "one", b"new")
    assert [fetch_bytes(directory.path, name) for name in ("one", "other")] == [b"new", b"other"]
    assert num_blocks() == 2


def test_a_name_that_is_not_held_is_an_error(holder: BlockHolder, directory: RunDirectory) -> None:
    with pytest.raises(KeyError, match="one"):
        fetch(directory.path, "one")


def test_descriptors_are_not_inherited_by_programs(holder: BlockHolder, directory: RunDirectory) -> None:
    hand_over_bytes(directory.path, "one", b"weights")
    descriptor = fetch(directory.path, "one")
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)


def test_it_closes_what_it_holds(directory: RunDirectory) -> None:
    holder = BlockHolder(directory.path)
    hand_over_bytes(directory.path, "one", b"weights")
    assert num_blocks() == 1
    holder.close()
    assert num_blocks() == 0
    holder.close()
    with pytest.raises(ConnectionRefusedError):
        fetch(directory.path, "one")


def test_a_client_that_says_nothing_does_not_stop_it(holder: BlockHolder, directory: RunDirectory) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(directory.path / "blocks.sock"))
    hand_over_bytes(directory.path, "one", b"weights")
    assert fetch_bytes(directory.path, "one") == b"weights"
