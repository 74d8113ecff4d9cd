"""Files of a host that belong to the process that has locked them, and to the next one when it has ended.

The lock is ``flock``: the kernel releases it however a process ends, and a pid that was given to another process does
not matter. It is kept by children that the owner forks, so these must end before the file can be adopted: an owner that
seems to live is never disturbed.
"""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

from vllm_omni.errors import ConfigError
from vllm_omni.process.proc import SHM

SLAB_SUFFIX = ".slab"
_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


def slab_directory(parent: Path = SHM) -> Path:
    """Where this user's slabs are in shared memory, unless the configuration says otherwise; not made here."""
    return parent / f"vllm_omni_pool_{os.geteuid()}"


def private_directory(path: Path) -> Path:
    """Make a directory, if it is not there, that only this user can enter.

    Raises:
        ConfigError: it is another user's, open to others, or cannot be made.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()
    except OSError as exc:
        raise ConfigError(f"no directory for cached pages can be made at {path}: {exc.strerror}") from exc
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise ConfigError(
            f"{path} is for cached pages, which are what users have sent: it must be a directory of this user with "
            "mode 0700; change it, or name another"
        )
    return path


def create(path: Path) -> int | None:
    """Create and lock a file; returns its descriptor, or None if another process was faster, and took or removed it.

    Raises:
        OSError: it cannot be created, or exists.
    """
    return _lock(path, os.open(path, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600))


def claim(path: Path) -> int | None:
    """Lock a file without an owner; returns its descriptor, or None if it has one, is gone, or is another user's."""
    try:
        fd = os.open(path, _FLAGS)
    except OSError:
        return None
    return _lock(path, fd)


def _lock(path: Path, fd: int) -> int | None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        found, named = os.fstat(fd), path.lstat()
        if (found.st_ino, found.st_dev) == (named.st_ino, named.st_dev) and found.st_uid == os.geteuid():
            return fd
    except OSError:  # it is locked by another process, or its last owner has just removed it
        pass
    os.close(fd)
    return None


def unlock(fd: int) -> None:
    """Unlock and close a file. A mapping keeps the lock of a descriptor that is only closed."""
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)
