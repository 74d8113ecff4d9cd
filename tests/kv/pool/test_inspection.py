"""Slabs and segments of a host, looked at without their engines: found, counted, verified, removed."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kv.pool.stores import (
    BACKENDS,
    LAYOUT,
    PAGE_BYTES,
    fill,
    flip,
    key_of,
    load,
    make_disk,
    make_slab,
    overwrite,
    page_of,
    place_of,
    start,
)
from vllm_omni.errors import ConfigError
from vllm_omni.kv.pool import inspection
from vllm_omni.kv.pool.disk import INDEX, OWNER, PAGES
from vllm_omni.kv.pool.disk_index import HEADER_BYTES, REWRITTEN
from vllm_omni.kv.pool.inspection import FoundSegment, FoundSlab, FoundStore, Verification, find_segments, find_slabs
from vllm_omni.kv.pool.store import PageStore

TIMEOUT_S = 60.0


def find(directory: Path) -> list[FoundStore]:
    """All stores that ``make_slab`` and ``make_disk`` have made."""
    found: list[FoundStore] = []
    if (directory / "slabs").exists():
        found += find_slabs(directory / "slabs")
    if (directory / "disk").exists():
        found += find_segments(directory / "disk")
    return found


def find_one(directory: Path) -> FoundStore:
    (store,) = find(directory)
    return store


@pytest.fixture(params=list(BACKENDS))
def make(request: pytest.FixtureRequest) -> Callable[..., PageStore]:
    return BACKENDS[request.param].make


def no_sleep(_: float) -> None: ...


# -- counting ---------------------------------------------------------------------------------------------------------


def test_a_store_is_counted_with_and_without_its_owner(make: Callable[..., PageStore], tmp_path: Path) -> None:
    with make(tmp_path) as store:
        fill(store, 1, 2)
        store.store(key_of(3), page_of(3, 100))
        lives = find_one(tmp_path).summarize()
    left = find_one(tmp_path).summarize()
    assert (lives.has_owner, left.has_owner) == (True, False)
    assert lives == left._replace(has_owner=True)
    assert (left.path, left.layout, left.is_readable) == (str(store.path), LAYOUT, True)
    assert (left.page_bytes, left.num_pages, left.num_bytes) == (PAGE_BYTES, 3, 2 * PAGE_BYTES + 100)
    assert left.size_bytes >= left.num_bytes


def test_pages_that_were_evicted_are_not_counted(make: Callable[..., PageStore], tmp_path: Path) -> None:
    with make(tmp_path, 2) as store:
        fill(store, 1, 2, 3)
        assert find_one(tmp_path).summarize().num_pages == 2


def test_looking_changes_nothing(make: Callable[..., PageStore], tmp_path: Path) -> None:
    with make(tmp_path) as store:
        fill(store, 1, 2)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    before = [path.read_bytes() for path in files]
    find_one(tmp_path).summarize()
    find_one(tmp_path).verify(no_sleep)
    assert [path.read_bytes() for path in files] == before
    with make(tmp_path) as store:
        assert [load(store, number) for number in (1, 2)] == [page_of(1), page_of(2)]


def test_a_store_without_a_usable_header_is_unreadable(tmp_path: Path) -> None:
    with make_slab(tmp_path) as slab, make_disk(tmp_path) as disk:
        fill(slab, 1)
        fill(disk, 1)
    flip(slab.path, 0)
    flip(disk.path / INDEX, 0)
    for one in (store.summarize() for store in find(tmp_path)):
        assert (one.layout, one.is_readable, one.num_pages) == (LAYOUT, False, 0), one


# -- verifying --------------------------------------------------------------------------------------------------------


def test_damaged_pages_of_a_killed_owner_are_removed(make: Callable[..., PageStore], tmp_path: Path) -> None:
    writer, _ = start(f"""
        import time
        from pathlib import Path
        from tests.kv.pool import stores
        store = stores.{make.__name__}(Path({str(tmp_path)!r}))
        stores.fill(store, 1, 2, 3)
        print("ready", flush=True)
        time.sleep({TIMEOUT_S})
    """)
    found = find_one(tmp_path)
    assert found.has_owner()
    writer.kill()
    writer.communicate(timeout=TIMEOUT_S)
    with make(tmp_path) as store:  # where the page is
        place = place_of(store, key_of(2))
    flip(*place)
    assert found.verify(no_sleep) == Verification(True, 3, 1, was_repaired=True)
    assert found.verify(no_sleep) == Verification(True, 2, 0, was_repaired=True)
    with make(tmp_path) as store:
        assert [load(store, number) for number in (1, 2, 3)] == [page_of(1), None, page_of(3)]
        assert store.statistics().num_corrupt == 0
        store.check_integrity()


def test_damaged_pages_of_a_live_owner_are_reported_and_left(make: Callable[..., PageStore], tmp_path: Path) -> None:
    with make(tmp_path) as store:
        fill(store, 1, 2, 3)
        flip(*place_of(store, key_of(2)))
        found = find_one(tmp_path)
        verified = found.verify(no_sleep)
        assert verified == Verification(True, 3, 1, was_repaired=False)
        assert verified.is_damaged
        assert key_of(2) in store
        assert load(store, 2) is None, "the owner finds it itself"
        assert found.verify(no_sleep) == Verification(True, 2, 0, was_repaired=False)


def test_a_page_that_is_replaced_while_it_is_read_is_not_damaged(
    make: Callable[..., PageStore], tmp_path: Path
) -> None:
    with make(tmp_path, 2) as store:
        fill(store, 1, 2)
        flip(*place_of(store, key_of(1)))

        def replace(_: float) -> None:
            store.remove([key_of(1)])
            fill(store, 3)

        assert find_one(tmp_path).verify(replace).num_damaged == 0


def test_a_segment_with_damaged_records_is_written_anew(tmp_path: Path) -> None:
    with make_disk(tmp_path) as disk:
        fill(disk, 1, 2, 3)
    flip(disk.path / INDEX, HEADER_BYTES + 64 + 30)
    found = find_one(tmp_path)
    assert found.verify(no_sleep) == Verification(True, 3, 1, was_repaired=True)
    assert found.verify(no_sleep) == Verification(True, 2, 0, was_repaired=True)


def test_pages_that_are_missing_at_the_end_of_a_file_are_damaged(tmp_path: Path) -> None:
    with make_disk(tmp_path) as disk:
        fill(disk, 1, 2, 3)
    os.truncate(disk.path / PAGES, 2 * PAGE_BYTES + 1)
    assert find_one(tmp_path).verify(no_sleep) == Verification(True, 3, 1, was_repaired=True)


def test_a_table_that_names_places_outside_is_no_crash(tmp_path: Path) -> None:
    with make_slab(tmp_path) as slab:
        fill(slab, 1, 2)
    overwrite(slab.path, 4096 + 8, (PAGE_BYTES + 1).to_bytes(4, "little"))  # the number of bytes of slot 0
    assert find_one(tmp_path).verify(no_sleep) == Verification(True, 1, 0, was_repaired=True)


def test_a_store_without_a_usable_header_is_removed(tmp_path: Path) -> None:
    with make_slab(tmp_path) as slab, make_disk(tmp_path) as disk:
        flip(slab.path, 0)
        (disk.path / PAGES).unlink()
        for found in find(tmp_path):
            verified = found.verify(no_sleep)
            assert verified == Verification(False, 0, 0, was_repaired=False)
            assert not verified.is_damaged, "an engine may be making it"
    for found in find(tmp_path):
        assert found.verify(no_sleep).is_damaged
    assert not slab.path.exists() and not disk.path.exists()


def test_an_engine_that_starts_while_a_store_is_verified_makes_another(tmp_path: Path) -> None:
    with make_slab(tmp_path) as slab:
        fill(slab, 1)
    owner = inspection.ownership.claim(slab.path)  # as `verify` does
    with make_slab(tmp_path) as other:
        assert other.path != slab.path
    inspection.ownership.unlock(owner)


# -- removing ---------------------------------------------------------------------------------------------------------


def test_only_what_has_no_owner_is_removed(make: Callable[..., PageStore], tmp_path: Path) -> None:
    with make(tmp_path) as live:
        with make(tmp_path, layout="layout.2") as dead:
            pass
        assert {found.layout: found.remove() for found in find(tmp_path)} == {LAYOUT: False, "layout.2": True}
        assert (live.path.exists(), dead.path.exists()) == (True, False)
        fill(live, 1)
        assert load(live, 1) == page_of(1)


# -- what is found ----------------------------------------------------------------------------------------------------


def test_other_files_beside_slabs_and_segments_are_left_out(tmp_path: Path) -> None:
    with make_slab(tmp_path) as slab, make_disk(tmp_path) as disk:
        pass
    (tmp_path / "slabs" / "notes.slab").write_text("not one")
    (tmp_path / "slabs" / f"{LAYOUT}-00000000.slab").symlink_to(slab.path)
    (tmp_path / "disk" / "lost+found").mkdir()
    (tmp_path / "disk" / "project" / "src").mkdir(parents=True)
    for name in (OWNER, "main.c"):
        (tmp_path / "disk" / "project" / "src" / name).touch()
    assert [found.path for found in find(tmp_path)] == [slab.path, disk.path]


def test_a_segment_whose_index_was_being_rewritten_is_one(tmp_path: Path) -> None:
    with make_disk(tmp_path) as disk:
        pass
    (disk.path / f"{INDEX}{REWRITTEN}").touch()
    assert find_one(tmp_path).remove()


@pytest.mark.parametrize("find", [find_slabs, find_segments])
def test_an_empty_directory_has_none(find: Callable, tmp_path: Path) -> None:
    assert find(tmp_path) == []


def test_the_empty_folder_of_a_layout_is_none(tmp_path: Path) -> None:
    (tmp_path / LAYOUT).mkdir()
    assert find_segments(tmp_path) == []


@pytest.mark.parametrize("find", [find_slabs, find_segments])
def test_a_path_that_is_no_pool_is_an_error(find: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="none cannot be read: No such file or directory"):
        find(tmp_path / "none")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file is not a directory"):
        find(tmp_path / "file")
    with pytest.raises(ConfigError, match=r"is no directory of .*: it has 'file', and no LAYOUT"):
        find(tmp_path)
    (tmp_path / "folder" / "another").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"it has 'file', 'folder', and no LAYOUT"):
        find(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(ConfigError, match="is another user's"):
        find(tmp_path)


def test_stores_that_end_meanwhile_are_gone(tmp_path: Path) -> None:
    with make_slab(tmp_path) as slab, make_disk(tmp_path) as disk:
        pass
    found = FoundSlab(slab.path, LAYOUT), FoundSegment(disk.path, LAYOUT)
    slab.path.unlink()
    shutil.rmtree(disk.path)
    for store in found:
        with pytest.raises(FileNotFoundError):
            store.summarize()
        with pytest.raises(FileNotFoundError):
            store.verify(no_sleep)
        assert store.remove()
