"""``ReplicaGroup``: the node of a stage that is several equal engines, of any kind.

vLLM's own data parallelism is not used beneath: it has autoregressive engines alone, one client that fails with the
first engine that dies, and no way to restart or drain one of them.

From: Omni-Flow, sections 3.5 (load balancing) and 6 (homogeneous replicas, among which devices are divided).
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace
from vllm.sampling_params import SamplingParams

from vllm_omni.config import StageConfig
from vllm_omni.config.epd import Balance, EPDDeployment, Instance, Tasks
from vllm_omni.engine.group import EngineGroup
from vllm_omni.engine.stage import StageEngine
from vllm_omni.epd.assignment import RequestSize
from vllm_omni.epd.router import MAX_TERMINATIONS, Recovery, RequestState, Router
from vllm_omni.errors import StageFailed, StageUnavailable
from vllm_omni.messages.outputs import OmniRequestOutput
from vllm_omni.messages.payload import decode, encode
from vllm_omni.messages.report import Reporter, ignore
from vllm_omni.model_executor.pipeline import RequestContext, StageRequest

logger = logging.getLogger(__name__)


def make_replicas(config: StageConfig) -> list[Instance]:
    """List the replicas of a stage; its ``device_ids`` are divided among them."""
    devices = config.engine_args.get("device_ids") or []
    size = len(devices) // config.replicas
    slices = [devices[number * size : (number + 1) * size] for number in range(config.replicas)]
    return [
        Instance(config.name, None, number, {"device_ids": own} if own else {}, is_front=number == 0)
        for number, own in enumerate(slices)
    ]


@dataclass
class _Request:
    """One request of the stage, as each replica that gets it is sent it."""

    stage_request: StageRequest
    context: RequestContext
    wanted: frozenset[str]
    request_id: str
    prompt: Any
    params: SamplingParams
    state: RequestState

    @property
    def task_id(self) -> str:
        """Id of the request to the engine, one for each replica that gets it."""
        number = self.state.num_assignments
        return self.request_id if number == 1 else f"{self.request_id}-t{number}"


class ReplicaGroup(EngineGroup):
    """The node of a stage with replicas: each request runs on one of them, which the policy chooses.

    If that one dies before the request's first output, another one gets the request.
    """

    def __init__(self, config: StageConfig, engines: Sequence[StageEngine], balance: Balance) -> None:
        super().__init__(config, engines)
        self.router = Router(dict.fromkeys(self.engines, Tasks.EPD), EPDDeployment(balance=balance), self.is_available)

    async def generate(
        self,
        request: StageRequest,
        context: RequestContext,
        wanted: frozenset[str],
        suffix: str = "",
        report: Reporter = ignore,
    ) -> AsyncGenerator[OmniRequestOutput, None]:
        """See ``StageNode.generate``.

        Raises:
            InvalidRequest: a replica rejected the request.
            StageFailed: the model failed on it, or its replica died and it cannot be repeated on another.
            StageUnavailable: no replica admits requests.
        """
        self.check_health()
        routed = await self._make_request(request, context, wanted, suffix)
        state, failure = routed.state, None
        while (assignment := self.router.assign(state)) is not None:
            engine = self.engines[assignment.instance]
            try:
                async with aclosing(self._run(routed, engine, report)) as outputs:
                    async for output in outputs:
                        state.num_given += 1
                        yield output
                return
            except StageFailed as exc:
                if self.is_alive(engine.name):
                    raise failure or exc from exc  # without the replica that died, it would not have failed here
                self._check_repeatable(routed, exc)
                failure = exc
            finally:
                self.router.release(assignment)
            await self._renew_rows(routed, failure, report)
        raise failure or StageUnavailable(self.name, "no replica admits requests")

    async def _make_request(
        self, request: StageRequest, context: RequestContext, wanted: frozenset[str], suffix: str
    ) -> _Request:
        prompt, params = await self.front.prepare(request, context, wanted)
        state = RequestState(
            RequestSize.of(prompt, params.max_tokens, params.n),
            prompt,
            # The requests of a call without a session, which a loop may make, belong together.
            session=context.session_id or context.request_id,
        )
        request_id = f"{context.request_id}-{self.name}{suffix}"
        return _Request(request, context, wanted, request_id, prompt, params, state)

    def _run(self, request: _Request, engine: StageEngine, report: Reporter) -> AsyncGenerator[OmniRequestOutput, None]:
        return engine.run(request.prompt, request.params.clone(), request.task_id, request.context, report)

    def _check_repeatable(self, request: _Request, error: StageFailed) -> None:
        """Check that another replica may get the request, as its own has died.

        Raises:
            StageFailed: the reply has started; or the request may be what ends replicas.
        """
        recovery, why = self.router.recover(request.state), ""
        if recovery is Recovery.TOO_MANY:
            why = f"so did {MAX_TERMINATIONS} others that had the request"
        elif recovery is not Recovery.REPEAT:
            why = "after the request's first output"
        if why:
            raise StageFailed(error.stage, f"{error.reason}; {why}") from error
        logger.warning("%s; request %s moves to another replica", error, request.request_id)

    async def _renew_rows(self, request: _Request, failure: StageFailed, report: Reporter) -> None:
        """Have the rows that the request reads while they are made computed again: the replica that died had them.

        Raises:
            StageFailed, StageUnavailable: the stage that made them cannot do so.
        """
        payloads = [(data, decode(data).streams) for data in request.stage_request.args.get("payloads", ())]
        if not any(streams for _, streams in payloads):
            return
        packed: list[bytes] = []
        for data, streams in payloads:
            for ref in streams.values():
                reply = None if self.streamed_replies is None else self.streamed_replies.find(ref)
                if reply is None:
                    why = "it had the rows that the request reads while they are made, and no stage can repeat them"
                    raise StageFailed(failure.stage, f"{failure.reason}; {why}") from failure
                packed += map(encode, await reply.compute_rows_again(ref, report))
            if not streams:
                packed.append(data)
        again = replace(request.stage_request, args={**request.stage_request.args, "payloads": packed})
        request.prompt, request.params = await self.front.prepare(again, request.context, request.wanted)
