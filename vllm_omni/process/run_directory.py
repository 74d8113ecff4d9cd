"""``RunDirectory``: the private directory of a server, removed when the server ends, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from multiprocessing import active_children, current_process, resource_tracker, shared_memory
from pathlib import Path

from vllm_omni import envs
from vllm_omni.errors import ConfigError
from vllm_omni.process.block_holder import BlockHolder
from vllm_omni.process.memory import format_bytes
from vllm_omni.process.proc import SHM

PREFIX = "vllm-omni-"
NUM_RANDOM = 8  # characters, in the name of a block
ROOM_BYTES = 4 << 20  # that must be free: logs, measurements, files by which vLLM's processes find one another
OWNER = "owner"  # the file that the server keeps locked while it lives
ENDING = "ending"  # the file that it creates when it ends its stages
WEIGHTS = "-weights-"  # in the names of blocks with weights (``WeightsFile``), which no single stage owns
# vLLM's sockets and, through tempfile, its rendezvous files; children inherit both.
_VARIABLES = ("VLLM_RPC_BASE_PATH", "TMPDIR")
_environment_lock = threading.Lock()

MAX_SOCKET_NAME = 107  # bytes in the path of a UNIX socket
SOCKET_NAME_BYTES = len("/vllm-omni-xxxxxxxx/") + 36  # a private directory, and a UUID in it


class RunDirectory:
    """Creates and locks the directory; stages that are started inside ``inherited`` put their files there.

    The server holds a lock on a file of the directory, and each process of a stage waits for that lock
    (``ServerTether``). The lock is free once the server has ended, or has removed the directory. It is a POSIX lock:
    ``flock``, or an open pipe, would survive in children that the user's program forks.

    Raises:
        ConfigError: the directory cannot be created, there is no room for its files, or its path is too long for
            sockets.
    """

    def __init__(self) -> None:
        tempfile.gettempdir()  # cached here: a first call inside ``inherited`` would cache this directory for good
        parent = envs.VLLM_OMNI_RUNTIME_DIR
        if wrong := path_too_long(parent):
            raise ConfigError(f"{wrong}: set VLLM_OMNI_RUNTIME_DIR to a directory with a short path")
        self.server_pid = os.getpid()
        self._holder: BlockHolder | None = None
        try:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
            self._lock: int | None = os.open(self.path / OWNER, os.O_CREAT | os.O_RDWR, 0o600)
        except OSError as exc:
            raise ConfigError(
                f"no directory for a server's sockets can be created in {parent}: {exc.strerror}: set "
                "VLLM_OMNI_RUNTIME_DIR to a writable directory"
            ) from exc
        fcntl.lockf(self._lock, fcntl.LOCK_EX)
        if (free := shutil.disk_usage(self.path).free) < ROOM_BYTES:
            self.remove()
            raise ConfigError(
                f"the file system of {parent} has {format_bytes(free)} free, and a server's files there need "
                f"{format_bytes(ROOM_BYTES)}: make room, or set VLLM_OMNI_RUNTIME_DIR to another directory"
            )
        self._semprefix = f"/{self.path.name}"  # multiprocessing's prefix for the names of semaphores

    @contextlib.contextmanager
    def inherited(self) -> Iterator[None]:
        """Point the environment at the directory, and name semaphores after it, also those of the children; another
        server of this process waits until the block ends."""
        config = current_process()._config  # type: ignore[attr-defined]
        with _environment_lock:
            saved = {name: os.environ.get(name) for name in _VARIABLES}
            os.environ.update(dict.fromkeys(_VARIABLES, str(self.path)))
            semprefix, config["semprefix"] = config["semprefix"], self._semprefix
            try:
                yield
            finally:
                config["semprefix"] = semprefix
                for name, value in saved.items():
                    if value is None:
                        os.environ.pop(name, None)
                    else:
                        os.environ[name] = value

    def hold_blocks(self) -> None:
        """Hold the blocks of GPU memory that the stages' processes share, until the directory is removed."""
        if self._holder is None:
            self._holder = BlockHolder(self.path)

    def announce_end(self) -> None:
        """Let the stages' processes end at SIGTERM, which they ignore before (``enter_stage_process``)."""
        with contextlib.suppress(OSError):  # they are killed a little later
            (self.path / ENDING).touch()

    def kill_starting(self) -> None:
        """Kill engine cores that were started inside ``inherited`` and are not tethered yet, which takes them seconds.

        The others end with the directory.
        """
        tethered = {file.name.split(".")[-2] for file in self.path.glob("*.process")}
        for child in active_children():  # the name is vLLM's, the prefix tells servers of one program apart
            semprefix = child._config.get("semprefix")  # type: ignore[attr-defined]
            is_ours = semprefix == self._semprefix and child.name.startswith("EngineCore")
            if is_ours and str(child.pid) not in tethered:
                child.kill()

    def remove(self) -> None:
        """Remove the directory and its contents; stages that still run end. A second call does nothing."""
        if self._holder is not None:
            self._holder.close()
            self._holder = None
        remove_directory(self.path, has_tracker=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def name_blocks(directory: Path) -> None:
    """Name the shared memory that this process will make after a server's directory, which shows its owner.

    Python's own names (``psm_*``) are random, as are those of semaphores (``sem.mp-*``; see ``inherited``). There is no
    public setting for either.
    """
    prefix = f"/{directory.name}-"
    shared_memory._SHM_NAME_PREFIX = prefix  # type: ignore[attr-defined]
    shared_memory._SHM_SAFE_NAME_LENGTH = len(prefix) + NUM_RANDOM  # type: ignore[attr-defined]


def path_too_long(parent: Path) -> str | None:
    """Why servers cannot create their sockets in a directory below ``parent``, if that is so."""
    if len(os.fsencode(parent)) + SOCKET_NAME_BYTES <= MAX_SOCKET_NAME:
        return None
    return (
        f"{parent}, where servers create their sockets, is too long a path: a socket's path has at most "
        f"{MAX_SOCKET_NAME} bytes, and theirs are {SOCKET_NAME_BYTES} bytes longer than this one"
    )


def remove_directory(directory: Path, *, has_tracker: bool) -> None:
    """Remove a server's directory, and what its processes have left in /dev/shm.

    Args:
        has_tracker: this process is the server, or one of its children: they have one resource tracker, which would
            report removed blocks as leaked.
    """
    for block in blocks_of(directory):
        remove_block(block, has_tracker=has_tracker)
    shutil.rmtree(directory, ignore_errors=True)


def blocks_of(directory: Path) -> list[Path]:
    """A server's blocks in /dev/shm (``name_blocks``); vLLM's CPU workers name theirs after their rendezvous file."""
    names = [directory.name, f"sem.{directory.name}", *(file.name for file in directory.glob("vllm_dist_*"))]
    return [block for name in names for block in SHM.glob(f"{name}-*")]


def weights_file(directory: Path, key: str) -> Path:
    """The block with a server's weights of some key; it is removed with the server."""
    return SHM / f"{directory.name}{WEIGHTS}{key}"


def has_weights(block: Path) -> bool:
    return block.name.startswith(PREFIX) and WEIGHTS in block.name


def remove_block(block: Path, *, has_tracker: bool) -> None:
    """Remove a block of /dev/shm; see ``remove_directory``."""
    try:
        block.unlink()
    except FileNotFoundError:
        return
    # Those that were not made by Python's classes (but by C++, or by ``WeightsFile``) are unknown to the tracker.
    if has_tracker and not block.name.startswith(("vllm_dist_", "vllm_offload_")) and not has_weights(block):
        kind = "semaphore" if block.name.startswith("sem.") else "shared_memory"
        resource_tracker.unregister(f"/{block.name.removeprefix('sem.')}", kind)
