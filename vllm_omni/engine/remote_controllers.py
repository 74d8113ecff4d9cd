"""``RemoteControllers``: the front end's side of controllers that run beside their engines on other hosts.

The front end opens and ends calls there, and gets what the user gets, reports and errors; frames between stages do not
pass through it (``engine/host_controllers.py`` is the other side).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from vllm_omni.engine.admission import AdmissionGate
from vllm_omni.engine.host_statistics import Recorded
from vllm_omni.engine.media_budget import HOLDING
from vllm_omni.engine.node import ServedNode, StageNode
from vllm_omni.engine.replicas import Placed, ReplicaGroup
from vllm_omni.engine.stage import StageEngine
from vllm_omni.engine.wire import ServedPayloads
from vllm_omni.errors import DeadlineExceeded, EngineLost, LinkError, StageFailed
from vllm_omni.flow import ENTRY, GraphRuntime, StaticPlan
from vllm_omni.flow.remote.encoded_link import EncodedLink, Outbox
from vllm_omni.flow.remote.host import Remote, RemoteController
from vllm_omni.flow.run.link import Link, Message
from vllm_omni.flow.run.node import Node
from vllm_omni.flow.run.scope import CallScope, RemoteNode
from vllm_omni.hosts.remote_engine import RemoteEngine
from vllm_omni.messages.request import RequestContext, StageRequest
from vllm_omni.relay.io_thread import io_thread

if TYPE_CHECKING:
    from vllm_omni.hosts.listener import HostListener

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 64 << 20  # sound of a whole answer is in one; in parts of a megabyte on its way
MIN_DEADLINE_S = 1e-3


class RemoteControllers:
    """Those of one server. Messages are sent and received on the event loop of its requests.

    Args:
        hosts: engine -> its host (``controllers_on_hosts``).
        nodes: of all stages.
    """

    def __init__(
        self,
        hosts: Mapping[str, str],
        nodes: Mapping[str, ServedNode],
        listener: HostListener,
    ) -> None:
        roles = {name.partition("/")[0] for name in hosts}
        self._stages = {role: node for role, node in nodes.items() if role in roles and isinstance(node, StageNode)}
        self._hosts, self._listener = dict(hosts), listener
        self._placed: dict[str, dict[str, Placed]] = {}  # by request: stage -> its replica
        self._running_on: dict[tuple[str, str], StageEngine] = {}  # node of the graph and open call -> its engine
        self._outboxes: dict[str, Outbox] = {}  # by host
        self._loop: asyncio.AbstractEventLoop | None = None  # once there was a request
        self._runtime: GraphRuntime | None = None
        self.link = EncodedLink(self._find_outbox, ServedPayloads(), max_message_bytes=MAX_MESSAGE_BYTES)
        listener.controllers = self

    def nodes(self, nodes: Mapping[str, Node]) -> dict[str, Node | RemoteNode]:
        """The nodes of the runtime: in the place of those on hosts, what sends to them."""
        hosted = {role: _HostedStage(partial(self._engine_of, role), self._running_on) for role in self._stages}
        return {**nodes, **hosted}

    def bind(self, runtime: GraphRuntime) -> None:
        self._runtime = runtime

    async def enter(
        self,
        context: RequestContext,
        inputs: Mapping[str, Any],
        plan: StaticPlan,
        stages: Collection[str],
        gate: AdmissionGate,
    ) -> tuple[RequestContext, Mapping[str, Any], float | None]:
        """Let a request in before its call is opened: a controller on a host can neither wait for the gate nor read a
        prompt within the front end's budget of media; and those of all stages must know on which replicas it runs.
        Call ``leave`` at its end, also where this fails.

        Args:
            stages: that it needs.

        Returns:
            The context, with the replicas; the inputs, with prompts as the controllers read them; and what is left of
            the deadline.

        Raises:
            InvalidRequest: a prompt cannot be read.
            DeadlineExceeded: not within the deadline.
            StageUnavailable: no replica of a stage admits requests.
        """
        started, deadline_s = time.monotonic(), context.deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                await gate.enter(context.request_id)
                inputs = await self._render(inputs, plan)
        except TimeoutError as exc:
            said = (
                f"call {context.request_id!r} is not done at its deadline, after {deadline_s:.3g} s: it was not opened"
            )
            raise DeadlineExceeded(said) from exc
        if (holding := HOLDING.get()) is not None:  # the prompt is read
            holding.release()
        left_s = None if deadline_s is None else max(deadline_s - (time.monotonic() - started), MIN_DEADLINE_S)
        return self._place(context, stages), inputs, left_s

    async def _render(self, inputs: Mapping[str, Any], plan: StaticPlan) -> dict[str, Any]:
        readers = {edge.source_field: plan.nodes[edge.target].role for edge in plan.edges if edge.source == ENTRY}
        made = dict(inputs)
        for name, request in inputs.items():
            node = self._stages.get(readers.get(name, ""))
            engine = node.front if isinstance(node, ReplicaGroup) else node
            if isinstance(engine, StageEngine) and isinstance(request, StageRequest) and engine.kind.renders_prompt:
                made[name] = replace(request, prompt=await engine.render(request.prompt))
        return made

    def _place(self, context: RequestContext, stages: Collection[str]) -> RequestContext:
        """Choose the replicas of a request, unless it has some."""
        placed = self._placed.setdefault(context.request_id, {})
        for stage in stages:
            if stage not in placed and isinstance(group := self._stages.get(stage), ReplicaGroup):
                placed[stage] = group.place(context)
        return replace(context, places={stage: one.engine.name for stage, one in placed.items()})

    def move(self, context: RequestContext, error: StageFailed, request_id: str) -> bool:
        """Let other replicas have what lost ones had of a request, which is opened again under another id.

        Args:
            error: with which it ended.

        Returns:
            Whether there are others for all of them, and one was lost at all.
        """
        placed = self._placed.get(context.request_id, {})
        names = {one.engine.name for one in placed.values() if one.engine.has_died} | {error.stage}
        lost = {stage: one for stage, one in placed.items() if one.engine.name in names}
        if error.stage not in {one.engine.name for one in lost.values()}:
            return False
        for stage, one in lost.items():
            moved = self._group(stage).move(one)
            if moved is None:
                return False
            self._group(stage).router.release(one.assignment)
            placed[stage] = moved
            logger.warning("%s; request %s moves to %s", error, context.request_id, moved.engine.name)
        self._placed[request_id] = self._placed.pop(context.request_id)
        return True

    def leave(self, request_id: str) -> None:
        """A request has ended; does nothing for one that has not entered."""
        for stage, placed in self._placed.pop(request_id, {}).items():
            self._group(stage).router.release(placed.assignment)

    def _group(self, stage: str) -> ReplicaGroup:
        group = self._stages[stage]
        assert isinstance(group, ReplicaGroup), "it has placed a request"
        return group

    def _engine_of(self, role: str, context: RequestContext) -> StageEngine:
        """The engine that a request runs on."""
        if role in context.places:
            return self._placed[context.request_id][role].engine
        engine = self._stages[role]
        assert isinstance(engine, StageEngine), "requests are given a replica"
        return engine

    def _find_outbox(self, message: Message) -> Outbox:
        self._loop = asyncio.get_running_loop()
        engine = self._running_on.get((message.target, message.call_id))
        if engine is None:
            raise LinkError(f"call {message.call_id!r} runs on no host at {message.target!r}")
        host = self._hosts[engine.name]
        if host not in self._outboxes:
            self._outboxes[host] = Outbox(partial(self._send, host))
        return self._outboxes[host]

    def _send(self, host: str, data: bytes) -> None:
        io_thread().call(self._listener.send_flow, host, data)

    # -- on the I/O thread --------------------------------------------------------------------------------------------

    def receive(self, data: memoryview) -> None:
        """See ``hosts.listener.Controllers``, as the next two."""
        self._call(self.link.receive, data)

    def end(self, engine: RemoteEngine, reason: str) -> None:
        if engine.name in self._hosts and engine.name != engine.stage:  # the only one of a stage may be back in time
            self._call(self._lose, [engine.name], reason)

    def lose(self, engines: Sequence[RemoteEngine], reason: str) -> None:
        self._call(self._lose, [engine.name for engine in engines if engine.name in self._hosts], reason)

    def count(self, engine: RemoteEngine, data: memoryview) -> None:
        if engine.name in self._hosts:
            self._call(self._count, engine.name, Recorded.unpack(data))

    def _call(self, function: Callable[..., object], *args: Any) -> None:
        if self._loop is not None and not self._loop.is_closed():  # else there is no call
            self._loop.call_soon_threadsafe(function, *args)

    # -- on the event loop --------------------------------------------------------------------------------------------

    def _lose(self, names: Sequence[str], reason: str) -> None:
        """End the calls that run on engines. Whether new ones may start is known by their state."""
        for name in names:
            calls = {call_id for (_, call_id), engine in self._running_on.items() if engine.name == name}
            if self._runtime is not None:
                self._runtime.lose_calls(calls, name.partition("/")[0], EngineLost(name, reason))

    def _count(self, name: str, recorded: Recorded) -> None:
        node = self._stages[name.partition("/")[0]]
        engine = node.engines.get(name) if isinstance(node, ReplicaGroup) else node
        if isinstance(engine, StageEngine):  # else it was removed meanwhile
            engine.llm.record(recorded)


def make_runtime(
    plans: Sequence[StaticPlan], nodes: Mapping[str, Node], controllers: RemoteControllers | None
) -> GraphRuntime:
    """The runtime of a server, whose controllers are here but for those on hosts."""
    if controllers is None:
        return GraphRuntime(plans, nodes)
    runtime = GraphRuntime(plans, controllers.nodes(nodes), link=controllers.link)
    controllers.bind(runtime)
    return runtime


class _HostedStage(Remote):
    def __init__(
        self,
        engine_of: Callable[[RequestContext], StageEngine],
        running_on: dict[tuple[str, str], StageEngine],
    ) -> None:
        self._engine_of, self._running_on = engine_of, running_on

    def make_controller(self, name: str, link: Link) -> RemoteController:
        return _PlacedController(name, link, self._engine_of, self._running_on)


class _PlacedController(RemoteController):
    """Knows on which engine each call runs, and counts them, as the engine's client would count requests.

    Args:
        running_on: of all nodes, see ``RemoteControllers``.
    """

    def __init__(
        self,
        name: str,
        link: Link,
        engine_of: Callable[[RequestContext], StageEngine],
        running_on: dict[tuple[str, str], StageEngine],
    ) -> None:
        super().__init__(name, link)
        self._engine_of, self._running_on = engine_of, running_on

    def open(self, scope: CallScope) -> None:
        engine = self._engine_of(scope.context)
        if engine.has_died:  # after it was chosen: what is sent would be dropped
            raise EngineLost(engine.name, engine.termination_reason())
        self._running_on[self.name, scope.call_id] = engine
        try:
            super().open(scope)
        except BaseException:
            del self._running_on[self.name, scope.call_id]
            raise
        engine.num_requests += 1

    def close(self, call_id: str) -> None:
        super().close(call_id)
        self._running_on.pop((self.name, call_id)).num_requests -= 1
