"""``Sessions``: ends what the calls of a session share when the session has been idle for a while."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from vllm_omni.flow import Clock, TimerHandle


class Sessions:
    """Counts the open calls of each session, and times how long it has had none.

    Args:
        ttl_s: seconds without a call after which a session ends.
        end: releases the state of a session (``GraphRuntime.end_session``).

    From: Omni-Flow section 3.5, session state; the time to live is ours.
    """

    def __init__(self, ttl_s: float, end: Callable[[str], None], clock: Clock) -> None:
        self._ttl_s = ttl_s
        self._end = end
        self._clock = clock
        self._num_calls: Counter[str] = Counter()
        self._timers: dict[str, TimerHandle] = {}

    def enter(self, session: str) -> None:
        """Note a call that opens."""
        if (timer := self._timers.pop(session, None)) is not None:
            timer.cancel()
        self._num_calls[session] += 1

    def leave(self, session: str) -> None:
        """Note a call that is over; after the last one the time starts."""
        self._num_calls[session] -= 1
        if not self._num_calls[session]:
            del self._num_calls[session]
            self._timers[session] = self._clock.call_later(self._ttl_s, lambda: self._expire(session))

    def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _expire(self, session: str) -> None:
        del self._timers[session]
        self._end(session)

    def __len__(self) -> int:
        """The number of sessions that have state."""
        return len(self._num_calls) + len(self._timers)
