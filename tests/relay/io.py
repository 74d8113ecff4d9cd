"""What a test does between an event on the relay's I/O thread and what it expects of it."""

import os
import re
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from selectors import EpollSelector

from vllm_omni.relay import io_thread

DEADLINE_S = 60.0  # of what takes milliseconds, on a machine that may stand still for seconds


def await_io_thread() -> None:
    """Wait until the thread has seen what happened to its connections so far."""

    async def nothing() -> None:
        pass

    for _ in range(3):  # what is done there may call for more
        io_thread.io_thread().submit(nothing()).result(DEADLINE_S)


def closed_and_watched() -> list[int]:
    """Numbers of descriptors that the thread's loop takes to be watched, and that were closed: it would not watch the
    next descriptor of that number.
    """
    thread = io_thread._io_thread
    if thread is None or thread.pid != os.getpid():  # a parent's
        return []

    async def look() -> list[int]:
        return _closed_and_watched(thread.loop._selector)  # type: ignore[attr-defined]

    future = thread.submit(look())
    try:
        return future.result(DEADLINE_S)
    except TimeoutError:
        stack = "".join(traceback.format_stack(sys._current_frames()[thread._thread.ident or 0]))
        raise AssertionError(f"the relay's I/O thread does not answer; it is at\n{stack}") from None


def _closed_and_watched(selector: EpollSelector) -> list[int]:
    fdinfo = Path(f"/proc/self/fdinfo/{selector.fileno()}").read_text()
    watched = {int(fd): int(inode, 16) for fd, inode in _WATCHED.findall(fdinfo)}
    return sorted(key.fd for key in selector.get_map().values() if watched.get(key.fd) != _inode(key.fd))


_WATCHED = re.compile(r"^tfd:\s*(\d+) .*\bino:\s*([0-9a-f]+)", re.MULTILINE)


def _inode(fd: int) -> int:
    with suppress(OSError):
        return os.fstat(fd).st_ino
    return -1  # closed
