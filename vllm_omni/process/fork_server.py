"""``stage_context``: stages and their ranks are forked from a process that has imported what they need.

Importing vLLM takes a core about ten seconds, in each process of each stage and again after each restart. Python's fork
server imports it once, and its children share that memory. It starts with the first stage, computes nothing, and ends
with the last process that it could serve. What is read while modules are imported is the same for all of its children,
so where the environment has changed since, another one takes its place.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.util
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from multiprocessing.context import SpawnContext
from multiprocessing.process import BaseProcess
from typing import Any

import psutil

from vllm_omni import envs
from vllm_omni.vllm_patches import start_engine_cores_in

UNREAD = ("PYTEST_CURRENT_TEST", "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR")
"""Environment variables that no process of a stage reads, and that change in a program that starts several servers: the
second is torch's, which sets it anew in each process that compiles."""

READ_LATE = (
    "TMPDIR",
    "VLLM_CPU_KVCACHE_SPACE",
    "VLLM_RPC_BASE_PATH",
    "LOCAL_WORLD_SIZE",
    "VLLM_DIST_IDENT",
    "VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME",
    "VLLM_USE_V2_MODEL_RUNNER",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "VLLM_NIXL_SIDE_CHANNEL_PORT",
    "PYTHONPATH",
    "traceparent",
    "tracestate",
    "VLLM_HOST_IP",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "TORCHELASTIC_USE_AGENT_STORE",
)
"""Those that are read when they are needed, as ``VLLM_OMNI_*`` are; a forked process has its parent's.

vLLM, its plugin, its traces and its compiler set most of them when an engine is made; the last four, the processes of
an engine that spans hosts. ``PYTHONPATH``: a forked process has its parent's ``sys.path``, and sets this for programs.
"""

POLL_S = 1.0


class ForkServer:
    """The fork server of this process, in the environment that it has.

    Args:
        preloaded: modules that it imports before it serves.
    """

    def __init__(self, preloaded: list[str]) -> None:
        self._preloaded = preloaded
        self._lock = threading.Lock()
        self._is_parent = False  # this process, or the one that it was forked from, is the fork server
        self._environment: Mapping[str, str] | None = None  # in which it was started

    def ensure_running(self) -> None:
        """Start it if it does not run, or if the one that runs was started in another environment.

        It and its children keep the calling thread's signal mask. Nothing in a process that it has forked.
        """
        with self.running():
            pass

    @contextmanager
    def running(self) -> Iterator[None]:
        """As ``ensure_running``; another thread, in another environment, does not replace it inside the block."""
        if self._is_parent:
            yield
            return
        with self._lock:
            environment = _read_early()
            if self._environment is not None and (self._environment != environment or not _has_directory()):
                self._leave()
            forkserver.set_forkserver_preload(self._preloaded)
            forkserver.ensure_running()
            self._environment = environment
            yield

    def serve_descendants(self) -> None:
        """Called in the fork server: it also forks the processes of those that it has forked.

        Python would start another fork server in each.
        """
        running: Any = forkserver._forkserver
        running.ensure_running = lambda: None
        self._is_parent, self._environment = True, _read_early()

    def serves(self) -> bool:
        """Whether this process was forked, and another one would be as if it had been spawned: the environment is the
        same, and the fork server has not been left by the server.
        """
        return self._is_parent and self._environment == _read_early() and os.path.exists(_address())

    def _leave(self) -> None:
        """Leave the one that runs to its children: only it can tell how they end."""
        running: Any = forkserver._forkserver
        if running._forkserver_pid is None:
            return
        with suppress(FileNotFoundError):
            os.unlink(running._forkserver_address)
        left = running._forkserver_pid, running._forkserver_alive_fd
        threading.Thread(target=_end, args=left, name="fork server's end", daemon=True).start()
        running._forkserver_address = running._forkserver_alive_fd = running._forkserver_pid = None


def _address() -> str:
    running: Any = forkserver._forkserver
    return str(running._forkserver_address)


def _end(pid: int, alive: int) -> None:
    """End a fork server once it has no children: it ends when the file descriptor is closed."""
    with suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).children():
            time.sleep(POLL_S)
    os.close(alive)
    with suppress(ChildProcessError):
        os.waitpid(pid, 0)


def _has_directory() -> bool:
    """Whether multiprocessing's directory of sockets was still there: some machines clean their /tmp. Now it is."""
    directory = multiprocessing.util.get_temp_dir()
    if os.path.isdir(directory):
        return True
    os.mkdir(directory, 0o700)
    return False


def _read_early() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in UNREAD and not _is_read_late(name)}


def _is_read_late(name: str) -> bool:
    return name in READ_LATE or name.startswith(envs.PREFIX)


FORK_SERVER = ForkServer(["vllm_omni.engine.preloaded"])


class StageProcess(BaseProcess):
    """A process that the fork server forks."""

    _start_method = "spawn"

    @staticmethod
    def _Popen(process: BaseProcess) -> Any:
        from multiprocessing.popen_forkserver import Popen

        with FORK_SERVER.running():
            return Popen(process)

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


def child_context(device_type: str) -> SpawnContext:
    """What starts other processes of a server: they are forked as its stages are, and spawned for another device."""
    is_forked = device_type == "cpu" and envs.VLLM_OMNI_FORK_SERVER
    return StageContext() if is_forked else multiprocessing.get_context("spawn")


def worker_context() -> SpawnContext | None:
    """What starts the processes of an engine core's ranks; None: what vLLM chooses."""
    return StageContext() if FORK_SERVER.serves() else None


def stage_context() -> SpawnContext | None:
    """What starts processes in this thread; None: what vLLM chooses."""
    return getattr(_thread, "context", None)
