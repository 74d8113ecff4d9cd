"""A slab outlives its owner, however that ends; what is not adopted can be found and removed."""

import mmap
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz import num_cases
from tests.kv.pool.stores import (
    LAYOUT,
    PAGE_BYTES,
    abandon,
    fill,
    flip,
    key_of,
    load,
    make_slab,
    overwrite,
    page_of,
    place_of,
    start,
)
from vllm_omni.errors import ConfigError
from vllm_omni.kv.pool import ownership, slab_leftovers
from vllm_omni.kv.pool.slab import Slab, SlabReader
from vllm_omni.kv.pool.slab_format import FREE, VALID, WRITING, SlabShape, read_shape
from vllm_omni.kv.pool.slab_leftovers import STARTING_S, find_slabs, find_vllm_files, reap, remove
from vllm_omni.process.proc import SHM

TIMEOUT_S = 60.0
LATER_S = 2e10  # long after any file was made


class Killed(BaseException):
    """Stands for the end of the process."""


def kill(*_: object) -> None:
    raise Killed


def states(slab: Slab) -> list[int]:
    return [slab._file.bytes[slab._file._entry(slot) + 16] for slot in range(slab.num_slots)]


# -- adoption ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["before the page", "within the page", "before the commit", "within the commit"])
def test_a_slot_that_was_being_written_is_free_after_adoption(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slab = make_slab(tmp_path, 3)
    fill(slab, 1, 2, 3)

    def write_half(slot: int, page: memoryview) -> None:
        slab._file.write(slot, page[: PAGE_BYTES // 2])
        raise Killed

    if step == "before the page":
        monkeypatch.setattr(slab, "_write", kill)
    elif step == "within the page":
        monkeypatch.setattr(slab, "_write", write_half)
    elif step == "before the commit":
        monkeypatch.setattr(slab, "_commit", kill)
    else:
        monkeypatch.setattr("vllm_omni.kv.pool.slab_format._BEHIND_STATE", type("Struct", (), {"pack_into": kill}))
    with pytest.raises(Killed):
        slab.store(key_of(4), page_of(4))
    monkeypatch.undo()
    assert sorted(states(slab)) == [WRITING, VALID, VALID]
    abandon(slab)
    with make_slab(tmp_path, 3) as adopted:
        assert sorted(states(adopted)) == [FREE, VALID, VALID]
        assert [load(adopted, number) for number in (1, 2, 3, 4)] == [None, page_of(2), page_of(3), None]
        adopted.check_integrity()
        fill(adopted, 4)
        assert key_of(2) in adopted, "the free slot was used"


def test_an_epoch_is_counted_for_each_owner(tmp_path: Path) -> None:
    with make_slab(tmp_path) as slab:
        assert slab.epoch == 1
        reader = SlabReader(slab.path, LAYOUT)
    with make_slab(tmp_path) as slab:
        assert slab.epoch == reader.epoch == 2
        fill(slab, 1)
        generation = slab.locate(key_of(1)).generation
    with make_slab(tmp_path) as slab:
        fill(slab, 2)
        assert slab.locate(key_of(1)).generation == generation < slab.locate(key_of(2)).generation
    reader.close()


def test_pages_of_a_damaged_table_are_dropped(tmp_path: Path) -> None:
    with make_slab(tmp_path, 4) as slab:
        fill(slab, 1, 2, 3, 4)
        path, entries = slab.path, [slab._file._entry(slab.locate(key_of(number)).slot) for number in (1, 2, 3, 4)]
    overwrite(path, entries[0] + 8, (PAGE_BYTES + 1).to_bytes(4, "little"))
    overwrite(path, entries[1] + 17, b"\xff")  # the key's number of bytes
    flip(path, entries[2] + 30)  # within the key
    with make_slab(tmp_path, 4) as slab:
        assert [load(slab, number) for number in (1, 2, 3, 4)] == [None, None, None, page_of(4)]
        slab.verify()
        assert len(slab) == 1
        slab.check_integrity()


@pytest.mark.parametrize("offset", [0, 8, 12, 30])  # magic, version, size of a page, layout
def test_a_slab_with_a_damaged_header_is_replaced(tmp_path: Path, offset: int) -> None:
    with make_slab(tmp_path) as slab:
        fill(slab, 1)
        path = slab.path
    flip(path, offset)
    assert read_shape(path) is None
    with make_slab(tmp_path) as slab:
        assert (len(slab), slab.path != path, path.exists()) == (0, True, False)


def test_a_slab_of_other_sizes_is_replaced_once_it_has_no_owner(tmp_path: Path) -> None:
    with make_slab(tmp_path, 4) as old:
        with make_slab(tmp_path, 5):
            assert old.path.exists()
        path = old.path
    with make_slab(tmp_path, 5) as slab:
        assert not path.exists()
        assert read_shape(slab.path) == SlabShape(LAYOUT, PAGE_BYTES, 5)


def test_a_file_that_names_another_layout_than_its_header_is_neither_adopted_nor_removed(tmp_path: Path) -> None:
    with make_slab(tmp_path, layout="layout.2") as slab:
        path = slab.path
    renamed = path.with_name(f"{LAYOUT}-0.slab")
    path.rename(renamed)
    with make_slab(tmp_path) as slab:
        assert slab.path != renamed
    assert renamed.exists()


def test_links_are_not_followed(tmp_path: Path) -> None:
    with make_slab(tmp_path) as slab:
        path = slab.path
    elsewhere = path.rename(tmp_path / "elsewhere")
    path.symlink_to(elsewhere)
    with make_slab(tmp_path) as slab:
        assert slab.path != path


def test_a_slab_that_does_not_fit_is_an_error_with_the_sizes_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs [\d,]+ bytes in .*, which has [\d,]+: make the slab smaller"):
        Slab(LAYOUT, 1 << 58, 4, directory=tmp_path / "slabs")
    assert list((tmp_path / "slabs").iterdir()) == []


def test_destroy_removes_the_file_and_a_reader_keeps_what_it_sees(tmp_path: Path) -> None:
    slab = make_slab(tmp_path)
    fill(slab, 1)
    location, reader = slab.locate(key_of(1)), SlabReader(slab.path, LAYOUT)
    slab.destroy()
    slab.destroy()
    assert not slab.path.exists()
    buffer = memoryview(bytearray(PAGE_BYTES))
    assert reader.read(key_of(1), location, buffer) and buffer == page_of(1)
    reader.close()


def test_a_child_that_outlives_its_parent_keeps_the_lock(tmp_path: Path) -> None:
    slab = make_slab(tmp_path)
    child = os.fork()
    if not child:
        time.sleep(TIMEOUT_S)
        os._exit(0)
    try:
        os.close(slab._fd)  # as if the parent were killed; only the child has it now
        slab._file.close()
        with make_slab(tmp_path) as other:
            assert other.path != slab.path
        assert find_slabs(tmp_path / "slabs")[0].path == other.path
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert {leftover.path for leftover in find_slabs(tmp_path / "slabs")} == {slab.path, other.path}


# -- views ------------------------------------------------------------------------------------------------------------


def test_a_view_shows_a_page_in_place_and_never_a_damaged_one(tmp_path: Path) -> None:
    with make_slab(tmp_path) as slab:
        fill(slab, 1, 2)
        view = slab.view(key_of(1))
        assert view == page_of(1) and view.readonly
        assert slab.view(key_of(7)) is None
        path, offset = place_of(slab, key_of(2))
        flip(path, offset)
        assert slab.view(key_of(2)) is None
        assert (key_of(2) in slab, slab.statistics().num_corrupt) == (False, 1)
        slab.check_integrity()


# -- another process --------------------------------------------------------------------------------------------------


@pytest.mark.fuzz
def test_a_reader_in_another_process_never_takes_a_page_for_another(tmp_path: Path) -> None:
    program = f"""
        from pathlib import Path
        from tests.kv.pool.stores import key_of, make_slab, page_of
        slab = make_slab(Path({str(tmp_path)!r}), 2)
        pages = [(key_of(number), page_of(number)) for number in range(5)]
        print(slab.path, flush=True)
        while True:
            for key, page in pages:
                slab.store(key, page)
    """
    writer, path = start(program)
    try:
        reader = SlabReader(Path(path), LAYOUT)
        pages, buffer = {key_of(number): page_of(number) for number in range(5)}, memoryview(bytearray(PAGE_BYTES))
        num_read = num_late = 0
        deadline_s = time.monotonic() + TIMEOUT_S
        while (num_read < num_cases(20_000) or not num_late) and time.monotonic() < deadline_s:
            for key, location in list(reader._file.entries()):
                if reader.read(key, location, buffer):
                    assert buffer[: location.num_bytes] == pages[key]
                    num_read += 1
                else:
                    num_late += 1
        assert num_read and num_late, "reads and rewrites did not overlap"
    finally:
        writer.kill()
        writer.communicate(timeout=TIMEOUT_S)
    reader.close()


# -- leftovers --------------------------------------------------------------------------------------------------------


def test_slabs_without_an_owner_are_removed_and_others_are_not(tmp_path: Path) -> None:
    directory = tmp_path / "slabs"
    with make_slab(tmp_path) as live, make_slab(tmp_path, layout="layout.2") as dead:
        abandon(dead)
        (leftover,) = find_slabs(directory)
        assert (leftover.path, leftover.num_bytes) == (dead.path, dead.path.stat().st_size)
        dead._fd = ownership.claim(dead.path)  # adopted meanwhile
        assert not remove(leftover)
        abandon(dead)
        assert reap(LATER_S, directory=directory, shm=tmp_path) == [leftover]
        assert (live.path.exists(), dead.path.exists()) == (True, False)
        assert remove(leftover), "it is gone"
        assert reap(LATER_S, directory=directory, shm=tmp_path) == []
        dead._fd = os.open("/dev/null", os.O_RDONLY)


def test_where_there_are_no_slabs_nothing_is_found(tmp_path: Path) -> None:
    assert find_slabs(tmp_path / "none") == []
    assert ownership.slab_directory() == SHM / f"vllm_omni_pool_{os.geteuid()}"


def test_finding_leftovers_imports_neither_torch_nor_numpy() -> None:
    program = """
        import sys, vllm_omni.kv.pool.slab_leftovers
        print(sorted({"torch", "numpy", "vllm"} & sys.modules.keys()))
    """
    process, line = start(program)
    process.communicate(timeout=TIMEOUT_S)
    assert line == "[]"


@pytest.fixture
def shm(tmp_path: Path) -> Iterator[Path]:
    """In place of /dev/shm: two files of dead engines, one younger than the other, and one of a live engine."""
    for name in ("vllm_offload_dead.mmap", "vllm_offload_mapped.mmap", "vllm_offload_open.mmap", "other.mmap"):
        (tmp_path / name).write_bytes(bytes(4096))
    program = f"""
        import mmap, os, time
        fd = os.open({str(tmp_path / "vllm_offload_mapped.mmap")!r}, os.O_RDWR)
        mapping = mmap.mmap(os.dup(fd), 4096)
        os.close(fd)
        file = open({str(tmp_path / "vllm_offload_open.mmap")!r})
        print("ready", flush=True)
        time.sleep({TIMEOUT_S})
    """
    engine, _ = start(program)
    yield tmp_path
    engine.kill()
    engine.communicate(timeout=TIMEOUT_S)


def names(leftovers: list[slab_leftovers.SharedLeftover]) -> list[str]:
    return [leftover.path.name for leftover in leftovers]


def test_files_of_vllm_that_no_process_uses_are_removed(shm: Path) -> None:
    assert names(find_vllm_files(time.time(), shm)) == [], "just made"
    assert names(find_vllm_files(time.time() + STARTING_S + 1, shm)) == ["vllm_offload_dead.mmap"]
    with (shm / "vllm_offload_own.mmap").open("w+b") as file:
        file.truncate(4096)
        with mmap.mmap(file.fileno(), 4096):
            assert names(find_vllm_files(LATER_S, shm)) == ["vllm_offload_dead.mmap"]
    removed = reap(LATER_S, directory=shm / "none", shm=shm)
    assert names(removed) == ["vllm_offload_dead.mmap", "vllm_offload_own.mmap"]
    assert sorted(path.name for path in shm.iterdir()) == [
        "other.mmap",
        "vllm_offload_mapped.mmap",
        "vllm_offload_open.mmap",
    ]


def test_a_file_of_vllm_that_is_locked_is_in_use(shm: Path) -> None:
    fd = ownership.claim(shm / "vllm_offload_dead.mmap")
    assert names(find_vllm_files(LATER_S, shm)) == []
    ownership.unlock(fd)


def test_where_a_process_cannot_be_read_all_files_count_as_used(
    shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = tmp_path / "proc" / "1"
    (process / "maps").mkdir(parents=True)  # cannot be read as a file
    (process / "cmdline").write_text("VLLM::EngineCore")
    monkeypatch.setattr(slab_leftovers, "PROC", tmp_path / "proc")
    monkeypatch.setattr(Path, "read_text", raising(Path.read_text, IsADirectoryError))
    assert names(find_vllm_files(LATER_S, shm)) == []
    for command in ("", "/sbin/init"):  # of one that has ended, of a container's first
        (process / "cmdline").write_text(command)
        assert len(find_vllm_files(LATER_S, shm)) == 3, command


def raising(read_text, error):
    """Reads files, and turns an error into the one that the kernel gives."""

    def read(path: Path) -> str:
        try:
            return read_text(path)
        except error as exc:
            raise PermissionError from exc

    return read
