"""Media count as sent when a prompt with them has been sent, whatever became of the prompts before it."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.multimodal.inputs import MultiModalKwargsItem

from vllm_omni.engine.media_cache import SenderCache


class Front:
    """Renders prompts with one picture each, as vLLM's processor does."""

    def __init__(self) -> None:
        multimodal = SimpleNamespace(mm_processor_cache_gb=1)
        self.cache = SenderCache(SimpleNamespace(get_multimodal_config=lambda: multimodal))  # type: ignore[arg-type]
        self.num_processed = 0

    def render(self, *names: str) -> dict[str, Any]:
        are_cached = self.cache.is_cached(list(names))
        items = [self.look_up(name, is_cached) for name, is_cached in zip(names, are_cached, strict=True)]
        self.cache.release_sender_touches()
        return {"mm_hashes": {"image": list(names)}, "mm_kwargs": {"image": items}}

    def look_up(self, name: str, is_cached: bool) -> Any:
        self.num_processed += not is_cached
        return self.cache.get_and_update_item(None if is_cached else (MultiModalKwargsItem.dummy(), []), name)[0]


@pytest.fixture
def front() -> Front:
    return Front()


def has_data(prompt: dict[str, Any]) -> list[bool]:
    return [item is not None for item in prompt["mm_kwargs"]["image"]]


def test_media_are_sent_once(front: Front) -> None:
    first = front.render("a")
    front.cache.note_sent(first)
    del first
    assert has_data(front.render("a", "b")) == [False, True]
    assert front.num_processed == 2


def test_media_of_a_rejected_prompt_are_processed_again(front: Front) -> None:
    front.render("a")
    again = front.render("a")
    assert has_data(again) == [True]
    assert front.num_processed == 2
    front.cache.note_sent(again)
    assert has_data(front.render("a")) == [False]


def test_every_prompt_has_the_data_until_one_is_sent(front: Front) -> None:
    first, second = front.render("a"), front.render("a")
    assert has_data(first) == has_data(second) == [True]
    del first  # rejected
    third = front.render("a")
    front.cache.note_sent(second)
    assert has_data(third) == [True]
    assert has_data(front.render("a")) == [False]
    assert front.num_processed == 1


def test_a_prompt_that_is_dropped_while_another_is_processed_keeps_its_data_for_that(front: Front) -> None:
    first = front.render("a")
    assert front.cache.is_cached(["a"]) == [True]
    del first
    assert front.look_up("a", is_cached=True) is not None
    front.cache.release_sender_touches()
    assert front.cache.is_cached(["a"]) == [False]


def test_a_cleared_cache_has_nothing(front: Front) -> None:
    first = front.render("a")
    front.cache.clear_cache()
    assert has_data(front.render("a")) == has_data(first) == [True]
    assert front.num_processed == 2


def test_a_prompt_without_media_is_sent(front: Front) -> None:
    front.cache.note_sent({"type": "token", "prompt_token_ids": [1]})
