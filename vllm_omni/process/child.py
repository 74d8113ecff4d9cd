"""``ChildProcess``: one process of a server that answers over a channel, from its start to its end."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from multiprocessing.process import BaseProcess

END_TIMEOUT_S = 1.0  # of a process that was asked to end


class ChildProcess:
    """A process that has been started.

    Attributes:
        is_lost: its channel has been closed; set by the owner of the channel.
    """

    def __init__(self, process: BaseProcess) -> None:
        self._process = process
        self.is_lost = False
        process.start()

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    @property
    def exit_code(self) -> int | None:
        return self._process.exitcode

    @property
    def has_died(self) -> bool:
        return self.is_lost or not self._process.is_alive()

    def kill(self) -> None:
        with suppress(ValueError):  # it was closed
            self._process.kill()

    def join(self) -> None:
        """Wait ``END_TIMEOUT_S`` for its end, at most."""
        self._process.join(END_TIMEOUT_S)

    async def wait_until_exited(self, timeout_s: float) -> None:
        """Wait until the reason of its end is known, or the time is over: its channel is closed a little earlier."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.exit_code is None:  # noqa: ASYNC110 - of another process
                    await asyncio.sleep(0.01)

    def end(self) -> None:
        """End it: by SIGTERM, and by SIGKILL if it has not ended within ``END_TIMEOUT_S``."""
        self._process.join(0)
        if self._process.is_alive():
            self._process.terminate()
            self._process.join(END_TIMEOUT_S)
        self._process.kill()
        self._process.join()
