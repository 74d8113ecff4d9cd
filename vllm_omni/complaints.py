"""Warnings about what other processes send, of which there may be any number."""

import logging
import time

WARN_S = 1.0


class Complaints:
    """Warns about messages that were dropped: once a second, with the number of warnings left out."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._next_at = 0.0
        self._num_silent = 0

    def warn(self, text: str, *args: object) -> None:
        now = time.monotonic()
        if now < self._next_at:
            self._num_silent += 1
            return
        others = f" ({self._num_silent} more like this)" if self._num_silent else ""
        self._logger.warning(text + "%s", *args, others)
        self._next_at, self._num_silent = now + WARN_S, 0
