"""Connections between the controllers of two hosts, by their sockets; end to end: tests/hosts/test_stages.py."""

import socket
import time
from collections.abc import Callable, Iterator

import pytest
import zmq

from vllm_omni.hosts import messages as msg
from vllm_omni.hosts.peers import PeerLinks
from vllm_omni.relay.io_thread import block_on, io_thread
from vllm_omni.relay.secret import MIN_BYTES, Secret

SECRET = Secret(bytes(MIN_BYTES))
TIMEOUT_S = 60.0


class Host:
    """A host that keeps what it hears."""

    def __init__(self, name: str, session: int, secret: Secret = SECRET, address: str = "127.0.0.1") -> None:
        self.name = name
        self.heard: list[bytes] = []
        self.lost: list[str] = []
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

        async def make() -> PeerLinks:
            return PeerLinks(
                self._context, secret, address, lambda data: self.heard.append(bytes(data)), self.lost.append
            )

        self.links = block_on(make(), TIMEOUT_S, "sockets")
        self.join(session)

    @property
    def peer(self) -> msg.Peer:
        return msg.Peer(self.links.link, self.session)

    def join(self, session: int) -> None:
        self.session = session
        self._do(self.links.join, msg.Hello(self.name, session))

    def knows(self, *others: "Host", lost: bool = False) -> None:
        peers = {one.name: msg.Peer("", one.session + 1) if lost else one.peer for one in others}
        self._do(self.links.update, peers)

    def send(self, host: str, data: bytes) -> None:
        self._do(self.links.send, host, data)

    def close(self) -> None:
        self._do(self.links.close)
        self._context.destroy(linger=0)

    def _do(self, function: Callable[..., None], *args: object) -> None:
        async def call() -> None:
            function(*args)

        block_on(call(), TIMEOUT_S, "the I/O thread")


Made = Callable[..., Host]


@pytest.fixture
def make() -> Iterator[Made]:
    hosts: list[Host] = []

    def make(*args: object, **kwargs: object) -> Host:
        hosts.append(Host(*args, **kwargs))  # type: ignore[arg-type]
        return hosts[-1]

    yield make
    for host in hosts:
        host.close()


@pytest.fixture
def pair(make: Made) -> tuple[Host, Host]:
    near, far = make("near", 1), make("far", 2)
    near.knows(far)
    far.knows(near)
    return near, far


def wait_for(is_true: Callable[[], object]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_messages_arrive_as_they_were_sent_in_their_order(pair: tuple[Host, Host]) -> None:
    near, far = pair
    sent = [b"x" * size for size in (1, 3 << 20, 2, 9 << 20, 3)]
    for data in sent:
        near.send("far", data)
    wait_for(lambda: len(far.heard) == len(sent))
    assert far.heard == sent


def test_hosts_reach_one_another_by_ipv6(make: Made) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    near, far = make("near", 1, address="::1"), make("far", 2, address="::1")
    near.knows(far)
    near.send("far", b"over IPv6")
    wait_for(lambda: far.heard == [b"over IPv6"])


def test_a_host_that_has_not_learned_of_another_one_yet_hears_it(make: Made) -> None:
    near, far = make("near", 1), make("far", 2)
    near.knows(far)
    near.send("far", b"early")
    wait_for(lambda: far.heard == [b"early"])


def test_what_a_host_sends_that_the_front_end_has_lost_is_not_heard(pair: tuple[Host, Host]) -> None:
    """It may not have noticed: it was cut off from the front end alone."""
    near, far = pair
    near.send("far", b"before")
    wait_for(lambda: far.heard == [b"before"])
    far.knows(near, lost=True)
    near.send("far", b"stale")
    near.join(5)
    near.knows(far)
    near.send("far", b"joined again")
    wait_for(lambda: far.heard == [b"before", b"joined again"])


def test_a_lost_host_that_connects_again_is_not_heard(pair: tuple[Host, Host]) -> None:
    near, far = pair
    far.knows(near, lost=True)
    near.send("far", b"stale")
    near.join(5)
    near.knows(far)
    near.send("far", b"joined again")
    wait_for(lambda: far.heard == [b"joined again"])


def test_nothing_is_sent_or_heard_without_a_front_end(pair: tuple[Host, Host]) -> None:
    near, far = pair
    near.send("far", b"before")
    wait_for(lambda: far.heard == [b"before"])
    far._do(far.links.leave)
    near.send("far", b"not heard")
    near._do(near.links.leave)
    near.send("far", b"not sent")
    far.join(6)
    near.join(7)
    near.knows(far)
    near.send("far", b"again")
    wait_for(lambda: far.heard == [b"before", b"again"])


def test_the_end_of_another_host_is_reported_once_to_those_that_sent_to_it(pair: tuple[Host, Host]) -> None:
    near, far = pair
    near.send("far", b"before")
    wait_for(lambda: far.heard)
    far.close()
    wait_for(lambda: near.lost == ["far"])


def test_a_host_that_cannot_be_reached_is_reported(make: Made) -> None:
    near, gone = make("near", 1), make("gone", 2)
    gone.close()
    near.knows(gone)
    near.send("gone", b"nowhere")
    wait_for(lambda: near.lost == ["gone"])


def test_a_host_with_another_secret_is_not_heard(make: Made) -> None:
    near, far = make("near", 1, Secret(b"w" * MIN_BYTES)), make("far", 2)
    near.knows(far)
    near.send("far", b"a frame")
    wait_for(lambda: near.lost == ["far"])
    assert not far.heard


def test_frames_that_no_host_sends_change_nothing(pair: tuple[Host, Host]) -> None:
    near, far = pair
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    SECRET.protect_caller(stranger)
    stranger.connect(far.links.link)
    stranger.send_multipart(msg.pack_flow(b"without a hello"))
    stranger.send(b"\xc1")
    stranger.send(msg.encode(msg.Hello("near", 1)))
    stranger.send_multipart([msg.encode(msg.Flow([3])), b"one part"])
    near.send("far", b"heard")
    wait_for(lambda: far.heard == [b"heard"])
    stranger.close(linger=0)
    context.destroy(linger=0)
    assert io_thread().loop.is_running()
