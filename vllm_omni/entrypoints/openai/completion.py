"""``POST /v1/completions``: vLLM's handler, with an SLO, a deadline, and errors in streams by their cause."""

from __future__ import annotations

import copy
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import Request
from vllm.entrypoints.openai.completion.protocol import CompletionRequest, CompletionResponse
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import GenerationError
from vllm.inputs import EngineInput

from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.entrypoints.deadline import Deadline
from vllm_omni.entrypoints.openai.arrivals import deadline_of
from vllm_omni.entrypoints.openai.engine import EngineWithArguments, without_tracebacks
from vllm_omni.entrypoints.openai.errors import write_end_of_stream
from vllm_omni.entrypoints.openai.protocol import OmniCompletionRequest
from vllm_omni.messages.outputs import OmniRequestOutput
from vllm_omni.vllm_patches import adopt


class OmniServingCompletion(OpenAIServingCompletion):
    """vLLM's completion handler; ``/invocations`` uses it, too."""

    engine_client: AsyncOmni | EngineWithArguments  # with those of the request, in the copy that serves it
    omni: AsyncOmni
    deadline = Deadline(None)  # of the request, in the copy that serves it

    @classmethod
    def of(cls, upstream: OpenAIServingCompletion, omni: AsyncOmni) -> OmniServingCompletion:
        """Make a handler with the settings of one that vLLM has made."""
        completion = adopt(cls, upstream)
        completion.engine_client = completion.omni = omni
        return completion

    async def create_completion(
        self, request: CompletionRequest, raw_request: Request | None = None
    ) -> AsyncGenerator[str, None] | CompletionResponse | ErrorResponse:
        """As upstream.

        Raises:
            InvalidRequest: an unknown field, an SLO or a deadline that cannot be honoured.
            DeadlineExceeded: the deadline passed before the reply started.
        """
        request = OmniCompletionRequest.of(request)
        request.check()
        self.omni.check_replies()
        serving = copy.copy(self)
        serving.deadline = deadline_of(request.deadline_s, raw_request)
        graph = self.omni.graph_of(request.model)
        serving.engine_client = EngineWithArguments(self.omni, serving.deadline, modalities=("text",), graph=graph)
        return await super(OmniServingCompletion, serving).create_completion(request, raw_request)

    async def render_completion_request(self, request: CompletionRequest) -> list[EngineInput] | ErrorResponse:
        """As upstream, up to the deadline."""
        async with self.deadline.limit("the reading of the prompt"):
            return await super().render_completion_request(request)

    def completion_stream_generator(
        self,
        request: CompletionRequest,
        engine_inputs: list[EngineInput],
        result_generator: AsyncGenerator[tuple[int, OmniRequestOutput], None],
        *args: Any,
        **kwargs: Any,
    ) -> AsyncGenerator[str, None]:
        """As upstream; an error ends the stream with its own status and type."""
        outputs = without_tracebacks(result_generator)
        return super().completion_stream_generator(request, engine_inputs, outputs, *args, **kwargs)

    def _convert_generation_error_to_streaming_response(self, e: GenerationError) -> str:
        return write_end_of_stream(e, "a completion")
