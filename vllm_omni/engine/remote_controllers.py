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
from vllm_omni.engine.wire import ServedPayloads
from vllm_omni.errors import DeadlineExceeded, LinkError, StageFailed
from vllm_omni.flow import ENTRY, GraphRuntime, StaticPlan
from vllm_omni.flow.remote.encoded_link import EncodedLink, Outbox
from vllm_omni.flow.remote.host import Remote, RemoteController
from vllm_omni.flow.run.link import Link
from vllm_omni.flow.run.node import Node
from vllm_omni.flow.run.scope import CallScope, RemoteNode, index_plans
from vllm_omni.hosts.remote_engine import RemoteEngine
from vllm_omni.messages.request import RequestContext, StageRequest
from vllm_omni.relay.io_thread import io_thread

if TYPE_CHECKING:
    from vllm_omni.engine.stage import StageEngine
    from vllm_omni.hosts.listener import HostListener

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 64 << 20  # sound of a whole answer is in one; in parts of a megabyte on its way
MIN_DEADLINE_S = 1e-3


class RemoteControllers:
    """Those of one server. Messages are sent and received on the event loop of its requests.

    Args:
        roles: stage -> its host (``roles_on_hosts``).
        plans: of the runtime.
        engines: of these stages.
    """

    def __init__(
        self,
        roles: Mapping[str, str],
        plans: Collection[StaticPlan],
        engines: Mapping[str, StageEngine],
        listener: HostListener,
    ) -> None:
        self._engines, self._listener = {role: engines[role] for role in roles}, listener
        self._hosts = {name: roles[node.role] for name, node in index_plans([*plans])[1].items() if node.role in roles}
        self._outboxes: dict[str, Outbox] = {}  # by host
        self._loop: asyncio.AbstractEventLoop | None = None  # once there was a request
        self._runtime: GraphRuntime | None = None
        self.link = EncodedLink(self._find_outbox, ServedPayloads(), max_message_bytes=MAX_MESSAGE_BYTES)
        listener.controllers = self

    def nodes(self, nodes: Mapping[str, Node]) -> dict[str, Node | RemoteNode]:
        """The nodes of the runtime: in the place of those on hosts, what sends to them."""
        return {**nodes, **{role: _HostedStage(engine) for role, engine in self._engines.items()}}

    def bind(self, runtime: GraphRuntime) -> None:
        self._runtime = runtime

    async def enter(
        self, context: RequestContext, inputs: Mapping[str, Any], plan: StaticPlan, gate: AdmissionGate
    ) -> tuple[Mapping[str, Any], float | None]:
        """Let a request in before its call is opened: a controller on a host can neither wait for the gate nor read a
        prompt within the front end's budget of media.

        Returns:
            The inputs, with prompts as those controllers read them; and what is left of the deadline.

        Raises:
            InvalidRequest: a prompt cannot be read.
            DeadlineExceeded: not within the deadline.
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
        return inputs, None if deadline_s is None else max(deadline_s - (time.monotonic() - started), MIN_DEADLINE_S)

    async def _render(self, inputs: Mapping[str, Any], plan: StaticPlan) -> dict[str, Any]:
        readers = {edge.source_field: plan.nodes[edge.target].role for edge in plan.edges if edge.source == ENTRY}
        made = dict(inputs)
        for name, request in inputs.items():
            engine = self._engines.get(readers.get(name, ""))
            if engine is not None and isinstance(request, StageRequest) and engine.kind.renders_prompt:
                made[name] = replace(request, prompt=await engine.render(request.prompt))
        return made

    def _find_outbox(self, target: str) -> Outbox:
        self._loop = asyncio.get_running_loop()
        host = self._hosts.get(target)
        if host is None:
            raise LinkError(f"no host has the controller of {target!r}")
        if host not in self._outboxes:
            self._outboxes[host] = Outbox(partial(self._send, host))
        return self._outboxes[host]

    def _send(self, host: str, data: bytes) -> None:
        io_thread().call(self._listener.send_flow, host, data)

    # -- on the I/O thread --------------------------------------------------------------------------------------------

    def receive(self, data: memoryview) -> None:
        """See ``hosts.listener.Controllers``, as the next two."""
        self._call(self.link.receive, data)

    def lose(self, engine: RemoteEngine, reason: str) -> None:
        if engine.name in self._engines:
            self._call(self._lose, engine.name, reason)

    def count(self, engine: RemoteEngine, data: memoryview) -> None:
        if engine.name in self._engines:
            self._call(self._engines[engine.name].llm.record, Recorded.unpack(data))

    def _call(self, function: Callable[..., object], *args: Any) -> None:
        if self._loop is not None and not self._loop.is_closed():  # else there is no call
            self._loop.call_soon_threadsafe(function, *args)

    # -- on the event loop --------------------------------------------------------------------------------------------

    def _lose(self, role: str, reason: str) -> None:
        """End the calls that need a stage. Whether new ones may start is known by the state of its engine."""
        if self._runtime is not None:
            self._runtime.lose(role, reason, StageFailed(role, reason))
            self._runtime.regain(role)


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
    def __init__(self, engine: StageEngine) -> None:
        self._engine = engine

    def make_controller(self, name: str, link: Link) -> RemoteController:
        return _CountedController(name, link, self._engine)


class _CountedController(RemoteController):
    """Counts the calls that may run on an engine, as the engine's client would count requests."""

    def __init__(self, name: str, link: Link, engine: StageEngine) -> None:
        super().__init__(name, link)
        self._engine = engine

    def open(self, scope: CallScope) -> None:
        super().open(scope)
        self._engine.num_requests += 1

    def close(self, call_id: str) -> None:
        self._engine.num_requests -= 1
        super().close(call_id)
