"""The one private directory of a server, gone when the server is gone, and what ends the server's processes with it."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import logging
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, NamedTuple

from vllm_omni import envs

PREFIX = "vllm-omni-"
OWNER = "owner"  # the file that the server keeps locked while it lives
SHM = Path("/dev/shm")
PF_EXITING = 0x4  # of the kernel's include/linux/sched.h: the process is in exit(), but may still hold its files
DYING_TIMEOUT_S = 10.0
KILL_TIMEOUT_S = 10.0
MAX_REASON_LENGTH = 1000  # a model can miss thousands of tensors
# vLLM's sockets and, through tempfile, its rendezvous files; children inherit both.
_VARIABLES = ("VLLM_RPC_BASE_PATH", "TMPDIR")
_environment_lock = threading.Lock()


class RunDirectory:
    """Owns the directory; ``inherited`` makes the stages started inside the block put their files there.

    The server holds a lock on a file of the directory, and each process of a stage waits for that lock (``Lease``). It
    is free when the server is gone, however it went, or has removed the directory. It is a POSIX lock: ``flock``, or a
    pipe held open, would live on in whatever children the user's program forks.
    """

    def __init__(self) -> None:
        tempfile.gettempdir()  # settled now: first asked in ``inherited``, it would be this directory for good
        self.server_pid = os.getpid()
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=envs.VLLM_OMNI_RUNTIME_DIR))
        self._lock: int | None = os.open(self.path / OWNER, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.lockf(self._lock, fcntl.LOCK_EX)

    @contextlib.contextmanager
    def inherited(self) -> Iterator[None]:
        """Point the environment at the directory; another server of this process waits its turn."""
        with _environment_lock:
            saved = {name: os.environ.get(name) for name in _VARIABLES}
            os.environ.update(dict.fromkeys(_VARIABLES, str(self.path)))
            try:
                yield
            finally:
                for name, value in saved.items():
                    if value is None:
                        os.environ.pop(name, None)
                    else:
                        os.environ[name] = value

    def lease(self, stage: str) -> Lease:
        return Lease(self.path, stage)

    def remove(self) -> None:
        """Remove the directory and all in it; processes of stages that still run end. Twice does nothing."""
        _remove(self.path)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


class Lease(dict[str, Any]):
    """Travels with a stage's ``VllmConfig`` and binds each process that unpickles it to the server's life.

    It takes the place of ``additional_config``, where a plugin may put what it likes, and holds what was there.

    vLLM's children outlive a parent that was killed. A plugin is loaded too late to prevent it: the engine core first
    waits, for up to five minutes, to hear from its parent. PR_SET_PDEATHSIG follows the thread that made the child, and
    stages are started from threads.
    """

    def __init__(self, directory: Path, stage: str) -> None:
        super().__init__()
        self.directory = directory
        self.stage = stage
        self.file_stem = stage.replace("/", "-")  # of an instance: "thinker/PD0"
        self.server_pid = os.getpid()
        self._started: list[_Process] = []  # the stage's processes, from the moment when it was ready
        self._shared_memory: set[Path] = set()  # blocks in /dev/shm that they have mapped

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        if os.getpid() != self.server_pid:  # in the server itself, configurations are copied
            _bind(self)

    def wait_if_orphaned(self) -> None:
        """While the server is dying, wait for its lock, which is free once its memory is: ``_end_with_server`` follows.

        One signal may end a server and its stages, and they are often gone first.
        """
        deadline = time.monotonic() + DYING_TIMEOUT_S
        while _is_dying(self.server_pid) and time.monotonic() < deadline:
            time.sleep(0.01)

    def failure(self) -> str | None:
        """The exception that ended one of the stage's processes, if it was reported: "ValueError: ..."."""
        try:
            return self._failure_file.read_text(encoding="utf-8") or None
        except OSError:
            return None

    def note_processes(self) -> None:
        """Remember the stage's processes and what they share: when they have died, nothing tells any more."""
        self._started = self._processes()
        for process in self._started:
            self._shared_memory |= _mapped_shared_memory(process.pid)

    @property
    def pids(self) -> list[int]:
        """The stage's processes, as of the moment when it was ready."""
        return [process.pid for process in self._started]

    def has_lost_process(self) -> bool:
        """Whether one of the processes noted, be it a worker, has ended."""
        return not all(process.is_alive() for process in self._started)

    def kill_processes(self) -> list[_Process]:
        """Tell those that live to end; returns them."""
        processes = self._processes()
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        return processes

    def end_processes(self) -> None:
        """Kill what still lives of the stage and remove what it left, so that it can be started again.

        Raises:
            TimeoutError: a process is not gone after ``KILL_TIMEOUT_S``.
        """
        for process in self._processes():
            self._shared_memory |= _mapped_shared_memory(process.pid)
        self._started = []
        processes = self.kill_processes()
        deadline = time.monotonic() + KILL_TIMEOUT_S
        while left := [process.pid for process in processes if process.is_alive()]:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"processes {left} of stage {self.stage!r} are not gone {KILL_TIMEOUT_S:g} s after SIGKILL"
                )
            time.sleep(0.01)
        for block in self._shared_memory - _mapped_shared_memory(os.getpid()):
            _remove_shared_memory(block, self.directory)
        self._shared_memory.clear()
        for file in self.directory.glob(f"{self.file_stem}.*"):
            file.unlink(missing_ok=True)
        self.remove_dead_sockets()

    def remove_dead_sockets(self) -> None:
        """Remove the files of sockets that nobody holds any more, whosever they were: vLLM leaves them."""
        sockets = [path for path in self.directory.iterdir() if path.is_socket()]
        # Read after the listing: a socket has its file before it is bound.
        bound = {line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()}
        for path in sockets:
            if str(path) not in bound:
                path.unlink(missing_ok=True)

    def _processes(self) -> list[_Process]:
        """The engine core and its workers, if alive: each left a file when it read its configuration."""
        processes = []
        for file in self.directory.glob(f"{self.file_stem}.*.process"):
            with contextlib.suppress(OSError, ValueError):
                processes.append(_Process(int(file.name.split(".")[-2]), int(file.read_text())))
        return [process for process in processes if process.is_alive()]

    @property
    def _failure_file(self) -> Path:
        return self.directory / f"{self.file_stem}.failure"

    def _end_with_server(self) -> None:
        with contextlib.suppress(OSError):  # the file is gone: so is the server
            owner = os.open(self.directory / OWNER, os.O_RDWR)
            fcntl.lockf(owner, fcntl.LOCK_SH)
        _remove(self.directory)
        os._exit(1)


