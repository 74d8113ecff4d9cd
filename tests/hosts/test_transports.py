"""Transports between hosts that a deployment names; ``tcp``, which is chosen otherwise, is in the other files."""

from typing import Any

import pytest

from tests import machine
from tests.contract.relays import BACKENDS
from tests.hosts.deployments import PARAMS, SMALL, assert_equal, deploy
from tests.hosts.machines import Network
from vllm_omni import OmniLLM
from vllm_omni.messages.outputs import OmniRequestOutput, collect
from vllm_omni.testing import qwen2_5_omni as tiny

pytestmark = [pytest.mark.timeout(400), pytest.mark.long]

PROMPT = f"<|im_start|>user\n{'Hello ' * 140}<|im_end|>\n<|im_start|>assistant\n"
"""Its hidden states are too many to travel inline."""


def ask(omni: OmniLLM) -> list[OmniRequestOutput]:
    return [omni.run(collect(omni.engine.generate(PROMPT, PARAMS)))]


def test_rows_travel_by_nixl_from_host_to_host(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """UCX would take two hosts of one kernel for one, and use shared memory or the loopback device."""
    machine.require("networks")
    machine.require(BACKENDS["nixl"].needs)

    def prepare(net: Network) -> None:
        variables = {"TLS": "tcp", "TCP_BRIDGE_ENABLE": "y", "NET_DEVICES": ",".join(net.devices)}
        for name, value in variables.items():
            monkeypatch.setenv(f"UCX_{name}", value)

    checkpoint = tiny.build(tmp_path_factory.mktemp("checkpoint"))
    with OmniLLM(checkpoint, **SMALL) as omni:
        expected = ask(omni)
    logs, hosts = tmp_path_factory.mktemp("logs"), tmp_path_factory.mktemp("h")
    engine = SMALL | {"overrides": {"edges": {"thinker->talker": {"transport": "nixl"}}}}
    how: dict[str, Any] = {"hosts_dir": hosts, "engine": engine, "prepare": prepare}
    with deploy(checkpoint, logs, {"talker": "box-b"}, "talker.host=box-b", **how) as deployment:
        assert_equal(ask(deployment.omni), expected)
        (read,) = deployment.omni.run(deployment.omni.engine.orchestrator.front("talker").relay_statistics())
        assert read["nixl"]["num_gets"] > 0
