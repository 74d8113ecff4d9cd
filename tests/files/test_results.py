"""Results by URL: private, within a quota, until they expire, shared by servers."""

import multiprocessing
import os
import stat
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from vllm_omni.errors import ConfigError, StorageFull
from vllm_omni.files.private import UNFINISHED, PrivateDirectory
from vllm_omni.files.results import SECRET, Limits, ResultStore


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def make_store(tmp_path: Path, clock: Clock, max_bytes: int = 10_000) -> ResultStore:
    return ResultStore(tmp_path / "state" / "files", Limits(max_bytes, ttl_s=60), clock)


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> ResultStore:
    return make_store(tmp_path, clock)


def names(store: ResultStore) -> list[str]:
    return store.directory.names()


def test_a_file_is_found_by_another_server_and_after_a_restart(store, tmp_path, clock):
    added = store.add(b"picture", "image/png")
    other = make_store(tmp_path, clock)
    assert other.find(added.id) == added
    assert (added.media_type, added.created_at, added.expires_at) == ("image/png", 1000, 1060)
    assert other.path(added.id).read_bytes() == b"picture"


def test_servers_of_a_directory_accept_each_others_signatures(store, tmp_path, clock):
    signature = store.sign("file-1", 1060)
    other = make_store(tmp_path, clock)
    assert other.is_signed("file-1", 1060, signature)
    wrong = signature[:-1] + ("0" if signature[-1] != "0" else "1")
    for file_id, expires_at, given in (
        ("file-1", 1061, signature),
        ("file-2", 1060, signature),
        ("file-1", 1060, wrong),
    ):
        assert not other.is_signed(file_id, expires_at, given)
    assert not other.is_signed("file-1", 1060, "é")
    assert not make_store(tmp_path / "elsewhere", clock).is_signed("file-1", 1060, signature)


def test_only_the_owner_can_read(store):
    added = store.add(b"picture", "image/png")
    directory = store.directory.path
    assert {stat.S_IMODE(path.stat().st_mode) for path in (directory, directory / added.id)} == {0o700}
    assert stat.S_IMODE((directory / SECRET).stat().st_mode) == 0o600
    directory.chmod(0o750)
    with pytest.raises(ConfigError, match=r"VLLM_OMNI_FILES_DIR: .*open to other users.*chmod 700"):
        ResultStore(directory, Limits(1, 1))


def test_a_result_beyond_the_quota_is_rejected_with_the_ways_out(store, tmp_path, clock):
    store.add(bytes(5000), "image/png")
    with pytest.raises(StorageFull, match=r"results use 5,\d+ of 10,000 bytes \(VLLM_OMNI_MAX_FILE_BYTES\).*delete"):
        store.add(bytes(5000), "image/png")
    assert len(names(store)) == 1
    store.check_room()
    full = make_store(tmp_path, clock, max_bytes=5000)
    with pytest.raises(StorageFull):
        full.check_room()


def test_what_has_expired_makes_room_and_is_removed(store, clock):
    first = store.add(bytes(6000), "image/png")
    clock.now += 59
    with pytest.raises(StorageFull):
        store.add(bytes(6000), "image/png")
    clock.now += 1
    second = store.add(bytes(6000), "image/png")
    assert names(store) == [second.id]
    assert store.find(first.id) is None
    clock.now += 60
    assert (store.remove_expired(), names(store)) == (1, [])


def _add(directory: Path) -> bool:
    try:
        make_store(directory, Clock()).add(bytes(3000), "image/png")
    except StorageFull:
        return False
    return True


def test_servers_that_add_files_at_the_same_time_share_the_quota(store, tmp_path):
    with ProcessPoolExecutor(4, mp_context=multiprocessing.get_context("spawn")) as servers:
        added = list(servers.map(_add, [tmp_path] * 8))
    assert (added.count(True), len(names(store))) == (3, 3)


def test_a_full_disk_leaves_nothing(store, monkeypatch):
    def write(*_: object, **__: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("vllm_omni.files.private._write", write)
    with pytest.raises(StorageFull, match=r"the disk of .* is full"):
        store.add(b"picture", "image/png")
    assert not [path for path in store.directory.path.iterdir() if path.name.startswith((UNFINISHED, "file-"))]


def test_what_a_killed_server_left_unfinished_is_no_result_and_is_removed(store, tmp_path, clock):
    left = store.directory.path / f"{UNFINISHED}1"
    left.mkdir()
    (left / "content").write_bytes(b"half")
    assert not names(store)
    make_store(tmp_path, clock)
    assert not left.exists()


def test_looking_for_a_path_finds_nothing(store):
    added = store.add(b"picture", "image/png")
    for name in (f"../files/{added.id}", f"{added.id}/", os.fspath(store.path(added.id)), f"{added.id}\0", SECRET):
        assert store.find(name) is None


def test_a_folder_that_is_no_result_is_left_alone(store, clock):
    (store.directory.path / "strange").mkdir()
    (store.directory.path / "strange" / "about.json").write_text("[]")
    clock.now += 100
    assert (store.remove_expired(), names(store)) == (0, ["strange"])


def test_a_directory_that_cannot_be_created_is_a_wrong_setting(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"no directory for results at .*: set VLLM_OMNI_FILES_DIR to a writable one"):
        ResultStore(tmp_path / "file" / "results", Limits(1, 1))


def test_a_file_is_replaced_whole_and_not_in_a_folder_that_is_gone(tmp_path):
    directory = PrivateDirectory(tmp_path / "files", "VLLM_OMNI_FILES_DIR", "results")
    directory.create("one", {"state": b"old"})
    directory.put("one", "state", b"new")
    assert (directory.read("one", "state"), os.listdir(tmp_path / "files" / "one")) == (b"new", ["state"])
    assert (directory.remove("one"), directory.remove("one")) == (True, False)
    with pytest.raises(FileNotFoundError):
        directory.put("one", "state", b"newer")
    assert directory.names() == []
