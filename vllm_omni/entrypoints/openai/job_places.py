"""``JobPlaces``: how many videos a server makes at a time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TypeAlias

from vllm_omni import envs
from vllm_omni.errors import Overloaded

RETRY_AFTER_S = 10

TakePlace: TypeAlias = Callable[[], AbstractAsyncContextManager[None]]
"""Gives a job a place, which it has inside the block; raises ``Overloaded`` where there is none."""


class JobPlaces:
    """Counts the jobs that are not complete."""

    def __init__(self) -> None:
        self._max_jobs = envs.VLLM_OMNI_MAX_VIDEO_JOBS
        self._num_jobs = 0

    @asynccontextmanager
    async def take(self) -> AsyncIterator[None]:
        """Count a job inside the block.

        Raises:
            Overloaded: so many are not complete.
        """
        if self._num_jobs >= self._max_jobs:
            said = f"{self._max_jobs} videos are not complete, which is the limit (VLLM_OMNI_MAX_VIDEO_JOBS)"
            raise Overloaded(f"{said}: try again later", retry_after_s=RETRY_AFTER_S)
        self._num_jobs += 1
        try:
            yield
        finally:
            self._num_jobs -= 1
