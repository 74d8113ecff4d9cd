"""Transports between hosts that a deployment names; ``tcp``, which is chosen otherwise, is in the other files."""

import pytest

from tests import machine
from tests.contract.relays import BACKENDS
from tests.hosts.deployments import PARAMS, SMALL, assert_equal, deploy
from vllm_omni import OmniLLM
from vllm_omni.messages.outputs import OmniRequestOutput, collect
from vllm_omni.testing import qwen2_5_omni as tiny

pytestmark = [pytest.mark.timeout(400), pytest.mark.long]

PROMPT = f"<|im_start|>user\n{'Hello ' * 140}<|im_end|>\n<|im_start|>assistant\n"
"""Its hidden states are too many to travel inline."""


def ask(omni: OmniLLM) -> list[OmniRequestOutput]:
    return [omni.run(collect(omni.engine.generate(PROMPT, PARAMS)))]


HOSTS = {"thinker": "box-a", "talker": "box-b"}


def test_rows_travel_by_nixl_from_host_to_host(tmp_path_factory: pytest.TempPathFactory) -> None:
    machine.require("networks")
    machine.require(BACKENDS["nixl"].needs)
    checkpoint = tiny.build(tmp_path_factory.mktemp("checkpoint"))
    with OmniLLM(checkpoint, **SMALL) as omni:
        expected = ask(omni)
    logs, hosts = tmp_path_factory.mktemp("logs"), tmp_path_factory.mktemp("h")
    engine = SMALL | {"overrides": {"edges": {"thinker->talker": {"transport": "nixl"}}}}
    settings = [f"{stage}.host={host}" for stage, host in HOSTS.items()]
    with deploy(checkpoint, logs, HOSTS, *settings, hosts_dir=hosts, engine=engine) as deployment:
        assert_equal(ask(deployment.omni), expected)
        (read,) = deployment.omni.run(deployment.omni.engine.orchestrator.front("talker").relay_statistics())
        assert read["nixl"]["num_gets"] > 0
