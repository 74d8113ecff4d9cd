"""Ways of a small message between two hosts, each with a program on either, for ``benchmarks/host_messages.py``.

The near one is asked by lines of JSON and answers with its figures; the far one returns every message.

    python -m benchmarks.host_ways near WAY HERE THERE DIRECTORY
    python -m benchmarks.host_ways far WAY HERE THERE DIRECTORY

Baseline: plain ZMQ, with and without CURVE.

HERE is the front end's address, THERE the other host's, DIRECTORY the program's own place for sockets.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import zmq

from vllm_omni.engine.wire import ServedPayloads
from vllm_omni.flow.remote.encoded_link import EncodedLink, Outbox
from vllm_omni.flow.run.frame import Frame
from vllm_omni.hosts import messages as msg
from vllm_omni.hosts.bridge import IDENTITY
from vllm_omni.hosts.connection import HostConnection
from vllm_omni.hosts.endpoint import Endpoint
from vllm_omni.hosts.listener import HostListener
from vllm_omni.hosts.peers import PeerLinks
from vllm_omni.relay.io_thread import block_on, io_thread
from vllm_omni.relay.secret import MIN_BYTES, Secret

PAYLOAD = os.urandom(256)
WINDOW = 64  # messages on their way at once, where messages per second are counted
TIMEOUT_S = 60.0
PORTS = {"zmq": 7701, "curve": 7702, "link": 7703, "served": 7704}
SECRET = Secret(b"s" * MIN_BYTES)
SAME = msg.Identity("1", "1", "cpu", "1")

WAYS = {
    "local": "vLLM's sockets on one machine (ipc)",
    "served": "ours, front end to an engine core on a host (CURVE)",
    "link": "ours, between the controllers of two hosts (CURVE)",
    "zmq": "plain ZMQ, not encrypted",
    "curve": "plain ZMQ, CURVE",
    "ray actor": "a call of a Ray actor",
    "ray graph": "Ray's compiled graph (2 on their way)",
}
RAY = ("ray actor", "ray graph")


# -- the near program --------------------------------------------------------------------------------------------------


class Way(Protocol):
    """A way there and back."""

    def exchange(self, window: int, on_answer: Callable[[], bool]) -> None:
        """Send ``window`` messages, and another for each answer for which ``on_answer`` says so; until all are back."""


class Blocking:
    """A way whose sending and receiving are calls.

    Args:
        most: messages that it takes before the first is received.
    """

    def __init__(self, send: Callable[[], object], receive: Callable[[], object], most: int = WINDOW) -> None:
        self._send, self._receive, self._most = send, receive, most

    def exchange(self, window: int, on_answer: Callable[[], bool]) -> None:
        window = min(window, self._most)
        for _ in range(window):
            self._send()
        num_open = window
        while num_open:
            self._receive()
            if on_answer():
                self._send()
            else:
                num_open -= 1


def plain(there: str, port: int, secret: Secret | None) -> Way:
    sock: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    sock.rcvtimeo = int(TIMEOUT_S * 1000)
    if secret is not None:
        secret.protect_caller(sock)
    sock.connect(f"tcp://{there}:{port}")
    return Blocking(lambda: sock.send(PAYLOAD), sock.recv)


def client_of(addresses: dict[str, str]) -> Way:
    """The sockets of vLLM's client."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    requests, outputs = context.socket(zmq.ROUTER), context.socket(zmq.PULL)
    for one, name in ((requests, "input_address"), (outputs, "output_address")):
        one.rcvtimeo = int(TIMEOUT_S * 1000)
        one.bind(addresses[name])
    requests.recv_multipart()  # an engine core is ready
    return Blocking(lambda: requests.send_multipart([IDENTITY, PAYLOAD]), outputs.recv)


