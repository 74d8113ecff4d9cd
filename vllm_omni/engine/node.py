"""``StageNode``: a stage as a node of the graph."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from contextlib import aclosing

from vllm_omni.config import StageConfig
from vllm_omni.engine.admission import AdmissionGate
from vllm_omni.errors import StageUnavailable
from vllm_omni.flow import Activation, Emission
from vllm_omni.messages.outputs import OmniRequestOutput
from vllm_omni.model_executor.pipeline import RequestContext, StageRequest
from vllm_omni.process.status import StageState, StageStatus


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
            StageFailed: the engine died, or the model failed on this request.
        """
        context: RequestContext = activation.context
        (chunks,) = activation.inputs.values()
        if self.gate is not None:
            await self.gate.enter(context.request_id)
        duration_s = 0.0  # without the time spent waiting for the next chunk
        async for chunk in chunks:
            if chunk.payload is None:
                continue
            started = time.monotonic()
            # Closing the generator waits for the engine's acknowledgement of an abort.
            async with aclosing(self.generate(chunk.payload, context, activation.wanted, chunk.seq)) as outputs:
                async for output in outputs:
                    is_last = output.finished and chunk.last
                    if is_last:
                        context.stage_durations[self.name] = duration_s + time.monotonic() - started
                    for field in activation.wanted:
                        yield Emission(field, output, last=is_last)
            duration_s += time.monotonic() - started

    @abstractmethod
    def generate(
        self, request: StageRequest, context: RequestContext, wanted: frozenset[str], seq: int = 0
    ) -> AsyncGenerator[OmniRequestOutput, None]:
        """Stream one request, as deltas; if closed early, return once the engine has dropped it.

        Args:
            wanted: fields of the graph that the call needs from this stage.
            seq: tells the request from the others of its activation.
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
