"""``RequestProcessor``: prompts are tokenized and their media processed off the event loop, within bounds.

From: HydraInfer, section 4.1 (request processor).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, wait
from contextlib import contextmanager, suppress
from threading import Barrier, BrokenBarrierError
from typing import Any

from vllm.multimodal.media.connector import global_thread_pool
from vllm.renderers.base import BaseRenderer

from vllm_omni.engine.media_budget import MediaBudget
from vllm_omni.engine.media_connector import BudgetedConnector
from vllm_omni.errors import Overloaded
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
        budget: of decoded media.
        max_prompts: with media, that are fetched, wait or are read at a time.
        observe: called with the seconds that each prompt took, including its wait.
    """

    def __init__(self, budget: MediaBudget, max_prompts: int, observe: Callable[[float], None] | None = None) -> None:
        self.budget = budget
        self.max_prompts = max_prompts
        self.num_prompts = 0
        self._observe = observe

    def bind(self, renderer: BaseRenderer) -> None:
        """Bound a renderer, whether the engine calls it or vLLM's handlers of chats and completions."""
        wrap_renderer(renderer, self._bound)
        replace_media_connector(BudgetedConnector)
        limit_media_threads()
        # A pool starts its threads when it is first given work, and the event loop waits until each runs: with all
        # cores busy decoding images, that is a tenth of a second per thread.
        start_threads(global_thread_pool, global_thread_pool._max_workers)
        start_threads(renderer._executor, renderer.model_config.renderer_num_workers)

    def _bound(self, render_prompts: Any, render_chats: Any) -> tuple[Any, Any]:
        async def render_cmpl_async(prompts: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            with self._reading(any(has_media(prompt) for prompt in prompts)) as arrived_at:
                return [_set_arrival(one, arrived_at) for one in await render_prompts(prompts, *args, **kwargs)]

        async def render_chat_async(conversations: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            async def render(chats: Sequence[Any]) -> Any:
                with self.budget.hold():
                    return await render_chats(chats, *args, **kwargs)

            have_media = any(is_chat_with_media(chat) for chat in conversations)
            with self._reading(have_media) as arrived_at:
                # One by one: together, they may need more than the whole budget.
                calls = [[chat] for chat in conversations] if have_media else [conversations]
                rendered = await _gather(render(chats) for chats in calls)
                prompts = [_set_arrival(one, arrived_at) for _, prompts in rendered for one in prompts]
                return [chat for chats, _ in rendered for chat in chats], prompts

        return render_cmpl_async, render_chat_async

    @contextmanager
    def _reading(self, has_media: bool) -> Iterator[float]:
        arrived_at = time.time()
        if not has_media:
            yield arrived_at
        else:
            if self.num_prompts >= self.max_prompts:
                raise Overloaded(
                    f"{self.num_prompts} prompts with media are being read, which is the limit; try again later, or "
                    "raise VLLM_OMNI_MAX_WAITING_MEDIA"
                )
            self.num_prompts += 1
            try:
                yield arrived_at
            finally:
                self.num_prompts -= 1
        if self._observe is not None:
            self._observe(time.time() - arrived_at)


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


def _set_arrival(prompt: Any, at: float) -> Any:
    prompt["arrival_time"] = at  # upstream's is the time at which it got its slot
    return prompt


def start_threads(pool: Executor, num_threads: int) -> None:
    barrier = Barrier(num_threads)

    def meet() -> None:
        with suppress(BrokenBarrierError):  # other work occupies a thread: the others have been started
            barrier.wait(WARM_TIMEOUT_S)

    wait([pool.submit(meet) for _ in range(num_threads)])
