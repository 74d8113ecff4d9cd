"""Connections of a listener that have sent nothing yet, on real sockets; in a socket of ZMQ, in ``tests/hosts``."""

import os
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest
import zmq

from tests.strangers import count_descriptors, strangers
from vllm_omni.relay.io_thread import block_on
from vllm_omni.relay.remote import wire
from vllm_omni.relay.remote.newcomers import MAX_ENDED, Newcomers

TIMEOUT_S = 20.0
LIMIT = 3
QUEUE = 1900  # of 2000 events that ZMQ keeps: 1000 at each end


class Port:
    """A listener, which accepts each connection at once."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.number = int(self._listener.getsockname()[1])

    def connect(self) -> tuple[socket.socket, socket.socket]:
        """Both ends of a connection: the client's, and the one that was accepted."""
        client = self._stack.enter_context(socket.create_connection(("127.0.0.1", self.number), TIMEOUT_S))
        accepted, _ = self._listener.accept()
        return client, self._stack.enter_context(accepted)


@pytest.fixture
def port() -> Iterator[Port]:
    with ExitStack() as stack:
        yield Port(stack)


@pytest.fixture
def newcomers(port: Port) -> Iterator[Newcomers]:
    made = Newcomers(port.number, LIMIT)
    yield made
    made.close()


def come(port: Port, newcomers: Newcomers, count: int) -> list[tuple[socket.socket, socket.socket]]:
    connections = [port.connect() for _ in range(count)]
    for _, accepted in connections:
        newcomers.accepted(accepted.fileno())
    return connections


def is_open(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        return bool(client.recv(1))
    except BlockingIOError:
        return True


@contextmanager
def take_free_descriptors() -> Iterator[None]:
    """Leave none free, without a limit below those that are open: it would count for their numbers, too."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    taken = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, limits[1]))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.dup(0))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in taken:
            os.close(descriptor)


def test_beyond_the_limit_the_oldest_is_ended(port: Port, newcomers: Newcomers) -> None:
    connections = come(port, newcomers, LIMIT + 2)
    assert [is_open(client) for client, _ in connections] == [False] * 2 + [True] * LIMIT
    assert len(newcomers) == LIMIT


def test_one_that_was_heard_is_not_ended(port: Port, newcomers: Newcomers) -> None:
    ((heard, accepted),) = come(port, newcomers, 1)
    newcomers.heard(b"name", accepted.fileno())
    others = come(port, newcomers, LIMIT + 1)
    assert is_open(heard)
    assert not is_open(others[0][0])
    assert newcomers.knows(b"name")


def test_a_message_may_be_read_before_the_event_of_its_connection(port: Port, newcomers: Newcomers) -> None:
    client, accepted = port.connect()
    newcomers.heard(b"name", accepted.fileno())
    newcomers.accepted(accepted.fileno())
    come(port, newcomers, LIMIT + 1)
    assert is_open(client)


def test_the_end_of_one_that_was_heard_differs_from_the_end_of_a_newcomer(port: Port, newcomers: Newcomers) -> None:
    (_, heard), (_, silent) = come(port, newcomers, 2)
    newcomers.heard(b"name", heard.fileno())
    assert newcomers.closed(silent.fileno())
    assert not newcomers.closed(heard.fileno())
    assert not newcomers.knows(b"name")
    assert not newcomers


def test_connections_that_ended_before_their_event_are_forgotten(port: Port, newcomers: Newcomers) -> None:
    ((_, kept),) = come(port, newcomers, 1)
    newcomers.heard(b"kept", kept.fileno())
    for number in range(3 * MAX_ENDED):
        _, accepted = port.connect()
        newcomers.heard(str(number).encode(), accepted.fileno())
        accepted.close()
    assert sum(newcomers.knows(str(number).encode()) for number in range(3 * MAX_ENDED)) <= MAX_ENDED
    assert newcomers.knows(b"kept")


def test_another_connection_with_the_descriptor_of_a_closed_one_is_not_ended(port: Port, newcomers: Newcomers) -> None:
    """ZMQ has closed a newcomer's descriptor, and its event is not read yet."""
    ((_, accepted),) = come(port, newcomers, 1)
    descriptor = accepted.fileno()
    other_client, other = port.connect()
    os.dup2(other.fileno(), descriptor)
    come(port, newcomers, LIMIT)
    assert is_open(other_client)


def test_no_other_file_with_the_descriptor_of_a_closed_one_is_ended(port: Port, newcomers: Newcomers) -> None:
    ((_, accepted),) = come(port, newcomers, 1)
    here, there = socket.socketpair()
    with here, there:
        os.dup2(here.fileno(), accepted.fileno())
        come(port, newcomers, LIMIT)
        assert is_open(there)
        newcomers.accepted(here.fileno())
        newcomers.accepted(1 << 20)  # no file at all
    assert len(newcomers) == LIMIT


def test_newcomers_are_ended_while_no_descriptor_is_free(port: Port, newcomers: Newcomers) -> None:
    connections = [port.connect() for _ in range(LIMIT + 1)]
    with take_free_descriptors():
        with pytest.raises(OSError, match="Too many open files"):
            os.dup(0)
        for _, accepted in connections:
            newcomers.accepted(accepted.fileno())
    assert [is_open(client) for client, _ in connections] == [False] + [True] * LIMIT


def test_its_own_descriptors_are_closed(port: Port) -> None:
    before = count_descriptors()
    Newcomers(port.number).close()
    assert count_descriptors() == before


def test_a_listener_closes_while_the_queue_of_its_events_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZMQ's thread then waits for room in it, with the lock that the end of the events takes."""
    monkeypatch.setattr(wire, "CONNECT_MS", 600_000)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    async def flood_and_close() -> None:
        listener = wire.Wire(context, zmq.ROUTER, lambda frames: None, lambda: None)
        address = listener.bind("127.0.0.1")
        with strangers("127.0.0.1", int(address.rpartition(":")[2]), at_once=10_000):
            fill_queue()
            listener.close()

    def fill_queue() -> None:
        """On the thread that would read the events."""
        while count_descriptors() < QUEUE:
            time.sleep(0.01)
        time.sleep(0.2)  # for the rest of it; with less in the queue, the test sees nothing

    block_on(flood_and_close(), 5 * TIMEOUT_S, "the end of the listener")
    context.destroy(linger=0)
