"""What a chat answer has beside its text: images, and the texts of further stages."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from vllm_omni.entrypoints.openai.images import data_url
from vllm_omni.media.image import IMAGE_FORMATS, to_image
from vllm_omni.messages.outputs import OmniRequestOutput

FORMAT = IMAGE_FORMATS["png"]


class AnswerMedia:
    """Collects the parts of one answer, as fields of its message: ``images`` and ``texts``.

    Args:
        modalities: those that the request asks for, and their kinds.
    """

    def __init__(self, modalities: Mapping[str, str]) -> None:
        images = {name for name, kind in modalities.items() if kind == "image"}
        self._names = modalities.keys() - {"text", "audio"} - images
        self._wants_images = bool(images)
        self.fields: dict[str, Any] = {}
        if self._wants_images:
            self.fields["images"] = []
        if self._names:
            self.fields["texts"] = dict.fromkeys(sorted(self._names), "")

    async def read(self, output: OmniRequestOutput) -> dict[str, Any]:
        """Add what an output has; returns it, as the fields of a delta."""
        delta: dict[str, Any] = {}
        for key, pixels in output.multimodal_output.items() if self._wants_images else ():
            name, _, value = key.rpartition(".")
            offsets = output.multimodal_output.get("text_offsets", ())  # of an answer with several texts
            for place, one in enumerate(pixels) if value == "images" else ():
                url = await asyncio.to_thread(data_url, to_image(one), FORMAT)
                # Clients that join the deltas of a stream find an item by its index.
                item = {"index": len(self.fields["images"]), "type": "image_url", "image_url": {"url": url}}
                item |= {"name": name} if name else {}
                self.fields["images"].append(item | ({"text_offset": offsets[place]} if offsets else {}))
                delta.setdefault("images", []).append(self.fields["images"][-1])
        texts = {name: output.multimodal_output[name] for name in self._names if output.multimodal_output.get(name)}
        if texts:
            delta["texts"] = texts
            for name, text in texts.items():
                self.fields["texts"][name] += text
        return delta
