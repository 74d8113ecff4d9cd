"""A host joins a front end: real sockets, vLLM's client and engine core replaced by plain ones."""

import logging
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import zmq

from tests.strangers import GREETING, Recorder, count_descriptors, have_ended, resident_bytes, strangers
from vllm_omni.errors import ConfigError
from vllm_omni.hosts import connection
from vllm_omni.hosts import messages as msg
from vllm_omni.hosts.bridge import IDENTITY, NOT_READY
from vllm_omni.hosts.connection import FrontEndLost, HostConnection
from vllm_omni.hosts.endpoint import Endpoint
from vllm_omni.hosts.listener import HostListener
from vllm_omni.hosts.remote_engine import HostGone, RemoteEngine
from vllm_omni.relay.remote import wire
from vllm_omni.relay.remote.newcomers import MAX_NEWCOMERS
from vllm_omni.relay.secret import MIN_BYTES, Secret

SECRET = Secret(b"1" * MIN_BYTES)
SAME = msg.Identity("1.0", "0.32.0", "cpu", "ab" * 32)
CONFIG = b"the deployment"
FAREWELL = b"ENGINE_CORE_DEAD"
TIMEOUT_S = 60.0
MAX_GROWTH = 64 << 20


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def join_of(*stages: str, identity: msg.Identity = SAME, protocol: int = msg.PROTOCOL) -> msg.Join:
    return msg.Join(protocol, identity, list(stages), "127.0.0.1", secrets.token_hex(16))


@pytest.fixture
def listener() -> Iterator[HostListener]:
    made = HostListener(Endpoint("127.0.0.1", free_port()), SECRET, SAME, CONFIG)
    made.add("talker", "talker", "box-a")
    made.add("token2wav", "token2wav", "box-a")
    made.add("extra/0", "extra", "box-b")
    made.add("extra/1", "extra", "box-c")
    made.open()
    yield made
    made.close()


@pytest.fixture
def hosts(listener: HostListener) -> Iterator[Callable[..., HostConnection]]:
    made: list[HostConnection] = []

    def make(secret: Secret = SECRET) -> HostConnection:
        made.append(HostConnection(listener._endpoint, secret))
        return made[-1]

    yield make
    for one in made:
        one.close()


Hosts = Callable[..., HostConnection]


class Client:
    """Stands for vLLM's client: binds, and waits for its engine core."""

    def __init__(self, addresses: dict[str, str]) -> None:
        self.context = zmq.Context()
        self.input, self.output = self.context.socket(zmq.ROUTER), self.context.socket(zmq.PULL)
        self.input.bind(addresses["input_address"])
        self.output.bind(addresses["output_address"])
        for one in (self.input, self.output):
            one.linger, one.rcvtimeo = 0, int(TIMEOUT_S * 1000)

    def close(self) -> None:
        self.context.destroy(linger=0)


class EngineCore:
    """Stands for vLLM's engine core: connects to its client."""

    def __init__(self, addresses: dict[str, list[str]]) -> None:
        self.context = zmq.Context()
        self.input, self.output = self.context.socket(zmq.DEALER), self.context.socket(zmq.PUSH)
        self.input.setsockopt(zmq.IDENTITY, IDENTITY)
        self.input.connect(addresses["inputs"][0])
        self.output.connect(addresses["outputs"][0])
        self.input.rcvtimeo = int(TIMEOUT_S * 1000)

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def launched(
    listener: HostListener, hosts: Hosts, tmp_path: Path
) -> Iterator[tuple[HostConnection, Client, EngineCore]]:
    """An engine that runs on a host."""
    host = hosts()
    host.join(join_of("talker", "token2wav"), TIMEOUT_S)
    client = Client(launch(listener.engines["talker"], tmp_path))
    start = host.inbox.get(timeout=TIMEOUT_S)
    assert isinstance(start, msg.Start)
    core = EngineCore(host.open_bridge(start.number, tmp_path))
    core.input.send(b"ready")
    assert client.input.recv_multipart() == [IDENTITY, b"ready"]
    yield host, client, core
    core.close()
    client.close()
    host.close_bridge(start.number)


def launch(engine: RemoteEngine, directory: Path) -> dict[str, str]:
    return engine.launch(directory, {"transport": "tcp"}, log_stats=True, farewell=FAREWELL, timeout_s=TIMEOUT_S)


