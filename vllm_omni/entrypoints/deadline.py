"""``Deadline``: one moment by which a request must be done, whatever it waits for until then."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from vllm_omni.errors import DeadlineExceeded, InvalidRequest


class Deadline:
    """The end of a request's time.

    Args:
        deadline_s: seconds that the request has; None: any number.
        arrived_at: when they started, by ``time.monotonic``; now by default.

    Raises:
        InvalidRequest: not a number above 0.
    """

    def __init__(self, deadline_s: float | None, arrived_at: float | None = None) -> None:
        if deadline_s is not None and not (isinstance(deadline_s, int | float) and deadline_s > 0):
            raise InvalidRequest(f"deadline_s = {deadline_s!r}: must be seconds, more than 0", param="deadline_s")
        self._deadline_s = deadline_s
        self._arrived_at = time.monotonic() if arrived_at is None else arrived_at

    def left_s(self) -> float | None:
        """The seconds that are left, always above 0: a call of a graph that is late ends as all others do."""
        if self._deadline_s is None:
            return None
        return max(self._arrived_at + self._deadline_s - time.monotonic(), sys.float_info.min)

    @asynccontextmanager
    async def limit(self, what: str) -> AsyncIterator[None]:
        """Cancel the block at the deadline.

        Args:
            what: the work of the block, for the error: "the encoding of the speech".

        Raises:
            DeadlineExceeded: it was cancelled.
        """
        timeout = asyncio.timeout(self.left_s())
        try:
            async with timeout:
                yield
        except TimeoutError as exc:
            if not timeout.expired():  # of the block itself
                raise
            raise DeadlineExceeded(f"deadline_s = {self._deadline_s:g} has passed during {what}") from exc
