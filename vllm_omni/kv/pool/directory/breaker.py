"""A circuit breaker: a server that failed is not asked again until a probe has found it alive."""

import threading
from collections.abc import Callable
from typing import NamedTuple


class BreakerStatistics(NamedTuple):
    """Since the start."""

    is_open: bool
    num_openings: int
    open_s: float


class Breaker:
    """Opens at the first failure, and closes when a probe succeeds.

    Thread-safe; it starts nothing: its owner probes. One failure is enough, because a caller that waits for a timeout
    once has lost more than all that it asks for could have saved. The delay before a probe doubles with each failure,
    of a probe or of a call soon after one, and starts anew after a call that succeeds.

    Args:
        clock: in seconds; never goes back.
    """

    def __init__(self, clock: Callable[[], float], *, first_delay_s: float = 0.1, max_delay_s: float = 5.0):
        self._clock = clock
        self._first_delay_s = first_delay_s
        self._max_delay_s = max_delay_s
        self._lock = threading.Lock()
        self._delay_s = first_delay_s
        self._opened_at: float | None = None
        self._probe_at = 0.0
        self._num_openings = 0
        self._open_s = 0.0

    @property
    def is_open(self) -> bool:
        return self._opened_at is not None

    def fail(self) -> bool:
        """Open, after a failed call. True: it was closed, and the caller has to start probing."""
        with self._lock:
            if self._opened_at is not None:
                return False
            self._opened_at = self._clock()
            self._num_openings += 1
            self._defer_probe()
            return True

    def seconds_until_probe(self) -> float:
        """Return how long to wait before the next probe of an open breaker."""
        return max(0.0, self._probe_at - self._clock())

    def probe_failed(self) -> None:
        """Stay open, and probe later."""
        with self._lock:
            self._defer_probe()

    def probe_succeeded(self) -> None:
        """Close."""
        with self._lock:
            if self._opened_at is not None:
                self._open_s += self._clock() - self._opened_at
                self._opened_at = None

    def succeed(self) -> None:
        """Forget earlier failures, after a call that succeeded."""
        if self._delay_s != self._first_delay_s and not self.is_open:
            self._delay_s = self._first_delay_s

    def statistics(self) -> BreakerStatistics:
        with self._lock:
            now_open_s = 0.0 if self._opened_at is None else self._clock() - self._opened_at
            return BreakerStatistics(self.is_open, self._num_openings, self._open_s + now_open_s)

    def _defer_probe(self) -> None:
        self._probe_at = self._clock() + self._delay_s
        self._delay_s = min(2 * self._delay_s, self._max_delay_s)
