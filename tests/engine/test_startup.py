"""Starting several engines at once, with stand-ins for engines. Real ones: tests/e2e/test_lifecycle.py."""

import os
from pathlib import Path
from typing import Any, cast

import pytest

from tests.process.programs import wait_for
from vllm_omni.engine.stage import StageEngine
from vllm_omni.engine.startup import start_engines
from vllm_omni.errors import StageFailed
from vllm_omni.process.tether import ServerTether
from vllm_omni.relay.hub import RelayHub, RelayOptions


class Engine:
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


def test_an_engine_that_is_late_for_a_failed_start_leaves_no_socket_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", "/elsewhere")
    slow = SlowEngine("thinker")
    engines: Any = {"thinker": slow, "talker": FailingEngine("talker")}
    hub = RelayHub(RelayOptions(), prefault=False)
    with pytest.raises(StageFailed, match="talker"):
        start_engines(cast(dict[str, StageEngine], engines), dict.fromkeys(engines, RelayOptions()), hub)
    hub.close()
    assert slow.chosen == slow.directory
    assert os.environ["VLLM_RPC_BASE_PATH"] == "/elsewhere"
