"""``ServerTether``: ends each process of a stage when the server ends.

vLLM's child processes outlive a parent that was killed, and nothing that vLLM offers prevents it: a plugin is loaded
too late, because the engine core first waits, for up to five minutes, for a message from its parent; PR_SET_PDEATHSIG
follows the thread that made the child, and stages are started from threads.

But vLLM pickles a stage's ``VllmConfig`` to every process of the stage (all are spawned), and leaves one of its
fields, the dictionary ``additional_config``, to plugins. A tether takes that dictionary's place. Unpickling it is thus
the first code of ours that runs in the process, and there it starts the thread that waits for the server's end.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from vllm_omni.process.logs import name_stage_process
from vllm_omni.process.proc import ProcessId, is_dying
from vllm_omni.process.run_directory import ENDING, OWNER, name_blocks, remove_directory

DYING_TIMEOUT_S = 10.0
RETRY_S = 1.0
MAX_REASON_LENGTH = 1000  # a model can miss thousands of tensors


class ServerTether(dict[str, Any]):
    """A stage's ``additional_config``, which ties each process that unpickles it to the server's life.

    Args:
        directory: the server's ``RunDirectory``.
        stage: the stage's name, or that of one of its instances.
        is_of_engine: its processes run vLLM, which is named after the stage before it starts.
    """

    def __init__(self, directory: Path, stage: str, *, is_of_engine: bool = True) -> None:
        super().__init__()
        self.is_of_engine = is_of_engine
        self.directory = directory
        self.stage = stage
        self.file_stem = stage.replace("/", "-")  # of an instance: "thinker-PD0"
        self.server_pid = os.getpid()

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        if os.getpid() != self.server_pid:  # in the server itself, configurations are copied
            _bind(self)

    @property
    def failure_file(self) -> Path:
        """Where the first process of the stage that fails writes its exception."""
        return self.directory / f"{self.file_stem}.failure"

    def wait_if_orphaned(self) -> None:
        """While the server is exiting, wait for its end; the thread of ``_end_with_server`` then ends this process.

        One signal may end a server and its stages, and the stages are often faster.
        """
        deadline = time.monotonic() + DYING_TIMEOUT_S
        with contextlib.suppress(OSError):
            while is_dying(self.server_pid) and time.monotonic() < deadline:
                time.sleep(0.01)


_tether: ServerTether | None = None  # of this process, if it belongs to a stage


def stage_sections() -> Mapping[str, Any]:
    """The ``additional_config`` of the stage to which this process belongs; empty if it belongs to none."""
    return _tether or {}


def _bind(tether: ServerTether) -> None:
    global _tether
    if _tether is None:
        _tether = tether
        name_blocks(tether.directory)
        with contextlib.suppress(OSError):  # the directory is gone, and so is the server
            this = ProcessId.current()
            (tether.directory / f"{tether.file_stem}.{this.pid}.process").write_text(str(this.started_at))
        threading.Thread(target=_end_with_server, args=(tether.directory,), name="end-with-server", daemon=True).start()
        if tether.is_of_engine:
            name_stage_process(tether.stage)


def _end_with_server(directory: Path) -> None:
    _wait_for_end_of_server(directory)
    remove_directory(directory, has_tracker=True)
    os._exit(1)


def _wait_for_end_of_server(directory: Path) -> None:
    while True:
        try:
            with (directory / OWNER).open("r+b") as owner:
                fcntl.lockf(owner, fcntl.LOCK_SH)
            return
        except FileNotFoundError:  # the file is gone, and so is the server
            return
        except OSError:  # no file descriptor or no lock is free: the server may run
            time.sleep(RETRY_S)


def enter_stage_process() -> None:
    """In a stage's process that vLLM has set up, end with the parent process, when the server says so, and report
    failures.

    Does nothing in a process that belongs to no stage.
    """
    parent = multiprocessing.parent_process()
    if _tether is None or parent is None:
        return

    def end_with_parent() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    if parent.pid != _tether.server_pid:  # a worker's parent is its engine core, which can die alone
        threading.Thread(target=end_with_parent, name="end-with-parent", daemon=True).start()
    atexit.register(_exit_at_once)
    _ignore_signals_until(_tether.directory / ENDING)
    for name in ("vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor", "vllm_omni.engine.node_ranks"):
        logging.getLogger(name).addHandler(_FailureReport(_tether.failure_file))


def _ignore_signals_until(ending: Path) -> None:
    """Ignore SIGTERM until a file exists: a shell, a container's init or a service manager sends it to the stages, too,
    while the server still lets requests end. vLLM has installed its handler before.
    """
    upstream = signal.getsignal(signal.SIGTERM)

    def handle(number: int, frame: FrameType | None) -> None:
        if callable(upstream) and ending.exists():
            upstream(number, frame)

    signal.signal(signal.SIGTERM, handle)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # in the engine core's first process, see in_thread


def _exit_at_once() -> None:
    """Skip the interpreter's shutdown, which takes seconds; multiprocessing has cleaned up before."""
    if _tether is not None:
        _tether.wait_if_orphaned()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if _FailureReport.has_failed else 0)


# Functions of vLLM's engine core that answer a call with its failure, and continue.
SURVIVED = ("_invoke_utility_method", "_handle_request_preproc_error")


class _FailureReport(logging.Handler):
    """Writes the first exception that vLLM logs to a file: its parent is notified that a process failed, not why."""

    has_failed = False  # in this process

    def __init__(self, path: Path) -> None:
        super().__init__(logging.ERROR)
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info is None or record.exc_info[1] is None:
            return
        if record.funcName in SURVIVED:
            _FailureReport.has_failed = False
            self._path.unlink(missing_ok=True)  # a worker may have reported it first
            return
        _FailureReport.has_failed = True
        error = record.exc_info[1]
        with contextlib.suppress(OSError), self._path.open("x", encoding="utf-8") as file:
            file.write(" ".join(f"{type(error).__name__}: {error}".split())[:MAX_REASON_LENGTH])