def _remove(directory: Path) -> None:
    # Workers on the CPU share blocks of memory named after the file by which they met. Python's resource tracker, which
    # removes what killed processes leave in /dev/shm, knows nothing of these.
    for rendezvous in directory.glob("vllm_dist_*"):
        for block in SHM.glob(f"{rendezvous.name}-*"):
            block.unlink(missing_ok=True)
    shutil.rmtree(directory, ignore_errors=True)


def _is_dying(pid: int) -> bool:
    """Whether a process has begun to end, or a signal that ends it is on its way (proc(5))."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True  # gone: the lock is free
    flags = int(stat.rpartition(")")[2].split()[6])
    pending = int(status.partition("SigPnd:")[2].split(maxsplit=1)[0], 16)
    return bool(flags & PF_EXITING or pending >> (signal.SIGKILL - 1) & 1)


class _Process(NamedTuple):
    pid: int
    started_at: int  # in the kernel's ticks; the pid of a process that is gone is given to another

    def is_alive(self) -> bool:
        try:
            state, started_at = _stat(self.pid)
        except OSError:
            return False
        return state != "Z" and started_at == self.started_at


def _stat(pid: int) -> tuple[str, int]:
    """State and start time of a process (proc(5)); the fields are counted from behind the name, which may be any."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[19])


def _mapped_shared_memory(pid: int) -> set[Path]:
    """Files of /dev/shm that a process has mapped, found by inode: a semaphore is mapped under a name it had before."""
    try:
        lines = [line.split(maxsplit=5) for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    except OSError:
        return set()
    inodes = {int(fields[4]) for fields in lines if len(fields) == 6 and fields[5].startswith(f"{SHM}/")}
    mapped = set()
    for file in SHM.iterdir() if inodes else ():
        with contextlib.suppress(FileNotFoundError):
            if file.stat().st_ino in inodes:
                mapped.add(file)
    return mapped


def _remove_shared_memory(block: Path, directory: Path) -> None:
    try:
        block.unlink()
    except FileNotFoundError:
        return
    if block.name.startswith("vllm_dist_"):  # see _remove; the tracker knows nothing of these
        (directory / block.name.partition("-")[0]).unlink(missing_ok=True)
    elif block.name.startswith("sem."):
        resource_tracker.unregister(f"/{block.name.removeprefix('sem.')}", "semaphore")
    else:
        # Children share the server's tracker, which would complain of it at the end.
        resource_tracker.unregister(f"/{block.name}", "shared_memory")


_lease: Lease | None = None  # of this process, when it belongs to a stage


def _bind(lease: Lease) -> None:
    global _lease
    if _lease is None:
        _lease = lease
        with contextlib.suppress(OSError):  # the directory is gone: so is the server
            _, started_at = _stat(os.getpid())
            (lease.directory / f"{lease.file_stem}.{os.getpid()}.process").write_text(str(started_at))
        threading.Thread(target=lease._end_with_server, name="end-with-server", daemon=True).start()


def enter_stage_process() -> None:
    """In a process of a stage, once vLLM has set it up: end with the parent, and report what it dies of.

    Does nothing in a process that belongs to no stage.
    """
    parent = multiprocessing.parent_process()
    if _lease is None or parent is None:
        return

    def end_with_parent() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    if parent.pid != _lease.server_pid:  # a worker's parent is its engine core, which can die alone
        threading.Thread(target=end_with_parent, name="end-with-parent", daemon=True).start()
    atexit.register(_leave_at_once)
    for name in ("vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor"):
        logging.getLogger(name).addHandler(_FailureReport(_lease._failure_file))


def _leave_at_once() -> None:
    """The interpreter of an engine takes seconds to take itself apart; multiprocessing has cleaned up before that."""
    if _lease is not None:
        _lease.wait_if_orphaned()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if _FailureReport.has_failed else 0)