def served(here: str, directory: Path) -> Way:
    listener = HostListener(Endpoint(here, PORTS["served"]), SECRET, SAME, b"")
    engine = listener.add("talker", "talker", "box-a")
    listener.open()
    return client_of(engine.launch(directory, {}, log_stats=False, farewell=b"", timeout_s=TIMEOUT_S))


def ipc(directory: Path) -> dict[str, str]:
    return {f"{way}_address": f"ipc://{directory}/{way}" for way in ("input", "output")}


class HostEnd:
    """The messages of a host's controllers to and from those of another host, as ``HostControllers`` has them.

    Made on the event loop of the controllers; the sockets belong to the I/O thread.
    """

    def __init__(self, own: str, addresses: dict[str, str]) -> None:
        loop, context = asyncio.get_running_loop(), zmq.Context()
        (other,) = addresses.keys() - {own}

        def receive(data: memoryview) -> None:
            self.link.receive(data)  # there is none yet where the first message arrives

        async def make() -> PeerLinks:
            made = PeerLinks(
                context,
                SECRET,
                addresses[own],
                lambda data: loop.call_soon_threadsafe(receive, data),
                lambda host: None,
                port=PORTS["link"],
            )
            made.join(msg.Hello(own, 1))
            made.update({other: msg.Peer(f"tcp://{addresses[other]}:{PORTS['link']}", 1)})
            return made

        peers = block_on(make(), TIMEOUT_S, "sockets")
        outbox = Outbox(lambda data: io_thread().call(peers.send, other, data))
        self.link = EncodedLink(lambda target: outbox, ServedPayloads())


class Controllers:
    """Frames between the controllers of two hosts."""

    def __init__(self, here: str, there: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._link: EncodedLink
        self._addresses = {"near": here, "far": there}
        self._receive: Callable[[], None]

    def exchange(self, window: int, on_answer: Callable[[], bool]) -> None:
        self._loop.run_until_complete(self._exchange(window, on_answer))

    async def _exchange(self, window: int, on_answer: Callable[[], bool]) -> None:
        if not hasattr(self, "_link"):
            self._link = HostEnd("near", self._addresses).link
            self._link.bind("near", lambda message: self._receive())
            wait_for_port(self._addresses["far"], PORTS["link"])
        num_open, done = window, self._loop.create_future()

        def receive() -> None:
            nonlocal num_open
            if on_answer():
                self._link.send(frame("far"))
                return
            num_open -= 1
            if not num_open:
                done.set_result(None)

        self._receive = receive
        for _ in range(window):
            self._link.send(frame("far"))
        await asyncio.wait_for(done, TIMEOUT_S)


def wait_for_port(address: str, port: int) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            socket.create_connection((address, port), TIMEOUT_S).close()
            return
        except ConnectionRefusedError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.05)


def frame(target: str) -> Frame:
    return Frame("call-0123456789", "node.run", target, 0, "hidden", 1, 1, False, PAYLOAD)


def ray_way(address: str, *, is_compiled: bool) -> Way:
    """An actor on the node "box-b" of the cluster at ``address``."""
    import ray
    from ray.dag import InputNode
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray.init(address, _node_ip_address=address.partition(":")[0], logging_level="error", log_to_driver=False)
    (node,) = [one["NodeID"] for one in ray.nodes() if one["NodeName"] == "box-b" and one["Alive"]]

    class Far:
        def echo(self, payload: bytes) -> bytes:
            return payload

    there = NodeAffinitySchedulingStrategy(node, soft=False)
    actor: Any = ray.remote(Far).options(num_cpus=0, scheduling_strategy=there).remote()
    waiting: deque[Any] = deque()
    if not is_compiled:
        return Blocking(
            lambda: waiting.append(actor.echo.remote(PAYLOAD)), lambda: ray.get(waiting.popleft(), timeout=TIMEOUT_S)
        )
    with InputNode() as given:
        graph = actor.echo.bind(given)
    compiled = graph.experimental_compile()
    return Blocking(
        lambda: waiting.append(compiled.execute(PAYLOAD)),
        lambda: ray.get(waiting.popleft(), timeout=TIMEOUT_S),
        most=2,  # a channel holds one message: further ones would wait for the reader, which is this thread
    )


