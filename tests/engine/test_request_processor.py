"""Prompts with media are counted and hold a budget while they are read; prompts without media do not wait."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_omni.engine.media_budget import HOLDING, MediaBudget
from vllm_omni.engine.rejection import rejection
from vllm_omni.engine.request_processor import RequestProcessor, has_media, is_chat_with_media, start_threads
from vllm_omni.errors import InvalidRequest, Overloaded

IMAGE = {"prompt": "<image>", "multi_modal_data": {"image": object()}}
TEXT = {"prompt": "a text"}
CHAT = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}, {"type": "text"}]}]
CHAT_OF_TEXT = [{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}, {"role": "user", "content": "c"}]


class Renderer:
    """A renderer that reads until the test releases it."""

    def __init__(self) -> None:
        self.model_config = SimpleNamespace(renderer_num_workers=1)
        self._executor = ThreadPoolExecutor(1)
        self.released = asyncio.Event()
        self.started: list[Any] = []
        self.num_bytes = 0  # of the media of a prompt

    async def render_cmpl_async(self, prompts: list[Any]) -> list[dict[str, Any]]:
        self.started += prompts
        if (holding := HOLDING.get()) is not None:
            await holding.budget.reserve(holding, self.num_bytes)
        await self.released.wait()
        return [{"type": "token", "arrival_time": time.time()} for _ in prompts]

    async def render_chat_async(self, conversations: list[Any]) -> tuple[list[Any], list[dict[str, Any]]]:
        return conversations, await self.render_cmpl_async(conversations)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def bind(max_prompts: int, observed: list[float] | None = None) -> tuple[Renderer, RequestProcessor]:
    renderer = Renderer()
    observe = None if observed is None else observed.append
    processor = RequestProcessor(MediaBudget(100, max_prompts), observe)
    processor.bind(renderer)  # type: ignore[arg-type]
    return renderer, processor


async def test_a_text_is_read_however_many_media_are() -> None:
    renderer, processor = bind(2)
    images = [asyncio.ensure_future(renderer.render_chat_async([CHAT])) for _ in range(2)]
    await settle()
    texts = [
        asyncio.ensure_future(renderer.render_cmpl_async([TEXT])),
        asyncio.ensure_future(renderer.render_chat_async([CHAT_OF_TEXT])),
    ]
    await settle()
    assert renderer.started == [CHAT, CHAT, TEXT, CHAT_OF_TEXT]
    renderer.released.set()
    await asyncio.gather(*images, *texts)
    assert processor.budget.num_prompts == 0


async def test_a_prompt_beyond_the_limit_is_rejected_and_can_be_tried_again() -> None:
    renderer, processor = bind(2)
    held = [asyncio.ensure_future(renderer.render_cmpl_async([IMAGE])) for _ in range(2)]
    await settle()
    with pytest.raises(Overloaded, match="2 prompts with media are being read") as rejected:
        await renderer.render_cmpl_async([IMAGE])
    with pytest.raises(Overloaded):  # not the prompt's fault
        rejection(rejected.value)
    renderer.released.set()
    await asyncio.gather(*held)
    await renderer.render_cmpl_async([IMAGE])
    assert processor.budget.num_prompts == 0


async def test_what_a_prompt_holds_is_released_at_its_end_and_when_it_is_aborted() -> None:
    renderer, processor = bind(10)
    renderer.num_bytes = 60
    tasks = [asyncio.ensure_future(renderer.render_chat_async([CHAT])) for _ in range(3)]
    await settle()
    assert processor.budget.num_held_bytes == 60
    tasks[0].cancel()
    await settle()
    assert (processor.budget.num_prompts, processor.budget.num_held_bytes) == (2, 60)
    renderer.released.set()
    await asyncio.gather(*tasks[1:])
    assert (processor.budget.num_prompts, processor.budget.num_held_bytes) == (0, 0)


async def test_conversations_of_one_call_hold_their_own_parts_and_fail_together() -> None:
    renderer, processor = bind(10)
    renderer.num_bytes = 60
    renderer.released.set()
    chats, prompts = await renderer.render_chat_async([CHAT, CHAT_OF_TEXT, CHAT])  # 180 of 100 bytes
    assert chats == [CHAT, CHAT_OF_TEXT, CHAT] and len(prompts) == 3
    renderer.released.clear()
    renderer.num_bytes = 101
    with pytest.raises(InvalidRequest, match="at most 100 are possible"):
        await renderer.render_chat_async([CHAT, CHAT])
    assert (processor.budget.num_prompts, processor.budget.num_held_bytes) == (0, 0)


async def test_the_time_that_a_prompt_took_includes_its_wait() -> None:
    observed: list[float] = []
    renderer, _ = bind(10, observed)
    renderer.num_bytes = 60
    before = time.time()
    tasks = [asyncio.ensure_future(renderer.render_cmpl_async([IMAGE])) for _ in range(2)]
    await settle()
    after = time.time()
    renderer.released.set()
    for (prompt,) in await asyncio.gather(*tasks):
        assert before <= prompt["arrival_time"] <= after
    assert len(observed) == 2


def test_prompts_with_media_are_recognized() -> None:
    assert has_media(IMAGE) and not has_media(TEXT) and not has_media("a text") and not has_media([1, 2])
    assert is_chat_with_media(CHAT) and not is_chat_with_media(CHAT_OF_TEXT)
    assert is_chat_with_media([{"role": "user", "content": [{"type": "input_audio"}]}])
    assert not is_chat_with_media([{"role": "assistant", "content": None}])


def test_every_thread_of_a_pool_is_started() -> None:
    with ThreadPoolExecutor(3, thread_name_prefix="started-here") as pool:
        start_threads(pool, 3)
        assert sum(thread.name.startswith("started-here") for thread in threading.enumerate()) == 3