# Functions of vLLM's engine core that answer a failure to whoever asked, and go on.
_SURVIVED = ("_invoke_utility_method", "_handle_request_preproc_error")


class _FailureReport(logging.Handler):
    """vLLM tells its parent that a process failed, and tells only its log why; this keeps the first reason told."""

    has_failed = False  # in this process

    def __init__(self, path: Path) -> None:
        super().__init__(logging.ERROR)
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info is None or record.exc_info[1] is None:
            return
        if record.funcName in _SURVIVED:
            _FailureReport.has_failed = False
            self._path.unlink(missing_ok=True)  # a worker may have reported it first
            return
        _FailureReport.has_failed = True
        error = record.exc_info[1]
        with contextlib.suppress(OSError), self._path.open("x", encoding="utf-8") as file:
            file.write(" ".join(f"{type(error).__name__}: {error}".split())[:MAX_REASON_LENGTH])


# --- What killed servers left ----------------------------------------------------------------------------------------

STARTING_S = 5.0  # a directory this young may belong to a server that has not locked it yet


class Leftover(NamedTuple):
    """A private directory without a server, and the blocks of shared memory that belong to it."""

    path: Path
    blocks: tuple[Path, ...]
    num_bytes: int


def find_leftovers(parent: Path, now_s: float) -> tuple[list[Leftover], list[Path]]:
    """What servers of this user that are gone left in ``parent``, and the directories of those that live.

    A directory without an owner's file, of another user, or made within ``STARTING_S`` of ``now_s`` (seconds since the
    epoch) is in neither list. For a process that owns no ``RunDirectory``: a POSIX lock does not keep its own process
    out, and looking would give it up.
    """
    leftovers, live = [], []
    for path in sorted(parent.glob(f"{PREFIX}*")):
        with contextlib.suppress(OSError), _claim(path, now_s) as is_free:
            if is_free:
                leftovers.append(_measure(path))
            else:
                live.append(path)
    return leftovers, live


def remove_leftover(leftover: Leftover, now_s: float) -> bool:
    """Remove it, unless it is somebody's by now; says whether it is gone."""
    with contextlib.suppress(OSError), _claim(leftover.path, now_s) as is_free:
        if is_free:
            _remove(leftover.path)
    return not leftover.path.exists()


@contextlib.contextmanager
def _claim(path: Path, now_s: float) -> Iterator[bool]:
    """Hold the owner's lock inside the block, if it is free; ``OSError`` for what is no directory of this user's."""
    if path.is_symlink() or not path.is_dir() or path.lstat().st_uid != os.geteuid():
        raise PermissionError(f"{path} is not this user's directory")
    owner = os.open(path / OWNER, os.O_RDWR | os.O_NOFOLLOW)
    try:
        if now_s - os.fstat(owner).st_mtime < STARTING_S:
            raise BlockingIOError(f"{path} is too young to tell")
        try:
            fcntl.lockf(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            yield False
        else:
            yield True
    finally:
        os.close(owner)


def _measure(path: Path) -> Leftover:
    blocks = tuple(block for file in path.glob("vllm_dist_*") for block in SHM.glob(f"{file.name}-*"))
    files = [file for file in path.rglob("*") if file.is_file() and not file.is_symlink()]
    return Leftover(path, blocks, sum(file.lstat().st_size for file in (*files, *blocks)))
