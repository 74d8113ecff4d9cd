"""``RequestCall``: the call of one request, opened once more where a replica that it runs on is lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from vllm_omni.engine.admission import AdmissionGate
from vllm_omni.engine.remote_controllers import MIN_DEADLINE_S, RemoteControllers
from vllm_omni.errors import EngineLost, SourceLost, StageFailed, StageUnavailable
from vllm_omni.flow import GraphCall, GraphRuntime, StaticPlan
from vllm_omni.flow.run.frame import OutputFrame
from vllm_omni.messages.request import RequestContext
from vllm_omni.process.status import StageState

if TYPE_CHECKING:
    from vllm_omni.engine.stage import StageEngine

AGAIN = "{}-again"  # the call of a request whose first one ran on a replica that was lost
NOTICED_S = 1.0  # how much later the front end may notice the end of an engine than one that reads from it
POLL_S = 0.02
ENDED = (StageState.RESTARTING, StageState.FAILED)
MAX_CALLS = 3  # of a request: where a reply is read whole, it may also be lost after its first output


class RequestCall:
    """An async iterator of the frames of a request's outputs.

    A replica whose controller is beside it may be lost with all that it knew of a request. If the user has nothing of
    the answer yet, the whole request runs once more, with another replica in its place.

    Args:
        controllers: those on hosts, if there are any.
        outputs: the wanted outputs.
        stages: that take part in answering.
        on_report: called with what activations report.
        engines: of all stages, by name.

    Attributes:
        call: that is read now.
        request_ids: of the calls so far, as their stages know them.
    """

    call: GraphCall

    def __init__(
        self,
        runtime: GraphRuntime,
        gate: AdmissionGate,
        controllers: RemoteControllers | None,
        plan: StaticPlan,
        outputs: frozenset[str],
        stages: Collection[str],
        session: str | None,
        on_report: Callable[[Any], None],
        engines: Mapping[str, StageEngine],
    ) -> None:
        self._runtime, self._gate, self._controllers = runtime, gate, controllers
        self._plan, self._outputs, self._stages = plan, outputs, stages
        self.session, self._on_report = session, on_report
        self._engines = engines
        self._has_output = False
        self.request_ids: list[str] = []

    async def open(self, context: RequestContext, inputs: Mapping[str, Any]) -> None:
        """Open it.

        Raises:
            InvalidRequest, DeadlineExceeded, StageUnavailable, OmniError: see ``GraphRuntime.open`` and
                ``RemoteControllers.enter``.
        """
        self._opened_at, deadline_s = time.monotonic(), context.deadline_s
        is_used: bool | None = None  # whether another open request has this id: then nothing of it is released here
        try:
            if self._controllers is not None:
                context, inputs, deadline_s = await self._controllers.enter(
                    context, inputs, self._plan, self._stages, self._gate
                )
            is_used = self._runtime.is_open(context.request_id)
            self.call = self._runtime.open(
                context.request_id,
                inputs,
                self._outputs,
                graph=self._plan.name,
                context=context,
                deadline_s=deadline_s,
                session=self.session,
                on_report=self._on_report,
            )
        except BaseException:
            if is_used is None:
                is_used = self._runtime.is_open(context.request_id)
            if not is_used:  # a call of this id that is open now is our own, which is being closed
                self._leave(context.request_id)
            raise
        self._context, self._inputs = context, inputs
        self.request_ids.append(context.request_id)

    def __aiter__(self) -> RequestCall:
        return self

    async def __anext__(self) -> OutputFrame:
        """The next frame. Raises: see ``GraphCall``, and ``open``."""
        while True:
            try:
                frame = await anext(self.call)
            except (EngineLost, StageUnavailable, SourceLost) as exc:
                error = await self._cause_of(exc) if isinstance(exc, SourceLost) else exc
                is_first = len(self.request_ids) == 1
                if not is_first and isinstance(error, EngineLost):  # the request may be the reason
                    raise StageFailed(error.stage, f"{error.reason}; so did another one that had the request") from exc
                if not is_first or isinstance(error, SourceLost) or not self._moves(error):
                    if error is exc:
                        raise
                    raise error from exc
            else:
                self._has_output = True
                return frame
            await self.open(self._context, self._inputs)

    async def _cause_of(self, error: SourceLost) -> StageFailed:
        """The loss of an engine from which an error follows, or the error itself where none is found."""
        deadline = time.monotonic() + NOTICED_S
        while (lost := self._find_lost()) is None and time.monotonic() < deadline:  # noqa: ASYNC110 - of a process
            await asyncio.sleep(POLL_S)
        return error if lost is None else lost

    def _find_lost(self) -> EngineLost | None:
        """An engine of the request's stages that has ended."""
        places = self._context.places
        for name, engine in self._engines.items():
            stage, status = engine.config.name, engine.current_status()
            if stage in self._stages and places.get(stage, name) == name and status.state in ENDED:
                return EngineLost(name, status.reason or status.state)
        return None

    def _moves(self, error: StageFailed) -> bool:
        """Whether the request runs once more, as another replica takes the place of one that was lost."""
        first = self._context.request_id
        if self._controllers is None or self._has_output or self.session is not None:  # its state may have changed
            return False
        if not self._controllers.move(self._context, error, AGAIN.format(first)):
            return False
        self._leave(first)
        deadline_s = self._context.deadline_s
        if deadline_s is not None:
            deadline_s = max(deadline_s - (time.monotonic() - self._opened_at), MIN_DEADLINE_S)
        self._context = replace(self._context, request_id=AGAIN.format(first), deadline_s=deadline_s)
        return True

    def _leave(self, request_id: str) -> None:
        self._gate.leave(request_id)
        if self._controllers is not None:
            self._controllers.leave(request_id)

    async def aclose(self) -> None:
        """End it, and return when every activation has cleaned up."""
        await self.call.aclose()
        self._leave(self._context.request_id)
