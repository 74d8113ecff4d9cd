"""The speech graph over ZMQ: the entry here, each role behind a link of its own, and at the end in its own process."""

import asyncio
import os
import signal
import sys
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
import zmq

from tests.flow.builders import (
    FunctionNode,
    ManualClock,
    hang,
    make_speech_nodes,
    make_speech_plan,
    read,
    read_payloads,
    talk,
)
from vllm_omni import complaints
from vllm_omni.errors import (
    CallAborted,
    DeadlineExceeded,
    GraphError,
    InvalidRequest,
    LinkError,
    RemoteError,
    RoleUnavailable,
)
from vllm_omni.flow import ENTRY, Emission, FlowStatistics, Frame, GraphRuntime
from vllm_omni.flow.remote.host import Remote, RoleHost
from vllm_omni.flow.remote.link import MAX_MESSAGE_BYTES, TOKEN_BYTES, ZmqLink
from vllm_omni.flow.remote.messages import OpenCall
from vllm_omni.flow.run.credit import WINDOW

ROLES = ("thinker", "talker", "token2wav")
ALL = {"text", "audio", "codec_ids"}
NOTHING_LEFT = FlowStatistics(0, 0, 0, 0)
TIMEOUT_S = 30.0
TOKEN = bytes(range(TOKEN_BYTES))


class World:
    """An entry and a host for each role, in one event loop, over sockets."""

    def __init__(self, directory, *, clock=None, local=(), payloads=None, **nodes):
        plan = make_speech_plan()
        addresses = {ENTRY: f"ipc://{directory}/entry"}
        for name, node in plan.nodes.items():
            addresses[name] = addresses[ENTRY] if node.role in local else f"ipc://{directory}/{node.role}"
        self.nodes = make_speech_nodes(**nodes)
        remote = [role for role in ROLES if role not in local]
        self.link = ZmqLink(addresses[ENTRY], addresses, TOKEN, payloads)
        self.links = [ZmqLink(f"ipc://{directory}/{role}", addresses, TOKEN, payloads) for role in remote]
        self.hosts = [
            RoleHost(plan, {role: self.nodes[role]}, link) for role, link in zip(remote, self.links, strict=True)
        ]
        self.runtime = GraphRuntime(plan, self.nodes | {role: Remote() for role in remote}, clock=clock, link=self.link)

    def open(self, outputs=ALL, call_id="call", **kwargs):
        return self.runtime.open(call_id, {"prompt": "w"}, outputs, **kwargs)

    def close(self):
        for link in (self.link, *self.links):
            link.close()


@pytest.fixture
async def make_world(tmp_path):
    worlds = []

    def make(**kwargs):
        worlds.append(World(tmp_path, **kwargs))
        return worlds[-1]

    async with asyncio.timeout(TIMEOUT_S):
        yield make
    for world in worlds:
        world.close()


async def until(condition):
    while not condition():  # noqa: ASYNC110 - messages are in flight on sockets
        await asyncio.sleep(0.001)


async def is_over(world):
    """Wait until the hosts have closed their calls, which they do after the entry."""
    await until(lambda: all(host.num_open_calls == 0 for host in world.hosts))
    assert world.runtime.statistics() == NOTHING_LEFT
    for node in world.nodes.values():
        assert node.events.count("start") == node.events.count("clean")


async def fail(activation):
    await asyncio.sleep(0)
    raise KeyError("weights")
    yield


async def reject(activation):
    raise InvalidRequest("too long")
    yield


@pytest.mark.parametrize("local", [(), ("thinker",), ("talker",), ("thinker", "token2wav")])
async def test_every_output_arrives_in_order_whichever_roles_are_remote(make_world, local):
    world = make_world(local=local)
    for number in range(3):
        assert await read_payloads(world.open(call_id=f"c{number}")) == {
            "text": ["w0", "w1", "w2"],
            "codec_ids": [0, 10, 20],
            "audio": [[0, 10, 20]],
        }
    await is_over(world)


async def test_many_calls_at_once_do_not_mix(make_world):
    world = make_world()
    calls = [world.runtime.open(f"c{i}", {"prompt": f"{i}-"}, {"text"}) for i in range(50)]
    answers = await asyncio.gather(*map(read_payloads, calls))
    assert answers == [{"text": [f"{i}-{step}" for step in range(3)]} for i in range(50)]
    await is_over(world)


async def test_text_only_call_never_starts_the_talker(make_world):
    world = make_world()
    await read(world.open({"text"}))
    await is_over(world)
    assert world.nodes["talker"].events == []


async def test_context_and_session_reach_the_node(make_world):
    world = make_world()
    await read(world.open({"text"}, context={"temperature": 0.5}, session="s"))
    (activation,) = world.nodes["thinker"].activations
    assert activation.context == {"temperature": 0.5}
    assert activation.session == "s"


