"""Uploaded voices survive a restart, are private, and stay within their quota."""

import os
import stat
import threading

import pytest

from vllm_omni.errors import ConfigError, InvalidRequest, UnknownVoice, VoiceExists
from vllm_omni.files.private import UNFINISHED
from vllm_omni.speech.voices import Quota, VoiceStore, check_name

QUOTA = Quota(max_voices=3, max_bytes=100)


@pytest.fixture
def store(tmp_path) -> VoiceStore:
    return VoiceStore(tmp_path / "data" / "voices", QUOTA)


def test_a_voice_is_found_by_another_server_and_after_a_restart(store):
    added = store.add("alice", b"sound", seconds=1.5, transcript="Hello.", consent="cons_1")
    again = VoiceStore(store.directory.path, QUOTA)
    assert again.voices() == [added]
    assert again.find("Alice") == added
    assert again.recording(added) == b"sound"
    assert (added.transcript, added.seconds, added.num_bytes, added.consent) == ("Hello.", 1.5, 5, "cons_1")


def test_a_deleted_voice_leaves_nothing(store):
    added = store.add("alice", b"sound", seconds=1)
    assert store.delete("alice") == added
    assert store.find("alice") is None
    with pytest.raises(UnknownVoice, match="has been deleted"):
        store.recording(added)
    assert [path.name for path in store.directory.path.iterdir()] == [".lock"]


def test_an_unknown_voice_is_rejected_with_the_nearest_one(store):
    store.add("alice", b"sound", seconds=1)
    with pytest.raises(UnknownVoice, match="no uploaded voice 'alise': did you mean 'alice'"):
        store.delete("alise")


def test_a_name_is_taken_once(store):
    store.add("alice", b"sound", seconds=1)
    with pytest.raises(VoiceExists, match="there is a voice 'alice'"):
        store.add("alice", b"other", seconds=1)
    assert store.recording(store.find("alice")) == b"sound"


def test_the_quota_counts_voices_and_bytes(store):
    store.add("one", bytes(60), seconds=1)
    with pytest.raises(InvalidRequest, match="has 41 bytes, and the uploaded voices use 60 of 100"):
        store.add("two", bytes(41), seconds=1)
    store.add("two", bytes(20), seconds=1)
    store.add("three", bytes(20), seconds=1)
    with pytest.raises(InvalidRequest, match="3 uploaded voices, which is the limit"):
        store.add("four", b"", seconds=1)
    store.delete("one")
    store.add("four", bytes(60), seconds=1)


def test_uploads_at_the_same_time_share_the_quota(store):
    errors = []

    def add(index: int) -> None:
        try:
            VoiceStore(store.directory.path, QUOTA).add(f"voice-{index}", bytes(30), seconds=1)
        except InvalidRequest as exc:
            errors.append(exc)

    threads = [threading.Thread(target=add, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(store.voices()), len(errors)) == (3, 5)


def test_only_the_owner_can_read_voices(store):
    store.add("alice", b"sound", seconds=1)
    for path in (store.directory.path, store.directory.path / "alice"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700, path
    store.directory.path.chmod(0o755)
    with pytest.raises(ConfigError, match=r"open to other users.*chmod 700"):
        VoiceStore(store.directory.path, QUOTA)


def test_what_a_killed_server_left_unfinished_is_no_voice_and_is_removed(store):
    left = store.directory.path / f"{UNFINISHED}1"
    left.mkdir()
    (left / "recording").write_bytes(b"sound")
    assert not store.voices()
    VoiceStore(store.directory.path, QUOTA)
    assert not left.exists()


def test_a_folder_that_is_no_voice_is_ignored(store):
    (store.directory.path / "strange").mkdir()
    (store.directory.path / "strange" / "voice.json").write_text("{}")
    assert not store.voices()
    assert store.find("strange") is None


def test_a_directory_that_cannot_be_created_is_a_wrong_setting(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="set VLLM_OMNI_VOICES_DIR"):
        VoiceStore(tmp_path / "file" / "voices", QUOTA)


@pytest.mark.parametrize("name", ["../alice", "/etc/passwd", "a/b", "..", ".lock", "", "a" * 65, "a b", "ä", "-a", 7])
def test_names_that_are_paths_or_cannot_be_folders_are_rejected_with_one_that_can(name):
    with pytest.raises(InvalidRequest, match="must be 1 to 64 letters") as caught:
        check_name(name)
    near = str(caught.value).rpartition("for example ")[2].strip("'")
    assert check_name(near) == near


def test_names_do_not_differ_by_case():
    assert check_name("Alice_2") == "alice_2"


def test_looking_for_a_path_finds_nothing(store, tmp_path):
    store.add("alice", b"sound", seconds=1)
    for name in ("../voices/alice", "alice/", os.fspath(store.directory.path / "alice"), "alice\0"):
        assert store.find(name) is None
