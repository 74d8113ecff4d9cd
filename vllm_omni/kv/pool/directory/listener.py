"""A thread that receives the events of a layout from Redis."""

import logging
import threading
from collections.abc import Iterator
from typing import Protocol

from vllm_omni.errors import Unavailable
from vllm_omni.kv.pool.directory.records import read_event
from vllm_omni.kv.pool.directory.subscription import Subscription

START_TIMEOUT_S = 0.05
FIRST_DELAY_S = 0.05  # before the connection is tried again; doubles up to
MAX_DELAY_S = 5.0

logger = logging.getLogger(__name__)


class Source(Protocol):
    """``redis.Feed``."""

    def read(self) -> Iterator[bytes | None]: ...

    def close(self) -> None: ...


class Listener:
    """Gives all events of a layout to the subscriptions of this process.

    Events are numbered, so that those which were sent while the connection was away are counted. A session does not
    get a channel of its own: that would be two commands to Redis for each session, while an event is a few hundred
    bytes.
    """

    def __init__(self, source: Source, key_bytes: int):
        self._source = source
        self._key_bytes = key_bytes
        self._subscriptions: list[Subscription] = []
        self._lock = threading.Lock()
        self._last_number: int | None = None
        self._has_started = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pool-directory-events", daemon=True)
        self._thread.start()

    def subscribe(self, session: str | None, max_events: int) -> Subscription:
        """Blocks for the start of the thread, ``START_TIMEOUT_S`` at most."""
        subscription = Subscription(session, max_events, self._remove)
        with self._lock:
            self._subscriptions.append(subscription)
        self._has_started.wait(START_TIMEOUT_S)
        return subscription

    def close(self) -> None:
        self._closing.set()
        while self._thread.is_alive():  # it may be about to connect
            self._source.close()
            self._thread.join(0.01)
        for subscription in list(self._subscriptions):
            subscription.close()

    def _remove(self, subscription: Subscription) -> None:
        with self._lock:
            if subscription in self._subscriptions:
                self._subscriptions.remove(subscription)

    def _run(self) -> None:
        delay_s = FIRST_DELAY_S
        while not self._closing.wait(0.0 if delay_s == FIRST_DELAY_S else delay_s):
            try:
                for message in self._source.read():
                    delay_s = FIRST_DELAY_S
                    self._has_started.set()
                    if message is not None:
                        self._receive(message)
            except Unavailable as exc:
                delay_s = min(2 * delay_s, MAX_DELAY_S)
                if not self._closing.is_set():
                    logger.debug("Events of pages are not received for %s s: %s", delay_s, exc)

    def _receive(self, message: bytes) -> None:
        try:
            number, event = read_event(message, self._key_bytes)
        except ValueError as exc:
            logger.warning("Ignored %s", exc)
            return
        with self._lock:
            if self._last_number is not None and number != self._last_number + 1:
                num_lost = max(1, number - self._last_number - 1)  # a lower number: Redis has lost its data
                for one in self._subscriptions:
                    one.count_lost(num_lost)
            self._last_number = number
            for one in self._subscriptions:
                if one.session == event.session:
                    one.put(event)
