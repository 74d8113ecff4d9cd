"""Settings and fixtures for all tests: a small machine's engine settings, tiny checkpoints, the order of a run."""

import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests import machine, shared_memory
from tests.engine_groups import place_of
from tests.shared_engines import SharedEngines

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

_STARTED_AT = time.time()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order tests by their groups of engines (``tests/engine_groups.py``)."""
    items.sort(key=lambda item: place_of(item.nodeid)[:2])  # stable: the order within a file stays


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``-n N``, or ``--dist loadgroup``, give workers whole groups of tests, in the order of collection.

    pytest-xdist 3.8 would write the groups of its own marks into node ids, which pytest 9.2 does not let it change.
    """
    if config.getoption("dist") not in ("load", "loadgroup"):  # the first is the default with -n
        return None
    from xdist.scheduler import LoadGroupScheduling

    class ByEngines(LoadGroupScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return place_of(nodeid)[2]

    config.option.loadscopereorder = False
    return ByEngines(config, log)


def pytest_report_header(config: pytest.Config) -> list[str]:
    """State first what this machine lacks and which tests are left out for it."""
    if hasattr(config, "workerinput"):  # the controller reports once for all workers of pytest-xdist
        return []
    return ["what this machine lacks:", *(f"  {line}" for line in machine.report())]


# -- shared engines (tests/shared_engines.py) --------------------------------------------------------------------------

_ENGINES = pytest.StashKey[SharedEngines]()
_HAS_FAILED = pytest.StashKey[bool]()


@pytest.fixture(scope="session")
def shared_engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SharedEngines:
    engines = request.config.stash[_ENGINES] = SharedEngines(tmp_path_factory)
    return engines


@pytest.fixture
def engines(shared_engines: SharedEngines) -> Iterator[SharedEngines]:
    """The worker's shared engines; those that the test uses must be idle after it."""
    yield shared_engines
    shared_engines.check()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.failed:
        item.stash[_HAS_FAILED] = True
    if report.when == "teardown" and (engines := item.config.stash.get(_ENGINES, None)):
        try:
            engines.end_test(has_failed=item.stash.get(_HAS_FAILED, False))
        except Exception as exc:  # raised from here, it would end the run
            report.outcome, report.longrepr = "failed", f"shared engines did not stop: {exc!r}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    try:
        return (yield)
    finally:
        engines = item.config.stash.get(_ENGINES, None)
        if engines and (nextitem is None or place_of(nextitem.nodeid)[2] != place_of(item.nodeid)[2]):
            engines.stop()


# ----------------------------------------------------------------------------------------------------------------------


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Remove what failed tests of this run left in /dev/shm."""
    if hasattr(session.config, "workerinput"):  # other workers of pytest-xdist may still run tests
        return
    if left := shared_memory.remove_orphans(_STARTED_AT):
        print(f"\nremoved from /dev/shm, left there by tests: {', '.join(left)}", file=sys.stderr)


@pytest.fixture(scope="session", autouse=True)
def vllm_inspects_models_here() -> Iterator[None]:
    """Save the process, with ten seconds of imports, in which vLLM inspects each class of a model.

    vLLM keeps CUDA out of the front end by it, and remembers the answer in a file until the class's file changes.
    """

    def inspect_here(inspect: Callable[[], Any]) -> Any:
        with warnings.catch_warnings(action="ignore"):  # of what it imports
            return inspect()

    with pytest.MonkeyPatch.context() as patch:
        if "vllm" in sys.modules:  # imported by a test file
            from vllm.model_executor.models import registry

            patch.setattr(registry, "_run_in_subprocess", inspect_here)
        yield


@pytest.fixture(scope="session", autouse=True)
def transformers_prints_no_configuration() -> Iterator[None]:
    """It formats each one that it loads, 0.15 s of a stage's 0.2, for a message of a level that is not logged."""
    with pytest.MonkeyPatch.context() as patch:
        if "transformers" in sys.modules:
            from transformers import PreTrainedConfig

            patch.setattr(PreTrainedConfig, "__repr__", object.__repr__)
        yield


@pytest.fixture(autouse=True)
def our_logs_reach_caplog(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo what earlier tests have changed about logging.

    The plugin makes our logger a child of vLLM's, which does not propagate to the root, and libraries that vLLM imports
    on demand raise the root's level.
    """
    monkeypatch.setattr(logging.getLogger("vllm_omni"), "parent", logging.root)
    logging.root.setLevel(logging.WARNING)  # this also clears the level that every logger has cached


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
