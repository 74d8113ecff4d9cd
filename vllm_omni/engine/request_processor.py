"""``RequestProcessor``: prompts are tokenised and their media prepared off the event loop, so many at once and no more.

From: HydraInfer, section 4.1 (request processor).
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Executor, wait
from contextlib import asynccontextmanager, suppress
from threading import Barrier, BrokenBarrierError
from typing import Any

from vllm.multimodal.media.connector import global_thread_pool
from vllm.renderers.base import BaseRenderer

from vllm_omni.errors import Overloaded

WARM_TIMEOUT_S = 10.0


class RequestProcessor:
    """Bounds what vLLM's renderer does in its threads.

    vLLM has a pool for tokenising, one for opening media, and one thread that prepares them for the model, in the order
    in which engine and front end keep their caches alike. It takes whatever comes: every picture that waits for that
    thread lies there decoded. So here a prompt with media waits for its turn while it is still small, in order, and is
    refused when too many do. One without media takes no turn: its tokens are never waited for behind a picture. Who is
    aborted while it waits leaves at once; what a thread has begun it ends, for nobody.

    Args:
        max_reading: prompts with media that are read at a time.
        max_waiting: more that may wait for it.
        observe: told the seconds that each took, its wait included.
    """

    def __init__(self, max_reading: int, max_waiting: int, observe: Callable[[float], None] | None = None) -> None:
        self.max_waiting = max_waiting
        self.num_waiting = 0
        self.num_reading = 0
        self._max_reading = max_reading
        self._observe = observe
        self._turns = asyncio.Semaphore(max_reading)

    def bind(self, renderer: BaseRenderer) -> None:
        """Stand before a renderer, whoever calls it: the engine, or vLLM's handlers of chats and completions."""
        render_prompts, render_chats = renderer.render_cmpl_async, renderer.render_chat_async

        async def render_cmpl_async(prompts: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            async with self._turn(any(has_media(prompt) for prompt in prompts)) as arrived_at:
                return [_arrived(one, arrived_at) for one in await render_prompts(prompts, *args, **kwargs)]

        async def render_chat_async(conversations: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            async with self._turn(any(is_chat_with_media(chat) for chat in conversations)) as arrived_at:
                chats, prompts = await render_chats(conversations, *args, **kwargs)
                return chats, [_arrived(one, arrived_at) for one in prompts]

        renderer.render_cmpl_async, renderer.render_chat_async = render_cmpl_async, render_chat_async
        # More threads than cores that decode pictures take turns with the loop, and it waits the longer.
        if not os.environ.get("VLLM_MEDIA_LOADING_THREAD_COUNT"):
            global_thread_pool._max_workers = min(global_thread_pool._max_workers, os.cpu_count() or 1)
        # A pool starts a thread when it is given work, and the loop stands still until that runs: with all cores at
        # work on pictures, for a tenth of a second each.
        _start_threads(global_thread_pool, global_thread_pool._max_workers)
        _start_threads(renderer._executor, renderer.model_config.renderer_num_workers)

    @asynccontextmanager
    async def _turn(self, has_media: bool) -> AsyncIterator[float]:
        arrived_at = time.time()
        if not has_media:
            yield arrived_at
        else:
            await self._take_turn()
            try:
                yield arrived_at
            finally:
                self.num_reading -= 1
                self._turns.release()
        if self._observe is not None:
            self._observe(time.time() - arrived_at)

    async def _take_turn(self) -> None:
        if self._turns.locked() and self.num_waiting >= self.max_waiting:
            raise Overloaded(
                f"{self.num_waiting} prompts with media wait to be read, and no more may; try again later, or raise "
                "VLLM_OMNI_MAX_WAITING_MEDIA"
            )
        self.num_waiting += 1
        try:
            await self._turns.acquire()
        finally:
            self.num_waiting -= 1
        self.num_reading += 1


def has_media(prompt: Any) -> bool:
    """Of a prompt of vLLM's."""
    return isinstance(prompt, Mapping) and bool(prompt.get("multi_modal_data"))


def is_chat_with_media(messages: Sequence[Any]) -> bool:
    """Of a conversation in OpenAI's form: a part that is no text."""
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, str) or not isinstance(content, Sequence):
            continue
        if any(not isinstance(part, str) and not _is_text(part) for part in content):
            return True
    return False


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and "text" in str(part.get("type", "text"))


def _arrived(prompt: Any, at: float) -> Any:
    prompt["arrival_time"] = at  # upstream's is that of its turn
    return prompt


def _start_threads(pool: Executor, num_threads: int) -> None:
    barrier = Barrier(num_threads)

    def meet() -> None:
        with suppress(BrokenBarrierError):  # somebody else's work holds a thread: the others have been started
            barrier.wait(WARM_TIMEOUT_S)

    wait([pool.submit(meet) for _ in range(num_threads)])