Launched = tuple[HostConnection, Client, EngineCore]


def test_a_host_that_joins_gets_the_deployment_and_its_engines(hosts: Hosts, listener: HostListener) -> None:
    joined = hosts().join(join_of("talker", "token2wav"), TIMEOUT_S)
    assert (joined.engines, joined.config, joined.host) == (["talker", "token2wav"], CONFIG, "box-a")
    wait_for(lambda: listener.engines["talker"].has_host)
    assert not listener.engines["extra/0"].has_host


def test_a_host_is_told_to_start_an_engine_with_its_options(launched: Launched, listener: HostListener) -> None:
    run = listener.engines["talker"].run
    assert run is not None
    assert run.number == 1


@pytest.mark.parametrize("size", [1, msg.PART_BYTES, 5 * msg.PART_BYTES + 7], ids=["a byte", "a part", "many parts"])
def test_requests_and_outputs_arrive_as_they_were_sent(launched: Launched, size: int) -> None:
    _, client, core = launched
    frames = [b"\x00", os.urandom(size), b"", os.urandom(3)]
    client.input.send_multipart([IDENTITY, *frames])
    assert core.input.recv_multipart() == frames
    core.output.send_multipart(frames)
    assert client.output.recv_multipart() == frames


def test_messages_keep_their_order(launched: Launched) -> None:
    _, client, core = launched
    for number in range(300):
        core.output.send(str(number).encode())
    assert [int(client.output.recv()) for _ in range(300)] == list(range(300))


