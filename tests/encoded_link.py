"""Serve a graph as if each of its nodes were in a process of its own: every message is delivered from its bytes."""

from collections.abc import Iterator
from contextlib import contextmanager

from vllm_omni.engine.orchestrator import Orchestrator
from vllm_omni.engine.wire import ServedPayloads
from vllm_omni.flow import FlowStatistics, GraphRuntime, InProcessLink
from vllm_omni.flow.remote.host import Remote, RoleHost
from vllm_omni.flow.remote.messages import MessageCodec
from vllm_omni.flow.run.link import Message


class EncodedLink(InProcessLink):
    """Encodes and decodes whatever it delivers.

    Attributes:
        num_bytes: of all messages.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0
        self._codec = MessageCodec(ServedPayloads())

    def send(self, message: Message) -> None:
        data = self._codec.encode(message)
        self.num_bytes += len(data)
        (decoded,) = self._codec.decode(b"\x91" + data)
        super().send(decoded)


@contextmanager
def served_from_bytes(orchestrator: Orchestrator) -> Iterator[EncodedLink]:
    """Inside the block, hosts serve the same engines and functions, and nothing is left of a request afterwards.

    Roles that share parameters stay with the entry.
    """
    link, plans, runtime = EncodedLink(), list(orchestrator.plans.values()), orchestrator.runtime
    local = {node.role for plan in plans for node in plan.nodes.values() if node.parameters}
    for role, node in orchestrator.nodes.items():
        if role not in local:
            RoleHost(plans, {role: node}, link)
    nodes = {role: node if role in local else Remote() for role, node in orchestrator.nodes.items()}
    orchestrator.runtime = GraphRuntime(plans, nodes, link=link)
    try:
        yield link
        assert orchestrator.runtime.statistics() == FlowStatistics(0, 0, 0, 0)
    finally:
        orchestrator.runtime = runtime
