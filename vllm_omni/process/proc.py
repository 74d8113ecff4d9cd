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
        return cls(os.getpid(), _stat(os.getpid())[1])

    def is_alive(self) -> bool:
        try:
            state, started_at = _stat(self.pid)
        except OSError:
            return False
        return state != "Z" and started_at == self.started_at


def _stat(pid: int) -> tuple[str, int]:
    """State and start time of a process; the fields are counted after its name, which may contain anything."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[19])


def is_dying(pid: int) -> bool:
    """Whether a process is exiting, or SIGKILL is pending for it."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True  # it has ended
    flags = int(stat.rpartition(")")[2].split()[6])
    pending = int(status.partition("SigPnd:")[2].split(maxsplit=1)[0], 16)
    return bool(flags & PF_EXITING or pending >> (signal.SIGKILL - 1) & 1)


def mapped_shared_memory(pid: int) -> set[Path]:
    """Files of /dev/shm that a process has mapped, found by inode: a semaphore is mapped under an earlier name."""
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


def bound_sockets() -> set[str]:
    """Paths of the Unix sockets that a process holds."""
    return {line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()}
