"""Pages on disk: the index survives damage, the quota holds, and a full disk drops what cannot be written."""

import os
from pathlib import Path

import pytest

from tests.kv.pool.stores import (
    LAYOUT,
    PAGE_BYTES,
    abandon,
    fill,
    flip,
    key_of,
    keys_of,
    load,
    make_disk,
    overwrite,
    page_of,
    place_of,
    quota_for,
    start,
)
from vllm_omni.errors import ConfigError
from vllm_omni.kv.pool import ownership
from vllm_omni.kv.pool.disk import INDEX, OWNER, PAGES, DiskPages, count_slots, remove_abandoned
from vllm_omni.kv.pool.disk_index import (
    HEADER_BYTES,
    MIN_RECORDS,
    RECORD_BYTES,
    IndexFile,
    encode_header,
    max_index_bytes,
    read_layout,
)

TIMEOUT_S = 60.0


def make_filled(directory: Path, *numbers: int, num_slots: int = 8) -> Path:
    """A closed segment with some pages; returns its path."""
    with make_disk(directory, num_slots) as disk:
        fill(disk, *numbers)
        return disk.path


def found(directory: Path, *numbers: int, num_slots: int = 8) -> list[int]:
    """Which pages are there, and right, when the segment is opened again."""
    with make_disk(directory, num_slots) as disk:
        loaded = {number: load(disk, number) for number in numbers}
        disk.check_integrity()
        assert all(page in (None, page_of(number)) for number, page in loaded.items())
        return [number for number, page in loaded.items() if page is not None]


# -- index ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_bytes", [1, 63, 64, 65, 3 * RECORD_BYTES])
def test_an_end_that_is_torn_off_costs_its_own_records(tmp_path: Path, num_bytes: int) -> None:
    index = make_filled(tmp_path, 1, 2, 3) / INDEX
    os.truncate(index, index.stat().st_size - num_bytes)
    kept = (3 * RECORD_BYTES - num_bytes) // RECORD_BYTES
    assert found(tmp_path, 1, 2, 3) == [1, 2, 3][:kept]
    assert index.stat().st_size == HEADER_BYTES + kept * RECORD_BYTES


def test_what_stands_behind_a_torn_end_is_cut_off(tmp_path: Path) -> None:
    index = make_filled(tmp_path, 1, 2) / INDEX
    size = index.stat().st_size
    overwrite(index, size, bytes(3 * RECORD_BYTES + 5))
    assert found(tmp_path, 1, 2) == [1, 2]
    assert index.stat().st_size == size


@pytest.mark.parametrize("offset", [0, 1, 4, 8, 12, 30, 63])
def test_a_flipped_record_costs_its_page_alone(tmp_path: Path, offset: int) -> None:
    path = make_filled(tmp_path, 1, 2, 3)
    flip(path / INDEX, HEADER_BYTES + RECORD_BYTES + offset)
    with make_disk(tmp_path, 8) as disk:
        assert disk.statistics().num_corrupt == 1
    assert found(tmp_path, 1, 2, 3) == [1, 3]


def test_a_removal_that_is_lost_gives_no_wrong_page(tmp_path: Path) -> None:
    with make_disk(tmp_path, 2) as disk:
        fill(disk, 1, 2)
        fill(disk, 3)  # 1 is evicted, and its slot has 3 now
        index = disk.path / INDEX
    records = [index.read_bytes()[start:][:RECORD_BYTES] for start in range(HEADER_BYTES, 384, RECORD_BYTES)]
    assert [record[0] for record in records] == [1, 1, 2, 1]  # PUT, PUT, REMOVE, PUT
    flip(index, HEADER_BYTES + 2 * RECORD_BYTES)
    assert found(tmp_path, 1, 2, 3, num_slots=2) == [2, 3]
    overwrite(index, HEADER_BYTES + 2 * RECORD_BYTES, bytes(2 * RECORD_BYTES))  # both of the last two are lost
    with make_disk(tmp_path, 2) as disk:
        assert [load(disk, number) for number in (1, 2, 3)] == [None, page_of(2), None]
        assert disk.statistics().num_corrupt == 1, "the index said that 1 is where 3 is"


@pytest.mark.parametrize("damage", ["header", "empty", "missing"])
def test_a_segment_without_a_usable_index_starts_anew(tmp_path: Path, damage: str) -> None:
    path = make_filled(tmp_path, 1, 2)
    if damage == "header":
        flip(path / INDEX, 20)
    elif damage == "empty":
        os.truncate(path / INDEX, 0)
    else:
        (path / INDEX).unlink()
    with make_disk(tmp_path, 8) as disk:
        assert (disk.path, len(disk)) == (path, 0)
        fill(disk, 3)
    assert found(tmp_path, 1, 2, 3) == [3]


