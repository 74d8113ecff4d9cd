"""What tests of several packages share: the settings of an engine on a small machine, and a checkpoint for it."""

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

# The Makefile's, for a bare `pytest`. vLLM reads them when it is imported, in this process and in its children.
for name, value in {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}.items():
    os.environ.setdefault(name, value)

_STARTUP = str(Path(__file__).parent / "startup")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_STARTUP, os.environ.get("PYTHONPATH")]))


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2.5-Omni that never ends by itself; tests that change it copy it first."""
    from vllm_omni.model_executor.models.qwen2_5_omni import tiny  # imports transformers

    return tiny.build(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_pipeline(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Name of a tiny pipeline of diffusers -> its checkpoint; tests that change it copy it first."""
    from vllm_omni.model_executor.models.diffusers import tiny

    return cache(lambda name: tiny.build(tmp_path_factory.mktemp(name), name))
