"""``FunctionNode``: a coroutine of the pipeline as a node of the graph."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator

from vllm_omni.engine.node import ServedNode, closed_at_end
from vllm_omni.errors import StageFailed
from vllm_omni.flow import Activation, Yield
from vllm_omni.model_executor.pipeline import FunctionSpec, RequestContext
from vllm_omni.process.status import StageStatus

logger = logging.getLogger(__name__)


class FunctionNode(ServedNode):
    """Runs a function of the pipeline on the front end's event loop.

    It is part of the graph as a stage is: a pause holds it back, an abort or a deadline cancels it, its error fails the
    request alone, and its time is among the request's ``stage_durations``.
    """

    def __init__(self, spec: FunctionSpec) -> None:
        self.name = spec.name
        self._spec = spec
        self.num_runs = self.num_failed = 0

    async def forward(self, activation: Activation) -> AsyncGenerator[Yield, None]:
        """Run the function once.

        Raises:
            StageFailed: it raised, whatever it was: it is not the client's.
            Exception: its input broke off with this error of an earlier stage.
        """
        context: RequestContext = activation.context
        await self.enter(context)
        started = time.monotonic()
        try:
            async with closed_at_end(self._spec.forward(activation)) as emissions:
                async for emission in emissions:
                    yield emission
        except Exception as exc:
            if activation.is_of_producer(exc):
                raise
            self.num_failed += 1
            logger.exception("request %s: function %s failed", context.request_id, self.name)
            raise StageFailed(self.name, f"the pipeline's function failed: {exc!r}") from exc
        finally:
            self.num_runs += 1
            context.add_duration(self.name, time.monotonic() - started)

    def current_status(self) -> StageStatus:
        return StageStatus()
