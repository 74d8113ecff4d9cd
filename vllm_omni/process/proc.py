"""Processes and shared memory as Linux reports them (proc(5))."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import NamedTuple

SHM = Path("/dev/shm")
PF_EXITING = 0x4  # from the kernel's include/linux/sched.h: the process is in exit(), but may still hold its files


class ProcessId(NamedTuple):
    """A process, distinguished from a later one with the same pid."""

    pid: int
    started_at: int  # in the kernel's ticks

    @classmethod
    def current(cls) -> ProcessId:
        stat = _read(os.getpid(), "stat")
        assert stat is not None, "a process that runs has an entry"
        return cls(os.getpid(), int(_fields(stat)[STARTED_AT]))

    def is_alive(self) -> bool:
        """Raises ``OSError`` if it cannot be determined: no file descriptor is free."""
        stat = _read(self.pid, "stat")
        if stat is None:
            return False
        fields = _fields(stat)
        return fields[STATE] != "Z" and int(fields[STARTED_AT]) == self.started_at


STATE, FLAGS, STARTED_AT = 0, 6, 19  # in ``_fields``


def _fields(stat: str) -> list[str]:
    """The fields behind the process's name, which may contain anything."""
    return stat.rpartition(")")[2].split()


def _read(pid: int, file: str) -> str | None:
    """The text of a file in /proc; None if the process has ended. Any other ``OSError`` leaves that open."""
    try:
        return Path(f"/proc/{pid}/{file}").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None


def is_dying(pid: int) -> bool:
    """Whether a process has ended, is exiting, or SIGKILL is pending for it; raises ``OSError`` as ``is_alive``."""
    stat, status = _read(pid, "stat"), _read(pid, "status")
    if stat is None or status is None:
        return True
    pending = int(status.partition("SigPnd:")[2].split(maxsplit=1)[0], 16)
    return bool(int(_fields(stat)[FLAGS]) & PF_EXITING or pending >> (signal.SIGKILL - 1) & 1)


def mapped_shared_memory(pid: int) -> set[Path]:
    """Files of /dev/shm that a process has mapped, found by inode: a semaphore is mapped under an earlier name."""
    lines = [line.split(maxsplit=5) for line in (_read(pid, "maps") or "").splitlines()]
    inodes = {int(fields[4]) for fields in lines if len(fields) == 6 and fields[5].startswith(f"{SHM}/")}
    mapped = set()
    for file in SHM.iterdir() if inodes else ():
        with contextlib.suppress(FileNotFoundError):
            if file.stat().st_ino in inodes:
                mapped.add(file)
    return mapped


def bound_sockets() -> set[str]:
    """Paths of the Unix sockets that a process holds."""
    return {line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()}