@pytest.mark.parametrize(
    ("join", "said"),
    [
        (join_of("talker", "nothing"), "no stage 'nothing' is for another host"),
        (join_of("talker"), "the deployment has further stages on host 'box-a': give --stage token2wav as well"),
        (join_of("talker", "talker", "token2wav"), "stage 'talker' is served by the same host already"),
        (join_of("extra", protocol=0), f"it joins by protocol 0, and the front end has {msg.PROTOCOL}"),
        (join_of("extra", identity=msg.Identity("1.0", "0.31.0", "cpu", "ab" * 32)), "vLLM: 0.31.0 there, 0.32.0 here"),
        (join_of("extra", identity=msg.Identity("0.9", "0.32.0", "cpu", "ab" * 32)), "vllm-omni-flow: 0.9 there, 1.0"),
        (join_of("extra", identity=msg.Identity("1.0", "0.32.0", "cuda", "ab" * 32)), "devices: cuda there, cpu here"),
        (join_of("extra", identity=msg.Identity("1.0", "0.32.0", "cpu", "cd")), "checkpoint: cd there, abab"),
    ],
    ids=["unknown stage", "part of a host", "twice", "protocol", "vLLM", "package", "device", "checkpoint"],
)
def test_a_host_that_does_not_fit_is_rejected_with_the_reason(hosts: Hosts, join: msg.Join, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        hosts().join(join, TIMEOUT_S)


def test_a_stage_that_has_a_host_is_refused_to_another(hosts: Hosts) -> None:
    hosts().join(join_of("talker", "token2wav"), TIMEOUT_S)
    with pytest.raises(ConfigError, match=r"stage 'talker' is served by 127\.0\.0\.1 already"):
        hosts().join(join_of("talker", "token2wav"), TIMEOUT_S)


def test_the_next_connection_of_a_host_takes_the_place_of_one_that_is_not_lost_yet(
    hosts: Hosts, listener: HostListener, tmp_path: Path
) -> None:
    """As after a first attempt that did not seem to reach the front end, and did."""
    join = join_of("extra")
    assert hosts().join(join, TIMEOUT_S).engines == ["extra/0"]
    client = Client(launch(listener.engines["extra/0"], tmp_path))
    assert hosts().join(join, TIMEOUT_S).engines == ["extra/0"]
    _, payload = client.input.recv_multipart()
    assert payload == NOT_READY
    client.close()


def test_hosts_share_the_replicas_of_a_stage(hosts: Hosts) -> None:
    assert hosts().join(join_of("extra"), TIMEOUT_S).engines == ["extra/0"]
    assert hosts().join(join_of("extra"), TIMEOUT_S).engines == ["extra/1"]
    with pytest.raises(ConfigError, match="stage 'extra' is served by"):
        hosts().join(join_of("extra"), TIMEOUT_S)


def test_a_host_with_another_secret_is_not_heard(
    hosts: Hosts, listener: HostListener, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("vllm_omni").addHandler(caplog.handler)
    with pytest.raises(ConfigError, match="does not accept the secret"):
        hosts(Secret(b"2" * MIN_BYTES)).join(join_of("extra"), TIMEOUT_S)
    wait_for(lambda: "it has not this deployment's secret" in caplog.text)
    logging.getLogger("vllm_omni").removeHandler(caplog.handler)
    assert not any(engine.has_host for engine in listener.engines.values())


def test_a_host_waits_for_its_front_end_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    endpoint = Endpoint("127.0.0.1", free_port())
    host = HostConnection(endpoint, SECRET)
    logging.getLogger("vllm_omni").addHandler(caplog.handler)
    with caplog.at_level(logging.INFO, logger="vllm_omni"):
        joined: list[msg.Joined] = []
        thread = threading.Thread(target=lambda: joined.append(host.join(join_of("talker"), TIMEOUT_S)))
        thread.start()
        wait_for(lambda: f"waits for the front end at {endpoint}: the connection was refused" in caplog.text)
        late = HostListener(endpoint, SECRET, SAME, CONFIG)
        late.add("talker", "talker", "box-a")
        late.open()
        thread.join(TIMEOUT_S)
    logging.getLogger("vllm_omni").removeHandler(caplog.handler)
    assert [one.engines for one in joined] == [["talker"]]
    late.close()
    host.close()


def test_a_host_waits_no_longer_than_its_deadline() -> None:
    host = HostConnection(Endpoint("127.0.0.1", free_port()), SECRET)
    with pytest.raises(FrontEndLost, match=r"no front end at .* within 0\.2 s"):
        host.join(join_of("talker"), 0.2)
    host.close()


def test_a_stage_waits_for_its_host_no_longer_than_its_deadline(listener: HostListener, tmp_path: Path) -> None:
    with pytest.raises(
        HostGone, match=r"host 'box-a' has not joined within 0\.2 s: vllm serve MODEL --omni --headless --stage"
    ):
        listener.engines["talker"].launch(tmp_path, {}, log_stats=False, farewell=FAREWELL, timeout_s=0.2)


def test_a_stage_that_waits_for_its_host_is_woken_by_the_end_of_the_server(
    listener: HostListener, tmp_path: Path
) -> None:
    errors: list[Exception] = []

    def start() -> None:
        try:
            launch(listener.engines["talker"], tmp_path)
        except HostGone as exc:
            errors.append(exc)

    thread = threading.Thread(target=start)
    thread.start()
    listener.close()
    thread.join(TIMEOUT_S)
    assert [str(error) for error in errors] == ["the server is shut down"]


def test_an_engine_that_is_not_ready_when_the_server_ends_fails_its_client(
    hosts: Hosts, listener: HostListener, tmp_path: Path
) -> None:
    hosts().join(join_of("extra"), TIMEOUT_S)
    client = Client(launch(listener.engines["extra/0"], tmp_path))
    listener.close()
    _, payload = client.input.recv_multipart()
    assert payload == NOT_READY
    client.close()


def test_a_host_is_told_that_its_front_end_ends(launched: Launched, listener: HostListener) -> None:
    host, _, _ = launched
    listener.close()
    assert host.inbox.get(timeout=TIMEOUT_S) == msg.Bye()


def test_the_loss_of_a_host_fails_its_engines_client(launched: Launched, listener: HostListener) -> None:
    host, client, _ = launched
    engine = listener.engines["talker"]
    host.disconnect()
    assert client.output.recv() == FAREWELL
    assert engine.has_ended
    assert not engine.has_host
    assert engine.failure() == "its host 'box-a' (127.0.0.1) does not answer any longer"


def test_an_engine_that_does_not_start_fails_its_client_at_once(
    hosts: Hosts, listener: HostListener, tmp_path: Path
) -> None:
    host = hosts()
    host.join(join_of("extra"), TIMEOUT_S)
    engine = listener.engines["extra/0"]
    client = Client(launch(engine, tmp_path))
    host.send(msg.Ended(1, "ValueError: no such thing"))
    _, payload = client.input.recv_multipart()
    assert payload == NOT_READY
    assert engine.has_ended
    assert engine.failure() == "ValueError: no such thing"
    assert engine.has_host
    client.close()


def test_what_an_earlier_start_still_sends_is_not_heard(
    launched: Launched, listener: HostListener, tmp_path: Path
) -> None:
    host, client, core = launched
    engine = listener.engines["talker"]
    engine.end()
    assert host.inbox.get(timeout=TIMEOUT_S) == msg.Kill(1)
    again = Client(launch(engine, tmp_path))
    core.output.send(b"of the first start")
    second = host.inbox.get(timeout=TIMEOUT_S)
    assert isinstance(second, msg.Start)
    other = EngineCore(host.open_bridge(second.number, tmp_path))
    other.input.send(b"ready")
    again.input.recv_multipart()
    other.output.send(b"of the second start")
    assert again.output.recv() == b"of the second start"
    assert client.output.poll(0) == 0
    for one in (again, other):
        one.close()
    host.close_bridge(second.number)


def test_a_host_may_join_again(launched: Launched, hosts: Hosts, listener: HostListener) -> None:
    host, _, _ = launched
    host.disconnect()
    wait_for(lambda: not listener.engines["talker"].has_host)
    assert host.join(join_of("talker", "token2wav"), TIMEOUT_S).engines == ["talker", "token2wav"]


def test_an_engine_that_runs_serves_another_connection_from_its_first_message_on(
    launched: Launched, listener: HostListener, tmp_path: Path
) -> None:
    host, client, core = launched
    engine = listener.engines["talker"]
    host.disconnect()
    core.output.send(b"while there is no front end")
    wait_for(lambda: not engine.has_host)
    engine.end()
    host.join(join_of("talker", "token2wav"), TIMEOUT_S)
    again = Client(launch(engine, tmp_path))
    start = host.inbox.get(timeout=TIMEOUT_S)
    assert isinstance(start, msg.Start)
    answers: queue.Queue[bytes] = queue.Queue()
    assert host.ask_engine(1, [[b"forget all requests"]], lambda frames: answers.put(frames[0].bytes))
    assert core.input.recv_multipart() == [b"forget all requests"]
    core.output.send(b"forgotten")
    while answers.get(timeout=TIMEOUT_S) != b"forgotten":
        pass
    host.continue_as(1, start.number)
    assert again.input.recv_multipart() == [IDENTITY, b"ready"]
    again.input.send_multipart([IDENTITY, b"a request"])
    assert core.input.recv_multipart() == [b"a request"]
    core.output.send(b"an output")
    assert again.output.recv() == b"an output"
    assert client.output.recv() == FAREWELL  # of the loss, and nothing since
    assert client.output.poll(0) == 0
    again.close()
    host.close_bridge(start.number)


def test_an_engine_that_is_not_ready_serves_no_other_connection(hosts: Hosts, tmp_path: Path) -> None:
    host = hosts()
    host.open_bridge(1, tmp_path)
    assert not host.ask_engine(1, [[b"a call"]], lambda frames: None)
    assert not host.ask_engine(2, [[b"a call"]], lambda frames: None)
    host.close_bridge(1)


def test_random_bytes_at_the_port_change_nothing(launched: Launched, listener: HostListener) -> None:
    _, client, core = launched
    for size in (1, 64, 100_000):
        # The listener ends the connection when it likes.
        with socket.create_connection(listener._endpoint, TIMEOUT_S) as stranger, suppress(OSError):
            stranger.sendall(os.urandom(size))
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(4096):
                pass
    core.output.send(b"an output")
    assert client.output.recv() == b"an output"


@pytest.fixture
def handshakes_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ends a connection meanwhile is not its deadline."""
    monkeypatch.setattr(wire, "CONNECT_MS", 600_000)
    monkeypatch.setattr(connection, "REACH_TIMEOUT_S", TIMEOUT_S)  # the kernel lets some wait that come with a crowd


@pytest.fixture
def quick_handshakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "CONNECT_MS", 200)


def test_ten_thousand_half_open_connections_change_nothing(
    handshakes_without_end: None, launched: Launched, hosts: Hosts, listener: HostListener
) -> None:
    """And ten thousand more in the place of those that are ended."""
    _, client, core = launched
    num_descriptors, num_bytes = count_descriptors(), resident_bytes()
    with strangers(*listener._endpoint, at_once=10_000, total=20_000) as crowd:
        number = 0
        while crowd.is_making():
            core.output.send(str(number).encode())
            assert int(client.output.recv()) == number
            number += 1
        assert hosts().join(join_of("extra"), TIMEOUT_S).engines == ["extra/0"]
        assert resident_bytes() - num_bytes < MAX_GROWTH
        wait_for(lambda: count_descriptors() < num_descriptors + MAX_NEWCOMERS + 64)
        assert crowd.process.poll() is None
    assert listener.engines["talker"].has_host


def test_half_open_connections_end_by_their_deadline(quick_handshakes: None, listener: HostListener) -> None:
    num_descriptors = count_descriptors()
    half_open = [socket.create_connection(listener._endpoint, TIMEOUT_S) for _ in range(100)]
    for one in half_open[::2]:
        one.sendall(GREETING)
    have_ended(half_open)
    wait_for(lambda: count_descriptors() <= num_descriptors + len(half_open))  # our ends
    for one in half_open:
        one.close()


def test_a_recorded_connection_that_is_sent_again_is_not_heard(hosts: Hosts, listener: HostListener) -> None:
    """All that a host sent to join and to send a message; its place is free again."""
    with Recorder(listener._endpoint) as recorder:
        host = HostConnection(Endpoint(*recorder.address), SECRET)
        host.join(join_of("extra"), TIMEOUT_S)
        host.close()
    wait_for(lambda: not listener.engines["extra/0"].has_host)
    recorded = bytes(recorder.sent)
    assert len(recorded) > 500
    for end in (64, len(recorded) // 2, len(recorded)):
        with socket.create_connection(listener._endpoint, TIMEOUT_S) as again, suppress(OSError):
            again.sendall(recorded[:end])
            again.shutdown(socket.SHUT_WR)
            have_ended([again])
    assert hosts().join(join_of("extra"), TIMEOUT_S).engines == ["extra/0"]
    assert not listener.engines["extra/1"].has_host


def test_messages_that_no_host_sends_change_nothing(launched: Launched, listener: HostListener) -> None:
    """From a process that has the secret."""
    _, client, core = launched
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    SECRET.protect_caller(stranger)
    stranger.connect(f"tcp://{listener._endpoint}")
    for frames in ([b""], [b"\xc1"], [msg.encode(msg.Output(1, [1])), b"forged"], [msg.encode(msg.Ended(1, "forged"))]):
        stranger.send_multipart(frames)
    core.output.send(b"an output")
    assert client.output.recv() == b"an output"
    assert not listener.engines["talker"].has_ended
    context.destroy(linger=0)


def test_hosts_join_by_ipv6() -> None:
    try:
        with socket.socket(socket.AF_INET6) as one:
            one.bind(("::1", 0))
            port = int(one.getsockname()[1])
    except OSError:
        pytest.skip("this machine has no IPv6")
    listener = HostListener(Endpoint.parse(f"[::1]:{port}", "--listen"), SECRET, SAME, CONFIG)
    listener.add("talker", "talker", "box-a")
    listener.open()
    host = HostConnection(Endpoint.parse(f"[::1]:{port}", "--join"), SECRET)
    assert host.join(join_of("talker"), TIMEOUT_S).engines == ["talker"]
    host.close()
    listener.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "*", "203.0.113.1", "no.such.name.invalid"])
def test_an_address_that_is_not_of_one_interface_here_is_rejected(host: str) -> None:
    with pytest.raises(ConfigError, match="cannot be listened at"):
        HostListener(Endpoint(host, free_port()), SECRET, SAME, CONFIG).open()


@pytest.mark.parametrize("text", ["10.0.0.1", "10.0.0.1:0", "10.0.0.1:70000", "::1:7", "host:port", ""])
def test_an_endpoint_without_host_or_port_is_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--join .*: must be HOST:PORT, for example 10\.0\.0\.1:7654"):
        Endpoint.parse(text, "--join")


def test_an_endpoint_is_written_as_it_is_read() -> None:
    for text in ("10.0.0.1:7654", "[fd00::1]:7654", "front:7654"):
        assert str(Endpoint.parse(text, "--join")) == text
