"""``AsyncOmni`` as vLLM's handlers of texts see it: with the arguments of a request, and errors of vLLM's classes."""

from __future__ import annotations

import copy
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, TypeVar

from vllm.exceptions import GenerationError, RetryableRequestError
from vllm.sampling_params import SamplingParams

from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.entrypoints.deadline import Deadline
from vllm_omni.errors import InvalidRequest, OmniError, Unavailable
from vllm_omni.messages.outputs import OmniRequestOutput

T = TypeVar("T")

FIELDS = ("deadline_s",)
"""Fields of requests that are no extra arguments of the engine (``vllm_xargs``), where they would have no effect."""


class EngineWithArguments:
    """``AsyncOmni`` for vLLM's handlers, which know ``EngineClient`` alone: adds arguments to every request."""

    def __init__(self, engine: AsyncOmni, deadline: Deadline, **arguments: Any) -> None:
        self.engine = engine
        self.deadline = deadline
        self.arguments = arguments

    def generate(
        self, prompt: Any, sampling_params: SamplingParams, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[OmniRequestOutput, None]:
        """Raises:
        InvalidRequest: a field of the request is among the extra arguments.
        """
        for name in FIELDS:
            if name in (sampling_params.extra_args or {}):
                raise InvalidRequest(f"{name}: a field of the request itself, not of vllm_xargs", param=name)
        kwargs |= self.arguments | {"deadline_s": self.deadline.left_s()}
        return _retryable(self.engine.generate(prompt, sampling_params, *args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


def serve_graphs(handler: Any, method: str, omni: AsyncOmni) -> None:
    """Have one of vLLM's handlers of texts run the graph that a request names as its model."""

    async def run(request: Any, *args: Any, **kwargs: Any) -> Any:
        serving = copy.copy(handler)
        graph = omni.graph_of(request.model)
        serving.engine_client = EngineWithArguments(omni, Deadline(None), modalities=("text",), graph=graph)
        return await getattr(type(handler), method)(serving, request, *args, **kwargs)

    setattr(handler, method, run)


async def _retryable(
    outputs: AsyncGenerator[OmniRequestOutput, None],
) -> AsyncGenerator[OmniRequestOutput, None]:
    """Raise what may be tried again as vLLM's own error, of which its handlers log no traceback."""
    async with aclosing(outputs):
        try:
            async for output in outputs:
                yield output
        except Unavailable as exc:
            raise RetryableRequestError(str(exc)) from exc


async def without_tracebacks(outputs: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """Raise errors of a stream as vLLM's own: its handlers leave those to ``write_end_of_stream``."""
    async with aclosing(outputs):
        try:
            async for output in outputs:
                yield output
        except OmniError as exc:
            raise GenerationError(str(exc)) from exc
