"""``MediaBudget``: how many bytes the media of all prompts that a front end reads take at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, NamedTuple

from vllm_omni.engine.received import ReceivedBytes
from vllm_omni.errors import InvalidRequest, Overloaded


class Holding:
    """What the media of one prompt take."""

    def __init__(self, budget: MediaBudget) -> None:
        self.budget = budget
        self.num_bytes = 0
        self.files = budget.received.files()  # that have been fetched for it
        self.media: list[Any] = []  # what is to be dropped with the release
        self.has_ended = False

    def release(self) -> None:
        """Give everything back: the prompt has been read. A second call does nothing."""
        if not self.has_ended:
            self.has_ended = True
            self.media.clear()
            self.files.release()
            self.budget.end(self)


HOLDING: ContextVar[Holding | None] = ContextVar("HOLDING", default=None)
"""That of the prompt which the current task reads."""


class _Waiting(NamedTuple):
    holding: Holding
    num_bytes: int
    granted: asyncio.Future[None]


class MediaBudget:
    """Counts prompts with media, and grants them bytes in the order in which they ask.

    A prompt asks for each of its items in turn, so two prompts could wait for each other. Therefore the prompt that has
    held bytes for longest never waits: together, prompts hold less than twice the budget. Decisions are synchronous; a
    task waits for its future alone.

    Args:
        max_prompts: with media, that are fetched, wait or are read at a time.
        received: counts their files, which are held as they were sent until there is room; that of the environment by
            default.

    Attributes:
        num_held_bytes: now.
        num_bytes_elsewhere: that the server's further front ends hold, when they were asked last.
        num_prompts: now.
    """

    def __init__(self, num_bytes: int, max_prompts: int, received: ReceivedBytes | None = None) -> None:
        self.received = received or ReceivedBytes.of_environment()
        self.num_bytes = num_bytes
        self.max_prompts = max_prompts
        self.num_held_bytes = 0
        self.num_bytes_elsewhere = 0
        self.num_prompts = 0
        self._holders: dict[Holding, None] = {}  # those with bytes, from the oldest
        self._waiting: list[_Waiting] = []

    @contextmanager
    def hold(self) -> Iterator[Holding]:
        """Read one prompt with media: what is reserved inside the block is released at its end, or before.

        Raises:
            Overloaded: too many prompts are being read.
        """
        if self.num_prompts >= self.max_prompts:
            raise Overloaded(
                f"{self.num_prompts} prompts with media are being read, which is the limit; try again later, or "
                "raise VLLM_OMNI_MAX_WAITING_MEDIA"
            )
        self.num_prompts += 1
        holding = Holding(self)
        token = HOLDING.set(holding)
        try:
            yield holding
        finally:
            with suppress(ValueError):  # another task closes the stream of an answer than starts it
                HOLDING.reset(token)
            holding.release()

    async def reserve(self, holding: Holding, num_bytes: int) -> None:
        """Wait until the prompt may hold so many more bytes.

        Raises:
            InvalidRequest: with them, it holds more than the whole budget.
            CancelledError: the prompt has ended, by the failure of another of its items.
        """
        if holding.has_ended:
            raise asyncio.CancelledError
        total = holding.num_bytes + num_bytes
        if total > self.num_bytes:
            raise InvalidRequest(
                f"the media of the prompt take {total:,} bytes to decode and process: at most {self.num_bytes:,} are "
                "possible (VLLM_OMNI_MAX_MEDIA_BYTES); send smaller images, or fewer frames"
            )
        one = _Waiting(holding, num_bytes, asyncio.get_running_loop().create_future())
        self._waiting.append(one)
        self._grant()
        try:
            await one.granted
        finally:
            with suppress(ValueError):
                self._waiting.remove(one)  # cancelled while it waited

    def _grant(self) -> None:
        is_blocked = False
        for one in list(self._waiting):
            is_oldest = next(iter(self._holders), one.holding) is one.holding
            if is_oldest or (not is_blocked and self.num_held_bytes + one.num_bytes <= self.num_bytes):
                self._waiting.remove(one)
                self._holders.setdefault(one.holding)
                one.holding.num_bytes += one.num_bytes
                self.num_held_bytes += one.num_bytes
                if not one.granted.done():  # otherwise its task is being cancelled
                    one.granted.set_result(None)
            else:
                is_blocked = True  # later requests do not overtake, whatever their size

    def end(self, holding: Holding) -> None:
        """Take back what a prompt holds, once; see ``Holding.release``."""
        self.num_prompts -= 1
        for one in self._waiting:
            if one.holding is holding:
                one.granted.cancel()
        self._waiting = [one for one in self._waiting if one.holding is not holding]
        self._holders.pop(holding, None)
        self.num_held_bytes -= holding.num_bytes
        holding.num_bytes = 0
        self._grant()
