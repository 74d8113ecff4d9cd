"""What killed servers left on this machine, for ``vllm-omni doctor``."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from vllm_omni.process.run_directory import OWNER, PREFIX, blocks_of, remove_directory

STARTING_S = 5.0  # a directory this young may belong to a server that has not locked it yet


class Leftover(NamedTuple):
    """A private directory without a server, and the blocks of shared memory that belong to it."""

    path: Path
    blocks: tuple[Path, ...]
    num_bytes: int


def find_leftovers(parent: Path, now_s: float) -> tuple[list[Leftover], list[Path]]:
    """Find what this user's servers that have ended left in ``parent``, and the directories of those that run.

    A directory without an owner's file, of another user, or made within ``STARTING_S`` of ``now_s`` (seconds since the
    epoch) is in neither list. Not for a process that owns a ``RunDirectory``: a POSIX lock does not exclude its own
    process, and looking would release it.
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
    """Remove it, unless a server owns it by now; returns whether it is gone."""
    with contextlib.suppress(OSError), _claim(leftover.path, now_s) as is_free:
        if is_free:
            remove_directory(leftover.path, has_tracker=False)
    return not leftover.path.exists()


@contextlib.contextmanager
def _claim(path: Path, now_s: float) -> Iterator[bool]:
    """Hold the owner's lock inside the block, if it is free; ``OSError`` if this is no directory of this user's."""
    if path.is_symlink() or not path.is_dir() or path.lstat().st_uid != os.geteuid():
        raise PermissionError(f"{path} is not this user's directory")
    owner = os.open(path / OWNER, os.O_RDWR | os.O_NOFOLLOW)
    try:
        if now_s - os.fstat(owner).st_mtime < STARTING_S:
            raise BlockingIOError(f"{path} is too new to be left over")
        try:
            fcntl.lockf(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            yield False
        else:
            yield True
    finally:
        os.close(owner)


def _measure(path: Path) -> Leftover:
    blocks = tuple(blocks_of(path))
    files = [file for file in path.rglob("*") if file.is_file() and not file.is_symlink()]
    return Leftover(path, blocks, sum(file.lstat().st_size for file in (*files, *blocks)))
