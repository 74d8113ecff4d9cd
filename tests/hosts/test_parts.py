"""An engine with a part on each of two hosts: real sockets, without vLLM and without ranks."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from threading import Thread

import pytest
from torch.distributed import TCPStore

from tests.hosts.test_joining import (
    CONFIG,
    FAREWELL,
    SAME,
    SECRET,
    TIMEOUT_S,
    Client,
    EngineCore,
    free_port,
    join_of,
    launch,
    wait_for,
)
from vllm_omni.errors import ConfigError
from vllm_omni.hosts import messages as msg
from vllm_omni.hosts.bridge import IDENTITY, NOT_READY
from vllm_omni.hosts.connection import HostConnection
from vllm_omni.hosts.endpoint import Endpoint
from vllm_omni.hosts.listener import HostListener
from vllm_omni.hosts.remote_engine import HostGone, RemoteEngine


@pytest.fixture
def listener() -> Iterator[HostListener]:
    made = HostListener(Endpoint("127.0.0.1", free_port()), SECRET, SAME, CONFIG)
    made.add("thinker/node1", "thinker", "box-b", made.add("thinker", "thinker", "box-a"))
    made.open()
    yield made
    made.close()


@pytest.fixture
def engine(listener: HostListener) -> RemoteEngine:
    return listener.engines["thinker"]


@pytest.fixture
def hosts(listener: HostListener) -> Iterator[list[HostConnection]]:
    """Two that have joined as ``--stage thinker``."""
    made = [HostConnection(listener._endpoint, SECRET) for _ in range(2)]
    joined = [one.join(join_of("thinker"), TIMEOUT_S).engines for one in made]
    assert joined == [["thinker"], ["thinker/node1"]]
    yield made
    for one in made:
        one.close()


@pytest.fixture
def client(engine: RemoteEngine, hosts: list[HostConnection], tmp_path: Path) -> Iterator[Client]:
    """vLLM's, of the engine that both hosts have been told to start."""
    made = Client(launch(engine, tmp_path))
    yield made
    made.close()


def started(host: HostConnection) -> msg.Start:
    message = host.inbox.get(timeout=TIMEOUT_S)
    assert isinstance(message, msg.Start)
    return message


@pytest.mark.parametrize("part", ["thinker/node1", "thinker/node0"])
def test_a_host_joins_for_the_part_that_it_names(listener: HostListener, part: str) -> None:
    hosts = [HostConnection(listener._endpoint, SECRET) for _ in range(2)]
    assert hosts[0].join(join_of(part), TIMEOUT_S).engines == ["thinker" if part == "thinker/node0" else part]
    with pytest.raises(ConfigError, match=f"stage '{part}' is served by"):  # though the other part has no host
        hosts[1].join(join_of(part), TIMEOUT_S)
    for one in hosts:
        one.close()


def test_a_third_host_is_rejected(hosts: list[HostConnection], listener: HostListener) -> None:
    third = HostConnection(listener._endpoint, SECRET)
    with pytest.raises(ConfigError, match="stage 'thinker' is served by"):
        third.join(join_of("thinker"), TIMEOUT_S)
    third.close()


def test_an_engine_waits_for_each_of_its_hosts(listener: HostListener, engine: RemoteEngine, tmp_path: Path) -> None:
    first = HostConnection(listener._endpoint, SECRET)
    first.join(join_of("thinker"), TIMEOUT_S)
    assert not engine.has_host
    with pytest.raises(HostGone, match=r"host 'box-b' has not joined within .*--stage thinker/node1"):
        engine.launch(tmp_path, {}, log_stats=True, farewell=FAREWELL, timeout_s=0.1)
    first.close()


def test_each_host_starts_its_part_and_finds_the_others_at_one_store(
    hosts: list[HostConnection], client: Client, engine: RemoteEngine, tmp_path: Path
) -> None:
    starts = [started(host) for host in hosts]
    assert [one.engine for one in starts] == ["thinker", "thinker/node1"]
    nodes = [one.node for one in starts if one.node is not None]
    assert [one.rank for one in nodes] == [0, 1]
    stores = [TCPStore(one.store_host, one.store_port, timeout=timedelta(seconds=TIMEOUT_S)) for one in nodes]
    stores[0].set("address", "here")
    assert stores[1].get("address") == b"here"
    core = EngineCore(hosts[0].open_bridge(starts[0].number, tmp_path))
    core.input.send(b"ready")
    assert client.input.recv_multipart() == [IDENTITY, b"ready"]
    core.close()
    assert engine.failure() is None


@pytest.mark.parametrize("ending", [0, 1], ids=["engine core", "ranks"])
def test_a_part_that_ends_ends_the_engine_and_the_other_part(
    hosts: list[HostConnection], client: Client, engine: RemoteEngine, ending: int
) -> None:
    starts = [started(host) for host in hosts]
    hosts[ending].send(msg.Ended(starts[ending].number, "out of memory"))
    wait_for(engine.failure)
    assert engine.failure() == f"on host '{'box-b' if ending else 'box-a'}': out of memory"
    assert hosts[1 - ending].inbox.get(timeout=TIMEOUT_S) == msg.Kill(starts[1 - ending].number)
    assert client.input.recv_multipart() == [IDENTITY, NOT_READY]


def test_a_part_whose_host_is_lost_ends_the_engine(
    hosts: list[HostConnection], client: Client, engine: RemoteEngine
) -> None:
    starts = [started(host) for host in hosts]
    hosts[1].disconnect()
    wait_for(engine.failure)
    assert "its host 'box-b' (127.0.0.1) does not answer any longer" in str(engine.failure())
    assert hosts[0].inbox.get(timeout=TIMEOUT_S) == msg.Kill(starts[0].number)
    assert not engine.has_host


def test_what_each_part_uses_is_added(hosts: list[HostConnection], client: Client, engine: RemoteEngine) -> None:
    for number, host in enumerate(hosts):
        host.send(msg.Usage(started(host).number, [10 + number], 1.5, 100))
    wait_for(lambda: len(engine.pids()) == len(hosts))
    assert (engine.pids(), engine.cpu_s(), engine.resident_bytes()) == ([10, 11], 3.0, 200)


def test_the_end_of_an_engine_kills_each_part_and_closes_its_store(
    hosts: list[HostConnection], client: Client, engine: RemoteEngine
) -> None:
    starts = [started(host) for host in hosts]
    node = starts[1].node
    assert node is not None
    Thread(target=engine.end).start()
    for host, start in zip(hosts, starts, strict=True):
        assert host.inbox.get(timeout=TIMEOUT_S) == msg.Kill(start.number)
    wait_for(lambda: engine.run is None)
    with pytest.raises(Exception, match=r"client socket has failed to connect|timed out"):
        TCPStore(node.store_host, node.store_port, timeout=timedelta(milliseconds=200))
