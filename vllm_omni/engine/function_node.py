"""``FunctionNode``: a coroutine of the pipeline as a node of the graph."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator

from vllm_omni.engine.edge_spans import edge_spans
from vllm_omni.engine.function_messages import name_of
from vllm_omni.engine.function_process import FunctionProcess
from vllm_omni.engine.node import ServedNode, closed_at_end
from vllm_omni.errors import StageFailed, StageUnavailable
from vllm_omni.flow import Activation, Yield
from vllm_omni.messages.report import NodeReport
from vllm_omni.messages.span import Span, SpanKind, new_span_id
from vllm_omni.model_executor.pipeline import FunctionSpec, RequestContext
from vllm_omni.process.status import StageState, StageStatus

logger = logging.getLogger(__name__)

CODEC = "vllm_omni.engine.wire:ServedPayloads"


class FunctionNode(ServedNode):
    """Runs a function of the pipeline: on the front end's event loop, or in processes of its own.

    It is part of the graph as a stage is: a pause holds it back, an abort or a deadline cancels it, its error fails the
    request alone, and its time is among the request's ``stage_durations``.

    Of a run in another process only inputs and yields travel; the node's controller stays in the front end. So a
    function that computes holds up neither frames nor aborts.

    Args:
        codec: the name of the ``PayloadCodec`` of what its processes read and yield.

    Attributes:
        processes: its own, which the orchestrator starts; empty: it runs in the front end.
    """

    def __init__(self, spec: FunctionSpec, codec: str = CODEC) -> None:
        self.name = spec.name
        self._spec = spec
        self.num_runs = self.num_failed = 0
        names = [spec.name] if spec.processes == 1 else [f"{spec.name}/{number}" for number in range(spec.processes)]
        self.processes = [FunctionProcess(name, name_of(spec.forward), codec) for name in names]

    async def forward(self, activation: Activation) -> AsyncGenerator[Yield, None]:
        """Run the function once.

        Raises:
            StageFailed: it raised, whatever it was: it is not the client's. Or its process died.
            Exception: its input broke off with this error of an earlier stage.
        """
        context: RequestContext = activation.context
        await self.enter(context)
        started, error = time.monotonic(), ""
        try:
            async with closed_at_end(self._run(activation)) as emissions:
                async for emission in emissions:
                    yield emission
        except Exception as exc:
            if activation.is_of_producer(exc):
                raise
            self.num_failed += 1
            error = repr(exc)
            if self.processes and isinstance(exc, StageFailed):  # logged there
                raise
            logger.exception("request %s: function %s failed", context.request_id, self.name)
            raise StageFailed(self.name, f"the pipeline's function failed: {exc!r}") from exc
        finally:
            self.num_runs += 1
            seconds, now = time.monotonic() - started, time.time()
            span = Span(self.name, SpanKind.FUNCTION, now - seconds, now, self.name, new_span_id(), error=error)
            spans = [span, *edge_spans(activation)]
            activation.report(NodeReport(self.name, seconds, spans=spans, held_s=activation.held_s()))

    def _run(self, activation: Activation) -> AsyncIterator[Yield]:
        if not self.processes:
            return self._spec.forward(activation)
        running = [one for one in self.processes if one.current_status().state is StageState.RUNNING]
        if not running:
            status = self.current_status()
            raise StageUnavailable(self.name, f"{status.state}: {status.reason}")
        return min(running, key=lambda one: one.load).run(activation)

    def current_status(self) -> StageStatus:
        """RUNNING while runs can be served; each process has a status of its own as well."""
        statuses = {one.name: one.current_status() for one in self.processes}
        states = {status.state for status in statuses.values()}
        if not states or StageState.RUNNING in states:
            return StageStatus(num_restarts=sum(status.num_restarts for status in statuses.values()))
        state = StageState.RESTARTING if StageState.RESTARTING in states else StageState.FAILED
        reason = "; ".join(f"{name}: {status.reason}" for name, status in statuses.items())
        return StageStatus(state, reason, sum(status.num_restarts for status in statuses.values()))
