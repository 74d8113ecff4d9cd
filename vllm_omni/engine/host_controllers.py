"""``HostControllers``: controllers that run beside their engines, on another host than the front end.

A frame goes from the controller that has made it straight to the host of the one that reads it. The front end has the
other side (``engine/remote_controllers.py``): it opens, cancels and closes calls, and gets what the user gets. Of each
engine core there are two clients of vLLM's: the front end's, which supervises it, and the one here, for requests.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterable, Mapping
from functools import partial
from pathlib import Path

from vllm.config import VllmConfig

from vllm_omni.engine.controller_places import expect_two_clients
from vllm_omni.engine.host_statistics import HostStatistics
from vllm_omni.engine.node import StageNode
from vllm_omni.engine.payload_edges import PayloadEdges
from vllm_omni.engine.remote_controllers import MAX_MESSAGE_BYTES
from vllm_omni.engine.stage import StageEngine
from vllm_omni.engine.wire import ServedPayloads
from vllm_omni.errors import EngineLost
from vllm_omni.flow import StaticPlan
from vllm_omni.flow.remote.encoded_link import EncodedLink, Outbox
from vllm_omni.flow.remote.host import RoleHost
from vllm_omni.flow.run.link import Message
from vllm_omni.flow.run.scope import index_plans
from vllm_omni.hosts.connection import HostConnection
from vllm_omni.messages.outputs import OmniRequestOutput
from vllm_omni.messages.report import Reporter, ignore
from vllm_omni.model_executor.pipeline import RequestContext, StageRequest, StageSpec
from vllm_omni.process.stage_processes import StageProcesses
from vllm_omni.process.status import StageStatus
from vllm_omni.relay.hub import RelayHub, RelayOptions

END_TIMEOUT_S = 10.0
PEER_LOST_S = 1.0  # by how much later the front end may notice what this host has noticed


class HostControllers:
    """Those of one host, on an event loop in a thread of its own: decoding sound may wait for an engine's relay.

    Args:
        host: the name of this one in the deployment.
        hosts: engine -> its host, of all beside which controllers run (``controllers_on_hosts``).
        engines: of this host, not started.
    """

    def __init__(
        self,
        host: str,
        hosts: Mapping[str, str],
        plans: Mapping[str, StaticPlan],
        specs: Mapping[str, StageSpec],
        engines: Mapping[str, StageEngine],
        connection: HostConnection,
        secret_file: str,
    ) -> None:
        self._connection, self._hosts = connection, dict(hosts)
        self._hub = RelayHub(RelayOptions(secret_file=secret_file), prefault=False)
        self._engines = {name: engines[name] for name, its in hosts.items() if its == host}
        for engine in self._engines.values():
            expect_two_clients(engine.vllm_config)
        edges = PayloadEdges(plans.values(), specs)
        nodes = _nodes_of(self._engines.values())
        for node in nodes.values():
            edges.bind(node)
        used = [edges.with_own_payloads(plan) for plan in plans.values()]
        self._roles = {name: node.role for name, node in index_plans(used)[1].items()}
        self._attached: set[StageEngine] = set()
        self._outboxes: dict[str | None, Outbox] = {}
        self._link = EncodedLink(
            self._find_outbox, ServedPayloads(), is_here=self._is_here, max_message_bytes=MAX_MESSAGE_BYTES
        )
        self._role_host = RoleHost(used, nodes, self._link)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="controllers", daemon=True)
        self._thread.start()
        connection.controllers = self

    def serves(self, engine: StageEngine) -> bool:
        """Whether the controller of an engine is here."""
        return self._engines.get(engine.name) is engine

    def _find_outbox(self, message: Message) -> Outbox:
        context = self._role_host.context_of(message.call_id)
        host = self._hosts.get(self._engine_of(message.target, context))  # None: the front end's
        if host not in self._outboxes:
            self._outboxes[host] = Outbox(partial(self._connection.send_flow, host))
        return self._outboxes[host]

    def _is_here(self, message: Message) -> bool:
        return self._engine_of(message.target, self._role_host.context_of(message.call_id)) in self._engines

    def _engine_of(self, node: str, context: RequestContext | None) -> str:
        """The engine of a node of the graph, or of the entry, in a call."""
        role = self._roles.get(node, node)
        return role if context is None else context.places.get(role, role)

    # -- for threads that start and watch engines ---------------------------------------------------------------------

    def addresses(self, directory: Path, number: int) -> dict[str, str]:
        """Where the client binds for the engine core of a start."""
        return {f"{way}_address": f"ipc://{directory}/controller-{number}-{way}" for way in ("input", "output")}

    def attach(
        self,
        engine: StageEngine,
        number: int,
        vllm_config: VllmConfig,
        processes: StageProcesses,
        directory: Path,
        *,
        log_stats: bool,
    ) -> None:
        """Let requests run on an engine core that has been started. Blocks until it is ready.

        Args:
            number: of the start.
        """
        send = partial(self._connection.send_statistics, number)
        statistics = (lambda llm: HostStatistics(send, llm.totals)) if log_stats else None
        engine.attach(processes, self._hub, vllm_config, self.addresses(directory, number), statistics)
        self._attached.add(engine)

    def detach(self, engine: StageEngine, reason: str) -> None:
        """The engine core has ended: its requests fail, before another one takes its place."""
        if engine not in self._attached:
            return
        self._attached.remove(engine)
        asyncio.run_coroutine_threadsafe(engine.detach(reason), self._loop).result(END_TIMEOUT_S)

    # -- on the I/O thread (``hosts.connection.Controllers``) ---------------------------------------------------------

    def receive(self, data: memoryview) -> None:
        self._loop.call_soon_threadsafe(self._link.receive, data)

    def lose_peer(self, host: str) -> None:
        self._loop.call_soon_threadsafe(self._on_peer_lost, host)

    def end_calls(self) -> None:
        self._loop.call_soon_threadsafe(self._role_host.end_calls)

    # -- on the event loop --------------------------------------------------------------------------------------------

    def _on_peer_lost(self, host: str) -> None:
        """What calls have sent to it may be lost. The front end says what became of a host that it has lost, too."""
        self._loop.call_later(PEER_LOST_S, self._fail_calls, host, self._calls_with(host))

    def _fail_calls(self, host: str, calls: Mapping[str, str]) -> None:
        said = f"its host {host!r} cannot be reached from that of {', '.join(self._engines)}"
        for call_id in calls.keys() & self._calls_with(host).keys():
            self._link.report(call_id, "", EngineLost(calls[call_id], said))

    def _calls_with(self, host: str) -> dict[str, str]:
        """The calls that need another host -> the engine there."""
        return {
            call_id: engine
            for call_id, (route, context) in self._role_host.open_calls().items()
            for engine in (self._engine_of(node, context) for node in route.nodes)
            if self._hosts.get(engine) == host
        }

    # ------------------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the calls and the event loop; the engines have ended, or do."""
        self._connection.controllers = None
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(END_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(END_TIMEOUT_S)
        self._loop.close()
        for engine in self._engines.values():
            engine.remove()
        self._hub.close()

    async def _end(self) -> None:
        self._role_host.end_calls()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


class _PlacedReplicas(StageNode):
    """Those replicas of a stage that are on this host, of which each request has been given one."""

    def __init__(self, engines: Mapping[str, StageEngine]) -> None:
        self._engines = engines
        first = next(iter(engines.values()))
        self.config, self.spec, self.name = first.config, first.spec, first.config.name

    def current_status(self) -> StageStatus:
        """RUNNING: the replicas have a status each."""
        return StageStatus()

    def generate(
        self,
        request: StageRequest,
        context: RequestContext,
        wanted: frozenset[str],
        suffix: str = "",
        report: Reporter = ignore,
    ) -> AsyncGenerator[OmniRequestOutput, None]:
        """See ``StageNode.generate``."""
        return self._engines[context.places[self.name]].generate(request, context, wanted, suffix, report)


def _nodes_of(engines: Iterable[StageEngine]) -> dict[str, StageNode]:
    """The nodes that these engines serve, by stage."""
    by_stage: dict[str, dict[str, StageEngine]] = {}
    for engine in engines:
        by_stage.setdefault(engine.config.name, {})[engine.name] = engine
    return {
        stage: its[stage] if stage in its else _PlacedReplicas(its)  # a single engine has its stage's name
        for stage, its in by_stage.items()
    }
