"""The thread on which all relays of a process wait."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from vllm_omni.errors import RelayTimeout

EXIT_S = 1.0  # what it may still take when the process ends
T = TypeVar("T")


class IOThread:
    """One event loop in a daemon thread for all relays of a process: connections and timers.

    An engine's thread has no loop of its own, and the program's loop may be busy or closed while another process reads
    from this one.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="relay-io", daemon=True)
        self._thread.start()
        atexit.register(self._stop)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def _stop(self) -> None:
        """End it before the interpreter ends: a thread that frees its last tensor meanwhile aborts the process."""
        if self.pid == os.getpid():
            self.call(self.loop.stop)
            self._thread.join(EXIT_S)

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def call(self, function: Callable[..., object], *args: object) -> None:
        self.loop.call_soon_threadsafe(function, *args)


_io_thread: IOThread | None = None
_io_lock = threading.Lock()


def io_thread() -> IOThread:
    """Return this process's thread; a forked child gets one of its own."""
    global _io_thread
    with _io_lock:
        if _io_thread is None or _io_thread.pid != os.getpid():
            _io_thread = IOThread()
        return _io_thread


async def wait_for(coroutine: Coroutine[Any, Any, T], timeout_s: float, what: str) -> T:
    """Run a coroutine on the I/O thread and await it here; ``RelayTimeout`` names ``what``."""
    try:
        return await asyncio.wait_for(asyncio.wrap_future(io_thread().submit(coroutine)), timeout_s)
    except TimeoutError as exc:
        raise RelayTimeout(f"{what} did not come within {timeout_s:g} s") from exc


def block_on(coroutine: Coroutine[Any, Any, T], timeout_s: float, what: str) -> T:
    """``wait_for`` for a thread without an event loop."""
    future = io_thread().submit(coroutine)
    try:
        return future.result(timeout_s)
    except TimeoutError as exc:
        future.cancel()
        raise RelayTimeout(f"{what} did not come within {timeout_s:g} s") from exc
