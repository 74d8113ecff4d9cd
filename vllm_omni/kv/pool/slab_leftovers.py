"""What killed processes left in shared memory: slabs without an owner, and the files of vLLM's offloading connector."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import NamedTuple

from vllm_omni.kv.pool import ownership
from vllm_omni.process.proc import SHM

VLLM_FILES = "vllm_offload_*.mmap"  # 512 MB and more each; vLLM removes them only where its process ends by itself
STARTING_S = 60.0  # a file this young may be awaited by workers that have not opened it yet
PROC = Path("/proc")


class SharedLeftover(NamedTuple):
    """A file of shared memory that no living process owns or has mapped."""

    path: Path
    num_bytes: int
    inode: int


def find_slabs(directory: Path | None = None) -> list[SharedLeftover]:
    """This user's slabs without an owner. The next process of the same layout would adopt them: to remove one costs
    the pages in it."""
    found = []
    directory = ownership.slab_directory() if directory is None else directory
    for path in sorted(directory.glob(f"*{ownership.SLAB_SUFFIX}")):
        fd = ownership.claim(path)
        if fd is not None:
            status = os.fstat(fd)
            found.append(SharedLeftover(path, status.st_size, status.st_ino))
            ownership.unlock(fd)
    return found


def find_vllm_files(now_s: float, shm: Path = SHM) -> list[SharedLeftover]:
    """This user's files of vLLM's offloading connector that no process has open or mapped.

    vLLM locks nothing, so processes are asked by ``/proc``: where the files of an engine of this user cannot be read,
    all are in use. Those of a container that shares ``/dev/shm`` but has its own process ids are not seen; a file that
    was made within ``STARTING_S`` of ``now_s`` (seconds since the epoch) or is locked is never in the list.
    """
    files = []
    for path in sorted(shm.glob(VLLM_FILES)):
        try:
            status = path.lstat()
        except FileNotFoundError:
            continue
        is_mine = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
        if is_mine and now_s - max(status.st_mtime, status.st_ctime) >= STARTING_S and _is_unlocked(path):
            files.append(SharedLeftover(path, status.st_size, status.st_ino))
    used = _used_inodes(shm) if files else set()
    return [] if used is None else [file for file in files if file.inode not in used]


def remove(leftover: SharedLeftover) -> bool:
    """Remove a leftover, unless it has an owner by now; returns whether it is gone."""
    fd = ownership.claim(leftover.path)
    if fd is not None:
        if os.fstat(fd).st_ino == leftover.inode:
            leftover.path.unlink(missing_ok=True)
        ownership.unlock(fd)
    return not leftover.path.exists()


def reap(now_s: float, *, directory: Path | None = None, shm: Path = SHM) -> list[SharedLeftover]:
    """Remove all leftovers of both kinds; returns those that are gone."""
    leftovers = [*find_slabs(directory), *find_vllm_files(now_s, shm)]
    return [leftover for leftover in leftovers if remove(leftover)]


def _is_unlocked(path: Path) -> bool:
    fd = ownership.claim(path)
    if fd is None:
        return False
    ownership.unlock(fd)
    return True


def _used_inodes(shm: Path) -> set[int] | None:
    """Files below a directory that processes have mapped or open; None if an engine of this user cannot be read."""
    used: set[int] = set()
    for process in PROC.glob("[0-9]*"):
        try:
            if process.stat().st_uid != os.geteuid():
                continue  # it could not open a private file of this user, unless it is root's
            used |= {int(inode) for inode in re.findall(rf" (\d+) +{shm}/", (process / "maps").read_text())}
            for link in (process / "fd").iterdir():
                try:
                    if str(link.readlink()).startswith(f"{shm}/"):
                        used.add(link.stat().st_ino)
                except FileNotFoundError:  # just closed
                    continue
        except (FileNotFoundError, ProcessLookupError):  # just ended
            continue
        except PermissionError:
            if _may_be_engine(process):
                return None
    return used


def _may_be_engine(process: Path) -> bool:
    """Whether a process that cannot be read may be of vLLM: others, as a container's first one, may be privileged."""
    try:
        command = (process / "cmdline").read_bytes().lower()  # empty once it has ended
    except (FileNotFoundError, ProcessLookupError):
        return False
    return b"python" in command or b"vllm" in command
