"""``stage_context``: stages are forked from a process that has imported what they need.

Importing vLLM takes a core about ten seconds, in each process of each stage and again after each restart. Python's fork
server imports it once, and its children share that memory. It starts with the first stage, computes nothing, and ends
with the last process that it could serve. What is read while modules are imported is the same for all of its children,
so a ``StageProcess`` is spawned instead where the environment has changed since.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.context import SpawnContext
from multiprocessing.process import BaseProcess
from typing import Any

from vllm_omni import envs
from vllm_omni.vllm_patches import start_engine_cores_in

UNREAD = ("PYTEST_CURRENT_TEST",)
"""Environment variables that no process of a stage reads, and that change in a program that starts several servers."""

READ_LATE = ("TMPDIR", "VLLM_RPC_BASE_PATH")
"""Those that are read when they are needed, as ``VLLM_OMNI_*`` are; a forked process has its parent's."""


class ForkServer:
    """The fork server of this process.

    Args:
        preloaded: modules that it imports before it serves.
    """

    def __init__(self, preloaded: list[str]) -> None:
        self._preloaded = preloaded
        self._lock = threading.Lock()
        self._environment: Mapping[str, str] | None = None  # in which it was started

    def ensure_running(self) -> None:
        """Start it if it does not run, in the environment of the first start.

        It and its children keep the calling thread's signal mask.
        """
        with self._lock:
            if self._environment is None:
                forkserver.set_forkserver_preload(self._preloaded)
                self._environment = _read_early()
            forkserver.ensure_running()

    def can_serve(self) -> bool:
        """Whether it was started in the environment that this process has."""
        return self._environment == _read_early()


def _read_early() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in UNREAD and not _is_read_late(name)}


def _is_read_late(name: str) -> bool:
    return name in READ_LATE or name.startswith(envs.PREFIX)


FORK_SERVER = ForkServer(["vllm_omni.engine.preloaded"])


class StageProcess(BaseProcess):
    """A process that the fork server forks, or, in another environment than its own, one that is spawned."""

    _start_method = "spawn"

    @staticmethod
    def _Popen(process: BaseProcess) -> Any:
        if FORK_SERVER.can_serve():
            from multiprocessing.popen_forkserver import Popen as Forked

            return Forked(process)
        from multiprocessing.popen_spawn_posix import Popen as Spawned

        return Spawned(process)

    def __getstate__(self) -> tuple[dict[str, Any], dict[str, str]]:
        return self.__dict__, {name: value for name, value in os.environ.items() if _is_read_late(name)}

    def __setstate__(self, state: tuple[dict[str, Any], dict[str, str]]) -> None:
        attributes, environment = state
        self.__dict__.update(attributes)
        for name in [name for name in os.environ if _is_read_late(name)]:
            del os.environ[name]
        os.environ.update(environment)
        tempfile.tempdir = None  # cached by an import


class StageContext(SpawnContext):
    """Starts a ``StageProcess`` where ``spawn`` would start a process; everything else is as there."""

    Process = StageProcess  # type: ignore[assignment]


_thread = threading.local()


@contextmanager
def forked_stages(device_type: str) -> Iterator[None]:
    """Fork the engine cores that this thread starts inside the block (``start_engine_cores_in``), on a CPU: what vLLM
    imports for another device may initialize it, and no fork survives that.
    """
    if device_type == "cpu" and envs.VLLM_OMNI_FORK_SERVER:
        FORK_SERVER.ensure_running()
        start_engine_cores_in(stage_context)
        _thread.context = StageContext()
    try:
        yield
    finally:
        _thread.context = None


def stage_context() -> SpawnContext | None:
    """What starts processes in this thread; None: what vLLM chooses."""
    return getattr(_thread, "context", None)
