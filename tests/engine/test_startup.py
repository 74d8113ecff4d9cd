"""Starting several engines at once, with stand-ins for engines. Real ones: tests/e2e/test_lifecycle.py."""

import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from vllm.utils.system_utils import get_mp_context

from tests.process.programs import wait_for
from vllm_omni.engine.stage import StageEngine
from vllm_omni.engine.startup import start_engines
from vllm_omni.errors import StageFailed
from vllm_omni.process.memory import StageMemory
from vllm_omni.process.memory_division import MEMORY, MemoryDivision, MemorySection
from vllm_omni.process.tether import ServerTether
from vllm_omni.relay.hub import RelayHub, RelayOptions


class Engine:
    remote = None
    vllm_config = SimpleNamespace(additional_config={})

    def __init__(self, name: str) -> None:
        self.name = name

    def shutdown(self) -> None:
        pass


class FailingEngine(Engine):
    def start(self, tether: ServerTether, hub: RelayHub) -> None:
        raise StageFailed(self.name, "did not start")


class SlowEngine(Engine):
    """Comes to the point where vLLM chooses the directory of its sockets only after the start has failed."""

    def start(self, tether: ServerTether, hub: RelayHub) -> None:
        wait_for(lambda: not tether.directory.exists())
        self.chosen = Path(os.environ["VLLM_RPC_BASE_PATH"])
        self.directory = tether.directory


def start(*engines: Engine, memory: Mapping[str, MemorySection] | None = None) -> None:
    named: Any = {engine.name: engine for engine in engines}
    hub = RelayHub(RelayOptions(), prefault=False)
    try:
        start_engines(cast(dict[str, StageEngine], named), dict.fromkeys(named, RelayOptions()), hub, memory or {})
    finally:
        hub.close()


def test_processes_of_engines_are_spawned_so_that_they_read_their_tether(monkeypatch: pytest.MonkeyPatch) -> None:
    class Core(Engine):
        def start(self, tether: ServerTether, hub: RelayHub) -> None:
            raise StageFailed(self.name, str(get_mp_context().get_start_method()))

    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    with pytest.raises(StageFailed, match="spawn"):
        start(Core("thinker"))


class WaitingEngine(Engine):
    """Has loaded its model, and waits for the others on its device."""

    def start(self, tether: ServerTether, hub: RelayHub) -> None:
        division = MemoryDivision(tether.directory, "cpu", tether[MEMORY]["ranks"]["cpu"])
        division.publish(StageMemory(stage=self.name, weights=0, activations=0))
        wait_for(lambda: not tether.directory.exists())


class LoadingEngine(Engine):
    def start(self, tether: ServerTether, hub: RelayHub) -> None:
        wait_for(lambda: not tether.directory.exists())


def test_at_the_deadline_the_stage_is_named_for_which_the_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_OMNI_STAGE_READY_TIMEOUT_S", "0.3")
    stages = [WaitingEngine("thinker"), LoadingEngine("talker"), WaitingEngine("token2wav")]
    names = [stage.name for stage in stages]
    memory = dict.fromkeys(names, MemorySection(["cpu"], {"cpu": names}))
    with pytest.raises(StageFailed, match=r"stage 'talker': not ready after 0\.3 s"):
        start(*stages, memory=memory)


def test_an_engine_that_is_late_for_a_failed_start_leaves_no_socket_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", "/elsewhere")
    slow = SlowEngine("thinker")
    with pytest.raises(StageFailed, match="talker"):
        start(slow, FailingEngine("talker"))
    assert slow.chosen == slow.directory
    assert os.environ["VLLM_RPC_BASE_PATH"] == "/elsewhere"
