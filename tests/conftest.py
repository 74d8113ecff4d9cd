"""Settings and fixtures for all tests: a small machine's engine settings, tiny checkpoints, the order of a run."""

import ctypes
import gc
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from _pytest.unraisableexception import collect_unraisable

from tests import machine, shared_memory
from tests.engine_groups import place_of
from tests.shared_engines import SharedEngines
from vllm_omni.entrypoints.cli import quiet
from vllm_omni.process import fork_server
from vllm_omni.vllm_patches import inspect_models_here

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
    "VLLM_OMNI_RELAY_BYTES": str(32 << 20),  # which each stage clears when it starts; 256 MiB take 0.2 s
}.items():
    os.environ.setdefault(name, value)

_STARTUP = str(Path(__file__).parent / "startup")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_STARTUP, os.environ.get("PYTHONPATH")]))

# A command that is quiet, run in this process, sets them for its time: its stages then say more, and need no other fork
# server, which imports for 6 s.
fork_server.UNREAD = (*fork_server.UNREAD, *quiet.VARIABLES)  # type: ignore[assignment]

SET_BY_LIBRARIES = ("TIKTOKEN_CACHE_DIR",)  # litellm's

_STARTED_AT = time.time()

# A request reads the certificates of all authorities, 20 ms of CPU; those that wait for a server ask 20 times a second.
httpx._transports.default.create_ssl_context = cache(httpx.create_ssl_context)  # type: ignore[attr-defined]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order tests by their groups of engines (``tests/engine_groups.py``)."""
    items.sort(key=lambda item: place_of(item.nodeid)[:2])  # stable: the order within a file stays


_freeze = gc.freeze


def pytest_collection_finish() -> None:
    """Leave all that was imported out of collections of garbage, which tests, groups and engines here ask for.

    Engines in this process would give it back when they end, and would keep what tests have made when they start.
    """
    gc.collect()
    _freeze()
    gc.freeze = gc.unfreeze = lambda: None


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
_RESIDENT = pytest.StashKey[int]()
GROWN_BYTES = 64 << 20


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
        if nextitem is None or place_of(nextitem.nodeid)[2] != place_of(item.nodeid)[2]:
            if engines:
                engines.stop()
            if has_grown(item.config):
                give_back_memory()
                collect_unraisable(item.config)  # what that found is this group's, not the next one's
                _freeze()  # modules that its tests have imported, and what these keep
                item.config.stash[_RESIDENT] = psutil.Process().memory_info().rss


END_AT = "TESTS_END_AT"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave tests out that would start after ``TESTS_END_AT``, a Unix time that ``.ci/run`` sets.

    A run that is killed from outside tells nothing of the tests that it has run; one that ends names what it left out.
    """
    if time.time() > float(os.environ.get(END_AT, "inf")):
        pytest.skip(f"the time of this run is over ({END_AT})")


_A_REASON = re.compile(r"E   |[\s|+-]*[\w.]*(Error|Warning|Exception|Group)\b")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Reasons())


class _Reasons:
    """Writes why tests failed below all else: of a long log, often only the end is kept."""

    def __init__(self) -> None:
        self.failed: list[pytest.TestReport] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report)

    def pytest_unconfigure(self) -> None:
        failed: dict[tuple[str, ...], list[str]] = {}  # reasons -> tests: a server that did not start fails many
        for report in self.failed:
            lines = report.longreprtext.splitlines()
            reasons = dict.fromkeys(line[:200] for line in lines if _A_REASON.match(line))
            failed.setdefault((*reasons,), []).append(f"{report.nodeid} ({report.when})")
        for reasons, names in list(failed.items())[:10]:
            others = f" and {len(names) - 1} others" if len(names) > 1 else ""
            print(f"\n{names[0]}{others}:", *reasons[:4], *reasons[4:][-12:], sep="\n")


def has_grown(config: pytest.Config) -> bool:
    """Whether this process has more memory than after it was last given back: most groups of tests keep none."""
    return psutil.Process().memory_info().rss > config.stash.get(_RESIDENT, 0) + GROWN_BYTES


def give_back_memory() -> None:
    """Return the memory of a group's models to the system: a worker would keep gigabytes beside its engines."""
    gc.collect()
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL("libc.so.6").malloc_trim(0)


# ----------------------------------------------------------------------------------------------------------------------


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Remove what failed tests of this run left in /dev/shm."""
    if hasattr(session.config, "workerinput"):  # other workers of pytest-xdist may still run tests
        return
    if left := shared_memory.remove_orphans(_STARTED_AT):
        print(f"\nremoved from /dev/shm, left there by tests: {', '.join(left)}", file=sys.stderr)


@pytest.fixture(scope="session", autouse=True)
def results_are_kept_with_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Not in the user's own directory. Created by pytest for its owner alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_OMNI_FILES_DIR", str(tmp_path_factory.mktemp("results")))
        yield


@pytest.fixture(autouse=True)
def commands_and_libraries_change_the_environment_for_their_time() -> Iterator[None]:
    """A process whose environment has changed would start another fork server, with ten seconds of imports, and no
    program could be forked for it (``tests/zygote.py``).
    """
    unset = {*quiet.VARIABLES, *quiet.SERVER_VARIABLES, *SET_BY_LIBRARIES} - os.environ.keys()
    yield
    for name in unset:
        os.environ.pop(name, None)


@pytest.fixture(autouse=True)
def relays_close_what_is_watched_for_them() -> Iterator[None]:
    """Otherwise a relay of a later test, whose descriptor has the same number, would wait for ever."""
    yield
    if "vllm_omni.relay.io_thread" in sys.modules:
        from tests.relay.io import closed_and_watched

        assert not closed_and_watched()


@pytest.fixture(scope="session", autouse=True)
def vllm_inspects_models_here() -> None:
    """As in our front ends, also for engines of plain vLLM."""
    if "vllm" in sys.modules:  # imported by a test file
        inspect_models_here()


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
