"""The directory and the lease, with real processes, without engines."""

import copy
import logging
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engine.stage_processes import fail, share, start_stage, survive
from vllm_omni.process import run_directory
from vllm_omni.process.run_directory import Lease, RunDirectory, enter_stage_process

TIMEOUT_S = 20.0


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[RunDirectory]:
    monkeypatch.setenv("VLLM_OMNI_RUNTIME_DIR", str(tmp_path))
    directory = RunDirectory()
    yield directory
    directory.remove()


def wait_for(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_children_inherit_the_directory_and_the_parent_does_not_keep_it(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", "/before")
    monkeypatch.delenv("VLLM_RPC_BASE_PATH", raising=False)
    with pytest.raises(ArithmeticError), directory.inherited():
        assert os.environ["VLLM_RPC_BASE_PATH"] == os.environ["TMPDIR"] == str(directory.path)
        assert tempfile.gettempdir() != str(directory.path)
        raise ArithmeticError
    assert os.environ["TMPDIR"] == "/before"
    assert "VLLM_RPC_BASE_PATH" not in os.environ


def test_remove_takes_the_memory_that_workers_share_and_no_other(directory: RunDirectory) -> None:
    rendezvous = f"vllm_dist_{uuid.uuid4().hex}"
    mine = run_directory.SHM / f"{rendezvous}-tp:0-[0-1]-cpushm_0"
    other = run_directory.SHM / f"vllm_dist_{uuid.uuid4().hex}-tp:0-[0-1]-cpushm_0"
    for file in (directory.path / rendezvous, mine, other):
        file.touch()
    try:
        directory.remove()
        directory.remove()
        assert not directory.path.exists()
        assert not mine.exists()
        assert other.exists()
    finally:
        other.unlink()


def test_lease_keeps_what_the_user_put_there_and_binds_no_copy_in_the_server(directory: RunDirectory) -> None:
    lease = directory.lease("talker")
    lease["user's"] = 1
    threads = threading.active_count()
    for copied in (copy.deepcopy(lease), pickle.loads(pickle.dumps(lease))):
        assert isinstance(copied, Lease)
        assert copied == {"user's": 1}
        assert (copied.directory, copied.stage) == (directory.path, "talker")
    assert threading.active_count() == threads


def test_stage_ends_when_the_directory_is_removed(directory: RunDirectory) -> None:
    process = start_stage(directory.lease("talker"))
    directory.remove()  # before the child looks for it, or after: it ends
    process.join(TIMEOUT_S)
    assert process.exitcode == 1


def test_stage_lives_as_long_as_the_directory(directory: RunDirectory) -> None:
    process = start_stage(directory.lease("talker"))
    wait_for(lambda: any(directory.path.glob("talker.*.process")))  # it is bound
    assert process.is_alive()
    directory.remove()
    process.join(TIMEOUT_S)
    assert process.exitcode == 1


# A server that has a stage, and a child of the user's that outlives it and holds all the server's files open.
SERVER = """
import os, time
from tests.engine.stage_processes import start_stage
from vllm_omni.process.run_directory import RunDirectory

if __name__ == "__main__":
    directory = RunDirectory()
    forked = os.fork()
    if forked == 0:
        time.sleep(200)
        os._exit(0)
    stage = start_stage(directory.lease("talker"))
    print(directory.path, stage.pid, forked, flush=True)
    time.sleep(200)
"""


def test_stage_ends_and_removes_the_directory_when_the_server_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    env = os.environ | {"VLLM_OMNI_RUNTIME_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
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


def test_what_is_left_of_a_stage_is_ended_and_removed_and_no_other_stage_is_touched(directory: RunDirectory) -> None:
    name = f"omni-{uuid.uuid4().hex}"
    lease, other_lease = directory.lease("talker"), directory.lease("thinker")
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=share, args=(lease, name, there), daemon=True)
    process.start()
    other = start_stage(other_lease)
    semaphore = run_directory.SHM / f"sem.{here.recv().removeprefix('/')}"
    wait_for(lambda: any(directory.path.glob("thinker.*.process")))
    lease.note_processes()
    assert not lease.has_lost_process()
    process.kill()  # what it shares is told by nothing afterwards
    process.join()
    assert lease.has_lost_process()
    assert (run_directory.SHM / name).exists()
    assert semaphore.exists()
    (directory.path / "talker.failure").write_text("the cause")
    lease.end_processes()
    assert not (run_directory.SHM / name).exists()
    assert not semaphore.exists()
    assert lease.failure() is None
    assert not list(directory.path.glob("talker.*"))
    assert other.is_alive()
    other_lease.end_processes()
    other.join(TIMEOUT_S)
    assert other.exitcode == -signal.SIGKILL


def test_a_socket_that_nobody_holds_is_removed(directory: RunDirectory) -> None:
    with socket.socket(socket.AF_UNIX) as dead, socket.socket(socket.AF_UNIX) as alive:
        dead.bind(str(directory.path / "dead"))
        alive.bind(str(directory.path / "alive"))
        dead.close()
        directory.lease("talker").remove_dead_sockets()
        assert not (directory.path / "dead").exists()
        assert (directory.path / "alive").exists()


def test_a_call_that_an_engine_answers_with_a_failure_is_no_cause_of_death(directory: RunDirectory) -> None:
    lease = directory.lease("talker")
    process = multiprocessing.get_context("spawn").Process(target=survive, args=(lease,))
    process.start()
    process.join(6 * TIMEOUT_S)  # it imports vLLM
    assert process.exitcode == 0
    assert lease.failure() is None


def test_first_reason_of_a_failure_is_reported_per_stage(directory: RunDirectory) -> None:
    lease = directory.lease("talker")
    assert lease.failure() is None
    process = multiprocessing.get_context("spawn").Process(target=fail, args=(lease,))
    process.start()
    process.join(TIMEOUT_S)
    assert process.exitcode == 1
    assert lease.failure() == "ValueError: the cause"
    assert directory.lease("thinker").failure() is None


def test_process_that_belongs_to_no_stage_is_left_alone() -> None:
    threads = threading.active_count()
    enter_stage_process()
    assert threading.active_count() == threads
    assert not logging.getLogger("vllm.v1.engine.core").handlers