async def test_reports_reach_the_reader_of_the_call(make_world):
    async def think_and_report(activation):
        activation.report({"seconds": 0.5})
        yield Emission("text", "w", last=True)

    world, reports = make_world(thinker=FunctionNode(think_and_report)), []
    call = world.open({"text"}, on_report=reports.append)
    assert (await anext(call)).payload == "w"
    assert reports == [{"seconds": 0.5}]
    await read(call)
    await is_over(world)


async def test_abort_returns_after_every_activation_has_cleaned_up(make_world):
    world = make_world(talker=FunctionNode(hang))
    call = world.open()
    await until(lambda: world.nodes["talker"].events)
    await call.abort()
    assert world.nodes["talker"].events == ["start", "cancelled", "clean"]
    with pytest.raises(CallAborted):
        await read(call)
    await is_over(world)


async def test_abort_before_any_report_of_a_host_waits_for_it(make_world):
    world = make_world(thinker=FunctionNode(hang))
    call = world.open()
    await call.abort()
    await is_over(world)
    assert world.nodes["thinker"].events in ([], ["start", "cancelled", "clean"])


async def test_deadline_aborts_activations_of_other_processes(make_world):
    clock = ManualClock()
    world = make_world(clock=clock, talker=FunctionNode(hang))
    call = world.open(deadline_s=1.0)
    await until(lambda: world.nodes["talker"].events)
    clock.advance(1.0)
    with pytest.raises(DeadlineExceeded):
        await read(call)
    await is_over(world)


async def test_failure_in_a_host_names_the_error_and_the_node(make_world):
    world = make_world(talker=FunctionNode(fail))
    with pytest.raises(RemoteError, match="KeyError: 'weights'") as raised:
        await read(world.open())
    assert "talker.generate" in "".join(raised.value.__notes__)
    await is_over(world)


async def test_omni_errors_keep_their_class_over_the_wire(make_world):
    world = make_world(thinker=FunctionNode(reject))
    with pytest.raises(InvalidRequest, match="too long"):
        await read(world.open())
    await is_over(world)


async def test_slow_consumer_in_a_host_holds_its_producer_back(make_world):
    sent, gate = [], asyncio.Event()

    async def emit(activation):
        for row in range(1000):
            yield Emission("rows", row, last=row == 999)
            sent.append(row)

    async def read_after_gate(activation):
        await gate.wait()
        async for emission in talk(activation):
            yield emission

    world = make_world(thinker=FunctionNode(emit), talker=FunctionNode(read_after_gate))
    call = world.open({"codec_ids"})
    await until(lambda: len(sent) == WINDOW - 1)
    await asyncio.sleep(0.05)  # time to continue, if it were not held back
    assert len(sent) == WINDOW - 1
    gate.set()
    assert await read_payloads(call) == {"codec_ids": [10 * row for row in range(1000)]}
    await is_over(world)


async def test_payload_that_cannot_be_encoded_fails_only_its_call(make_world):
    async def emit(activation):
        yield Emission("text", object() if activation.call_id == "bad" else "fine", last=True)

    world = make_world(thinker=FunctionNode(emit))
    with pytest.raises(LinkError, match="cannot leave this process"):
        await read(world.open({"text"}, call_id="bad"))
    assert await read_payloads(world.open({"text"}, call_id="good")) == {"text": ["fine"]}
    await is_over(world)


async def test_context_that_cannot_be_encoded_is_rejected_and_leaves_nothing(make_world):
    world = make_world()
    with pytest.raises(LinkError):
        world.open(context=object())
    await is_over(world)


NOT_MESSAGES = {
    "without the token": [b"", b"\xc1", bytes(TOKEN_BYTES) + b"\x90"],
    "not valid": [
        TOKEN + data
        for data in (
            b"",
            b"\xc1",
            *map(msgspec.msgpack.encode, (["Frame"], [["Frame", 1]], {"a": 1})),
            msgspec.msgpack.encode([["CloseCall", "X", "Y"]]).replace(b"X", b"\xff"),  # no UTF-8
            b"\x91" * 100_000,
        )
    ],
}


@pytest.mark.parametrize("complaint", NOT_MESSAGES)
async def test_invalid_message_is_dropped_and_the_next_one_read(make_world, tmp_path, caplog, monkeypatch, complaint):
    monkeypatch.setattr(complaints, "WARN_S", 0)
    world = make_world()
    with zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
        stranger.connect(f"ipc://{tmp_path}/thinker")
        for data in NOT_MESSAGES[complaint]:
            stranger.send(data)
        await until(lambda: caplog.text.count(complaint) == len(NOT_MESSAGES[complaint]))
    assert world.links[0].num_dropped == len(NOT_MESSAGES[complaint])
    assert await read_payloads(world.open({"text"})) == {"text": ["w0", "w1", "w2"]}


