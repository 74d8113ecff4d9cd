"""``StageNode``: a stage as a node of the graph."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from contextlib import aclosing

from vllm_omni.config import StageConfig
from vllm_omni.engine.admission import AdmissionGate
from vllm_omni.errors import StageFailed, StageUnavailable
from vllm_omni.flow import Activation, Chunk, Emission
from vllm_omni.flow.run.frame import ITERATION
from vllm_omni.messages.outputs import OmniRequestOutput
from vllm_omni.model_executor.pipeline import RequestContext, StageRequest
from vllm_omni.process.status import StageState, StageStatus

logger = logging.getLogger(__name__)


class StageNode(ABC):
    """One engine, or a group of instances."""

    config: StageConfig
    name: str  # the stage's name, or that of one instance: "thinker/PD0"
    gate: AdmissionGate | None = None  # of the first stage

    async def forward(self, activation: Activation) -> AsyncGenerator[Emission, None]:
        """Run one activation: each chunk of its input is a request, in order; outputs go to every wanted field.

        An input without a chunk (a branch that has nothing to say) yields nothing. Cancelling aborts the request.

        Raises:
            InvalidRequest: the engine rejected the request.
            StageFailed: the engine died, the model failed on this request, or its request could not be made.
            Exception: the input broke off with this error of an earlier stage.
        """
        context: RequestContext = activation.context
        place = "".join("+" if key >= ITERATION else f".{key}" for key in activation.path)
        if self.gate is not None:
            await self.gate.enter(context.request_id)
        duration_s = 0.0  # without the time spent waiting for the next chunk
        while (chunk := await self._next(activation)) is not None:
            if chunk.payload is None:
                continue
            started = time.monotonic()
            suffix = f"{place}-{chunk.seq}" if chunk.seq else place
            # Closing the generator waits for the engine's acknowledgement of an abort.
            async with aclosing(self.generate(chunk.payload, context, activation.wanted, suffix)) as outputs:
                async for output in outputs:
                    is_last = output.finished and chunk.last
                    if is_last:
                        context.add_duration(self.name, duration_s + time.monotonic() - started)
                    for field in activation.wanted:
                        yield Emission(field, output, last=is_last)
            if chunk.last:
                return
            duration_s += time.monotonic() - started
        if duration_s:
            context.add_duration(self.name, duration_s)

    async def _next(self, activation: Activation) -> Chunk | None:
        """The next request, as the edge's transfer function makes it; None at the end.

        Raises:
            StageFailed: the transfer function raised, whatever it was: it is not the client's.
            Exception: the error of an earlier stage, which ended its stream.
        """
        (chunks,) = activation.inputs.values()
        try:
            return await anext(chunks)
        except StopAsyncIteration:
            return None
        except Exception as exc:
            if activation.is_of_producer(exc):
                raise
            request_id = activation.context.request_id
            logger.exception("request %s: the request to stage %s could not be made", request_id, self.name)
            raise StageFailed(self.name, f"its request could not be made: {exc!r}") from exc

    @abstractmethod
    def generate(
        self, request: StageRequest, context: RequestContext, wanted: frozenset[str], suffix: str = ""
    ) -> AsyncGenerator[OmniRequestOutput, None]:
        """Stream one request, as deltas; if closed early, return once the engine has dropped it.

        Args:
            wanted: fields of the graph that the call needs from this stage.
            suffix: distinguishes the request from others of the call in the engine's request id.
        """

    @abstractmethod
    def current_status(self) -> StageStatus:
        """The status of the stage as a whole."""

    def check_health(self) -> None:
        """Raises:
        StageUnavailable: the stage can serve no request: it is being restarted, or could not be.
        """
        status = self.current_status()
        if status.state is not StageState.RUNNING:
            raise StageUnavailable(self.name, f"{status.state}: {status.reason}")
