"""Slab and disk against a dictionary, with kills at any write and hosts that fail.

A *kill* ends the process at a write to the medium: some of its first bytes are there, as is all that was written
before, and nothing follows. After a *failure of the host* (for the disk), any mixture of the blocks of each file, old
and new, may be there, because nothing is synchronized. In both cases a page that is found is right, and after a kill
all are found that were stored and not evicted.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.fuzz import num_cases
from tests.kv.pool.stores import BACKENDS, abandon, key_of, keys_of, load, make_disk, page_of
from vllm_omni.kv.pool import disk, disk_index
from vllm_omni.kv.pool.disk import INDEX, PAGES, DiskPages
from vllm_omni.kv.pool.slab_format import SlabFile
from vllm_omni.kv.pool.store import PageStore

NUM_SLOTS = 4
NUM_KEYS = 9
NUMBERS = st.integers(0, NUM_KEYS - 1)
BLOCK_BYTES = 512  # that a host which fails writes whole or not at all


class Killed(BaseException):
    """Stands for the end of the process."""


class Countdown:
    """Kills at one of the next writes, in the midst of it."""

    def __init__(self, num_writes: int, share: float) -> None:
        self.num_writes = num_writes
        self.share = share  # of the bytes of that write that are there

    def write(self, do: Callable[[memoryview], None], data: bytes | memoryview) -> None:
        self.num_writes -= 1
        view = memoryview(data)
        if self.num_writes < 0:
            do(view[: int(len(view) * self.share)])
            raise Killed
        do(view)


@contextmanager
def killed_at(countdown: Countdown) -> Iterator[None]:
    """Lets every write to a slab or a disk count down."""
    write_at, write_page = disk_index.write_at, SlabFile.write
    begin, commit, free = SlabFile.begin, SlabFile.commit, SlabFile.free

    def counted_write_at(fd: int, data: bytes | memoryview, offset: int) -> None:
        countdown.write(lambda part: write_at(fd, part, offset), data)

    def counted_page(file: SlabFile, slot: int, data: memoryview) -> None:
        countdown.write(lambda part: write_page(file, slot, part) if part else None, data)

    def counted(step: Callable[..., None]) -> Callable[..., None]:
        def run(*args: object) -> None:
            countdown.write(lambda part: step(*args) if part else None, b"x" * 2)

        return run

    with (
        mock.patch.object(disk_index, "write_at", counted_write_at),
        mock.patch.object(disk, "write_at", counted_write_at),
        mock.patch.multiple(
            SlabFile, write=counted_page, begin=counted(begin), commit=counted(commit), free=counted(free)
        ),
    ):
        yield


class StoreMachine(RuleBasedStateMachine):
    """A store, and what a dictionary says must be in it."""

    backend: str

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.certain: set[int] = set()  # pages that must be there
        self.store = self.open()

    def open(self) -> PageStore:
        return BACKENDS[self.backend].make(self.directory, NUM_SLOTS, on_evicted=self.forget)

    def forget(self, keys: list[bytes]) -> None:
        self.certain -= {number for number in range(NUM_KEYS) if key_of(number) in keys}

    @rule(number=NUMBERS)
    def put(self, number: int) -> None:
        is_new = number not in self.certain
        assert self.store.store(key_of(number), page_of(number)) == is_new
        self.certain.add(number)

    @rule(numbers=st.lists(NUMBERS, max_size=4, unique=True))
    def use(self, numbers: list[int]) -> None:
        self.store.access(keys_of(*numbers))

    @rule(number=NUMBERS)
    def get(self, number: int) -> None:
        assert load(self.store, number) == (page_of(number) if number in self.certain else None)

    @rule(numbers=st.lists(NUMBERS, max_size=3, unique=True))
    def remove(self, numbers: list[int]) -> None:
        self.store.remove(keys_of(*numbers))
        self.certain -= set(numbers)

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = self.open()
        self.check_all()

    @rule(
        numbers=st.lists(NUMBERS, min_size=1, max_size=12),
        num_writes=st.integers(0, 14),
        share=st.floats(0, 1),
        removes=st.booleans(),
    )
    def kill(self, numbers: list[int], num_writes: int, share: float, removes: bool) -> None:
        """Store pages, and perhaps remove the first, until the process is killed in one of its writes."""
        number, before, open_ones = numbers[0], set(self.certain), set[int]()
        try:
            with killed_at(Countdown(num_writes, share)):
                if removes:
                    self.certain.discard(number)
                    self.store.remove(keys_of(number))
                for number in numbers:
                    before = set(self.certain)
                    if self.store.store(key_of(number), page_of(number)):
                        self.certain.add(number)
        except Killed:
            # The page may be there, though nothing could report it; its victim may still be there, and may be gone.
            there = {one for one in before if key_of(one) in self.store}
            open_ones = {number} | (before - there)
            self.certain = there - open_ones
        abandon(self.store)
        self.store = self.open()
        self.certain |= {one for one in open_ones if load(self.store, one) is not None}
        self.check_all()

    def check_all(self) -> None:
        for number in range(NUM_KEYS):
            assert load(self.store, number) == (page_of(number) if number in self.certain else None), number

    @invariant()
    def is_sound(self) -> None:
        self.store.check_integrity()
        assert len(self.store) == len(self.certain) <= NUM_SLOTS

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.directory)


class DiskMachine(StoreMachine):
    """Beside kills, hosts that fail and files that are damaged."""

    backend = "disk"

    def __init__(self) -> None:
        super().__init__()
        self.saved: dict[str, bytes] = {}  # what has certainly reached the disk

    @property
    def path(self) -> Path:
        assert isinstance(self.store, DiskPages)
        return self.store.path

    @rule()
    def reach_the_disk(self) -> None:
        self.saved = {name: (self.path / name).read_bytes() for name in (INDEX, PAGES)}

    @precondition(lambda self: self.saved)
    @rule(seed=st.integers(0, 10**6))
    def fail_host(self, seed: int) -> None:
        rng = random.Random(seed)
        abandon(self.store)
        for name, old in self.saved.items():
            new = (self.path / name).read_bytes()
            size = rng.choice([len(old), len(new), rng.randint(min(len(old), len(new)), max(len(old), len(new)))])
            mixed = bytearray()
            for start in range(0, size, BLOCK_BYTES):
                block = rng.choice([old, new])[start : start + BLOCK_BYTES]
                mixed += block.ljust(BLOCK_BYTES, b"\0")
            (self.path / name).write_bytes(mixed[:size])
        self.start_anew()

    @rule(name=st.sampled_from([INDEX, PAGES]), place=st.floats(0, 1), bit=st.integers(0, 7))
    def flip(self, name: str, place: float, bit: int) -> None:
        self.store.close()
        data = bytearray((self.path / name).read_bytes())
        if data:
            data[int(place * (len(data) - 1))] ^= 1 << bit
            (self.path / name).write_bytes(data)
        self.start_anew()

    def start_anew(self) -> None:
        """What is there is right; the rest of the pages is gone."""
        self.store = self.open()
        self.certain = {number for number in range(NUM_KEYS) if load(self.store, number) == page_of(number)}
        self.saved = {}
        self.check_all()


class SlabMachine(StoreMachine):
    backend = "slab"


def configure(machine: type[StoreMachine], full_size: int) -> type[StoreMachine]:
    machine.TestCase.settings = settings(
        max_examples=num_cases(full_size),
        stateful_step_count=30,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    return machine


TestDisk = pytest.mark.fuzz(configure(DiskMachine, 500).TestCase)
TestSlab = pytest.mark.fuzz(configure(SlabMachine, 500).TestCase)


@pytest.mark.parametrize("num_writes", range(6))
def test_a_store_that_is_killed_at_its_first_writes_can_be_opened(tmp_path: Path, num_writes: int) -> None:
    """Also within the making of its files."""
    for share in (0.0, 0.5, 1.0):
        with killed_at(Countdown(num_writes, share)):
            try:
                store = make_disk(tmp_path, NUM_SLOTS)
                store.store(key_of(1), page_of(1))
                abandon(store)
            except Killed:
                pass
        with make_disk(tmp_path, NUM_SLOTS) as store:
            assert load(store, 1) in (None, page_of(1))
            store.remove(keys_of(1))
            store.check_integrity()
