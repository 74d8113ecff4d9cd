"""A bounded queue of events: the directory never waits for its reader."""

import threading
from collections import deque
from collections.abc import Callable

from vllm_omni.kv.pool.directory.base import Event


class Subscription:
    """The events of a layout or a session since ``Directory.subscribe``, oldest first.

    Thread-safe. When the queue is full its oldest event is dropped: a reader that is late wants the newest pages.
    Lost events are counted, and nothing else: whatever they announced is found by ``match_and_claim`` or ``chain``.
    """

    def __init__(self, session: str | None, max_events: int, on_close: Callable[["Subscription"], None]):
        if max_events < 1:
            raise ValueError(f"a queue of {max_events} events: must be at least 1")
        self.session = session
        self.num_lost = 0
        self._events: deque[Event] = deque(maxlen=max_events)
        self._changed = threading.Condition()
        self._is_closed = False
        self._on_close = on_close

    def get(self, timeout_s: float | None = None) -> Event | None:
        """Return the next event; None: none arrived in time, or the subscription is closed and empty.

        Args:
            timeout_s: how long to block; 0 does not, None has no limit.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._events or self._is_closed, timeout_s)
            return self._events.popleft() if self._events else None

    def close(self) -> None:
        """Receive no further events, and wake the reader."""
        self._on_close(self)
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def put(self, event: Event) -> None:
        """Append an event, for the directory; does not block."""
        with self._changed:
            self.num_lost += len(self._events) == self._events.maxlen
            self._events.append(event)
            self._changed.notify()

    def count_lost(self, num_events: int) -> None:
        """Count events that did not reach this process, for the directory."""
        with self._changed:
            self.num_lost += num_events
