"""``RequestProcessor``: prompts are tokenized and their media processed off the event loop, a bounded number at once.

From: HydraInfer, section 4.1 (request processor).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Executor, wait
from contextlib import asynccontextmanager, suppress
from threading import Barrier, BrokenBarrierError
from typing import Any

from vllm.multimodal.media.connector import global_thread_pool
from vllm.renderers.base import BaseRenderer

from vllm_omni.errors import Overloaded
from vllm_omni.vllm_patches import limit_media_threads, wrap_renderer

WARM_TIMEOUT_S = 10.0


class RequestProcessor:
    """Bounds the work of vLLM's renderer in its threads.

    vLLM has a thread pool for tokenizing, one for opening media, and one thread that processes media for the model, in
    order, so that the caches of engine and front end agree. It accepts any number of prompts: each image that waits for
    that thread is held decoded. So prompts with media wait here, in order, while they are still small, and are rejected
    when too many wait. A prompt without media is never delayed by one with media. A request that is aborted while it
    waits leaves at once; a thread that works for it completes its work, and the result is dropped.

    Args:
        max_reading: prompts with media that are read at a time.
        max_waiting: how many more may wait.
        observe: called with the seconds that each prompt took, including its wait.
    """

    def __init__(self, max_reading: int, max_waiting: int, observe: Callable[[float], None] | None = None) -> None:
        self.max_waiting = max_waiting
        self.num_waiting = 0
        self.num_reading = 0
        self._observe = observe
        self._slots = asyncio.Semaphore(max_reading)

    def bind(self, renderer: BaseRenderer) -> None:
        """Bound a renderer, whether the engine calls it or vLLM's handlers of chats and completions."""
        wrap_renderer(renderer, self._bound)
        limit_media_threads()
        # A pool starts its threads when it is first given work, and the event loop waits until each runs: with all
        # cores busy decoding images, that is a tenth of a second per thread.
        start_threads(global_thread_pool, global_thread_pool._max_workers)
        start_threads(renderer._executor, renderer.model_config.renderer_num_workers)

    def _bound(self, render_prompts: Any, render_chats: Any) -> tuple[Any, Any]:
        async def render_cmpl_async(prompts: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            async with self._slot(any(has_media(prompt) for prompt in prompts)) as arrived_at:
                return [_set_arrival(one, arrived_at) for one in await render_prompts(prompts, *args, **kwargs)]

        async def render_chat_async(conversations: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            async with self._slot(any(is_chat_with_media(chat) for chat in conversations)) as arrived_at:
                chats, prompts = await render_chats(conversations, *args, **kwargs)
                return chats, [_set_arrival(one, arrived_at) for one in prompts]

        return render_cmpl_async, render_chat_async

    @asynccontextmanager
    async def _slot(self, has_media: bool) -> AsyncIterator[float]:
        arrived_at = time.time()
        if not has_media:
            yield arrived_at
        else:
            await self._acquire_slot()
            try:
                yield arrived_at
            finally:
                self.num_reading -= 1
                self._slots.release()
        if self._observe is not None:
            self._observe(time.time() - arrived_at)

    async def _acquire_slot(self) -> None:
        if self._slots.locked() and self.num_waiting >= self.max_waiting:
            raise Overloaded(
                f"{self.num_waiting} prompts with media wait to be read, which is the limit; try again later, or raise "
                "VLLM_OMNI_MAX_WAITING_MEDIA"
            )
        self.num_waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self.num_waiting -= 1
        self.num_reading += 1


def has_media(prompt: Any) -> bool:
    """Whether one of vLLM's prompts has media."""
    return isinstance(prompt, Mapping) and bool(prompt.get("multi_modal_data"))


def is_chat_with_media(messages: Sequence[Any]) -> bool:
    """Whether a conversation in OpenAI's form has a part that is not text."""
    contents = (message.get("content") for message in messages if isinstance(message, Mapping))
    return any(
        not (isinstance(part, str) or (isinstance(part, Mapping) and "text" in str(part.get("type", "text"))))
        for content in contents
        if isinstance(content, Sequence) and not isinstance(content, str)
        for part in content
    )


def _set_arrival(prompt: Any, at: float) -> Any:
    prompt["arrival_time"] = at  # upstream's is the time at which it got its slot
    return prompt


def start_threads(pool: Executor, num_threads: int) -> None:
    barrier = Barrier(num_threads)

    def meet() -> None:
        with suppress(BrokenBarrierError):  # other work occupies a thread: the others have been started
            barrier.wait(WARM_TIMEOUT_S)

    wait([pool.submit(meet) for _ in range(num_threads)])
