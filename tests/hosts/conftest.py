"""What deployments of Qwen2.5-Omni on several hosts are compared with."""

from pathlib import Path

import pytest

from tests.hosts.deployments import answers_of_one_machine
from vllm_omni.messages.outputs import OmniRequestOutput
from vllm_omni.testing import qwen2_5_omni as tiny


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="session")
def of_one_machine(checkpoint: Path) -> tuple[list[OmniRequestOutput], OmniRequestOutput]:
    return answers_of_one_machine(checkpoint)


@pytest.fixture(scope="session")
def expected(of_one_machine: tuple[list[OmniRequestOutput], OmniRequestOutput]) -> list[OmniRequestOutput]:
    """The answers of one machine."""
    return of_one_machine[0]


@pytest.fixture(scope="session")
def expected_of_image(of_one_machine: tuple[list[OmniRequestOutput], OmniRequestOutput]) -> OmniRequestOutput:
    return of_one_machine[1]
