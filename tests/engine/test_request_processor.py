"""Prompts with media take turns to be read; those without do not wait."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_omni.engine.rejection import rejection
from vllm_omni.engine.request_processor import RequestProcessor, has_media, is_chat_with_media, start_threads
from vllm_omni.errors import Overloaded

IMAGE = {"prompt": "<image>", "multi_modal_data": {"image": object()}}
TEXT = {"prompt": "a text"}
CHAT = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}, {"type": "text"}]}]
CHAT_OF_TEXT = [{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}, {"role": "user", "content": "c"}]


class Renderer:
    """Reads as long as the test wants."""

    def __init__(self) -> None:
        self.model_config = SimpleNamespace(renderer_num_workers=1)
        self._executor = ThreadPoolExecutor(1)
        self.go_on = asyncio.Event()
        self.begun: list[Any] = []
        self.num_at_once = 0
        self.most_at_once = 0

    async def render_cmpl_async(self, prompts: list[Any]) -> list[dict[str, Any]]:
        self.begun += prompts
        self.num_at_once += 1
        self.most_at_once = max(self.most_at_once, self.num_at_once)
        try:
            await self.go_on.wait()
        finally:
            self.num_at_once -= 1
        return [{"type": "token", "arrival_time": time.time()} for _ in prompts]

    async def render_chat_async(self, conversations: list[Any]) -> tuple[list[Any], list[dict[str, Any]]]:
        return conversations, await self.render_cmpl_async(conversations)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def bind(max_reading: int, max_waiting: int, observed: list[float] | None = None) -> tuple[Renderer, RequestProcessor]:
    renderer = Renderer()
    observe = None if observed is None else observed.append
    processor = RequestProcessor(max_reading, max_waiting, observe)
    processor.bind(renderer)  # type: ignore[arg-type]
    return renderer, processor


async def test_so_many_are_read_at_a_time_in_the_order_of_their_arrival() -> None:
    renderer, processor = bind(2, 10)
    prompts = [{**IMAGE, "prompt": str(number)} for number in range(5)]
    tasks = [asyncio.ensure_future(renderer.render_cmpl_async([one])) for one in prompts]
    await settle()
    assert (processor.num_reading, processor.num_waiting) == (2, 3)
    renderer.go_on.set()
    await asyncio.gather(*tasks)
    assert renderer.begun == prompts and renderer.most_at_once == 2
    assert (processor.num_reading, processor.num_waiting) == (0, 0)


async def test_a_text_is_read_at_once_whatever_waits() -> None:
    renderer, processor = bind(1, 10)
    images = [asyncio.ensure_future(renderer.render_chat_async([CHAT])) for _ in range(3)]
    await settle()
    texts = [
        asyncio.ensure_future(renderer.render_cmpl_async([TEXT])),
        asyncio.ensure_future(renderer.render_chat_async([CHAT_OF_TEXT])),
    ]
    await settle()
    assert renderer.begun == [CHAT, TEXT, CHAT_OF_TEXT]
    renderer.go_on.set()
    await asyncio.gather(*images, *texts)
    assert processor.num_waiting == 0


async def test_one_more_than_may_wait_is_refused_and_can_be_tried_again() -> None:
    renderer, processor = bind(1, 1)
    held = [asyncio.ensure_future(renderer.render_cmpl_async([IMAGE])) for _ in range(2)]
    await settle()
    with pytest.raises(Overloaded, match="1 prompts with media wait to be read") as refused:
        await renderer.render_cmpl_async([IMAGE])
    with pytest.raises(Overloaded):  # not the prompt's fault
        rejection(refused.value)
    renderer.go_on.set()
    await asyncio.gather(*held)
    await renderer.render_cmpl_async([IMAGE])
    assert processor.num_reading == 0


async def test_who_is_aborted_leaves_whether_it_waits_or_is_read() -> None:
    renderer, processor = bind(1, 10)
    read, waits, last = (asyncio.ensure_future(renderer.render_cmpl_async([IMAGE])) for _ in range(3))
    await settle()
    waits.cancel()
    await settle()
    assert (processor.num_reading, processor.num_waiting) == (1, 1)
    read.cancel()
    await settle()
    assert len(renderer.begun) == 2  # the turn goes on to the last
    renderer.go_on.set()
    await last
    assert (processor.num_reading, processor.num_waiting) == (0, 0)


async def test_a_prompt_has_arrived_when_it_came_and_not_when_it_had_its_turn() -> None:
    observed: list[float] = []
    renderer, _ = bind(1, 10, observed)
    before = time.time()
    tasks = [asyncio.ensure_future(renderer.render_cmpl_async([IMAGE])) for _ in range(2)]
    await settle()
    after = time.time()
    renderer.go_on.set()
    for (prompt,) in await asyncio.gather(*tasks):
        assert before <= prompt["arrival_time"] <= after
    assert len(observed) == 2


def test_what_has_media() -> None:
    assert has_media(IMAGE) and not has_media(TEXT) and not has_media("a text") and not has_media([1, 2])
    assert is_chat_with_media(CHAT) and not is_chat_with_media(CHAT_OF_TEXT)
    assert is_chat_with_media([{"role": "user", "content": [{"type": "input_audio"}]}])
    assert not is_chat_with_media([{"role": "assistant", "content": None}])


def test_every_thread_of_a_pool_is_started() -> None:
    with ThreadPoolExecutor(3, thread_name_prefix="started-here") as pool:
        start_threads(pool, 3)
        assert sum(thread.name.startswith("started-here") for thread in threading.enumerate()) == 3