async def test_a_message_that_cannot_be_read_fails_its_call_and_the_others_sent_with_it_arrive(make_world, tmp_path):
    world = make_world(thinker=FunctionNode(hang))
    lost, other = world.open({"text"}, call_id="lost"), world.open({"text"}, call_id="other", context=[])
    received = []
    world.link.bind("other.run", received.append)
    with zmq.Context() as context, context.socket(zmq.PUSH) as peer:
        peer.connect(f"ipc://{tmp_path}/entry")
        peer.send(TOKEN + msgspec.msgpack.encode([["Frame", "lost", 7], ["CloseCall", "call", "other.run"]]))
        with pytest.raises(LinkError, match="a message of call 'lost' cannot be read: Expected `array`"):
            await read(lost)
    assert [message.call_id for message in received] == ["call"]
    assert world.link.num_dropped == 0
    await other.aclose()
    await is_over(world)


class Torn:
    """Loses what it encodes, unless it is text."""

    def encode(self, value):
        return msgspec.msgpack.encode(value if isinstance(value, str) else None)

    def decode(self, data):
        if (value := msgspec.msgpack.decode(data)) is None:
            raise ValueError("torn")
        return value


@pytest.mark.parametrize(("context", "kind"), [({}, "OpenCall"), ("fine", "Frame")])
async def test_a_payload_that_cannot_be_read_fails_its_call_at_once(make_world, context, kind):
    async def emit(activation):
        yield Emission("text", {"a": 1}, last=True)

    world = make_world(thinker=FunctionNode(emit), payloads=Torn())
    with pytest.raises(LinkError, match=f"call 'call' cannot be read: the payload of a {kind}: torn"):
        await read(world.open({"text"}, context=context))
    await is_over(world)


async def test_message_of_a_stranger_beyond_the_bound_is_not_read(make_world, tmp_path):
    world = make_world()
    with zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
        monitor = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        stranger.connect(f"ipc://{tmp_path}/thinker")
        stranger.send(bytes(2 * MAX_MESSAGE_BYTES + 65))
        await until(lambda: monitor.poll(0))
        stranger.disable_monitor()
        monitor.close(linger=0)
        stranger.linger = 0
    assert await read_payloads(world.open({"text"})) == {"text": ["w0", "w1", "w2"]}


async def test_message_beyond_the_bound_fails_its_call_where_it_is_sent(make_world):
    world = make_world()
    said = r"has 16,777,2\d\d bytes, and may have 16,777,216 \(max_message_bytes of the link\).* through the relay"
    with pytest.raises(LinkError, match=said):
        world.open(context="x" * MAX_MESSAGE_BYTES)
    await is_over(world)


async def test_a_link_carries_as_much_as_it_is_given(tmp_path):
    text, received = "x" * MAX_MESSAGE_BYTES, []
    addresses = {"other.run": f"ipc://{tmp_path}/other"}
    there, here = (
        ZmqLink(f"ipc://{tmp_path}/{name}", addresses, TOKEN, max_message_bytes=2 * MAX_MESSAGE_BYTES)
        for name in ("other", "entry")
    )
    with closing(there), closing(here):
        there.bind("other.run", lambda message: received.append(len(message.context)))
        here.send(OpenCall("call", "other.run", "speech", [], text, None))
        await until(lambda: received == [len(text)])


