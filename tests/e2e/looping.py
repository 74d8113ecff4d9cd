"""A pipeline of another package: a language model that continues its own text, three times in all.

A seed chooses what goes wrong between two iterations.
"""

from collections.abc import AsyncIterator, Mapping
from typing import Any

from transformers import PreTrainedConfig

from vllm_omni.errors import InvalidRequest
from vllm_omni.flow import CallInfo, Chunk, Field, Graph, Role, interface
from vllm_omni.model_executor.pipeline import Pipeline, StageRequest, StageSpec

NUM_ITERATIONS = 3
REJECTS, FAILS = 400, 500


class Writer(Role):
    write = interface(
        [["prompt"], ["draft"]], {"text": Field("text", streamed=True)}, max_iterations=NUM_ITERATIONS - 1
    )


class LoopingPipeline(Pipeline):
    modalities = {"text": "text"}

    def __init__(self, model: str, hf_config: PreTrainedConfig, revision: str | None = None) -> None:
        self.graph = Graph("looping")
        writer = self.graph.role(Writer, "writer")
        reply = writer.write(prompt=self.graph.placeholder("prompt"))
        writer.write(draft=reply.text.via(self.again))
        self.graph.output(text=reply.text)
        self.stages = (StageSpec("writer", architecture="", output_type="text"),)

    def validate(self, options: Mapping[str, Any]) -> dict[str, Any]:
        return {}

    async def again(self, chunks: AsyncIterator[Chunk], call: CallInfo) -> AsyncIterator[Chunk]:
        ids: list[int] = []
        async for chunk in chunks:
            if chunk.payload is not None:
                ids = ids or list(chunk.payload.prompt_token_ids)
                ids += chunk.payload.outputs[0].token_ids
        seed = call.context.params["writer"].seed
        if seed == REJECTS:
            raise InvalidRequest("the draft is bad")
        if seed == FAILS:
            raise KeyError("draft")
        yield Chunk(StageRequest({"prompt_token_ids": ids}), last=True)
