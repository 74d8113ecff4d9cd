"""What a chat answer has beside its text: images, and the texts of further stages."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from vllm_omni.entrypoints.openai.images import data_url
from vllm_omni.media.image import IMAGE_FORMATS
from vllm_omni.messages.outputs import OmniRequestOutput

FORMAT = IMAGE_FORMATS["png"]


class AnswerMedia:
    """Collects the parts of one answer, as fields of its message: ``images`` and ``texts``.

    Args:
        modalities: those that the request asks for.
    """

    def __init__(self, modalities: Iterable[str]) -> None:
        self._names = set(modalities) - {"text", "audio", "image"}
        self._wants_images = "image" in modalities
        self.fields: dict[str, Any] = {}
        if self._wants_images:
            self.fields["images"] = []
        if self._names:
            self.fields["texts"] = dict.fromkeys(sorted(self._names), "")

    async def read(self, output: OmniRequestOutput) -> dict[str, Any]:
        """Add what an output has; returns it, as the fields of a delta."""
        delta: dict[str, Any] = {}
        if self._wants_images and (images := output.images):
            urls = [await asyncio.to_thread(data_url, image, FORMAT) for image in images]
            # Clients that join the deltas of a stream find an item by its index.
            first = len(self.fields["images"])
            delta["images"] = [
                {"index": index, "type": "image_url", "image_url": {"url": url}}
                for index, url in enumerate(urls, first)
            ]
            self.fields["images"] += delta["images"]
        texts = {name: output.multimodal_output[name] for name in self._names if output.multimodal_output.get(name)}
        if texts:
            delta["texts"] = texts
            for name, text in texts.items():
                self.fields["texts"][name] += text
        return delta
