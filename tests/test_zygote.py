"""``tests/zygote.py``: a program that is forked is as one that is started."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests import zygote

PROGRAM = """
import atexit, json, os, sys
facts = {
    "argv": sys.argv, "name": __name__, "file": __file__, "path": sys.path[0], "cwd": os.getcwd(),
    "parent": os.getppid(), "leads a session": os.getsid(0) == os.getpid(), "temporary": os.environ["TMPDIR"],
    "threads": len(os.listdir("/proc/self/task")), "input": sys.stdin.read(),
    "imports": "vllm.v1.engine.core" in sys.modules,
}
print(json.dumps(facts))
atexit.register(print, "the end", file=sys.stderr)
sys.exit(3)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path / "program.py"


def run(popen: Callable[..., Any], command: list[str], cwd: Path, **variables: str) -> tuple[dict[str, Any], str, int]:
    """What a program says of itself, its errors, and its exit code."""
    environ = os.environ | {"TMPDIR": str(cwd)} | variables
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with popen(command, cwd=cwd, env=environ, text=True, start_new_session=True, **pipes) as process:
        out, err = process.communicate("a line", timeout=60)
    return json.loads(out), err, process.returncode


@pytest.mark.parametrize("words", [["program.py", "a", "-b"], ["-m", "program", "a"]])
def test_a_forked_program_is_as_one_that_is_started(program: Path, words: list[str]) -> None:
    command = [sys.executable, *words]
    started = run(subprocess.Popen, command, program.parent)
    forked = run(zygote.Popen, command, program.parent)
    assert (started[0].pop("imports"), forked[0].pop("imports")) == (False, True)
    assert forked == started
    assert forked[0]["parent"] == os.getpid()


def test_a_program_that_a_signal_ends_has_its_exit_code(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import time; time.sleep(60)")
    with zygote.Popen([sys.executable, tmp_path / "program.py"]) as process:
        process.send_signal(signal.SIGKILL)
        assert process.wait(20) == -signal.SIGKILL


def test_a_program_whose_imports_read_another_environment_is_started(program: Path) -> None:
    facts, _, _ = run(zygote.Popen, [sys.executable, "program.py"], program.parent, VLLM_TARGET_DEVICE="cpu")
    assert not facts["imports"]


def test_a_program_forks_those_that_it_starts_where_it_is_told_to(program: Path) -> None:
    outer = "import subprocess, sys; sys.exit(subprocess.run([sys.executable, 'program.py']).returncode)"
    (program.parent / "outer.py").write_text(outer)
    for forks in (False, True):
        facts, errors, code = run(partial(zygote.Popen, forks=forks), [sys.executable, "outer.py"], program.parent)
        assert facts["imports"] == forks
        assert (facts["input"], errors, code) == ("a line", "the end\n", 3)
        assert facts["parent"] != os.getpid()
