"""Tensors in pages: whole or not at all, stored once, and found again by the next process and by those beside it."""

import hashlib
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.kv.pool.stores import abandon, flip, start
from vllm_omni.kv.pool.disk import PAGES, DiskPages
from vllm_omni.kv.pool.slab import Slab
from vllm_omni.kv.pool.store import PageStore
from vllm_omni.kv.pool.tensors import (
    DISK,
    HEADER_BYTES,
    MEMORY,
    PEER,
    ROWS_PER_PAGE,
    TensorStore,
    open_tensors,
    page_bytes,
    page_key,
    tensor_digest,
)
from vllm_omni.messages.payload import DTYPES

WIDTH = 8
PAGE = page_bytes(WIDTH, torch.float32)
NUM_SLOTS = 8


def image(number: int, num_rows: int = 3 * ROWS_PER_PAGE - 5, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows of random bytes: NaN and infinity among them."""
    generator = torch.Generator().manual_seed(number)
    data = torch.randint(0, 256, (num_rows, WIDTH * dtype.itemsize), generator=generator, dtype=torch.uint8)
    return (data & 1).view(dtype) if dtype is torch.bool else data.view(dtype)


def is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one.view(torch.uint8), _bytes(other))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


class Host:
    """Opens the stores of engines of one host."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.opened: list[TensorStore] = []

    def open(self, num_slots: int = NUM_SLOTS, *, with_disk: bool = False, layout: str = "layout.1") -> TensorStore:
        options = {"disk": str(self.root / "disk"), "disk_bytes": 4 << 20} if with_disk else {}
        memory = num_slots * PAGE
        self.opened.append(open_tensors(layout, PAGE, memory, directory=str(self.root / "slabs"), **options))
        return self.opened[-1]


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    host = Host(tmp_path)
    yield host
    for store in host.opened:
        if not any(medium.store.is_closed for medium in store.media.values()):
            store.check_integrity()
            store.close()


def slab_of(store: TensorStore) -> Slab:
    slab = store.media[MEMORY].store
    assert isinstance(slab, Slab)
    return slab


def places(store: TensorStore, identifier: str, name: str = "") -> list[int]:
    """Offsets of a tensor's pages in the slab's file."""
    slab, found = slab_of(store), []
    for index in range(NUM_SLOTS):
        if (location := slab.locate(page_key(tensor_digest(identifier, name), index))) is not None:
            found.append(slab._shape.pages_offset + location.slot * slab._shape.stride)
    return found


# -- one store --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_a_tensor_is_returned_as_it_was_stored(host: Host, dtype: torch.dtype) -> None:
    store, rows = host.open(64), image(1, dtype=dtype)
    assert store.put("one", rows)
    found = store.get("one")
    assert found is not None and found.medium == MEMORY and is_same(found.tensor, rows)


@pytest.mark.parametrize("num_rows", [1, ROWS_PER_PAGE - 1, ROWS_PER_PAGE, ROWS_PER_PAGE + 1, 576])
@pytest.mark.parametrize("width", [1, WIDTH, 4 * WIDTH])
def test_rows_of_any_number_and_width_fit_pages_of_one_size(host: Host, num_rows: int, width: int) -> None:
    store, rows = host.open(64), torch.arange(float(num_rows * width)).view(num_rows, width)
    assert store.put("one", rows)
    found = store.get("one")
    assert found is not None and torch.equal(found.tensor, rows)


def test_what_has_no_rows_or_does_not_fit_is_dropped(host: Host) -> None:
    store = host.open()
    for rows in (torch.empty(0, WIDTH), torch.ones(WIDTH), torch.ones(2, PAGE), image(1, 100 * ROWS_PER_PAGE)):
        assert not store.put("one", rows) and store.get("one") is None
    assert store.statistics().num_dropped == 4 and not len(slab_of(store))


def test_names_and_identifiers_are_apart(host: Host) -> None:
    store = host.open(16)
    for number, (identifier, name) in enumerate([("one", ""), ("one", "more"), ("onemore", ""), ("re", "onemo")]):
        assert store.put(identifier, image(number, 4), name)
        found = store.get(identifier, name)
        assert found is not None and is_same(found.tensor, image(number, 4))
    assert len(slab_of(store)) == 4


def test_a_tensor_that_is_there_is_not_stored_again(host: Host) -> None:
    store = host.open()
    assert store.put("one", image(1)) and not store.put("one", image(1))
    assert store.statistics().num_duplicates == 1


def test_what_was_evicted_leaves_no_fragment(host: Host) -> None:
    store = host.open()  # of 8 pages; each tensor has 3
    for number in range(5):
        assert store.put(str(number), image(number))
        store.check_integrity()
    present = [
        number for number in range(5) if (found := store.get(str(number))) and is_same(found.tensor, image(number))
    ]
    assert present == [3, 4] and len(slab_of(store)) == 6


def test_a_tensor_evicts_no_page_of_its_own(host: Host) -> None:
    store = host.open()
    assert store.put("small", image(0)) and store.put("all", image(1, NUM_SLOTS * ROWS_PER_PAGE))
    found = store.get("all")
    assert found is not None and store.get("small") is None


def test_tensors_that_are_used_stay(host: Host) -> None:
    store = host.open()
    for number in range(6):
        assert store.put(str(number), image(number))
        assert store.get("0") is not None
    assert store.get("3") is None


@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize("offset", [3, 20, HEADER_BYTES + 7])
def test_a_flipped_bit_is_a_miss_and_removes_the_whole(host: Host, index: int, offset: int) -> None:
    store = host.open()
    assert store.put("one", image(1))
    flip(slab_of(store).path, places(store, "one")[index] + offset)
    assert store.get("one") is None and not len(slab_of(store))
    assert slab_of(store).counts()["corrupt"] == 1
    assert store.put("one", image(1)) and store.get("one") is not None


def test_pages_of_two_writings_are_never_put_together(host: Host) -> None:
    """Whatever led to it: each page is right by its checksum."""
    store, digest = host.open(16), tensor_digest("one", "")
    pages = []
    for number in (1, 2):
        assert store.put("one", image(number))
        buffer = memoryview(bytearray(PAGE))
        num_bytes = slab_of(store).load(page_key(digest, 1), buffer)
        pages.append(bytes(buffer[:num_bytes]))
        store.remove("one")
    assert store.put("one", image(2))
    slab_of(store).remove([page_key(digest, 1)])
    assert slab_of(store).store(page_key(digest, 1), pages[0])
    assert store.get("one") is None and not len(slab_of(store))


# -- a herd -----------------------------------------------------------------------------------------------------------


class SlowStore(Slab):
    """Lets the test see two writers at once."""

    writing: threading.Event
    proceed: threading.Event

    def _write(self, slot: int, page: memoryview) -> None:
        self.writing.set()
        assert self.proceed.wait(20)
        super()._write(slot, page)


def test_of_many_threads_one_stores_and_none_waits(tmp_path: Path) -> None:
    SlowStore.writing, SlowStore.proceed = threading.Event(), threading.Event()

    def open_slab(on_gone: Callable) -> PageStore:
        return SlowStore("layout.1", PAGE, NUM_SLOTS, directory=tmp_path / "slabs", on_evicted=on_gone)

    store, results = TensorStore({MEMORY: open_slab}), []
    first = threading.Thread(target=lambda: results.append(store.put("one", image(1))))
    first.start()
    assert SlowStore.writing.wait(20)
    others = [threading.Thread(target=lambda: results.append(store.put("one", image(1)))) for _ in range(8)]
    for thread in others:
        thread.start()
        thread.join(20)
    assert results == [False] * 8, "while the first has not ended"
    assert store.get("one") is None, "what is being stored is not there yet"
    SlowStore.proceed.set()
    first.join(20)
    assert results[8:] == [True] and store.statistics().num_duplicates == 8 and store.get("one") is not None
    store.check_integrity()
    store.close()


def test_threads_that_store_read_and_evict_never_see_a_part(host: Host) -> None:
    store, wrong, end = host.open(), [], threading.Event()

    def work(first: int) -> None:
        for turn in range(150):
            number = (first + turn * 7) % 6
            store.put(str(number), image(number))
            found = store.get(str((number + first) % 6))
            if found is not None and not is_same(found.tensor, image((number + first) % 6)):
                wrong.append(number)
        end.set()

    threads = [threading.Thread(target=work, args=(one,)) for one in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert end.is_set() and not wrong
    store.check_integrity()


# -- processes --------------------------------------------------------------------------------------------------------

PROGRAM = """
    import time
    from pathlib import Path
    from tests.kv.pool.test_tensors import Host, image
    store = Host(Path({root!r})).open()
    print("stored", sum(store.put(str(number), image(number)) for number in range(2)), flush=True)
    time.sleep(60)
"""


def test_a_process_reads_what_another_has_and_does_not_store_it_again(host: Host) -> None:
    process, line = start(PROGRAM.format(root=str(host.root)))
    try:
        assert line == "stored 2"
        store = host.open()
        found = store.get("1")
        assert found is not None and found.medium == PEER and is_same(found.tensor, image(1))
        assert not store.put("1", image(1)) and not len(slab_of(store))
        assert store.put("5", image(5))
    finally:
        process.kill()
        process.communicate()
    found = store.get("0")
    assert found is not None and found.medium == PEER, "a slab outlives its process"


HERD = """
    import sys
    from pathlib import Path
    from tests.kv.pool.test_tensors import Host, image, is_same
    store = Host(Path({root!r})).open(with_disk=True)
    print("ready", flush=True)
    sys.stdin.readline()
    stored = sum(store.put(str(number), image(number)) for number in range(2))
    found = [store.get(str(number)) for number in range(2)]
    assert all(one is not None and is_same(one.tensor, image(number)) for number, one in enumerate(found))
    store.check_integrity()
    print(stored, flush=True)
    store.close()
"""


def test_processes_that_store_the_same_at_once_all_find_it(host: Host) -> None:
    program = textwrap.dedent(HERD.format(root=str(host.root)))
    command = [sys.executable, "-c", program]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    herd = [subprocess.Popen(command, cwd=Path(__file__).parents[3], **pipes) for _ in range(3)]  # type: ignore[call-overload]
    for process in herd:
        assert process.stdout.readline() == "ready\n"
    for process in herd:  # together
        process.stdin.write("\n")
        process.stdin.flush()
    num_stored = [int(process.communicate(timeout=60)[0]) for process in herd]
    assert not any(process.returncode for process in herd) and sum(num_stored) >= 2
    store = host.open(with_disk=True)
    assert all((found := store.get(str(number))) and is_same(found.tensor, image(number)) for number in range(2))


@pytest.mark.parametrize("missing", [0, 1, 2])
@pytest.mark.parametrize("with_disk", [False, True])
def test_a_store_that_was_killed_is_adopted_with_whole_tensors_only(host: Host, with_disk: bool, missing: int) -> None:
    store = host.open(with_disk=with_disk)
    assert store.put("0", image(0)) and store.put("1", image(1))
    for medium in store.media.values():  # killed before the first page, the last, was written; or one was damaged
        medium.store.remove([page_key(tensor_digest("1", ""), missing)])
        abandon(medium.store)
    host.opened.clear()
    again = host.open(with_disk=with_disk)
    again.check_integrity()
    found = again.get("0")
    assert found is not None and found.medium == MEMORY and is_same(found.tensor, image(0))
    assert again.get("1") is None and len(slab_of(again)) == 3


def test_a_restarted_host_finds_tensors_on_disk(host: Host) -> None:
    store = host.open(with_disk=True)
    assert store.put("one", image(1))
    store.close()
    slab_of(store).path.unlink()
    found = host.open(with_disk=True).get("one")
    assert found is not None and found.medium == DISK and is_same(found.tensor, image(1))


def test_a_page_that_is_damaged_on_disk_is_a_miss(host: Host) -> None:
    store = host.open(with_disk=True)
    assert store.put("one", image(1))
    disk = store.media[DISK].store
    assert isinstance(disk, DiskPages) and store.get("one", media=[DISK]) is not None
    location = disk.locate(page_key(tensor_digest("one", ""), 2))
    assert location is not None
    flip(disk.path / PAGES, location.slot * disk._stride + HEADER_BYTES)
    assert store.get("one", media=[DISK]) is None and not len(disk)
    assert store.get("one") is not None, "memory still has it"


def test_another_layout_shares_nothing(host: Host) -> None:
    assert host.open().put("one", image(1))
    assert host.open(layout="layout.2").get("one") is None


def test_digests_are_those_of_earlier_versions() -> None:
    """A change of the names makes all that is stored unusable: give the layout another version then."""
    rest = hashlib.sha256(b"0  one").digest()[:20] + bytes(4)
    assert page_key(tensor_digest("one", ""), 0) == hashlib.sha256(rest).digest()[:16] + rest
