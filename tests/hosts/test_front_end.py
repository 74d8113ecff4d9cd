"""A front end that is killed, and started again while its host waits for it."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests import zygote
from tests.hosts.deployments import PORT, Deployment, wait_for
from tests.hosts.machines import network
from vllm_omni.relay.secret import MIN_BYTES
from vllm_omni.testing import qwen2_5_omni as tiny

pytestmark = [pytest.mark.timeout(600), pytest.mark.long]


@contextmanager
def front_end(deployment: Deployment) -> Iterator[tuple["zygote.Popen", dict[str, Any]]]:
    """The process, and what it has answered."""
    where = f"{deployment.net.address}:{PORT}"
    command = [sys.executable, "-m", "tests.hosts.front_end_program", str(deployment.checkpoint), where]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with zygote.Popen([*command, str(deployment.token)], **pipes) as process:
        try:
            assert process.stdout is not None
            line = next(line for line in iter(process.stdout.readline, "") if line.startswith("{"))
            yield process, json.loads(line)
        finally:
            process.kill()


def test_engines_continue_for_a_front_end_that_was_killed(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """And end with one that is stopped."""
    token = tmp_path / "token"
    token.write_text("s" * MIN_BYTES)
    token.chmod(0o600)
    with network(tmp_path_factory.mktemp("h")) as net:
        made = Deployment(net, tiny.build(tmp_path / "checkpoint"), token, tmp_path, {"talker": "box-b"})
        made.join("talker")
        with front_end(made) as (first, before):
            first.kill()
            first.wait()
        with front_end(made) as (second, after):
            (program,) = made.hosts["talker"].running()
            second.communicate("")
            assert second.returncode == 0
        assert after == before
        wait_for("the host's end", made.hosts["talker"].has_ended)
        assert program.returncode == 0
