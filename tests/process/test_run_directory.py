"""The private directory of a server."""

import os
import tempfile
import uuid

import pytest

from vllm_omni.process.proc import SHM
from vllm_omni.process.run_directory import RunDirectory


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
