"""Processes and shared memory as Linux reports them (proc(5))."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Collection, Iterable
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


STATE, PARENT, FLAGS, STARTED_AT = 0, 1, 6, 19  # in ``_fields``
CPU_TIMES = slice(11, 15)  # likewise: its own in user and system mode, and those of its children that have ended


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


def cpu_s(pids: Collection[int]) -> float:
    """Seconds of CPU time that processes and their descendants have used, as far as these still run."""
    stats: dict[int, str | None] = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(PermissionError):  # with hidepid, another user's
            stats[int(path.name)] = _read(int(path.name), "stat")
    fields = {pid: _fields(stat) for pid, stat in stats.items() if stat is not None}
    family, new = set[int](), set(pids) & fields.keys()
    while new:
        family |= new
        new = {pid for pid, one in fields.items() if int(one[PARENT]) in new} - family
    return sum(int(ticks) for pid in family for ticks in fields[pid][CPU_TIMES]) / os.sysconf("SC_CLK_TCK")


def resident_bytes(pids: Iterable[int]) -> int:
    """Resident memory of processes that live; what several of them share counts for each."""
    statuses = (_read(pid, "status") or "" for pid in pids)
    fields = (status.partition("VmRSS:")[2].split(maxsplit=1) for status in statuses)  # one that exits has none
    return 1024 * sum(int(field[0]) for field in fields if field)


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


def reset_peak_rss() -> bool:
    """Set this process's peak of resident memory to its present size; False where the kernel does not allow it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def transient_rss() -> int:
    """By how many bytes the peak of this process's resident memory exceeds its present size."""
    return max(0, _status_bytes("VmHWM") - _status_bytes("VmRSS"))


def anonymous_rss() -> int:
    """Bytes of resident memory of this process that belong to no file."""
    return _status_bytes("RssAnon")


def _status_bytes(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{field}:")[2].split(maxsplit=1)[0]) * 1024