def test_a_segment_whose_index_names_another_layout_is_left_alone(tmp_path: Path) -> None:
    path = make_filled(tmp_path, 1)
    index = (path / INDEX).read_bytes()
    (path / INDEX).write_bytes(encode_header("layout.2", PAGE_BYTES) + index[HEADER_BYTES:])
    assert read_layout(path / INDEX) == "layout.2"
    with make_disk(tmp_path) as disk:
        assert disk.path != path
    assert read_layout(path / INDEX) == "layout.2"


def test_the_log_is_rewritten_when_most_of_it_is_of_no_use(tmp_path: Path) -> None:
    with make_disk(tmp_path, 4) as disk:
        numbers = range(MIN_RECORDS)
        for number in numbers:
            fill(disk, number)
        assert disk._index.num_records < MIN_RECORDS + 2 * 4
        held = [number for number in numbers if key_of(number) in disk]
        index = disk.path / INDEX
        assert index.stat().st_size < max_index_bytes(4)
    assert not index.with_suffix(".new").exists()
    assert found(tmp_path, *numbers, num_slots=4) == held == list(numbers[-4:])


def test_a_rewriting_that_was_interrupted_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = make_disk(tmp_path, 4)
    fill(disk, *range(3))
    monkeypatch.setattr(IndexFile, "is_due", lambda *_: True)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fail)
        fill(disk, 3)
        assert disk.statistics().num_failures == 1
    (disk.path / "index.new").write_bytes(b"half of a file")
    fill(disk, 4)
    abandon(disk)
    assert found(tmp_path, *range(5), num_slots=4) == [1, 2, 3, 4]


def fail(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_page_whose_index_cannot_be_written_is_there_until_the_process_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = make_disk(tmp_path, 4)
    fill(disk, 1)
    with monkeypatch.context() as patch:
        patch.setattr(IndexFile, "append", fail)
        fill(disk, 2)
    fill(disk, 3)
    assert [load(disk, number) for number in (1, 2, 3)] == [page_of(1), page_of(2), page_of(3)]
    assert disk.statistics().num_failures == 1
    disk.close()
    assert found(tmp_path, 1, 2, 3, num_slots=4) == [1, 3]


# -- pages ------------------------------------------------------------------------------------------------------------


def test_truncated_pages_are_misses(tmp_path: Path) -> None:
    with make_disk(tmp_path, 4) as disk:
        fill(disk, 1, 2, 3)
        path, offset = place_of(disk, key_of(2))
        os.truncate(path, offset + PAGE_BYTES - 1)
        assert [load(disk, number) for number in (1, 2, 3)] == [page_of(1), None, None]
        statistics = disk.statistics()
        assert (statistics.num_corrupt, statistics.num_failures) == (2, 0)
        fill(disk, 4, 5, 6)
    assert found(tmp_path, *range(1, 7), num_slots=4) == [1, 4, 5, 6]


def test_a_quota_holds_at_any_time_index_included(tmp_path: Path) -> None:
    quota = quota_for(5)
    assert count_slots(PAGE_BYTES, quota) == 5
    assert count_slots(PAGE_BYTES, quota - 1) == 4
    with DiskPages(tmp_path / "disk", LAYOUT, PAGE_BYTES, quota) as disk:
        for number in range(MIN_RECORDS):
            fill(disk, number)
            assert sum(file.stat().st_size for file in disk.path.iterdir()) <= quota
        assert len(disk) == 5


def test_a_smaller_quota_keeps_the_pages_that_fit(tmp_path: Path) -> None:
    path = make_filled(tmp_path, *range(8))
    with make_disk(tmp_path, 3) as disk:
        assert (disk.path, len(disk)) == (path, 3)
        assert (path / PAGES).stat().st_size == 3 * PAGE_BYTES
        disk.check_integrity()
        assert disk.verify() == 0


def test_a_quota_without_room_for_a_page_is_rejected_with_what_is_needed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"a quota of 1,000 bytes.* at least {quota_for(1):,} are needed"):
        DiskPages(tmp_path, LAYOUT, PAGE_BYTES, 1000)


def test_a_directory_that_cannot_be_made_is_an_error_of_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "disk").write_text("a file")
    with pytest.raises(ConfigError, match="cached pages"):
        make_disk(tmp_path)


def test_a_disk_without_room_for_an_index_is_an_error_and_keeps_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_filled(tmp_path, 1)
    (path / INDEX).unlink()
    num_open = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr("vllm_omni.kv.pool.disk_index.write_at", fail)
        with pytest.raises(ConfigError, match=f"{path}: No space left on device"):
            make_disk(tmp_path, 8)
    assert len(os.listdir("/proc/self/fd")) == num_open
    assert found(tmp_path, 1) == []
    with make_disk(tmp_path, 8) as disk:
        assert disk.path == path


