"""``ReplicaGroup``: the node of a stage that is several equal engines, of any kind.

vLLM's own data parallelism is not used beneath: it has autoregressive engines alone, one client that fails with the
first engine that dies, and no way to restart or drain one of them.

From: Omni-Flow, sections 3.5 (load balancing) and 6 (homogeneous replicas, among which devices are divided).
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from msgspec.structs import replace
from vllm.sampling_params import SamplingParams

from vllm_omni.config import StageConfig
from vllm_omni.config.epd import Balance, EPDDeployment, Instance, Tasks
from vllm_omni.engine.group import EngineGroup
from vllm_omni.engine.prompt_names import names_of_prompt
from vllm_omni.engine.stage import StageEngine
from vllm_omni.epd.assignment import RequestSize
from vllm_omni.epd.router import MAX_TERMINATIONS, Assignment, Recovery, RequestState, Router
from vllm_omni.errors import EngineLost, StageFailed, StageUnavailable
from vllm_omni.messages.outputs import OmniRequestOutput
from vllm_omni.messages.payload import decode, encode
from vllm_omni.messages.report import Reporter, ignore
from vllm_omni.messages.token_names import TokenNames, decode_names
from vllm_omni.model_executor.pipeline import RequestContext, StageRequest

logger = logging.getLogger(__name__)

NO_REPLICA = "no replica admits requests"


def make_replicas(config: StageConfig) -> list[Instance]:
    """List the replicas that a stage may have, those of its start first; ``device_ids`` are divided among all."""
    devices = config.engine_args.get("device_ids") or []
    size = len(devices) // config.max_engines
    slices = [devices[number * size : (number + 1) * size] for number in range(config.max_engines)]
    return [
        Instance(config.name, None, number, {"device_ids": own} if own else {}, is_front=number == 0)
        for number, own in enumerate(slices)
    ]


class Placed(NamedTuple):
    """The replica that a request has been given; pass ``assignment`` to ``Router.release`` at its end."""

    engine: StageEngine
    state: RequestState
    assignment: Assignment


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
    reply: list[int] = field(default_factory=list)  # its tokens, where the stage's prompts have tokens of this kind

    def note_tokens(self, output: OmniRequestOutput) -> None:
        """Note the tokens of an output: the prompt of a session's next turn has them."""
        if not _reads_rows(self.stage_request) and self.params.n == 1:
            self.reply += (token for completion in output.outputs for token in completion.token_ids)

    @property
    def task_id(self) -> str:
        """Id of the request to the engine, one for each replica that gets it."""
        number = self.state.num_assignments
        return self.request_id if number == 1 else f"{self.request_id}-t{number}"


def _reads_rows(request: StageRequest) -> bool:
    """Whether the prompt is rows of another stage, and its ids are fillers."""
    return "payloads" in request.args


def _names_of(request: StageRequest, prompt: Any, context: RequestContext) -> TokenNames | None:
    """The names of the tokens, or rows, of a prompt."""
    if not _reads_rows(request):
        return names_of_prompt(prompt, context.lora_request)
    names: bytes | None = request.args.get("row_names")
    return None if names is None else decode_names(names)