def make_way(name: str, here: str, there: str, directory: Path) -> Way:
    match name:
        case "zmq" | "curve":
            return plain(there, PORTS[name], SECRET if name == "curve" else None)
        case "local":
            return client_of(ipc(directory))
        case "served":
            return served(here, directory)
        case "link":
            return Controllers(here, there)
    return ray_way(here, is_compiled=name == "ray graph")


def measure_trips(way: Way, number: int) -> list[float]:
    """Seconds there and back of one message after the other."""
    times: list[float] = []
    started_at = time.perf_counter()

    def on_answer() -> bool:
        nonlocal started_at
        now = time.perf_counter()
        times.append(now - started_at)
        started_at = now
        return len(times) < number

    way.exchange(1, on_answer)
    return times


def measure_rate(way: Way, seconds: float) -> tuple[float, float]:
    """Messages there and back per second with ``WINDOW`` on their way, and seconds of this process's CPU for each."""
    number = 0
    started_at, cpu_s = time.perf_counter(), time.process_time()

    def on_answer() -> bool:
        nonlocal number
        number += 1
        return time.perf_counter() < started_at + seconds

    way.exchange(WINDOW, on_answer)
    return number / (time.perf_counter() - started_at), (time.process_time() - cpu_s) / number


def be_near(name: str, here: str, there: str, directory: Path) -> None:
    way = make_way(name, here, there, directory)
    measure_trips(way, 20)  # connects
    print("[]", flush=True)
    for line in sys.stdin:
        num_trips, seconds = json.loads(line)
        print(json.dumps([measure_trips(way, num_trips), *measure_rate(way, seconds)]), flush=True)


# -- the far program ---------------------------------------------------------------------------------------------------


def be_far(name: str, here: str, there: str, directory: Path) -> None:
    match name:
        case "zmq" | "curve":
            sock: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
            if name == "curve":
                SECRET.protect_listener(sock)
            sock.bind(f"tcp://{there}:{PORTS[name]}")
            while True:
                sock.send_multipart(sock.recv_multipart())
        case "local":
            be_engine_core(ipc(directory))
        case "served":
            connection = HostConnection(Endpoint(here, PORTS[name]), SECRET)
            connection.join(msg.Join(msg.PROTOCOL, SAME, ["talker"], there, "a host"), TIMEOUT_S)
            start = connection.inbox.get(timeout=TIMEOUT_S)
            assert isinstance(start, msg.Start)
            addresses = connection.open_bridge(start.number, directory)
            ways = {"input_address": addresses["inputs"][0], "output_address": addresses["outputs"][0]}
            # As on a host, the engine core is another process.
            subprocess.run([sys.executable, "-m", __spec__.name, "core", json.dumps(ways)], check=True)
        case "link":
            asyncio.run(return_frames({"near": here, "far": there}))


async def return_frames(addresses: dict[str, str]) -> None:
    link = HostEnd("far", addresses).link
    link.bind("far", lambda message: link.send(frame("near")))
    await asyncio.Event().wait()


def be_engine_core(addresses: dict[str, str]) -> None:
    """The sockets of vLLM's engine core."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    requests, outputs = context.socket(zmq.DEALER), context.socket(zmq.PUSH)
    requests.setsockopt(zmq.IDENTITY, IDENTITY)
    requests.connect(addresses["input_address"])
    outputs.connect(addresses["output_address"])
    requests.send(b"ready")
    while True:
        outputs.send_multipart(requests.recv_multipart())


if __name__ == "__main__":
    role, *arguments = sys.argv[1:]
    if role == "core":
        be_engine_core(json.loads(arguments[0]))
    else:
        way, here, there, directory = arguments
        (be_near if role == "near" else be_far)(way, here, there, Path(directory))
