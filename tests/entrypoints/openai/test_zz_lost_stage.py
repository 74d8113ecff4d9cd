"""The last test of the server that all tests of this directory share."""

import os
import re
import signal

import psutil
import pytest

from tests.entrypoints.openai.conftest import END_TIMEOUT_S, Server, wait_for

pytestmark = pytest.mark.slow


def test_health_names_a_stage_that_died_and_the_server_ends(server: Server) -> None:
    stages = [child for child in psutil.Process(server.process.pid).children() if "EngineCore" in child.name()]
    assert len(stages) == 3
    os.kill(stages[0].pid, signal.SIGKILL)
    wait_for("/health sees it", lambda: server.get("/health").status_code == 503)
    assert re.search(
        r"stage '(thinker|talker|token2wav)': its engine has died", server.get("/health").json()["error"]["message"]
    )
    assert server.process.wait(END_TIMEOUT_S) == 1
