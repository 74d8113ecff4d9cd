"""What tests of several packages share: the settings of an engine on a small machine, and a checkpoint for it."""

import logging
import os
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

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

# What one of `pytest -n`'s workers runs alone: files that share a server, and those with so many engines that two at a
# time would need more than a small machine's memory.
_TOGETHER = (r"tests/entrypoints/openai/", r"tests/e2e/test_(ec|kv|nixl|epd)_")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``-n``, a worker takes whole files, whose engines are then made once.

    They are taken in the order of collection, in which the long ones are not the last: in the end, one worker is not
    left alone for long.
    """
    if config.option.dist != "load":  # of `-n`, if no other was asked for
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByEngines(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return next((place for place in _TOGETHER if re.match(place, nodeid)), super()._split_scope(nodeid))

    config.option.loadscopereorder = False
    return ByEngines(config, log)


@pytest.fixture(autouse=True)
def logs_are_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """By ``caplog``, whatever ran before.

    The plugin makes our logger vLLM's child, which tells the root nothing, and libraries that vLLM imports when it
    needs them raise the root's level.
    """
    monkeypatch.setattr(logging.getLogger("vllm_omni"), "parent", logging.root)
    logging.root.setLevel(logging.WARNING)  # and forget what every logger knows of its level


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2.5-Omni that never ends by itself; tests that change it copy it first."""
    from vllm_omni.testing import qwen2_5_omni as tiny  # imports transformers

    return tiny.build(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_pipeline(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Name of a tiny pipeline of diffusers -> its checkpoint; tests that change it copy it first."""
    from vllm_omni.testing import diffusion as tiny

    return cache(lambda name: tiny.build(tmp_path_factory.mktemp(name), name))
