"""Pausing processes, and taking file descriptors from them."""

import itertools
import os
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

DEADLINE_S = 20.0
POLL_S = 0.005


def pause(pid: int) -> None:
    """Stop a process, and wait until none of its threads runs: on a busy machine, some run on for 25 ms.

    The process need not be a child of this one, as ``os.waitid`` requires.
    """
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + DEADLINE_S
    while not _has_stopped(pid):
        assert time.monotonic() < deadline, f"process {pid} did not stop within {DEADLINE_S} s"
        time.sleep(POLL_S)


def resume(pid: int) -> None:
    with suppress(ProcessLookupError):  # it was killed meanwhile
        os.kill(pid, signal.SIGCONT)


@contextmanager
def paused(*pids: int) -> Iterator[None]:
    """Keep these processes stopped inside the ``with``."""
    for pid in pids:
        pause(pid)
    try:
        yield
    finally:
        for pid in pids:
            resume(pid)


@contextmanager
def few_file_descriptors(pid: int, num_free: int = 0) -> Iterator[None]:
    """Let a process open no more than so many files inside the ``with``."""
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    used = {int(name) for name in os.listdir(f"/proc/{pid}/fd") if os.path.lexists(f"/proc/{pid}/fd/{name}")}
    free = (number for number in itertools.count() if number not in used)
    limit = next(itertools.islice(free, num_free, None))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, limits[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)


def _has_stopped(pid: int) -> bool:
    try:
        return all("State:\tT" in status.read_text() for status in Path(f"/proc/{pid}/task").glob("*/status"))
    except (FileNotFoundError, ProcessLookupError):  # a thread has just ended
        return False
