"""A server's directory."""

import tempfile
from collections.abc import Iterator

import pytest

from vllm_omni.process.run_directory import RunDirectory


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[RunDirectory]:
    with tempfile.TemporaryDirectory(prefix="omni-", dir="/tmp") as parent:  # the path of a socket must be short
        monkeypatch.setenv("VLLM_OMNI_RUNTIME_DIR", parent)
        directory = RunDirectory()
        yield directory
        directory.remove()
