"""A cluster that is not there, with a real Ray: what the front end says, and that nothing of it stays. And which nodes
run the hosts of a server while nodes leave: a cluster that is a list."""

import importlib.util
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from tests import machine
from tests.deploy.test_cluster import SPANS, config, cpu
from tests.hosts.deployments import wait_for
from tests.hosts.ray_cluster import VARIABLES
from vllm_omni.config import load_config
from vllm_omni.deploy import ray_messages as msg
from vllm_omni.deploy import workers
from vllm_omni.deploy.workers import ClusterLost, RayWorkers
from vllm_omni.errors import MissingDependency
from vllm_omni.hosts.listener import HostListener

MOVED_WITHIN_S = 10.0


def test_without_ray_the_error_names_the_extra(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ray" else find(name))
    with pytest.raises(MissingDependency, match=r"worker_backend = 'ray' needs ray; .*pip install -e '\.\[ray\]'"):
        RayWorkers(load_config(tiny_checkpoint, worker_backend="ray"))


def test_a_cluster_that_cannot_be_reached_fails_the_start_in_time(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    machine.require("ray")
    for name, value in {**VARIABLES, "VLLM_OMNI_STAGE_READY_TIMEOUT_S": "2"}.items():
        monkeypatch.setenv(name, value)
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(ClusterLost, match=r"Ray: not within 2 s \(VLLM_OMNI_STAGE_READY_TIMEOUT_S\): .*127\.0\.0\.1:1"):
        RayWorkers(load_config(tiny_checkpoint, worker_backend="ray", ray_address="127.0.0.1:1"))
    assert "waits for Ray's cluster 127.0.0.1:1: " in caplog.text
    assert set(psutil.Process().children(recursive=True)) <= before


class ListedCluster:
    """Answers orders as the process that speaks to Ray, of nodes in a list; in the place of ``RayProcess``."""

    def __init__(self) -> None:
        self.nodes = [cpu("a"), cpu("bb")]
        self.bundles: dict[str, msg.Bundle] = {}  # host -> what is reserved for it
        self.runs: list[tuple[str, str, tuple[str, ...]]] = []  # host, its node, what it joins for
        self._ended: list[msg.Outcome] = []
        self._lock = threading.Lock()

    def change(self, nodes: list[msg.Node], *ended: str) -> None:
        """Have other nodes, and report that the programs of these hosts have ended; forgets ``runs``."""
        with self._lock:
            self.nodes, self.runs = nodes, []
            self._ended = [msg.Outcome(host, "killed") for host in ended]

    def ask(self, order: msg.Order, kind: type[Any], timeout_s: float = 0.0) -> Any:
        with self._lock:
            match order:
                case msg.Connect():
                    return msg.Connected("127.0.0.1")
                case msg.ListNodes():
                    return msg.Nodes(self.nodes)
                case msg.Reserve(bundles):
                    self.bundles |= {one.host: one for one in bundles}
                    return msg.Reserved(True)
                case msg.Run(work):
                    self.runs.append((work.host, self.bundles[work.host].node, tuple(work.stages)))
                    return msg.Running()
                case _:
                    ended, self._ended = self._ended, []
        threading.Event().wait(0.01)
        return msg.Ended(ended)

    def close(self) -> None: ...


@pytest.fixture
def listed(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ListedCluster]:
    """With the hosts of a server whose thinker is on both nodes."""
    cluster = ListedCluster()
    monkeypatch.setattr(workers, "RayProcess", lambda: cluster)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    for name in ("REPORT_S", "FIRST_DELAY_S"):
        monkeypatch.setattr(workers, name, 0.1)
    made = RayWorkers(config(tiny_checkpoint, *SPANS))
    made.start(cast(HostListener, None))  # which is notified of rejected hosts alone
    wait_for("both hosts", lambda: len(cluster.runs) == 2, MOVED_WITHIN_S)
    yield cluster
    made.close()


def test_each_node_has_a_program_that_joins_for_the_parts_on_it(listed: ListedCluster) -> None:
    assert listed.runs == [
        ("a", "id-a", ("thinker/node0", "talker")),
        ("bb", "id-bb", ("thinker/node1", "token2wav")),
    ]


def test_a_part_whose_node_leaves_waits_for_one_without_the_other_part(listed: ListedCluster) -> None:
    listed.change([cpu("a")], "bb", "a")
    wait_for("the host whose node is there", lambda: listed.runs, MOVED_WITHIN_S)  # it does not wait for the other one
    assert {host for host, *_ in listed.runs} == {"a"}
    listed.change([cpu("a"), cpu("ccc")])
    wait_for("the host that has moved", lambda: listed.runs, MOVED_WITHIN_S)
    assert listed.runs == [("bb", "id-ccc", ("thinker/node1", "token2wav"))]


def test_parts_whose_nodes_have_all_left_are_on_different_nodes_again(listed: ListedCluster) -> None:
    listed.change([cpu("ccc"), cpu("dddd")], "a", "bb")
    wait_for("both hosts", lambda: len(listed.runs) == 2, MOVED_WITHIN_S)
    assert sorted(node for _, node, _ in listed.runs) == ["id-ccc", "id-dddd"]
