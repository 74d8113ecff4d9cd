from collections import Counter

import pytest

from tests.flow.builders import FunctionNode, make_speech_nodes, make_speech_plan, read_payloads, spin
from vllm_omni.errors import NoInstance
from vllm_omni.flow import Activation, Chunk, Emission, GraphRuntime, Scheduling
from vllm_omni.flow.remote.registry import MemoryRegistry, Replica
from vllm_omni.flow.remote.replicas import (
    Broadcast,
    LeastOutstanding,
    ReplicatedNode,
    RoundRobin,
    SessionLoadBalance,
    policy_for,
)
from vllm_omni.flow.run.sequence import Stream

A, B, C = (Replica("thinker", name) for name in "abc")


async def choose(policy, instances, number, outstanding=None, session=None):
    return [(await policy.choose(instances, outstanding or {}, session)).replica_id for _ in range(number)]


async def test_round_robin_alternates():
    assert await choose(RoundRobin(), [A, B, C], 6) == ["a", "b", "c", "a", "b", "c"]


async def test_round_robin_continues_when_a_replica_leaves():
    policy = RoundRobin()
    await choose(policy, [A, B, C], 2)
    assert Counter(await choose(policy, [A, C], 4)) == {"a": 2, "c": 2}


async def test_least_outstanding_prefers_the_idle():
    assert await choose(LeastOutstanding(), [A, B, C], 1, {"a": 2, "b": 1, "c": 3}) == ["b"]


async def test_least_outstanding_alternates_among_equals():
    assert Counter(await choose(LeastOutstanding(), [A, B, C], 4, {"b": 5})) == {"a": 2, "c": 2}


async def test_session_stays_where_it_is():
    policy = SessionLoadBalance("thinker", MemoryRegistry(), RoundRobin())
    first = await choose(policy, [A, B, C], 1, session="s")
    await choose(policy, [A, B, C], 4)
    assert await choose(policy, [A, B, C], 3, session="s") == first * 3


async def test_session_moves_when_its_instance_has_left():
    policy = SessionLoadBalance("thinker", MemoryRegistry(), RoundRobin())
    assert await choose(policy, [A], 1, session="s") == ["a"]
    first, *others = await choose(policy, [B, C], 3, session="s")
    assert first in ("b", "c")
    assert others == [first, first]


async def test_processes_agree_on_a_session():
    registry = MemoryRegistry()
    one, other = (SessionLoadBalance("thinker", registry, RoundRobin()) for _ in range(2))
    await choose(other, [A, B], 1)  # it alternates independently
    assert await choose(one, [A, B], 1, session="s") == await choose(other, [A, B], 1, session="s")


async def test_instance_that_another_process_chose_is_looked_up():
    registry = MemoryRegistry()
    await registry.register(B)

    class Late(RoundRobin):
        async def choose(self, instances, outstanding, session):
            await registry.bind("thinker", session, "b", instead_of=None)  # another process, just now
            return await super().choose(instances, outstanding, session)

    assert await choose(SessionLoadBalance("thinker", registry, Late()), [A], 1, session="s") == ["b"]


# ---- in a graph ----


def make_instances(*names):
    async def forward(activation):
        async for _ in activation.inputs["prompt"]:
            await spin(3)
            yield Emission("text", activation.node, last=True)

    return {name: FunctionNode(forward) for name in names}


async def make_runtime(nodes, policy=None):
    registry = MemoryRegistry()
    for name in nodes:
        await registry.register(Replica("thinker", name))
    thinker = ReplicatedNode("thinker", registry, policy or RoundRobin(), lambda one: nodes[one.replica_id])
    return GraphRuntime(make_speech_plan(), make_speech_nodes(thinker=thinker)), registry, thinker


async def ask(runtime, call_id, **kwargs):
    return await read_payloads(runtime.open(call_id, {"prompt": "w"}, {"text"}, **kwargs))


async def test_activations_are_shared_out_and_nothing_is_left():
    nodes = make_instances("a", "b")
    runtime, _, thinker = await make_runtime(nodes)
    for index in range(4):
        assert await ask(runtime, f"c{index}") == {"text": ["thinker.generate"]}
    assert [len(node.activations) for node in nodes.values()] == [2, 2]
    assert not thinker.outstanding


async def test_instances_join_and_leave_while_calls_run():
    nodes = make_instances("a", "b")
    runtime, registry, _ = await make_runtime({"a": nodes["a"]})
    await ask(runtime, "alone")
    await registry.register(B)
    runtime._controllers["thinker.generate"]._node._resolve = lambda one: nodes[one.replica_id]
    running = runtime.open("running", {"prompt": "w"}, {"text"})
    await spin(1)
    await registry.deregister(A)
    await registry.deregister(B)
    assert await read_payloads(running) == {"text": ["thinker.generate"]}
    with pytest.raises(NoInstance, match="'thinker'"):
        await ask(runtime, "nobody")


