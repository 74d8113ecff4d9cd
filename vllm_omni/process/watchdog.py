"""``Watchdog``: notices an engine that has work and makes no step, or a front end that stands still, though its
processes live.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from vllm_omni import envs

logger = logging.getLogger(__name__)

TICK_S = 1.0  # a second without an answer counts only if the event loop was there to take one
BUSY_FACTOR = 10  # how much longer a step may take that uses CPU time: a compilation, a long window of a vocoder
BUSY_SHARE = 0.1  # of one core, from which on processes count as computing; a process that waits uses less


class Watched(Protocol):
    """The engine or front end that is watched, by its requests' event loop."""

    def has_requests(self) -> bool:
        """Whether it is to answer."""

    def answer(self) -> Coroutine[Any, Any, Any]:
        """A call that it answers between two steps, however little these do."""

    def cpu_s(self) -> float:
        """CPU time that its processes have used, seconds."""

    def end_stuck(self, after_s: float) -> None:
        """Kill its processes, which have not answered for so many seconds."""


class Watchdog:
    """Asks the engine for an answer while it has requests, and ends it if none comes.

    An engine whose requests all wait for other stages makes empty steps, and answers at once. A process that is
    stopped, or waits for a lock that nothing releases, uses no CPU time: it is ended after
    ``VLLM_OMNI_STAGE_STUCK_S``. One that computes is given ``BUSY_FACTOR`` times as long, because a step may be long.

    Args:
        sleep: waits for so many seconds.
    """

    def __init__(self, engine: Watched, sleep: Callable[[float], Coroutine[Any, Any, None]] = asyncio.sleep) -> None:
        self._engine = engine
        self._sleep = sleep
        self._stuck_s = envs.VLLM_OMNI_STAGE_STUCK_S
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Watch for as long as the engine has requests; call it with each request."""
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._watch())

    async def stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _watch(self) -> None:
        while self._engine.has_requests():
            answer = asyncio.get_running_loop().create_task(self._engine.answer())
            try:
                if not await self._comes(answer):
                    return
            except OSError as exc:  # no file descriptor is free: whether its processes compute is unknown
                logger.warning("an engine cannot be watched: %s", exc)
                await self._sleep(TICK_S)
            finally:
                answer.cancel()

    async def _comes(self, answer: asyncio.Task[Any]) -> bool:
        """Whether the answer comes in time; ends the engine if it does not. An error is an answer, too."""
        idle_s = busy_s = 0.0
        used_s: float | None = None  # from the first second without an answer: most engines answer in less
        while True:
            await self._sleep(TICK_S)
            if answer.done():
                return not answer.cancelled() and answer.exception() is None
            before_s, used_s = used_s, await asyncio.to_thread(self._engine.cpu_s)
            if before_s is None:
                continue
            if used_s - before_s >= BUSY_SHARE * TICK_S:
                busy_s += TICK_S
            else:
                idle_s += TICK_S
            if idle_s + busy_s / BUSY_FACTOR >= self._stuck_s:
                self._engine.end_stuck(idle_s + busy_s)
                return False
