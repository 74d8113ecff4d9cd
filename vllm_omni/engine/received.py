"""``ReceivedBytes``: how much is held as it was received: bodies of requests, and files that prompts name by URL."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from vllm_omni import envs
from vllm_omni.errors import InvalidRequest, Overloaded, RequestTooLarge

RETRY_AFTER_S = 5


class ReceivedBytes:
    """Counts bytes as they arrive, of each request and of all.

    Nothing waits for room here: a client that sends slowly, or names a host that does, would hold up all others. Thus
    what a request has not sent yet costs nothing, and beyond the limit of all, those that arrive are rejected.

    Args:
        max_bytes: of all requests.
        max_body_bytes: of the body of one.
        max_fetched_bytes: of the files that one prompt names.
    """

    def __init__(self, max_bytes: int, max_body_bytes: int, max_fetched_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.max_body_bytes = max_body_bytes
        self.max_fetched_bytes = max_fetched_bytes
        self.num_held_bytes = 0
        self.num_bytes_elsewhere = 0  # see ``MediaBudget``

    @classmethod
    def of_environment(cls) -> ReceivedBytes:
        return cls(envs.VLLM_OMNI_MAX_RECEIVED_BYTES, envs.VLLM_OMNI_MAX_BODY_BYTES, envs.VLLM_OMNI_MAX_FETCHED_BYTES)

    def body(self) -> ReceivedShare:
        return ReceivedShare(
            self, self.max_body_bytes, "VLLM_OMNI_MAX_BODY_BYTES", "the body of the request has", RequestTooLarge
        )

    def files(self) -> ReceivedShare:
        return ReceivedShare(
            self, self.max_fetched_bytes, "VLLM_OMNI_MAX_FETCHED_BYTES", "the files that the prompt names have"
        )


class ReceivedShare:
    """What one request holds.

    Args:
        max_bytes: of this request.
        setting: that changes the limit, for errors.
        said: of what it has, for errors.
        error: raised for a request beyond its limit.
    """

    def __init__(
        self,
        received: ReceivedBytes,
        max_bytes: int,
        setting: str,
        said: str,
        error: type[InvalidRequest] = InvalidRequest,
    ) -> None:
        self.num_bytes = 0
        self._received = received
        # A request with more than all may have together is rejected for good, however long it waits.
        limits = [(max_bytes, setting), (received.max_bytes, "VLLM_OMNI_MAX_RECEIVED_BYTES")]
        self._max_bytes, self._setting = min(limits, key=lambda limit: limit[0])
        self._said = said
        self._error = error
        self._has_ended = False
        self._num_holders = 0

    @contextmanager
    def held(self) -> Iterator[None]:
        """Give everything back at the end of the block, or of the last of several: a job outlives its request."""
        self._num_holders += 1
        try:
            yield
        finally:
            self._num_holders -= 1
            if not self._num_holders:
                self.release()

    def add(self, num_bytes: int) -> None:
        """Count further bytes.

        Raises:
            InvalidRequest: the request has more than it may.
            Overloaded: all requests together have.
            CancelledError: the request has ended.
        """
        if self._has_ended:
            raise asyncio.CancelledError
        self.check(self.num_bytes + num_bytes)
        received = self._received
        if received.num_held_bytes + num_bytes > received.max_bytes:
            raise Overloaded(
                f"the server holds {received.num_held_bytes:,} bytes of requests and their files, and {num_bytes:,} "
                f"more exceed {received.max_bytes:,} (VLLM_OMNI_MAX_RECEIVED_BYTES): try again later",
                retry_after_s=RETRY_AFTER_S,
            )
        self.num_bytes += num_bytes
        received.num_held_bytes += num_bytes

    def check(self, num_bytes: int) -> None:
        """Check how many bytes the request will have, where that is known before they arrive.

        Raises:
            InvalidRequest: they are more than it may have.
        """
        if num_bytes > self._max_bytes:
            said = f"{self._said} {num_bytes:,} bytes or more: at most {self._max_bytes:,} ({self._setting})"
            raise self._error(said)

    def take_back(self, num_bytes: int) -> None:
        """Count fewer bytes: a file is fetched again from its start."""
        if not self._has_ended:
            self.num_bytes -= num_bytes
            self._received.num_held_bytes -= num_bytes

    def release(self) -> None:
        """Give everything back. A second call does nothing."""
        self.take_back(self.num_bytes)
        self._has_ended = True
