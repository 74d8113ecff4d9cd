"""A cluster that is not there, or has no room: what the front end says, and that nothing of it stays. A real Ray."""

import importlib.util
from pathlib import Path

import psutil
import pytest

from tests import machine
from tests.hosts.ray_cluster import VARIABLES
from vllm_omni.config import load_config
from vllm_omni.deploy.workers import ClusterLost, RayWorkers
from vllm_omni.errors import MissingDependency


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
