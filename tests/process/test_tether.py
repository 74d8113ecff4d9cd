"""Processes of a stage end with the server; with real processes, without engines."""

import copy
import errno
import logging
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.process.programs import TIMEOUT_S, handle_signals, start_stage, wait_for
from vllm_omni.process.run_directory import OWNER, RunDirectory
from vllm_omni.process.supervisor import in_thread
from vllm_omni.process.tether import ServerTether, _wait_for_end_of_server, enter_stage_process


def test_a_tether_keeps_the_users_values_and_binds_no_copy_in_the_server(directory: RunDirectory) -> None:
    tether = ServerTether(directory.path, "talker")
    tether["user's"] = 1
    threads = threading.active_count()
    for copied in (copy.deepcopy(tether), pickle.loads(pickle.dumps(tether))):
        assert isinstance(copied, ServerTether)
        assert copied == {"user's": 1}
        assert (copied.directory, copied.stage) == (directory.path, "talker")
    assert threading.active_count() == threads


def test_stage_ends_when_the_directory_is_removed(directory: RunDirectory) -> None:
    process = start_stage(ServerTether(directory.path, "talker"))
    directory.remove()  # the child ends whether it looks for it before or after
    process.join(TIMEOUT_S)
    assert process.exitcode == 1


def test_stage_lives_as_long_as_the_directory(directory: RunDirectory) -> None:
    process = start_stage(ServerTether(directory.path, "talker"))
    wait_for(lambda: any(directory.path.glob("talker.*.process")))  # it is tethered
    assert process.is_alive()
    directory.remove()
    process.join(TIMEOUT_S)
    assert process.exitcode == 1


def test_stage_ignores_the_signals_of_its_server_until_that_ends_it(directory: RunDirectory) -> None:
    """Both get them from a terminal, or a service manager, and the server may first let requests end."""
    server, stage = multiprocessing.Pipe()
    tether = ServerTether(directory.path, "talker")
    process = multiprocessing.get_context("spawn").Process(target=handle_signals, args=(tether, stage), daemon=True)
    in_thread(process.start).result(TIMEOUT_S)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGTERM)  # before it can handle one
    assert server.recv() == "ready"
    os.kill(process.pid, signal.SIGTERM)
    os.kill(process.pid, signal.SIGINT)
    server.send("lives")
    assert server.recv() == "lives"
    directory.announce_end()
    os.kill(process.pid, signal.SIGTERM)
    process.join(TIMEOUT_S)
    assert process.exitcode == 0


def test_a_stage_without_locks_keeps_waiting_and_leaks_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / OWNER).touch()
    num_descriptors: list[int] = []

    def lockf(*_: object) -> None:
        num_descriptors.append(len(os.listdir("/proc/self/fd")))
        if len(num_descriptors) < 4:
            raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.lockf", lockf)
    monkeypatch.setattr("vllm_omni.process.tether.RETRY_S", 0.0)
    _wait_for_end_of_server(tmp_path)
    assert num_descriptors == num_descriptors[:1] * 4


# A server with a stage, and with a child of the user that outlives it and holds all its files open.
SERVER = """
import os, time
from tests.process.programs import start_stage
from vllm_omni.process.run_directory import RunDirectory
from vllm_omni.process.supervisor import in_thread
from vllm_omni.process.tether import ServerTether

if __name__ == "__main__":
    directory = RunDirectory()
    forked = os.fork()
    if forked == 0:
        time.sleep(200)
        os._exit(0)
    stage = start_stage(ServerTether(directory.path, "talker"))
    print(directory.path, stage.pid, forked, flush=True)
    time.sleep(200)
"""


@pytest.mark.usefixtures("directory")
def test_stage_ends_and_removes_the_directory_when_the_server_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=env) as server:
        assert server.stdout is not None
        path, stage, forked = server.stdout.readline().split()
        server.kill()
        server.wait()
        try:
            wait_for(lambda: not is_running(int(stage)) and not Path(path).exists())
            assert is_running(int(forked))
        finally:
            os.kill(int(forked), signal.SIGKILL)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_process_of_no_stage_is_unaffected() -> None:
    threads = threading.active_count()
    enter_stage_process()
    assert threading.active_count() == threads
    assert not logging.getLogger("vllm.v1.engine.core").handlers