async def test_calls_of_a_session_go_to_one_instance():
    nodes = make_instances("a", "b", "c")
    registry = MemoryRegistry()
    runtime, _, _ = await make_runtime(nodes, SessionLoadBalance("thinker", registry, RoundRobin()))
    for index in range(3):
        await ask(runtime, f"c{index}", session="s")
    assert sorted(len(node.activations) for node in nodes.values()) == [0, 0, 3]


async def test_abort_reaches_the_instance():
    async def hang(activation):
        await spin(10**6)
        yield Emission("text", "never")

    nodes = {"a": FunctionNode(hang)}
    runtime, _, thinker = await make_runtime(nodes)
    call = runtime.open("c", {"prompt": "w"}, {"text"})
    await spin(5)
    await call.abort()
    assert nodes["a"].events == ["start", "cancelled", "clean"]
    assert not thinker.outstanding


@pytest.mark.parametrize(
    "scheduling, policy",
    [
        (Scheduling.ROUND_ROBIN, RoundRobin),
        (Scheduling.LEAST_OUTSTANDING, LeastOutstanding),
        (Scheduling.SESSION, SessionLoadBalance),
        (Scheduling.BROADCAST, Broadcast),
    ],
)
def test_what_an_interface_declares_is_a_policy(scheduling, policy):
    assert type(policy_for(scheduling, "thinker", MemoryRegistry())) is policy


async def make_broadcast(**instances):
    """thinker, served by all of them"""
    registry = MemoryRegistry()
    for name in instances:
        await registry.register(Replica("thinker", name))
    resolve = lambda instance: instances[instance.replica_id]  # noqa: E731
    node = ReplicatedNode("thinker", registry, Broadcast(), resolve)
    return node, GraphRuntime(make_speech_plan(), make_speech_nodes(thinker=node))


def say(name, delay=0):
    async def forward(activation):
        async for chunk in activation.inputs["prompt"]:
            for number in range(2):
                await spin(delay)
                yield Emission("text", f"{name}{number}{chunk.payload}")

    return FunctionNode(forward)


async def test_broadcast_is_served_by_all_and_what_they_yield_is_one_stream():
    node, runtime = await make_broadcast(a=say("a", delay=3), b=say("b"))
    payloads = (await read_payloads(runtime.open("c", {"prompt": "x"}, {"text"})))["text"]
    assert sorted(filter(None, payloads)) == ["a0x", "a1x", "b0x", "b1x"]
    assert [one for one in payloads if one and one.startswith("a")] == ["a0x", "a1x"]
    assert node.outstanding == {}


async def test_broadcast_without_replicas_is_rejected():
    _, runtime = await make_broadcast()
    with pytest.raises(NoInstance):
        await read_payloads(runtime.open("c", {"prompt": "x"}, {"text"}))


async def test_instance_that_fails_ends_the_broadcast_and_the_others():
    async def fail(activation):
        await spin(2)
        raise KeyError("weights")
        yield

    late = say("b", delay=1000)
    node, runtime = await make_broadcast(a=FunctionNode(fail), b=late)
    with pytest.raises(KeyError, match="weights"):
        await read_payloads(runtime.open("c", {"prompt": "x"}, {"text"}))
    assert late.events == ["start", "cancelled", "clean"]
    assert node.outstanding == {}


async def test_aborted_broadcast_leaves_no_activation():
    slow = [say(name, delay=1000) for name in "ab"]
    node, runtime = await make_broadcast(a=slow[0], b=slow[1])
    call = runtime.open("c", {"prompt": "x"}, {"text"})
    await spin()
    await call.aclose()
    assert [one.events for one in slow] == [["start", "cancelled", "clean"]] * 2
    assert node.outstanding == {}


async def test_broadcast_closed_at_a_yield_leaves_no_activation():
    slow = [say(name) for name in "ab"]
    node, _ = await make_broadcast(a=slow[0], b=slow[1])
    prompt = Stream()
    prompt.put_nowait(Chunk("x"))
    prompt.finish()
    emissions = node.forward(Activation("c", "n", "run", 1, {"prompt": prompt}, frozenset({"text"}), None))
    await anext(emissions)
    await emissions.aclose()
    assert [one.events[-1] for one in slow] == ["clean", "clean"]
    assert node.outstanding == {}
