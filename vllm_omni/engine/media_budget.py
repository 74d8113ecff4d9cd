"""``MediaBudget``: how many bytes the media of all prompts that a front end reads take at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import NamedTuple

from vllm_omni.errors import InvalidRequest


class Holding:
    """What the media of one prompt take."""

    def __init__(self, budget: MediaBudget) -> None:
        self.budget = budget
        self.num_bytes = 0
        self.has_ended = False


HOLDING: ContextVar[Holding | None] = ContextVar("HOLDING", default=None)
"""That of the prompt which the current task reads."""


class _Waiting(NamedTuple):
    holding: Holding
    num_bytes: int
    granted: asyncio.Future[None]


class MediaBudget:
    """Grants bytes in the order in which they are asked for.

    A prompt asks for each of its items in turn, so two prompts could wait for each other. Therefore the prompt that has
    held bytes for longest never waits: together, prompts hold less than twice the budget. Decisions are synchronous; a
    task waits for its future alone.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.num_held_bytes = 0
        self._holders: dict[Holding, None] = {}  # those with bytes, from the oldest
        self._waiting: list[_Waiting] = []

    @contextmanager
    def hold(self) -> Iterator[Holding]:
        """Read one prompt: what is reserved inside the block is released at its end."""
        holding = Holding(self)
        token = HOLDING.set(holding)
        try:
            yield holding
        finally:
            HOLDING.reset(token)
            self._release(holding)

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

    def _release(self, holding: Holding) -> None:
        holding.has_ended = True
        for one in self._waiting:
            if one.holding is holding:
                one.granted.cancel()
        self._waiting = [one for one in self._waiting if one.holding is not holding]
        self._holders.pop(holding, None)
        self.num_held_bytes -= holding.num_bytes
        holding.num_bytes = 0
        self._grant()
