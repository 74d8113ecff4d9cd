"""Checkpoints that several test files serve."""

from pathlib import Path

import pytest

from vllm_omni.testing import llava as llava


@pytest.fixture(scope="session")
def llava_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny LLaVA-1.5 whose replies never end by themselves where ``ignore_eos`` is set."""
    return llava.build(tmp_path_factory.mktemp("llava"))
