"""A pipeline of another package: a language model that continues its own text, three times in all, and two further
nodes on the same engine, one of which reviews the text while the other comments on text and review.

A seed chooses what goes wrong between two iterations, or in the review.
"""

from collections.abc import AsyncIterator, Mapping
from typing import Any

from transformers import PreTrainedConfig

from vllm_omni.errors import InvalidRequest
from vllm_omni.flow import CallInfo, Chunk, Field, Graph, Role, interface
from vllm_omni.model_executor.pipeline import Pipeline, StageRequest, StageSpec

NUM_ITERATIONS = 3
REJECTS, FAILS, TOO_LONG = 400, 500, 413
MAX_MODEL_LEN = 512


class Writer(Role):
    write = interface(
        [["prompt"], ["draft"]], {"text": Field("text", streamed=True)}, max_iterations=NUM_ITERATIONS - 1
    )
    review = interface([["text"]], {"text": Field("text", streamed=True)})
    comment = interface([["texts"]], {"text": Field("text", streamed=True)})


class LoopingPipeline(Pipeline):
    modalities = {"text": "text", "comment": "comment"}

    def __init__(self, model: str, hf_config: PreTrainedConfig, revision: str | None = None) -> None:
        self.graph = Graph("looping")
        writer = self.graph.role(Writer, "writer")
        reply = writer.write(prompt=self.graph.placeholder("prompt"))
        writer.write(draft=reply.text.via(self.again))
        review = writer.review(text=reply.text.via(self.to_review))
        comment = writer.comment(texts=review.text.via(self.to_comment))
        writer.comment(texts=reply.text.via(self.to_comment))
        self.graph.output(text=reply.text, comment=comment.text)
        self.stages = (StageSpec("writer", architecture="", output_type="text"),)

    def validate(self, options: Mapping[str, Any]) -> dict[str, Any]:
        return {}

    async def to_review(self, chunks: AsyncIterator[Chunk], call: CallInfo) -> AsyncIterator[Chunk]:
        """Two requests: the second may be longer than the model can read, when the first has been answered."""
        yield Chunk(StageRequest({"prompt_token_ids": [3]}))
        is_too_long = call.context.params["writer"].seed == TOO_LONG
        yield Chunk(StageRequest({"prompt_token_ids": [3] * (MAX_MODEL_LEN + 1 if is_too_long else 1)}), last=True)

    async def to_comment(self, chunks: AsyncIterator[Chunk], call: CallInfo) -> AsyncIterator[Chunk]:
        async for chunk in chunks:
            if chunk.payload is not None and chunk.payload.finished:
                yield Chunk(StageRequest({"prompt_token_ids": [3]}))

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
