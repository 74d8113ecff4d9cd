"""Sockets between hosts that cannot be made: nothing of them is left, least of all on the thread of all relays."""

from collections.abc import Callable

import pytest
import zmq

from tests.relay.io import DEADLINE_S, closed_and_watched
from vllm_omni.hosts.bridge import ClientBridge, EngineBridge
from vllm_omni.hosts.peers import PeerLinks
from vllm_omni.relay.io_thread import block_on
from vllm_omni.relay.remote.wire import Wire
from vllm_omni.relay.secret import MIN_BYTES, Secret

NO_ADDRESS = "203.0.113.1"  # of documentation, and of no machine
NO_SOCKET = "ipc:///there/is/no/such/folder"

Context = zmq.Context[zmq.Socket[bytes]]


def make_wire(context: Context, kind: int) -> Wire:
    return Wire(context, kind, lambda frames: None, lambda: None)


def bind(context: Context) -> None:
    make_wire(context, zmq.ROUTER).bind(NO_ADDRESS)


def connect(context: Context) -> None:
    make_wire(context, zmq.DEALER).connect("no address")


def link(context: Context) -> None:
    PeerLinks(context, Secret(bytes(MIN_BYTES)), NO_ADDRESS, lambda data: None, lambda host: None)


def bridge_client(context: Context) -> None:
    ClientBridge(context, "no address", "ipc://x", lambda frames: None)


def bridge_engine(context: Context) -> None:
    EngineBridge(context, f"{NO_SOCKET}/input", f"{NO_SOCKET}/output", lambda frames: None, lambda frames: None)


def on_io_thread(function: Callable[[], object]) -> None:
    async def call() -> None:
        function()

    block_on(call(), DEADLINE_S, "the I/O thread")


@pytest.mark.parametrize("make", [bind, connect, link, bridge_client, bridge_engine])
def test_a_socket_that_cannot_be_made_is_watched_no_longer(make: Callable[[Context], None]) -> None:
    context: Context = zmq.Context()
    with pytest.raises(zmq.ZMQError):
        on_io_thread(lambda: make(context))
    on_io_thread(lambda: context.destroy(linger=0))
    assert not closed_and_watched()
