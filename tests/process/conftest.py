"""A server's directory."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_omni.process.run_directory import RunDirectory


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[RunDirectory]:
    monkeypatch.setenv("VLLM_OMNI_RUNTIME_DIR", str(tmp_path))
    directory = RunDirectory()
    yield directory
    directory.remove()
