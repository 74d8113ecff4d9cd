"""A graph over several processes: a ``RoleHost`` serves a node there, and the entry's runtime has a
``RemoteController`` for it.

The entry owns calls, deadlines and aborts; hosts own activations, and report their start and end to the entry. A host
that dies fails only the calls that need it (``GraphRuntime.lose``).
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from vllm_omni.errors import GraphError
from vllm_omni.flow.graph.plan import Route, StaticPlan
from vllm_omni.flow.graph.transfer import ENTRY
from vllm_omni.flow.remote.messages import CANCELLATION, ActivityReport, CancelCall, CloseCall, OpenCall, ShutdownHost
from vllm_omni.flow.run.activity import Activity, Tracker
from vllm_omni.flow.run.controller import NodeController
from vllm_omni.flow.run.frame import EdgeCredit, Frame, SlotEos
from vllm_omni.flow.run.link import Link
from vllm_omni.flow.run.node import Node
from vllm_omni.flow.run.scope import CallScope, RemoteNode, check_names, index_plans

logger = logging.getLogger(__name__)

FlowMessage: TypeAlias = Frame | SlotEos | EdgeCredit

MAX_CALLS_REMEMBERED = 4096
MAX_EARLY_MESSAGES = 4096
"""Messages of calls that the entry has not opened here yet: those of other hosts may arrive earlier."""


class Remote(RemoteNode):
    """Stands for the node of a role that a ``RoleHost`` serves."""

    def make_controller(self, name: str, link: Link) -> RemoteController:
        return RemoteController(name, link)


class RemoteController:
    """The entry's side of a node in another process: forwards every operation as a message."""

    num_running = 0  # unknown in this process
    num_buffered = 0

    def __init__(self, name: str, link: Link) -> None:
        self.name = name
        self._link = link
        self._trackers: dict[str, Tracker] = {}

    def open(self, scope: CallScope) -> None:
        outputs = sorted(scope.route.outputs)
        self._link.send(OpenCall(scope.call_id, self.name, scope.route.graph, outputs, scope.context, scope.session))
        self._trackers[scope.call_id] = scope.tracker

    def cancel(self, call_id: str, *, unfinished_only: bool = False) -> None:
        if not unfinished_only:
            # Reports of started activations may be in flight, so the call waits for the answer.
            self._trackers[call_id].start(Activity(self.name, CANCELLATION))
        self._link.send(CancelCall(call_id, self.name, unfinished_only))

    def close(self, call_id: str) -> None:
        del self._trackers[call_id]
        self._link.send(CloseCall(call_id, self.name))

    def shutdown(self) -> None:
        self._link.send(ShutdownHost("", self.name))


class _RemoteTracker:
    """Reports activations of one call at one node to the entry.

    Attributes:
        route: of the call; None: it is not open.
        context: likewise.
    """

    def __init__(self, link: Link, call_id: str, node: str, route: Route | None = None, context: Any = None) -> None:
        self.route, self.context = route, context
        self._link = link
        self._call_id = call_id
        self._node = node
        self._num_inflight = 0
        self._is_cancelled = False

    def start(self, activity: Activity) -> None:
        self._num_inflight += 1
        self._report(activity.activation_id, has_ended=False)

    def end(self, activity: Activity) -> None:
        self._num_inflight -= 1
        self._report(activity.activation_id, has_ended=True)
        if self._is_cancelled:
            self.acknowledge()

    def acknowledge(self) -> None:
        """Answer a cancellation, now or when the last activation has ended."""
        self._is_cancelled = True
        if not self._num_inflight:
            self._report(CANCELLATION, has_ended=True)

    def _report(self, activation_id: int, *, has_ended: bool) -> None:
        self._link.send(ActivityReport(self._call_id, ENTRY, self._node, activation_id, has_ended))


@dataclass(slots=True)
class _HostedNode:
    controller: NodeController
    trackers: dict[str, _RemoteTracker] = field(default_factory=dict)  # by open call
    early: OrderedDict[str, deque[FlowMessage]] = field(default_factory=OrderedDict)  # by call that is not open yet
    closed: OrderedDict[str, None] = field(default_factory=OrderedDict)  # calls closed recently


