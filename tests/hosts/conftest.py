"""What deployments of Qwen2.5-Omni on several hosts are compared with."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.deployments import Deployment, answers_of_one_machine
from vllm_omni.messages.outputs import OmniRequestOutput
from vllm_omni.testing import qwen2_5_omni as tiny

LOG_BYTES = 4000


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Function) -> Iterator[None]:
    """A test that fails shows what its hosts have logged."""
    report = yield
    deployment = item.funcargs.get("deployment")
    if report.failed and isinstance(deployment, Deployment):
        for stage in deployment.hosts:
            if (log := deployment.log(stage)).is_file():
                report.sections.append((f"log of {stage}", log.read_bytes()[-LOG_BYTES:].decode(errors="replace")))
    return report


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
