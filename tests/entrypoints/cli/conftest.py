"""The commands set defaults of environment variables, which a test takes back."""

import pytest

from vllm_omni.entrypoints.cli.quiet import VARIABLES


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