def test_a_full_disk_drops_pages_and_serves_those_that_it_has(tmp_path: Path) -> None:
    """With the kernel's limit on the size of a file, at which writes are short and then fail as on a full disk."""
    program = f"""
        import resource
        from pathlib import Path
        from tests.kv.pool.stores import fill, key_of, load, make_disk, page_of
        disk = make_disk(Path({str(tmp_path)!r}), 8)
        fill(disk, 1, 2)
        resource.setrlimit(resource.RLIMIT_FSIZE, ({3 * PAGE_BYTES + 100}, resource.RLIM_INFINITY))
        fill(disk, 3)
        assert not disk.store(key_of(4), page_of(4))  # 100 of its bytes fit
        assert not disk.store(key_of(4), page_of(4))
        assert [load(disk, number) for number in range(1, 5)] == [page_of(1), page_of(2), page_of(3), None]
        disk.remove([key_of(1)])
        fill(disk, 5)  # in the slot that is free
        statistics = disk.statistics()
        assert (statistics.num_dropped, statistics.num_failures) == (2, 2), statistics
        disk.check_integrity()
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        fill(disk, 4)
        disk.close()
        print("done")
    """
    process, line = start(program)
    process.communicate(timeout=TIMEOUT_S)
    assert line == "done"
    assert found(tmp_path, *range(1, 6)) == [2, 3, 4, 5]


# -- segments ---------------------------------------------------------------------------------------------------------


def test_abandoned_segments_are_removed_the_oldest_first(tmp_path: Path) -> None:
    root, paths = tmp_path / "disk", []
    for age, layout in ((300, "layout.1"), (100, "layout.2"), (200, "layout.3")):
        with make_disk(tmp_path, layout=layout) as disk:
            fill(disk, 1, 2)
        paths.append(disk.path)
        for file in disk.path.iterdir():
            os.utime(file, (1000 - age, 1000 - age))
    first, third, second = paths
    each = sum(file.stat().st_blocks * 512 for file in first.iterdir())
    with make_disk(tmp_path, layout="layout.4") as live:
        fill(live, 1, 2)
        assert remove_abandoned(root, keep_bytes=4 * each) == []
        assert remove_abandoned(root, keep_bytes=3 * each) == [first]
        assert remove_abandoned(root) == [second, third]
        assert [path.name for path in root.iterdir()] == ["layout.4"]
        assert load(live, 1) == page_of(1)


def test_removal_that_was_interrupted_is_finished_by_the_next(tmp_path: Path) -> None:
    path = make_filled(tmp_path, 1)
    (path / INDEX).unlink()
    assert remove_abandoned(tmp_path / "disk") == [path]
    assert not path.exists()
    assert remove_abandoned(tmp_path / "none") == []


def test_a_segment_that_is_just_being_made_is_taken_by_one_process_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others: list[DiskPages] = []
    lock = ownership._lock

    def let_another_be_faster(path: Path, fd: int) -> int | None:
        monkeypatch.setattr(ownership, "_lock", lock)
        others.append(make_disk(tmp_path))  # finds the owner's file before its maker has locked it
        return lock(path, fd)

    monkeypatch.setattr(ownership, "_lock", let_another_be_faster)
    with make_disk(tmp_path) as disk:
        assert disk.path != others[0].path
        fill(disk, 1)
        assert len(list((tmp_path / "disk" / LAYOUT).glob(f"*/{OWNER}"))) == 2
    others[0].close()


def test_removed_pages_stay_removed(tmp_path: Path) -> None:
    with make_disk(tmp_path, 4) as disk:
        fill(disk, 1, 2, 3)
        disk.remove(keys_of(2))
    assert found(tmp_path, 1, 2, 3) == [1, 3]
    with make_disk(tmp_path, 8) as disk:
        disk.clear()
    assert found(tmp_path, 1, 2, 3) == []


def test_of_several_segments_the_largest_is_adopted(tmp_path: Path) -> None:
    """Names are random, so that their order shows nothing."""
    for number in range(4):
        disks = [make_disk(tmp_path / str(number)) for _ in range(3)]
        for disk, num_pages in zip(disks, (1, 3, 0), strict=True):
            for page in range(num_pages):
                disk.store(key_of(10 * num_pages + page), bytes(PAGE_BYTES))
        for disk in disks:
            disk.close()
        adopted = make_disk(tmp_path / str(number))
        assert sorted(adopted.pages()) == sorted(keys_of(30, 31, 32))
        adopted.close()