async def test_long_messages_that_are_sent_together_arrive(make_world):
    world = make_world()
    half = "x" * (MAX_MESSAGE_BYTES // 2)
    received = []
    world.links[0].bind("other.run", lambda message: received.append(len(message.context)))
    world.link._addresses["other.run"] = world.link._addresses["thinker.generate"]
    for _ in range(6):
        world.link.send(OpenCall("call", "other.run", "speech", [], half, None))
    await until(lambda: received == [len(half)] * 6)


async def test_token_of_another_length_is_rejected(tmp_path):
    with pytest.raises(LinkError, match="has 3 bytes, not 16"):
        ZmqLink(f"ipc://{tmp_path}/entry", {}, b"abc")


async def test_frames_that_arrive_before_their_call_is_opened_are_kept(make_world):
    world = make_world()
    host = world.hosts[1]
    frames = [Frame("call", "thinker.generate", "talker.generate", 0, "rows", 7, 0, True, 4)]
    for frame in frames:
        host._receive(frame)
    world.runtime._calls.clear()
    received = []
    world.link.bind(ENTRY, received.append)
    world.link.send(OpenCall("call", "talker.generate", "speech", ["codec_ids"], None, None))
    await until(lambda: any(isinstance(one, Frame) for one in received))
    assert [one.payload for one in received if isinstance(one, Frame)] == [40]


async def test_lost_role_fails_its_calls_and_rejects_new_ones_until_regained(make_world):
    world = make_world(talker=FunctionNode(hang))
    needs_it, does_not = world.open({"audio"}, call_id="needs"), world.open({"text"}, call_id="does not")
    await until(lambda: world.nodes["talker"].events)
    world.runtime.lose("talker", "killed")
    with pytest.raises(RoleUnavailable, match="'talker' was lost: killed"):
        await read(needs_it)
    assert await read_payloads(does_not) == {"text": ["w0", "w1", "w2"]}
    with pytest.raises(RoleUnavailable, match="'talker' is unavailable: killed"):
        world.open({"audio"}, call_id="new")
    assert await read_payloads(world.open({"text"}, call_id="new")) == {"text": ["w0", "w1", "w2"]}
    world.runtime.regain("talker")
    await world.open({"audio"}, call_id="again").aclose()
    await is_over(world)


async def test_host_of_an_unknown_role_is_rejected(make_world):
    world = make_world()
    with pytest.raises(GraphError, match="'singer'"):
        RoleHost(make_speech_plan(), {"singer": FunctionNode(talk)}, world.link)


async def test_address_that_cannot_be_bound_is_named(make_world, tmp_path):
    with pytest.raises(LinkError, match="nowhere"):
        ZmqLink(f"ipc://{tmp_path}/nowhere/at/all", {}, TOKEN)


async def test_target_without_an_address_is_named(make_world):
    with pytest.raises(LinkError, match=r"'b\.run'"):
        make_world().link.send(Frame("call", "a.run", "b.run", 0, "x", 7, 0, True, None))


# ---- processes ----

HOST = """
import asyncio, sys
from tests.flow.builders import FunctionNode, hang, make_speech_nodes, make_speech_plan
from vllm_omni.flow import ENTRY
from vllm_omni.flow.remote.host import RoleHost
from vllm_omni.flow.remote.link import ZmqLink

async def main(directory, role):
    plan = make_speech_plan()
    addresses = {ENTRY: f"ipc://{directory}/entry"}
    addresses |= {name: f"ipc://{directory}/{node.role}" for name, node in plan.nodes.items()}
    link = ZmqLink(f"ipc://{directory}/{role}", addresses, bytes(range(16)))
    host = RoleHost(plan, {role: make_speech_nodes()[role]}, link)
    print("ready", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)  # until the parent exits
    link.close()

asyncio.run(main(*sys.argv[1:]))
"""


async def start_host(directory, role):
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HOST, str(directory), role,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[3],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
    )  # fmt: skip
    assert await process.stdout.readline() == b"ready\n"
    return process


async def test_killing_the_process_of_a_role_fails_only_the_calls_that_need_it(tmp_path):
    plan = make_speech_plan()
    addresses = {ENTRY: f"ipc://{tmp_path}/entry"}
    addresses |= {name: f"ipc://{tmp_path}/{node.role}" for name, node in plan.nodes.items()}
    link = ZmqLink(addresses[ENTRY], addresses, TOKEN)
    runtime = GraphRuntime(plan, dict.fromkeys(ROLES, Remote()), link=link)
    processes = dict(zip(ROLES, await asyncio.gather(*(start_host(tmp_path, role) for role in ROLES)), strict=True))
    try:
        async with asyncio.timeout(TIMEOUT_S):
            whole = {"text": ["w0", "w1", "w2"], "audio": [[0, 10, 20]]}
            assert await read_payloads(runtime.open("before", {"prompt": "w"}, {"text", "audio"})) == whole

            processes["talker"].send_signal(signal.SIGKILL)
            await processes["talker"].wait()
            stuck = runtime.open("stuck", {"prompt": "w"}, {"audio"})
            runtime.lose("talker", "killed by SIGKILL")
            with pytest.raises(RoleUnavailable):
                await read(stuck)
            assert await read_payloads(runtime.open("text", {"prompt": "w"}, {"text"})) == {"text": whole["text"]}

            processes["talker"] = await start_host(tmp_path, "talker")
            runtime.regain("talker")
            assert await read_payloads(runtime.open("after", {"prompt": "w"}, {"text", "audio"})) == whole
            assert runtime.statistics() == NOTHING_LEFT
    finally:
        for process in processes.values():
            process.stdin.close()
        assert {await process.wait() for process in processes.values()} == {0}
        link.close()


async def test_hosts_are_notified_at_shutdown(make_world):
    world = make_world(local=("talker",))
    assert await read_payloads(world.open({"text"}))
    waiting = [asyncio.create_task(host.wait_stopped()) for host in world.hosts]
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    await world.runtime.aclose()
    world.runtime.shutdown_hosts()
    await asyncio.gather(*waiting)
