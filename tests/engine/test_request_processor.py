"""A bounded number of prompts with media is read at a time; prompts without media do not wait."""

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
    """A renderer that reads until the test releases it."""

    def __init__(self) -> None:
        self.model_config = SimpleNamespace(renderer_num_workers=1)
        self._executor = ThreadPoolExecutor(1)
        self.released = asyncio.Event()
        self.started: list[Any] = []
        self.num_at_once = 0
        self.most_at_once = 0

    async def render_cmpl_async(self, prompts: list[Any]) -> list[dict[str, Any]]:
        self.started += prompts
        self.num_at_once += 1
        self.most_at_once = max(self.most_at_once, self.num_at_once)
        try:
            await self.released.wait()
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


async def test_a_bounded_number_is_read_at_a_time_in_order_of_arrival() -> None:
    renderer, processor = bind(2, 10)
    prompts = [{**IMAGE, "prompt": str(number)} for number in range(5)]
    tasks = [asyncio.ensure_future(renderer.render_cmpl_async([one])) for one in prompts]
    await settle()
    assert (processor.num_reading, processor.num_waiting) == (2, 3)
    renderer.released.set()
    await asyncio.gather(*tasks)
    assert renderer.started == prompts and renderer.most_at_once == 2
    assert (processor.num_reading, processor.num_waiting) == (0, 0)


async def test_a_text_is_read_at_once() -> None:
    renderer, processor = bind(1, 10)
    images = [asyncio.ensure_future(renderer.render_chat_async([CHAT])) for _ in range(3)]
    await settle()
    texts = [
        asyncio.ensure_future(renderer.render_cmpl_async([TEXT])),
        asyncio.ensure_future(renderer.render_chat_async([CHAT_OF_TEXT])),
    ]
    await settle()
    assert renderer.started == [CHAT, TEXT, CHAT_OF_TEXT]
    renderer.released.set()
    await asyncio.gather(*images, *texts)
    assert processor.num_waiting == 0


async def test_a_prompt_beyond_the_limit_is_rejected_and_can_be_tried_again() -> None:
    renderer, processor = bind(1, 1)
    held = [asyncio.ensure_future(renderer.render_cmpl_async([IMAGE])) for _ in range(2)]
    await settle()
    with pytest.raises(Overloaded, match="1 prompts with media wait to be read") as rejected:
        await renderer.render_cmpl_async([IMAGE])
    with pytest.raises(Overloaded):  # not the prompt's fault
        rejection(rejected.value)
    renderer.released.set()
    await asyncio.gather(*held)
    await renderer.render_cmpl_async([IMAGE])
    assert processor.num_reading == 0


async def test_an_aborted_prompt_frees_its_slot() -> None:
    renderer, processor = bind(1, 10)
    read, waits, last = (asyncio.ensure_future(renderer.render_cmpl_async([IMAGE])) for _ in range(3))
    await settle()
    waits.cancel()
    await settle()
    assert (processor.num_reading, processor.num_waiting) == (1, 1)
    read.cancel()
    await settle()
    assert len(renderer.started) == 2  # the slot passes to the last
    renderer.released.set()
    await last
    assert (processor.num_reading, processor.num_waiting) == (0, 0)


async def test_the_arrival_time_includes_the_wait() -> None:
    observed: list[float] = []
    renderer, _ = bind(1, 10, observed)
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
