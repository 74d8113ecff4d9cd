"""The private directory of a server."""

import multiprocessing
import os
import tempfile
import uuid
from multiprocessing import resource_tracker
from pathlib import Path

import pytest

from tests.cases import rejected
from tests.process.programs import share
from vllm_omni.errors import ConfigError
from vllm_omni.process.proc import SHM
from vllm_omni.process.run_directory import RunDirectory, blocks_of
from vllm_omni.process.tether import ServerTether


def test_children_inherit_the_directory_and_the_parent_does_not(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", "/before")
    monkeypatch.delenv("VLLM_RPC_BASE_PATH", raising=False)
    with pytest.raises(ArithmeticError), directory.inherited():
        assert os.environ["VLLM_RPC_BASE_PATH"] == os.environ["TMPDIR"] == str(directory.path)
        assert tempfile.gettempdir() != str(directory.path)
        raise ArithmeticError
    assert os.environ["TMPDIR"] == "/before"
    assert "VLLM_RPC_BASE_PATH" not in os.environ


def test_the_programs_temporary_directory_is_known_before_the_environment_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_OMNI_RUNTIME_DIR", tempfile.gettempdir())
    monkeypatch.setattr(tempfile, "tempdir", None)
    directory = RunDirectory()
    with directory.inherited():
        assert tempfile.gettempdir() != str(directory.path)
    directory.remove()


def test_a_parent_that_cannot_hold_it_is_rejected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    long = tmp_path / ("a" * 100)
    long.mkdir()
    for parent, message in [
        ("/proc", "No such file or directory: set VLLM_OMNI_RUNTIME_DIR"),
        (long, "too long a path"),
    ]:
        monkeypatch.setenv("VLLM_OMNI_RUNTIME_DIR", str(parent))
        with rejected(ConfigError, message, parent):
            RunDirectory()


def test_a_full_file_system_is_rejected_and_nothing_is_left_there(
    monkeypatch: pytest.MonkeyPatch, directory: RunDirectory
) -> None:
    parent = directory.path.parent
    monkeypatch.setattr("vllm_omni.process.run_directory.ROOM_BYTES", 1 << 60)  # more than any has
    with pytest.raises(ConfigError, match=r"free, and a server's files there need .*: make room, or set VLLM_OMNI"):
        RunDirectory()
    assert list(parent.iterdir()) == [directory.path]


def test_remove_frees_the_memory_that_workers_share_and_no_other(directory: RunDirectory) -> None:
    rendezvous = f"vllm_dist_{uuid.uuid4().hex}"
    mine = SHM / f"{rendezvous}-tp:0-[0-1]-cpushm_0"
    other = SHM / f"vllm_dist_{uuid.uuid4().hex}-tp:0-[0-1]-cpushm_0"
    for file in (directory.path / rendezvous, mine, other):
        file.touch()
    try:
        directory.remove()
        directory.remove()
        assert not directory.path.exists()
        assert not mine.exists()
        assert other.exists()
    finally:
        other.unlink()


def test_remove_frees_what_killed_stages_have_shared(
    directory: RunDirectory, capfd: pytest.CaptureFixture[str]
) -> None:
    here, there = multiprocessing.Pipe()
    tether = ServerTether(directory.path, "talker")
    with directory.inherited():
        process = multiprocessing.get_context("spawn").Process(target=share, args=(tether, there), daemon=True)
    process.start()
    blocks = {SHM / name for name in here.recv()}
    process.kill()
    process.join()
    assert set(blocks_of(directory.path)) == blocks, "an owner can be told by the names"
    directory.remove()
    assert not any(block.exists() for block in blocks)
    # The tracker, which is asked to forget them, complains of nothing.
    resource_tracker.ensure_running()
    assert "Traceback" not in capfd.readouterr().err
