"""Runtimes over several links. Tests of ``make_runtime`` run within the process, in order and shuffled; those that
depend on the link are marked with ``over_every_link`` and run over sockets, too.
"""

import asyncio
import random

import pytest

from tests.flow.builders import ShufflingLink, spin
from vllm_omni.flow import ENTRY, FlowStatistics, Graph, GraphParser, GraphRuntime, InProcessLink, parse_graphs
from vllm_omni.flow.remote.host import Remote, RoleHost
from vllm_omni.flow.remote.link import ZmqLink


@pytest.fixture(params=["in_process", "shuffled"])
async def make_runtime(request, tmp_path):
    """``make_runtime(graph_or_graphs, nodes)``; after the test nothing may be left."""
    runtimes, hosts, links = [], [], []

    def make(graphs, nodes, **options):
        plans = [GraphParser(graphs).parse()] if isinstance(graphs, Graph) else list(parse_graphs(graphs).values())
        if request.param != "zmq":
            link = ShufflingLink(random.Random(1)) if request.param == "shuffled" else InProcessLink()
            runtimes.append(GraphRuntime(plans, nodes, link=link, **options))
            return runtimes[-1]
        nodes_of = {name: node for plan in plans for name, node in plan.nodes.items()}
        addresses = {ENTRY: f"ipc://{tmp_path}/entry"}
        for name, node in nodes_of.items():
            addresses[name] = addresses[ENTRY] if node.graph else f"ipc://{tmp_path}/{node.role}"
        entry = ZmqLink(addresses[ENTRY], addresses, bytes(16))
        links.append(entry)
        for role in nodes:
            links.append(ZmqLink(f"ipc://{tmp_path}/{role}", addresses, bytes(16)))
            hosts.append(RoleHost(plans, {role: nodes[role]}, links[-1]))
        runtimes.append(GraphRuntime(plans, {role: Remote() for role in nodes}, link=entry, **options))
        return runtimes[-1]

    yield make
    await spin()
    for runtime in runtimes:
        assert runtime.statistics() == FlowStatistics(0, 0, 0, 0)
    while any(host.num_open_calls for host in hosts):  # noqa: ASYNC110 - messages are in flight on sockets
        await asyncio.sleep(0.001)
    await spin()
    assert [task for task in asyncio.all_tasks() if "NodeController" in str(task.get_coro())] == []
    for link in links:
        link.close()
