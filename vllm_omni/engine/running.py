"""``RunningRequests``: counts a server's requests, which may end before the server does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from vllm_omni.errors import CallAborted, GraphError, OmniError, ShuttingDown, StageFailed

logger = logging.getLogger(__name__)

STOPPING = "the server is shutting down"

# Whether the current task works for a request that was counted at its arrival: what its handler asks of the engines
# is not a new request.
_has_arrived: ContextVar[bool] = ContextVar("has_arrived", default=False)


class RunningRequests:
    """Counts requests and, when the server shuts down, first rejects new ones, then all.

    A request of the HTTP server is counted from its arrival, before its body and its media are read, until its reply
    has been sent; another one while it is generated.

    Attributes:
        is_draining: new requests are rejected.
        is_over: all requests are rejected, and those that run are aborted.
        loop: the event loop of the requests, after the first.
    """

    def __init__(self) -> None:
        self.is_draining = False
        self.is_over = False
        self.loop: asyncio.AbstractEventLoop | None = None
        self._num_running = 0
        self._has_ended = asyncio.Event()  # set when one of them ends

    def check(self) -> None:
        """Raises:
        ShuttingDown: the request is new and new ones are rejected, or all are.
        """
        if self.is_over or (self.is_draining and not _has_arrived.get()):
            raise ShuttingDown(STOPPING)

    def enter(self) -> None:
        """Count a request, which has been checked, until ``leave``."""
        self.loop = asyncio.get_running_loop()
        self._num_running += 1

    def leave(self) -> None:
        self._num_running -= 1
        self._has_ended.set()

    @contextmanager
    def arrive(self) -> Iterator[None]:
        """Count a request inside the block, and let everything pass that its handler asks for there.

        Raises:
            ShuttingDown: see ``check``.
        """
        self.check()
        self.enter()
        token = _has_arrived.set(True)
        try:
            yield
        finally:
            _has_arrived.reset(token)
            self.leave()

    @staticmethod
    def note_arrived() -> None:
        """Note that the current task works for a request that a further front end has counted at its arrival."""
        _has_arrived.set(True)

    def drain(self) -> None:
        """Reject new requests from now on."""
        self.is_draining = True

    def end(self) -> None:
        """Reject all requests from now on."""
        self.is_draining = self.is_over = True

    def error_for_client(self, request_id: str, error: Exception) -> OmniError:
        """The error that the client of a failed request gets: itself, if it is one of ours, or what it means."""
        if isinstance(error, OmniError) and not isinstance(error, GraphError):
            is_stopped = self.is_draining and isinstance(error, CallAborted | StageFailed)
            return ShuttingDown(STOPPING) if is_stopped else error
        # Of the pipeline, or a defect of ours: not the client's fault, whatever its class.
        logger.error("request %s failed", request_id, exc_info=error)
        where = "; ".join(getattr(error, "__notes__", ()))
        return OmniError(f"the pipeline failed: {error!r}" + (f" {where}" if where else ""))

    async def wait_until_none(self) -> None:
        while self._num_running:
            self._has_ended.clear()
            await self._has_ended.wait()
