"""``RequestProcessor``: prompts are tokenized and their media processed off the event loop, within bounds.

From: HydraInfer, section 4.1 (request processor).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Executor, wait
from contextlib import AbstractContextManager, nullcontext, suppress
from threading import Barrier, BrokenBarrierError
from typing import Any

from vllm.multimodal.media.connector import global_thread_pool
from vllm.renderers.base import BaseRenderer

from vllm_omni.engine.media_budget import MediaBudget
from vllm_omni.engine.media_connector import BudgetedConnector, video_threads
from vllm_omni.vllm_patches import limit_media_threads, replace_media_connector, wrap_renderer

WARM_TIMEOUT_S = 10.0


class RequestProcessor:
    """Bounds the work of vLLM's renderer in its threads.

    vLLM has a thread pool for tokenizing, one for opening media, and one thread that processes media for the model, in
    order, so that the caches of engine and front end agree. It accepts any number of prompts: each image that waits for
    that thread is held decoded. So media are fetched within a deadline (``BudgetedConnector``), and decoded within a
    budget of bytes, which a prompt holds until it has been processed; prompts beyond a number are rejected. A prompt
    without media is never delayed by one with media. A request that is aborted leaves at once.

    Args:
        budget: of decoded media, and of prompts.
        observe: called with the seconds that each prompt took, including its wait.
    """

    def __init__(self, budget: MediaBudget, observe: Callable[[float], None] | None = None) -> None:
        self.budget = budget
        self._observe = observe

    def bind(self, renderer: BaseRenderer) -> None:
        """Bound a renderer, whether the engine calls it or vLLM's handlers of chats and completions."""
        wrap_renderer(renderer, self._bound)
        replace_media_connector(BudgetedConnector)
        limit_media_threads()
        # A pool starts its threads when it is first given work, and the event loop waits until each runs: with all
        # cores busy decoding images, that is a tenth of a second per thread.
        for pool in (global_thread_pool, video_threads()):
            start_threads(pool, pool._max_workers)
        start_threads(renderer._executor, renderer.model_config.renderer_num_workers)

    def _bound(self, render_prompts: Any, render_chats: Any) -> tuple[Any, Any]:
        async def render_cmpl_async(prompts: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            arrived_at = time.time()
            with self._reading(any(has_media(prompt) for prompt in prompts)):
                rendered = await render_prompts(prompts, *args, **kwargs)
            return self._note_read(rendered, arrived_at)

        async def render_chat_async(conversations: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            arrived_at = time.time()

            async def render(chat: Any) -> Any:
                with self._reading(is_chat_with_media(chat)):
                    return await render_chats([chat], *args, **kwargs)

            # One by one: together, they may need more than the whole budget.
            rendered = await _gather(render(chat) for chat in conversations)
            prompts = [prompt for _, prompts in rendered for prompt in prompts]
            return [chat for chats, _ in rendered for chat in chats], self._note_read(prompts, arrived_at)

        return render_cmpl_async, render_chat_async

    def _reading(self, has_media: bool) -> AbstractContextManager[Any]:
        return self.budget.hold() if has_media else nullcontext()

    def _note_read(self, prompts: list[Any], arrived_at: float) -> list[Any]:
        for prompt in prompts:
            prompt["arrival_time"] = arrived_at  # upstream's is the time at which it got its slot
        if self._observe is not None:
            self._observe(time.time() - arrived_at)
        return prompts


async def _gather(calls: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Run calls at once; when one fails, the others are cancelled."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


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


def start_threads(pool: Executor, num_threads: int) -> None:
    barrier = Barrier(num_threads)

    def meet() -> None:
        with suppress(BrokenBarrierError):  # other work occupies a thread: the others have been started
            barrier.wait(WARM_TIMEOUT_S)

    wait([pool.submit(meet) for _ in range(num_threads)])
