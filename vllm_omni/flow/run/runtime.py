"""The runtime of a graph: it holds the controllers and opens calls."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from vllm_omni.errors import GraphError, InvalidRequest, OmniError, RoleUnavailable
from vllm_omni.flow.graph.plan import NodePlan, Route, StaticPlan
from vllm_omni.flow.graph.transfer import ENTRY
from vllm_omni.flow.run.call import GraphCall
from vllm_omni.flow.run.clock import Clock, LoopClock
from vllm_omni.flow.run.controller import NodeController
from vllm_omni.flow.run.link import InProcessLink, Link
from vllm_omni.flow.run.node import Node
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
        self.plans, node_plans = index_plans(plans)
        roles = {node.role for node in node_plans.values()}
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
            name: self._make_controller(node_plan, nodes[node_plan.role]) for name, node_plan in node_plans.items()
        }
        self.link.bind(ENTRY, self._receive)

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
    ) -> GraphCall:
        """Start a call. On return, the nodes that its inputs feed have been fired, unless its session is busy.

        Args:
            inputs: placeholder -> payload. Placeholders that ``outputs`` do not depend on may be left out.
            outputs: the wanted outputs; nodes that none of them depends on are never activated.
            graph: its name, if there are several.
            entry: instead of ``outputs``: a graph call that the graph declares.
            context: passed unchanged to every activation and transfer function.
            deadline_s: a call not over by then is aborted, and raises ``DeadlineExceeded``.
            session: calls of one session run one after the other, in the order in which they were opened.

        Raises:
            InvalidRequest: a graph, entry, output or input does not exist or is missing, or ``call_id`` is in use.
            RoleUnavailable: the process of a role that the outputs need has died.
            OmniError: the runtime is closed.
        """
        plan = self._choose(call_id, graph)
        where = f"call {call_id!r} of graph {plan.name!r}"
        if self._closing:
            raise OmniError(f"{where}: the runtime is closed")
        if call_id in self._calls:
            raise InvalidRequest(f"{where}: a call of this id is still open; abort it, or use another id")
        if deadline_s is not None and deadline_s <= 0:
            raise InvalidRequest(f"{where}: deadline_s is {deadline_s}, but must be greater than 0, or None")
        wanted, until = _wanted(where, plan, frozenset(outputs), entry)
        route = self._route(where, plan, wanted, inputs)
        controllers = [self._controllers[name] for name in route.nodes]
        call = GraphCall(call_id, session, route, until, controllers, self.link, self.clock, self._forget)
        self._calls[call_id] = call
        if deadline_s is not None:
            call.start_timer(deadline_s)
        start = partial(self._start, call, inputs, context)
        if session is None:
            start()
        else:
            self._scheduler.enter(session, call_id, start)
        if call.error is not None:
            raise call.error
        return call

    def _choose(self, call_id: str, graph: str | None) -> StaticPlan:
        if graph is None:
            if len(self.plans) > 1:
                raise InvalidRequest(f"call {call_id!r}: there are several graphs, name one; {suggest('', self.plans)}")
            return next(iter(self.plans.values()))
        check_names(f"call {call_id!r}: no graph", [graph], self.plans, InvalidRequest)
        return self.plans[graph]

    def _route(self, where: str, plan: StaticPlan, wanted: frozenset[str], inputs: Mapping[str, Any]) -> Route:
        check_names(f"{where}: no input", inputs, plan.placeholders, InvalidRequest)
        key = (plan.name, wanted)
        route = self._routes.get(key) or self._routes.setdefault(key, plan.route(wanted))
        check_names(f"{where}: outputs {sorted(wanted)} need input", route.placeholders, inputs, InvalidRequest)
        for node in route.nodes.values() if self._lost else ():
            if (reason := self._lost.get(node.role)) is not None:
                raise RoleUnavailable(f"{where}: role {node.role!r} is unavailable: {reason}")
        return route

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
        await asyncio.gather(*(call.abort("the runtime was closed") for call in self._calls.values()))
        self._parameters.end_all()

    def shutdown_hosts(self) -> None:
        """Notify the processes that serve roles that no more work follows; call it after ``aclose``."""
        for controller in self._controllers.values():
            controller.shutdown()

    def lose(self, role: str, reason: str) -> None:
        """Mark a role whose process has died: calls that need it fail at once, and new ones are rejected until
        ``regain``.
        """
        self._lost[role] = reason
        names = {name for plan in self.plans.values() for name, node in plan.nodes.items() if node.role == role}
        for call in list(self._calls.values()):
            if names.intersection(call.route.nodes):
                call.lose(names, RoleUnavailable(f"role {role!r} was lost: {reason}"))

    def regain(self, role: str) -> None:
        """Mark a role as served again."""
        self._lost.pop(role, None)

    def _receive(self, message: Any) -> None:
        call = self._calls.get(message.call_id)
        if call is not None:
            call.receive(message)

    def _start(self, call: GraphCall, inputs: Mapping[str, Any], context: Any) -> None:
        try:
            call.start(inputs, context, self._parameters.of(call.session, call.call_id))
        except Exception as exc:  # the link failed; activations that have been fired must end
            call.stop(exc)

    def _forget(self, call: GraphCall) -> None:
        del self._calls[call.call_id]
        self._parameters.leave(call.session, call.call_id)
        if call.session is not None:
            self._scheduler.leave(call.session, call.call_id)


def _wanted(
    where: str, plan: StaticPlan, outputs: frozenset[str], entry: str | None
) -> tuple[frozenset[str], frozenset[str]]:
    """The outputs that a call asks for, and those that complete it."""
    if entry is not None:
        check_names(f"{where}: no graph call", [entry], plan.graph_calls, InvalidRequest)
        if outputs:
            raise InvalidRequest(f"{where}: graph call {entry!r} names its outputs; leave outputs out")
        return plan.graph_calls[entry].outputs, plan.graph_calls[entry].until
    if not outputs:
        raise InvalidRequest(f"{where}: asks for no output; {suggest('', plan.outputs)}")
    check_names(f"{where}: no output", outputs, plan.outputs, InvalidRequest)
    return outputs, outputs
