"""``RunDirectory``: the private directory of a server, removed when the server ends, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from vllm_omni import envs
from vllm_omni.process.proc import SHM

PREFIX = "vllm-omni-"
OWNER = "owner"  # the file that the server keeps locked while it lives
# vLLM's sockets and, through tempfile, its rendezvous files; children inherit both.
_VARIABLES = ("VLLM_RPC_BASE_PATH", "TMPDIR")
_environment_lock = threading.Lock()


class RunDirectory:
    """Creates and locks the directory; stages that are started inside ``inherited`` put their files there.

    The server holds a lock on a file of the directory, and each process of a stage waits for that lock
    (``ServerTether``). The lock is free once the server has ended, or has removed the directory. It is a POSIX lock:
    ``flock``, or an open pipe, would survive in children that the user's program forks.
    """

    def __init__(self) -> None:
        tempfile.gettempdir()  # cached here: a first call inside ``inherited`` would cache this directory for good
        self.server_pid = os.getpid()
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=envs.VLLM_OMNI_RUNTIME_DIR))
        self._lock: int | None = os.open(self.path / OWNER, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.lockf(self._lock, fcntl.LOCK_EX)

    @contextlib.contextmanager
    def inherited(self) -> Iterator[None]:
        """Point the environment at the directory; another server of this process waits until the block ends."""
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

    def remove(self) -> None:
        """Remove the directory and its contents; stages that still run end. A second call does nothing."""
        remove_directory(self.path)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def remove_directory(directory: Path) -> None:
    """Remove a server's directory, and the shared memory that its workers named after files in it."""
    for block in blocks_of_workers(directory):
        block.unlink(missing_ok=True)
    shutil.rmtree(directory, ignore_errors=True)


def blocks_of_workers(directory: Path) -> list[Path]:
    """Blocks in /dev/shm of vLLM's CPU workers, which are named after their rendezvous file.

    Python's resource tracker, which removes what killed processes leave there, does not know them.
    """
    return [block for file in directory.glob("vllm_dist_*") for block in SHM.glob(f"{file.name}-*")]