class ReplicaGroup(EngineGroup):
    """The node of a stage with replicas: each request runs on one of them, which the policy chooses.

    If that one dies before the request's first output, another one gets the request. Where the controllers run beside
    the replicas (``controllers_on_hosts``), a request is given its replica when it is opened (``place``), and
    ``generate`` is not called.
    """

    def __init__(self, config: StageConfig, engines: Sequence[StageEngine], balance: Balance) -> None:
        super().__init__(config, engines)
        kinds = dict.fromkeys(self.engines, Tasks.EPD)
        has_pool = config.pool is not None
        self.router = Router(kinds, EPDDeployment(balance=balance), self.is_available, has_pool=has_pool)

    def add(self, engine: StageEngine) -> None:
        """Give requests to one more replica, which runs."""
        self.engines[engine.name] = engine
        self.router.kinds = dict.fromkeys(self.engines, Tasks.EPD)

    def remove(self, name: str) -> None:
        """A replica that has no requests ends; it is not the front."""
        del self.engines[name]
        self._num_restarts.pop(name, None)
        self.router.kinds = dict.fromkeys(self.engines, Tasks.EPD)
        self.router.forget_pages(name)

    def place(self, context: RequestContext) -> Placed:
        """Give a whole request one of the replicas, before it is known what it will ask of the stage: all requests
        count as one unit of work.

        Raises:
            StageUnavailable: no replica admits requests.
        """
        state = RequestState(RequestSize(0, 0, 1), session=context.session_id or context.request_id)
        placed = self._placed(state)
        if placed is None:
            raise StageUnavailable(self.name, NO_REPLICA)
        return placed

    def move(self, placed: Placed) -> Placed | None:
        """Give a request another replica in the place of one that was lost; None: no other one admits it."""
        self.router.withdraw(placed.state, placed.assignment)
        moved = self._placed(placed.state)
        if moved is not None and moved.engine is placed.engine:
            self.router.release(moved.assignment)
            return None
        return moved

    def _placed(self, state: RequestState) -> Placed | None:
        assignment = self.assign(state)
        return None if assignment is None else Placed(self.engines[assignment.instance], state, assignment)

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
        while (assignment := self.assign(state)) is not None:
            engine = self.engines[assignment.instance]
            try:
                async with aclosing(self._run(routed, engine, report)) as outputs:
                    async for output in outputs:
                        if not state.num_given:
                            self.router.note_found(state, assignment, output.num_cached_tokens or 0)
                        state.num_given += 1
                        routed.note_tokens(output)
                        yield output
                self.router.note_reply(state, assignment, routed.reply[:-1])
                return
            except StageFailed as exc:
                if self.is_alive(engine.name):
                    if failure is None:
                        raise
                    # Without the replica that died, it would not have failed here.
                    raise StageFailed(failure.stage, f"{failure.reason}; then {engine.name!r}: {exc.reason}") from exc
                self._check_repeatable(routed, exc)
                failure = exc
            finally:
                self.router.release(assignment)
            await self._renew_rows(routed, failure, report)
        if failure is None:
            raise StageUnavailable(self.name, NO_REPLICA)
        raise StageFailed(failure.stage, f"{failure.reason}; {NO_REPLICA}") from failure

    async def _make_request(
        self, request: StageRequest, context: RequestContext, wanted: frozenset[str], suffix: str
    ) -> _Request:
        prompt, params = await self.front.prepare(request, context, wanted)
        state = RequestState(
            RequestSize.of(prompt, params.max_tokens, params.n),
            _names_of(request, prompt, context),
            # The requests of a call without a session, which a loop may make, belong together.
            session=context.session_id or context.request_id,
            reads_pool=not (self.spec.publishes_rows and self.spec.publishing_fields & wanted),
            reads_cache=not params.skip_reading_prefix_cache,
        )
        request_id = f"{context.request_id}-{self.name}{suffix}"
        return _Request(request, context, wanted, request_id, prompt, params, state)

    def _run(self, request: _Request, engine: StageEngine, report: Reporter) -> AsyncGenerator[OmniRequestOutput, None]:
        return engine.run(request.prompt, request.params.clone(), request.task_id, request.context, report)

    def _check_repeatable(self, request: _Request, error: StageFailed) -> None:
        """Check that another replica may get the request, as its own has died.

        Raises:
            EngineLost: the reply has started.
            StageFailed: the request may be what ends replicas.
        """
        recovery = self.router.recover(request.state)
        if recovery is Recovery.TOO_MANY:
            said = f"so did {MAX_TERMINATIONS} others that had the request"
            raise StageFailed(error.stage, f"{error.reason}; {said}") from error
        if recovery is not Recovery.REPEAT:
            raise EngineLost(error.stage, f"{error.reason}; after the request's first output") from error
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
