"""The runtime of a graph: it holds the controllers and opens calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from vllm_omni.errors import GraphError, InvalidRequest, OmniError, RoleUnavailable
from vllm_omni.flow.graph.plan import NodePlan, Route, StaticPlan
from vllm_omni.flow.graph.transfer import ENTRY
from vllm_omni.flow.run.call import GraphCall
from vllm_omni.flow.run.clock import Clock, LoopClock
from vllm_omni.flow.run.controller import NodeController
from vllm_omni.flow.run.frame import place_of
from vllm_omni.flow.run.graph_node import GraphNode
from vllm_omni.flow.run.link import InProcessLink, Link
from vllm_omni.flow.run.node import Activation, Node
from vllm_omni.flow.run.scope import Controller, RemoteNode, check_names, index_plans
from vllm_omni.flow.run.session import GCScheduler, ParameterStore
from vllm_omni.names import suggest


@dataclass(frozen=True, slots=True)
class FlowStatistics:
    """The content of a runtime at this moment; all zero when it is idle."""

    num_open_calls: int
    num_waiting_calls: int  # open calls that wait for another one of their session
    num_running_activations: int
    num_buffered_frames: int  # arrived, not yet read by their node or user


class GraphRuntime:
    """Runs calls of one plan, or of several that share nodes, on the event loop it is used from.

    Args:
        plans: compiled graphs; see ``parse_graphs`` for several.
        nodes: role name -> the node that serves it, or a ``RemoteNode``; one for each role of the plans.
        clock: the clock of deadlines; the event loop's by default.
        link: carries frames between controllers; within the process by default.

    Raises:
        GraphError: ``nodes`` does not match the roles of the plans, or roles that share parameters are in several
            processes.

    From: Omni-Flow section 3.4.
    """

    def __init__(
        self,
        plans: StaticPlan | Sequence[StaticPlan],
        nodes: Mapping[str, Node | RemoteNode],
        *,
        clock: Clock | None = None,
        link: Link | None = None,
    ):
        self._graphs, node_plans = index_plans(plans)
        self.plans = {name: plan for name, plan in self._graphs.items() if not plan.until}
        roles = {node.role for node in node_plans.values() if node.graph is None}
        graphs = ", ".join(map(repr, self.plans))
        check_names(f"graph {graphs}: no node is bound to role", roles, nodes, GraphError)
        check_names(f"graph {graphs}: has no role", nodes, roles, GraphError)
        self.clock: Clock = clock or LoopClock()
        self.link: Link = link or InProcessLink()
        self._calls: dict[str, GraphCall] = {}
        self._scheduler = GCScheduler()
        self._parameters = ParameterStore(one for plan in self.plans.values() for one in plan.parameters.values())
        self._routes: dict[tuple[str, frozenset[str]], Route] = {}  # a handful: one for each set of wanted outputs
        self._closing = False
        self._lost: dict[str, str] = {}  # role whose process died -> the reason
        self._controllers = {
            name: self._make_controller(node_plan, self._node_of(node_plan, nodes))
            for name, node_plan in node_plans.items()
        }
        self.link.bind(ENTRY, self._receive)

    def _node_of(self, node_plan: NodePlan, nodes: Mapping[str, Node | RemoteNode]) -> Node | RemoteNode:
        if node_plan.graph is None:
            return nodes[node_plan.role]
        plan = self._graphs.get(f"{node_plan.graph}.{node_plan.interface}")
        if plan is None:
            raise GraphError(
                f"node {node_plan.name!r} calls graph {node_plan.graph!r}, whose plan is missing: compile the graphs "
                "with parse_graphs, which adds those that they call"
            )
        return GraphNode(node_plan.name, partial(self._open_within, plan.name))

    def _open_within(self, graph: str, activation: Activation, inputs: Mapping[str, Any]) -> GraphCall:
        """Open the call of a graph that a node calls."""
        return self.open(
            f"{activation.call_id}/{activation.node}{place_of(activation.path)}",
            inputs,
            activation.wanted,
            graph=graph,
            context=activation.context,
            session=activation.session,
            within=self._calls[activation.call_id],
            on_report=activation.report,
        )

    def _make_controller(self, node_plan: NodePlan, node: Node | RemoteNode) -> Controller:
        if isinstance(node, RemoteNode):
            if node_plan.parameters:
                raise GraphError(
                    f"role {node_plan.role!r} is served by another process, which has no access to its parameters "
                    f"{', '.join(map(repr, node_plan.parameters))}; serve it in this process"
                )
            return node.make_controller(node_plan.name, self.link)
        controller = NodeController(node_plan.name, node, self.link)
        self.link.bind(node_plan.name, controller.receive)
        return controller

    def open(
        self,
        call_id: str,
        inputs: Mapping[str, Any],
        outputs: Iterable[str] = (),
        *,
        graph: str | None = None,
        entry: str | None = None,
        context: Any = None,
        deadline_s: float | None = None,
        session: str | None = None,
        within: GraphCall | None = None,
        on_report: Callable[[Any], None] = lambda payload: None,
    ) -> GraphCall:
        """Start a call. On return, the nodes that its inputs feed have been fired, unless its session is busy.

        Args:
            inputs: placeholder -> payload. Placeholders that ``outputs`` do not depend on may be left out.
            outputs: the wanted outputs; nodes that none of them depends on are never activated. By default all of the
                graph call.
            graph: its name, if there are several; or "graph.call".
            entry: a graph call that the graph declares.
            context: passed unchanged to every activation and transfer function.
            deadline_s: a call not over by then is aborted, and raises ``DeadlineExceeded``.
            session: calls of one session run one after the other, in the order in which they were opened.
            within: the open call that this one is part of; it has the same session, and shares its parameters.
            on_report: called with what activations report (``Activation.report``), the last time before the call is
                over.

        Raises:
            InvalidRequest: a graph, entry, output or input does not exist or is missing, or ``call_id`` is in use.
            RoleUnavailable: the process of a role that the outputs need has died.
            OmniError: the runtime is closed.
        """
        plan = self._choose(call_id, graph, entry)
        where = f"call {call_id!r} of graph {plan.name!r}"
        if self._closing:
            raise OmniError(f"{where}: the runtime is closed")
        if call_id in self._calls:
            raise InvalidRequest(f"{where}: a call of this id is still open; abort it, or use another id")
        if deadline_s is not None and deadline_s <= 0:
            raise InvalidRequest(f"{where}: deadline_s is {deadline_s}, but must be greater than 0, or None")
        wanted = _wanted(where, plan, frozenset(outputs))
        route = self._route(where, plan, wanted, inputs)
        controllers = [self._controllers[name] for name in route.nodes]
        until = plan.until & wanted or wanted
        call = GraphCall(
            call_id, session, within, route, until, controllers, self.link, self.clock, self._forget, on_report
        )
        self._calls[call_id] = call
        if deadline_s is not None:
            call.start_timer(deadline_s)
        start = partial(self._start, call, inputs, context)
        if session is None or within is not None:
            start()
        else:
            self._scheduler.enter(session, call_id, start)
        if call.error is not None:
            raise call.error
        return call

    def _choose(self, call_id: str, graph: str | None, entry: str | None) -> StaticPlan:
        if graph is None and len(self.plans) > 1:
            raise InvalidRequest(f"call {call_id!r}: there are several graphs, name one; {suggest('', self.plans)}")
        if graph is None:
            graph = next(iter(self.plans))
        check_names(f"call {call_id!r}: no graph", [graph], self._graphs, InvalidRequest)
        plan = self._graphs[graph]
        if entry is None:
            return plan
        check_names(f"call {call_id!r} of graph {graph!r}: no graph call", [entry], plan.graph_calls, InvalidRequest)
        return self._graphs[f"{graph}.{entry}"]

    def _route(self, where: str, plan: StaticPlan, wanted: frozenset[str], inputs: Mapping[str, Any]) -> Route:
        check_names(f"{where}: no input", inputs, plan.placeholders, InvalidRequest)
        key = (plan.name, wanted)
        route = self._routes.get(key) or self._routes.setdefault(key, plan.route(wanted))
        check_names(f"{where}: outputs {sorted(wanted)} need input", route.placeholders, inputs, InvalidRequest)
        for node in route.nodes.values() if self._lost else ():
            if (reason := self._lost.get(node.role)) is not None:
                raise RoleUnavailable(f"{where}: role {node.role!r} is unavailable: {reason}")
        return route

    def is_open(self, call_id: str) -> bool:
        """Whether a call of this id is open."""
        return call_id in self._calls

    def end_session(self, session: str) -> None:
        """Release the state of a session. Open calls keep theirs; later calls start with new state."""
        self._parameters.end(session)

    async def abort(self, call_id: str, reason: str = "no reason given") -> None:
        """Abort an open call, see ``GraphCall.abort``; an unknown id is ignored."""
        call = self._calls.get(call_id)
        if call is not None:
            await call.abort(reason)

    def statistics(self) -> FlowStatistics:
        # Copies: the thread of the metrics reads them, too.
        calls, controllers = list(self._calls.values()), list(self._controllers.values())
        return FlowStatistics(
            num_open_calls=len(calls),
            num_waiting_calls=self._scheduler.num_waiting,
            num_running_activations=sum(controller.num_running for controller in controllers),
            num_buffered_frames=sum(call.num_buffered for call in calls)
            + sum(controller.num_buffered for controller in controllers),
        )

    async def aclose(self) -> None:
        """Reject new calls, abort the open ones, and wait until all have cleaned up."""
        self._closing = True
        calls = [call for call in self._calls.values() if call.within is None]  # these end those within them
        await asyncio.gather(*(call.abort("the runtime was closed") for call in calls))
        self._parameters.end_all()

    def shutdown_hosts(self) -> None:
        """Notify the processes that serve roles that no more work follows; call it after ``aclose``."""
        for controller in self._controllers.values():
            controller.shutdown()

    def lose(self, role: str, reason: str) -> None:
        """Mark a role whose process has died, of a graph without a server: calls that need it fail at once, with
        ``RoleUnavailable``, and new ones are rejected until ``regain``. Of a server, see ``lose_calls``.
        """
        self._lost[role] = reason
        self.lose_calls(list(self._calls), role, RoleUnavailable(f"role {role!r} was lost: {reason}"))

    def lose_calls(self, call_ids: Iterable[str], role: str, error: Exception) -> None:
        """Let those of these calls fail at once that need a role: the process that served it for them has died."""
        names = {name for plan in self.plans.values() for name, node in plan.nodes.items() if node.role == role}
        for call in [self._calls[call_id] for call_id in call_ids if call_id in self._calls]:
            if names.intersection(call.route.nodes):
                call.lose(names, error)

    def regain(self, role: str) -> None:
        """Mark a role as served again."""
        self._lost.pop(role, None)

    def _receive(self, message: Any) -> None:
        call = self._calls.get(message.call_id)
        if call is not None:
            call.receive(message)

    def _start(self, call: GraphCall, inputs: Mapping[str, Any], context: Any) -> None:
        try:
            parameters = None if call.within is None else call.within.parameters
            call.start(inputs, context, parameters or self._parameters.of(call.session, call.call_id))
        except Exception as exc:  # the link failed; activations that have been fired must end
            call.stop(exc)

    def _forget(self, call: GraphCall) -> None:
        del self._calls[call.call_id]
        if call.within is not None:
            return
        self._parameters.leave(call.session, call.call_id)
        if call.session is not None:
            self._scheduler.leave(call.session, call.call_id)


def _wanted(where: str, plan: StaticPlan, outputs: frozenset[str]) -> frozenset[str]:
    """The outputs that a call asks for."""
    if not outputs and not plan.until:
        raise InvalidRequest(f"{where}: asks for no output; {suggest('', plan.outputs)}")
    check_names(f"{where}: no output", outputs, plan.outputs, InvalidRequest)
    return outputs or frozenset(plan.outputs)
