"""The clock of deadlines; tests and the simulator bring their own."""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol


class TimerHandle(Protocol):
    def cancel(self) -> None:
        """Cancel the timer; harmless after it has run."""


class Clock(Protocol):
    def monotonic(self) -> float:
        """Seconds since some fixed point."""

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> TimerHandle:
        """Run ``callback`` once on the event loop, ``delay_s`` from now."""


class LoopClock:
    """The running event loop's clock."""

    def monotonic(self) -> float:
        return time.monotonic()

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> TimerHandle:
        return asyncio.get_running_loop().call_later(delay_s, callback)
