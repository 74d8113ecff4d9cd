"""Transfer functions that pipelines share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from vllm_omni.flow import CallInfo, Chunk
from vllm_omni.messages.payload import encode
from vllm_omni.model_executor.pipeline import StageRequest


class pass_tensors:
    """Hand what a stage has published to a diffusion stage, which pulls it: one request, when the stage has ended.

    ``StageSpec.combine`` may call it for one of several fields.

    Args:
        prompt: goes with them: a text, or what else a diffusion stage reads.
        inputs: argument of the target's pipeline, or ``image`` -> its key in what the source publishes:
            ``prompt_embeds="rows"`` of a language model, ``image="images"`` of a diffusion stage.
    """

    def __init__(self, prompt: Any = "", **inputs: str) -> None:
        self._prompt = prompt
        self._inputs = inputs
        self.__qualname__ = "pass_tensors"

    async def __call__(self, chunks: AsyncIterator[Chunk], call: CallInfo | None = None) -> AsyncIterator[Chunk]:
        payloads = [
            encode(payload)
            async for chunk in chunks
            if chunk.payload is not None
            for payload in chunk.payload.payloads
            if payload.tensors
        ]
        if payloads:
            yield Chunk(StageRequest(self._prompt, {"payloads": payloads, "inputs": self._inputs}), last=True)


async def pass_cache(chunks: AsyncIterator[Chunk], call: CallInfo | None = None) -> AsyncIterator[Chunk]:
    """Hand the KV cache of a stage's prompt to a stage that continues behind it: one request with the same prompt.

    The stage pulls the pages and computes what it cannot pull. The field is one of ``StageSpec.cache_fields``.
    """
    async for chunk in chunks:
        if chunk.payload is not None and (cache := chunk.payload.prompt_cache) is not None:
            yield Chunk(StageRequest(cache.prompt, cache=cache.pages), last=True)
