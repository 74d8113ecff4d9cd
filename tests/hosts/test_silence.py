"""The connection to a host that vanishes, or hangs, is lost soon, also while much is being sent to it. With little, and
end to end: tests/hosts/test_stages.py."""

import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq

from tests import machine
from tests.hosts.deployments import NOTICED_S, wait_for
from tests.hosts.machines import network
from vllm_omni.hosts.listener import HEARTBEAT_MS
from vllm_omni.relay.io_thread import block_on, io_thread
from vllm_omni.relay.remote.wire import Wire

pytestmark = pytest.mark.long

PORT = 7654
TIMEOUT_S = 20.0
NUM_BYTES = 64 << 20  # more than the kernel takes of a connection whose other end is silent
PEER = """
import os, signal, sys, zmq
socket = zmq.Context().socket(getattr(zmq, sys.argv[1]))
if sys.argv[1] == "ROUTER":
    socket.bind(sys.argv[2])
    print("listens", flush=True)
    socket.send_multipart(socket.recv_multipart())
else:
    socket.connect(sys.argv[2])
    socket.send(b"hello")
while socket.recv_multipart()[-1] != b"hang":
    pass
os.kill(os.getpid(), signal.SIGSTOP)
"""


class Line:
    """A ``Wire`` of this process, whose first message names the other end."""

    def __init__(self, kind: int) -> None:
        self.heard, self.lost = threading.Event(), threading.Event()
        self.first: list[bytes] = []
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        make = self._make(kind)
        self.wire = block_on(make, TIMEOUT_S, "a socket")

    async def _make(self, kind: int) -> Wire:
        return Wire(self._context, kind, self._take, self.lost.set, heartbeat_ms=HEARTBEAT_MS)

    def _take(self, frames: list[zmq.Frame]) -> None:
        self.first = [frame.bytes for frame in frames]
        self.heard.set()

    def do(self, function: Callable[..., object], *args: object) -> None:
        io_thread().call(function, *args)

    def close(self) -> None:
        async def close() -> None:
            self.wire.close()
            self._context.destroy(linger=0)

        block_on(close(), TIMEOUT_S, "the end of a socket")


@pytest.mark.parametrize("how", ["vanishes", "hangs"])
@pytest.mark.parametrize("kind", ["ROUTER", "DEALER"])
def test_a_host_is_lost_that_stops_answering_with_a_large_message_under_way(
    kind: str, how: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """ZMQ's heartbeat alone does not find it: it asks nothing while the kernel takes no more bytes."""
    if how == "vanishes":
        machine.require("networks")
    log, other = tmp_path / "log", "DEALER" if kind == "ROUTER" else "ROUTER"
    with network(tmp_path_factory.mktemp("h")) as net:
        host, line = net.add(), Line(getattr(zmq, kind))
        try:
            listener = net.address if kind == "ROUTER" else host.address
            if kind == "ROUTER":
                line.do(line.wire.bind, listener, PORT)
            host.start([sys.executable, "-c", PEER, other, f"tcp://{listener}:{PORT}"], log)
            if kind == "DEALER":
                wait_for("the host listens", lambda: "listens" in log.read_text(), TIMEOUT_S)
                line.do(line.wire.connect, f"tcp://{listener}:{PORT}")
                line.do(line.wire.send, [b"hello"])
            assert line.heard.wait(TIMEOUT_S)
            to = line.first[:-1]
            if how == "vanishes":
                host.cut()
            else:
                line.do(line.wire.send, [*to, b"hang"])
            line.do(line.wire.send, [*to, bytes(NUM_BYTES)])
            assert line.lost.wait(NOTICED_S)
        finally:
            line.close()