class RoleHost:
    """Serves roles of a plan, or of several, for an entry in another process.

    Args:
        plans: the same plans as the entry's.
        nodes: role -> the node that serves it, for the roles of this process.

    Raises:
        GraphError: a role is not in the plans, or shares parameters, which stay with the entry.
    """

    def __init__(self, plans: StaticPlan | Sequence[StaticPlan], nodes: Mapping[str, Node], link: Link) -> None:
        self.plans, node_plans = index_plans(plans)
        roles = {node.role for node in node_plans.values()}
        check_names(f"graph {', '.join(map(repr, self.plans))}: has no role", nodes, roles, GraphError)
        self.link = link
        self._routes: dict[tuple[str, frozenset[str]], Route] = {}
        self._stopped = asyncio.Event()
        self._nodes: dict[str, _HostedNode] = {}
        for name, node_plan in node_plans.items():
            if node_plan.role not in nodes:
                continue
            if node_plan.parameters:
                raise GraphError(
                    f"role {node_plan.role!r} shares parameters, which stay in the entry's process; serve it there"
                )
            self._nodes[name] = _HostedNode(NodeController(name, nodes[node_plan.role], link))
            link.bind(name, self._receive)

    @property
    def num_open_calls(self) -> int:
        return len({call_id for node in self._nodes.values() for call_id in node.trackers})

    def open_calls(self) -> dict[str, tuple[Route, Any]]:
        """The open calls, each with its route, of which nodes may be served elsewhere, and its context."""
        trackers = [pair for node in self._nodes.values() for pair in node.trackers.items()]
        return {call_id: (one.route, one.context) for call_id, one in trackers if one.route is not None}

    def context_of(self, call_id: str) -> Any:
        """The context of a call; None: it is not open."""
        trackers = (node.trackers.get(call_id) for node in self._nodes.values())
        return next((one.context for one in trackers if one is not None), None)

    def end_calls(self) -> None:
        """Cancel and forget all calls: their entry is lost."""
        for name, node in self._nodes.items():
            for call_id in [*node.trackers, *node.early]:
                self._close(node, CloseCall(call_id, name))

    async def wait_stopped(self) -> None:
        """Wait until the entry has no more work for this process (``GraphRuntime.shutdown_hosts``)."""
        await self._stopped.wait()

    def _receive(self, message: Any) -> None:
        node = self._nodes[message.target]
        match message:
            case ShutdownHost():
                self._stopped.set()
            case OpenCall():
                self._open(node, message)
            case CancelCall():
                self._cancel(node, message)
            case CloseCall():
                self._close(node, message)
            case _ if message.call_id in node.trackers:
                node.controller.receive(message)
            case _ if message.call_id not in node.closed:
                self._keep(node, message)

    def _open(self, node: _HostedNode, message: OpenCall) -> None:
        key = (message.graph, frozenset(message.outputs))
        route = self._routes.get(key) or self._routes.setdefault(key, self.plans[message.graph].route(key[1]))
        node.closed.pop(message.call_id, None)  # a call id may be reused
        tracker = node.trackers[message.call_id] = _RemoteTracker(
            self.link, message.call_id, message.target, route, message.context
        )
        node.controller.open(CallScope(message.call_id, route, tracker, message.context, message.session))
        for early in node.early.pop(message.call_id, ()):
            node.controller.receive(early)

    def _cancel(self, node: _HostedNode, message: CancelCall) -> None:
        tracker = node.trackers.get(message.call_id)
        if tracker is not None:
            node.controller.cancel(message.call_id, unfinished_only=message.unfinished_only)
            if not message.unfinished_only:
                tracker.acknowledge()
        elif not message.unfinished_only:  # nothing runs: the message that opens the call could not be read
            _RemoteTracker(self.link, message.call_id, message.target).acknowledge()

    def _close(self, node: _HostedNode, message: CloseCall) -> None:
        node.early.pop(message.call_id, None)
        if node.trackers.pop(message.call_id, None) is not None:
            node.controller.cancel(message.call_id)  # normally nothing runs
            node.controller.close(message.call_id)
        node.closed[message.call_id] = None
        if len(node.closed) > MAX_CALLS_REMEMBERED:
            node.closed.popitem(last=False)

    def _keep(self, node: _HostedNode, message: FlowMessage) -> None:
        node.early.setdefault(message.call_id, deque()).append(message)
        while sum(map(len, node.early.values())) > MAX_EARLY_MESSAGES:
            call_id, lost = node.early.popitem(last=False)
            logger.warning("dropped %d messages of call %r, which the entry has not opened here", len(lost), call_id)
