"""Processes that the fork server forks equal spawned ones, but for what they need not import."""

import multiprocessing.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

import psutil
import pytest

from vllm_omni.process import fork_server
from vllm_omni.process.fork_server import ForkServer, StageContext, forked_stages, stage_context, worker_context

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 60.0


@pytest.fixture(autouse=True)
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkServer]:
    """One that preloads nothing, if the process has none yet."""
    server = ForkServer([])
    monkeypatch.setattr(fork_server, "FORK_SERVER", server)
    server.ensure_running()
    yield server
    monkeypatch.undo()


def say(path: Path, *names: str) -> None:
    words = [str(os.getppid()), tempfile.gettempdir(), *(os.environ.get(name, "") for name in names)]
    path.write_text("\n".join(words))


def said(path: Path, *names: str) -> list[str]:
    process = StageContext().Process(target=say, args=(path, *names), name="says")
    process.start()
    process.join(TIMEOUT_S)
    assert process.exitcode == 0
    return path.read_text().split("\n")


def pid_of_server() -> int:
    return forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]


def test_a_stage_is_forked_from_the_fork_server(tmp_path: Path) -> None:
    assert said(tmp_path / "said")[0] == str(pid_of_server())


def fork_another(path: Path, has_changed: bool) -> None:
    if has_changed:
        os.environ["OMP_NUM_THREADS"] = "3"
    context = worker_context()
    if context is None:
        path.write_text("spawned by vLLM's choice")
        return
    another = context.Process(target=say, args=(path,))
    another.start()
    another.join(TIMEOUT_S)
    assert another.exitcode == 0


@pytest.mark.parametrize("has_changed", [False, True])
def test_a_forked_process_has_the_fork_server_fork_its_own_while_the_environment_is_the_same(
    tmp_path: Path, has_changed: bool
) -> None:
    program = f"""if True:
        from pathlib import Path
        from multiprocessing import forkserver
        from tests.process.test_fork_server import fork_another
        from vllm_omni.process.fork_server import FORK_SERVER, StageContext
        FORK_SERVER._preloaded = ["tests.process.serving_descendants"]
        process = StageContext().Process(target=fork_another, args=(Path("said").absolute(), {has_changed}))
        process.start()
        process.join({TIMEOUT_S})
        print(process.exitcode, forkserver._forkserver._forkserver_pid)
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", program]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    code, pid = ran.stdout.split()[-2:]
    assert code == "0"
    expected = "spawned by vLLM's choice" if has_changed else pid
    assert (tmp_path / "said").read_text().splitlines()[0] == expected


def test_a_forked_process_has_the_variables_that_are_read_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    first = pid_of_server()
    for name in ("VLLM_OMNI_STAGE_STUCK_S", "traceparent"):  # the latter differs from stage to stage
        monkeypatch.setenv(name, "7")
        assert said(tmp_path / "said", name) == [str(first), str(tmp_path), "7"]
        monkeypatch.delenv(name)
        assert said(tmp_path / "said", name)[2] == ""
    assert pid_of_server() == first


def test_in_another_environment_another_fork_server_takes_its_place(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = pid_of_server()
    with monkeypatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "3")
        assert said(tmp_path / "said", "OMP_NUM_THREADS")[::2] == [str(pid_of_server()), "3"]
    assert pid_of_server() != first
    assert said(tmp_path / "said", "OMP_NUM_THREADS")[2] == os.environ.get("OMP_NUM_THREADS", "")


def test_torch_that_has_compiled_here_does_not_replace_it(server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.ensure_running()
    before = pid_of_server()
    monkeypatch.setenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "1")
    server.ensure_running()
    assert pid_of_server() == before


def test_a_replaced_fork_server_tells_how_its_last_child_ended_and_ends(
    server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = pid_of_server()
    process = StageContext().Process(target=time.sleep, args=(TIMEOUT_S,))
    process.start()
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    server.ensure_running()
    assert psutil.Process(process.pid).ppid() == first != pid_of_server()
    process.kill()
    process.join(TIMEOUT_S)
    assert process.exitcode == -signal.SIGKILL
    for _ in range(int(10 * TIMEOUT_S)):
        if not psutil.pid_exists(first):
            break
        time.sleep(0.1)
    assert not psutil.pid_exists(first)


def test_another_thread_does_not_replace_it_while_a_process_starts(
    server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = pid_of_server()
    with server.running():
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
        thread = threading.Thread(target=server.ensure_running)
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        assert pid_of_server() == first
    thread.join(TIMEOUT_S)
    assert pid_of_server() != first


def test_the_sockets_directory_may_have_been_removed(server: ForkServer, tmp_path: Path) -> None:
    shutil.rmtree(multiprocessing.util.get_temp_dir())
    assert said(tmp_path / "said")[0] == str(pid_of_server())


def test_a_fork_server_leaves_a_directory_that_its_parent_uses() -> None:
    program = """if True:
        import multiprocessing.util, os
        from multiprocessing import forkserver
        from vllm_omni.process.fork_server import FORK_SERVER
        FORK_SERVER.ensure_running()
        forkserver._forkserver._stop()
        print(os.listdir(multiprocessing.util.get_temp_dir()))
    """
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.split()[-1] == "[]"


def test_a_fork_server_that_was_killed_is_started_again(tmp_path: Path) -> None:
    killed = pid_of_server()
    os.kill(killed, signal.SIGKILL)
    os.waitid(os.P_PID, killed, os.WEXITED | os.WNOWAIT)
    assert said(tmp_path / "said")[0] == str(pid_of_server()) != str(killed)


def test_the_signal_that_ends_a_process_is_its_exit_code(tmp_path: Path) -> None:
    process = StageContext().Process(target=time.sleep, args=(TIMEOUT_S,))
    process.start()
    process.kill()
    process.join(TIMEOUT_S)
    assert process.exitcode == -signal.SIGKILL


def test_only_the_thread_that_starts_a_stage_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_OMNI_FORK_SERVER", "0")
    with forked_stages("cpu"):
        assert stage_context() is None
    monkeypatch.setenv("VLLM_OMNI_FORK_SERVER", "1")
    monkeypatch.setattr(fork_server, "start_engine_cores_in", lambda context: None)  # imports vLLM
    assert stage_context() is None
    with forked_stages("cpu"):
        assert isinstance(stage_context(), StageContext)
    with forked_stages("cuda"):
        assert stage_context() is None


def test_what_stages_share_is_imported_without_a_thread() -> None:
    """A thread of the fork server would not exist in its children; only OpenBLAS's, which it restores, may run."""
    program = "import os, vllm_omni.engine.preloaded; print(len(os.listdir('/proc/self/task')))"
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.split()[-1] == "1"
