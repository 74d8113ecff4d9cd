"""``SenderCache``: which media the engine has been sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import ref

from vllm.config import ModelConfig
from vllm.multimodal.cache import LruKeyReplicatedSenderCache
from vllm.multimodal.inputs import MultiModalKwargsItem


class SenderCache(LruKeyReplicatedSenderCache):
    """vLLM's record of the media that an engine has, so that they are sent once.

    Upstream takes media for sent as soon as they have been processed. But a prompt may be rejected after that, or
    aborted while it waits, and another with the same media may be sent before it: a request without data for an engine
    that has none fails. Here each prompt gets the data until one has been sent; once every prompt that has them is
    gone, the media are processed again.

    vLLM calls it from the one thread that processes media; ``note_sent`` is called from the event loop.
    """

    def __init__(self, model_config: ModelConfig) -> None:
        super().__init__(model_config)
        self._unsent: dict[str, ref[MultiModalKwargsItem]] = {}  # alive as long as a prompt has the item
        self._kept: list[MultiModalKwargsItem] = []  # of the prompt that is being processed

    def note_sent(self, prompt: Any) -> None:
        """Note that the engine has been sent a rendered prompt."""
        kwargs: Mapping[str, Any] = prompt.get("mm_kwargs") or {}
        for modality, names in (prompt.get("mm_hashes") or {}).items():
            for name, item in zip(names, kwargs[modality], strict=True):
                if item is not None:
                    self._unsent.pop(name, None)

    def is_cached(self, mm_hashes: list[str]) -> list[bool]:
        unsent = {name: item() for name, item in list(self._unsent.items())}
        for name, item in unsent.items():
            if item is None:
                self.invalidate(name)
        self._kept += [item for name in mm_hashes if (item := unsent.get(name)) is not None]
        cached: list[bool] = super().is_cached(mm_hashes)
        return cached

    def get_and_update_item(self, mm_item: Any, mm_hash: str) -> Any:
        item, updates = super().get_and_update_item(mm_item, mm_hash)
        if item is not None:
            self._unsent[mm_hash] = ref(item)
        elif (unsent := self._unsent.get(mm_hash)) is not None:
            item = unsent()
        return item, updates

    def release_sender_touches(self) -> None:
        """As upstream, which calls it once a prompt's media have been looked up."""
        self._kept.clear()

    def invalidate(self, mm_hash: str) -> None:
        super().invalidate(mm_hash)
        self._unsent.pop(mm_hash, None)

    def clear_cache(self) -> None:
        super().clear_cache()
        self._unsent.clear()
