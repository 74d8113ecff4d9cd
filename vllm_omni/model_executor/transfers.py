"""Transfer functions that pipelines share."""

from __future__ import annotations

from collections.abc import AsyncIterator

from vllm_omni.flow import CallInfo, Chunk, TransferFunction
from vllm_omni.messages.payload import encode
from vllm_omni.model_executor.pipeline import StageRequest


def pass_tensors(prompt: str = "", **inputs: str) -> TransferFunction:
    """Hand what a stage has published to a diffusion stage, which pulls it: one request, when the stage has ended.

    Args:
        prompt: the text that goes with them.
        inputs: argument of the target's pipeline, or ``image`` -> its key in what the source publishes:
            ``prompt_embeds="rows"`` of a language model, ``image="images"`` of a diffusion stage.
    """

    async def transfer(chunks: AsyncIterator[Chunk], call: CallInfo) -> AsyncIterator[Chunk]:
        payloads = [
            encode(payload)
            async for chunk in chunks
            if chunk.payload is not None
            for payload in chunk.payload.payloads
            if payload.tensors
        ]
        if payloads:
            yield Chunk(StageRequest(prompt, {"payloads": payloads, "inputs": inputs}), last=True)

    transfer.__qualname__ = "pass_tensors"
    return transfer
