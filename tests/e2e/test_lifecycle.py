"""However a server ends, it leaves no process, no socket, no file, and nothing in /dev/shm.

Each test runs a user's program in a session of its own, which identifies its processes even after their parent has
ended, and in a directory of its own for everything that it writes. A program has three stages where several are needed,
and otherwise one, which starts sooner.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file, save_file

from tests import zygote
from tests.e2e import server_program
from tests.processes import few_file_descriptors

START_TIMEOUT_S = 120.0
# Time for processes to end: on two busy cores Python takes seconds.
END_TIMEOUT_S = 20.0
# A child that is importing vLLM notices its parent's end only afterwards: after 5 s, or 15 s on busy cores.
IMPORT_TIMEOUT_S = 60.0
STAGES = ("thinker", "talker", "token2wav")


def wait_for(what: str, is_true: Callable[[], bool], timeout_s: float) -> None:
    started = time.monotonic()
    while not is_true():
        if time.monotonic() - started > timeout_s:
            pytest.fail(f"not within {timeout_s:g} s: {what}")
        time.sleep(0.02)
    print(f"{what}: after {time.monotonic() - started:.2f} s")


Starts = type["subprocess.Popen[Any]"]


class Program:
    """A user's program and all that belongs to it."""

    def __init__(self, directory: Path, model: Path, scenario: str, overrides: Sequence[str], log: str, starts: Starts):
        self.directory = directory
        self.runtime_directory = directory / "run"
        self.temporary_directory = directory / "tmp"
        self.runtime_directory.mkdir()
        self.temporary_directory.mkdir()
        self._shm: set[str] = set()
        self._log = directory / "log"
        env = os.environ | {
            "VLLM_OMNI_RUNTIME_DIR": str(self.runtime_directory),
            "TMPDIR": str(self.temporary_directory),
            "VLLM_LOGGING_LEVEL": log,
        }
        with self._log.open("wb") as output:
            self.process = starts(
                [sys.executable, server_program.__file__, str(model), scenario, *overrides],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
            )

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def events(self) -> list[str]:
        return re.findall(f"^{server_program.EVENT}(.*)$", self.log(), re.MULTILINE)

    def wait_for_event(self, pattern: str, timeout_s: float = START_TIMEOUT_S) -> re.Match[str]:
        """The first event that matches; fails when the program ends without it."""
        found: list[re.Match[str]] = []

        def has_come() -> bool:
            ended = self.process.poll() is not None  # read first: all of its events are in the log then
            found.extend(match for event in self.events() if (match := re.fullmatch(pattern, event)))
            assert found or not ended, f"ended with {self.process.returncode} before {pattern!r}:\n{self.log()}"
            return bool(found)

        wait_for(f"event {pattern!r}", has_come, timeout_s)
        self.note_shared_memory()
        return found[0]

    def processes(self) -> list[psutil.Process]:
        """The program's living processes, itself included, also those whose parent has ended."""
        found = []
        for pid in psutil.pids():
            try:
                process = psutil.Process(pid)
                if os.getsid(pid) == self.process.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, ProcessLookupError):
                continue
        return found

    def engine_cores(self) -> list[psutil.Process]:
        """The children that vLLM has spawned, from their first instruction on."""
        return [process for process in self.processes() if is_spawned(process, self.process.pid)]

    def note_shared_memory(self) -> list[str]:
        """What the program's processes have mapped of /dev/shm; other programs may put things there, too."""
        for process in self.processes():
            with contextlib.suppress(OSError):
                self._shm |= set(re.findall(r"/dev/shm/\S+", Path(f"/proc/{process.pid}/maps").read_text()))
        return sorted(self._shm)

    def leftovers(self) -> list[str]:
        files = [*self.runtime_directory.rglob("*"), *self.temporary_directory.rglob("*")]
        return [str(path) for path in files] + [path for path in sorted(self._shm) if os.path.exists(path)]

    def is_tethered(self) -> bool:
        """Whether a process of a stage has read what its parent sent."""
        return any(self.runtime_directory.rglob("*.process"))

    def sockets(self) -> list[Path]:
        return [path for path in self.runtime_directory.rglob("*") if path.is_socket()]

    def kill_parent(self) -> None:
        self.note_shared_memory()
        self.process.kill()
        self.process.wait()

    def interrupt(self) -> None:
        """Ctrl-C: the whole foreground group gets it."""
        self.note_shared_memory()
        os.killpg(self.process.pid, signal.SIGINT)

    def resume(self) -> None:
        """Give the line of input that the program waits for."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def wait_for_exit(self, timeout_s: float = END_TIMEOUT_S) -> int:
        wait_for("the program's end", lambda: self.process.poll() is not None, timeout_s)
        return self.process.returncode

    def expect_nothing_left(self, timeout_s: float = END_TIMEOUT_S) -> None:
        """Multiprocessing's resource tracker, which removes shared memory, is among the processes."""
        wait_for("all processes gone", lambda: not self.processes(), timeout_s)
        assert self.leftovers() == []

    def expect_only_the_parent_left(self) -> None:
        """After ``close``, while the user's program continues."""

        def only_parent() -> bool:
            return all(is_parent_or_helper(process, self.process.pid) for process in self.processes())

        wait_for("all stages gone", only_parent, END_TIMEOUT_S)
        # A process that was killed leaves its semaphores to the tracker; "pymp-" holds the fork server's socket.
        assert [path for path in self.leftovers() if "/sem." not in path and "/pymp-" not in path] == []


def is_spawned(process: psutil.Process, parent_pid: int) -> bool:
    """Whether this parent's multiprocessing made it, also by a fork server. What has ended is not."""
    try:
        line = " ".join(process.cmdline())
        if process.ppid() != parent_pid:  # a fork server's imports run commands as well
            return "VLLM::" in line and is_fork_server(psutil.Process(process.ppid()), parent_pid)
    except psutil.Error:
        return False
    return "spawn_main" in line or "EngineCore" in line


def cpu_s(process: psutil.Process) -> float:
    try:
        return sum(process.cpu_times()[:2])
    except psutil.NoSuchProcess:
        return 0.0


def is_fork_server(process: psutil.Process, parent_pid: int) -> bool:
    line = " ".join(process.cmdline())
    return process.ppid() == parent_pid and ("multiprocessing.forkserver" in line or "ForkServer" in line)


def is_unnamed(process: psutil.Process) -> bool:
    """vLLM has not renamed it yet."""
    try:
        line = " ".join(process.cmdline())
        return "spawn_main" in line or "ForkServer" in line
    except psutil.NoSuchProcess:
        return True


def is_parent_or_helper(process: psutil.Process, parent_pid: int) -> bool:
    """The tracker and the fork server belong to Python's multiprocessing, serve the whole program, and end with it."""
    try:
        if process.pid == parent_pid or "resource_tracker" in " ".join(process.cmdline()):
            return True
        return is_fork_server(process, parent_pid)
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def run(tiny_checkpoint: Path) -> Iterator[Callable[..., Program]]:
    """Starts a program; at the end of the test, ends what a failed test has left."""
    directory = Path(tempfile.mkdtemp(prefix="omni-", dir="/tmp"))  # the path of a socket must be short
    programs: list[Program] = []

    def start(
        scenario: str,
        *overrides: str,
        model: Path = tiny_checkpoint,
        log: str = "WARNING",
        starts: Starts = zygote.Popen,
    ) -> Program:
        programs.append(Program(directory, model, scenario, overrides, log, starts))
        return programs[-1]

    yield start
    for program in programs:
        for process in program.processes():
            process.kill()
        program.process.wait()
        assert program.process.stdin is not None
        program.process.stdin.close()
        print(program.log()[-6000:])
    shutil.rmtree(directory)


Run = Callable[..., Program]


SPAWNED_TOO = (
    "test_close_ends_everything_and_is_quiet",
    "test_parent_killed_while_its_child_imports",
    "test_ctrl_c_while_stages_load",
)
"""Tests that also run with a spawned stage, as on a GPU; in the others, the way of the start makes no difference."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "how_stages_start" in metafunc.fixturenames:
        modes = ["forked", "spawned"] if metafunc.function.__name__ in SPAWNED_TOO else ["forked"]
        metafunc.parametrize("how_stages_start", modes, indirect=True)


@pytest.fixture
def how_stages_start(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("VLLM_OMNI_FORK_SERVER", str(int(request.param == "forked")))
    return str(request.param)


@pytest.fixture
def model_and_stages(how_stages_start: str, tiny_checkpoint: Path, one_stage: Path) -> tuple[Path, tuple[str, ...]]:
    """One with a stage where stages are spawned, each of which imports vLLM."""
    return (tiny_checkpoint, STAGES) if how_stages_start == "forked" else (one_stage, ("diffusion",))


@pytest.fixture(scope="module")
def one_stage(tiny_pipeline: Callable[[str], Path]) -> Path:
    """A checkpoint whose program has one child."""
    return tiny_pipeline("qwen-image")


@pytest.mark.long
def test_close_ends_everything_and_is_quiet(run: Run, model_and_stages: tuple[Path, tuple[str, ...]]) -> None:
    """The program leaves its ``with`` by an exception of its own, catches it, and continues."""
    model, stages = model_and_stages
    program = run("close", model=model, log="INFO")
    program.wait_for_event("closed after the user's own ArithmeticError")
    program.expect_only_the_parent_left()
    program.resume()
    assert program.wait_for_exit() == 0
    program.expect_nothing_left()
    log = program.log()
    for stage in stages:
        assert re.search(rf"INFO .*stage {stage}: starting\n", log)
        assert re.search(rf"INFO .*stage {stage}: ready after \d+\.\d s\n", log)
    assert_quiet(log)


@pytest.mark.long
def test_exit_without_close_ends_everything_and_is_quiet(run: Run, one_stage: Path) -> None:
    program = run("leave", model=one_stage)
    program.wait_for_event("leaving")
    assert program.wait_for_exit() == 0
    program.expect_nothing_left()
    assert_quiet(program.log())


def assert_quiet(log: str) -> None:
    for noise in ("Traceback", "ERROR", "Exception ignored", "Task was destroyed", "leaked", "unexpectedly"):
        assert noise not in log


@pytest.mark.long
@pytest.mark.usefixtures("how_stages_start")
def test_parent_killed_while_its_child_imports(run: Run, one_stage: Path) -> None:
    program = run("generate", model=one_stage, starts=subprocess.Popen)
    program.wait_for_event("starting")

    def is_importing() -> bool:
        """Whether the child has its arguments. One whose parent dies before sending them ends, without knowing the
        run directory, which then stays until ``vllm-omni doctor --clean``.
        """
        children = program.engine_cores()
        return len(children) == 1 and (program.is_tethered() or cpu_s(children[0]) > 0.5)

    wait_for("child", is_importing, START_TIMEOUT_S)
    program.kill_parent()
    program.expect_nothing_left(IMPORT_TIMEOUT_S)


@pytest.mark.long
def test_parent_of_two_workers_killed_while_requests_run(run: Run, llava_checkpoint: Path) -> None:
    program = run("generate", "language.tensor_parallel_size=2", model=llava_checkpoint)
    program.wait_for_event("generating")
    shared_memory = program.note_shared_memory()
    assert any("/vllm-omni-" in path for path in shared_memory), "an engine core speaks to its workers through it"
    program.kill_parent()
    program.expect_nothing_left()


@pytest.mark.long
def test_ctrl_c_while_stages_load(run: Run, model_and_stages: tuple[Path, tuple[str, ...]]) -> None:
    model, stages = model_and_stages
    program = run("generate", model=model)
    program.wait_for_event("starting")

    def are_loading() -> bool:
        """vLLM renames a process once it has all its arguments."""
        engine_cores = program.engine_cores()
        return len(engine_cores) == len(stages) and not any(map(is_unnamed, engine_cores))

    wait_for("loading", are_loading, START_TIMEOUT_S)
    program.interrupt()
    assert program.wait_for_exit() != 0
    program.expect_nothing_left()
    assert program.log().count("\nKeyboardInterrupt") == 1  # the program's own


@pytest.mark.long
def test_ctrl_c_while_requests_run(run: Run) -> None:
    program = run("generate")
    program.wait_for_event("generating")
    program.interrupt()
    assert program.wait_for_exit() != 0
    program.expect_nothing_left()
    assert program.log().count("\nKeyboardInterrupt") == 1  # the program's own


@pytest.mark.long
def test_close_ends_a_stage_that_is_stuck(run: Run, llava_checkpoint: Path) -> None:
    program = run("close a stuck stage", "language.tensor_parallel_size=2", model=llava_checkpoint)
    program.wait_for_event("stuck")
    program.wait_for_event("closed", END_TIMEOUT_S)
    program.expect_only_the_parent_left()
    assert [path for path in program.leftovers() if "/pymp-" not in path] == []
    program.resume()
    assert program.wait_for_exit() == 0
    assert "leaked" not in program.log()


@pytest.mark.long
def test_whole_group_terminated(run: Run, one_stage: Path) -> None:
    """As service managers and containers do: one signal for the server and its stages, which has no handler here."""
    program = run("generate", model=one_stage)
    program.wait_for_event("generating")
    program.note_shared_memory()
    os.killpg(program.process.pid, signal.SIGTERM)
    assert program.wait_for_exit() == -signal.SIGTERM
    program.expect_nothing_left()


@pytest.mark.long
def test_stage_that_cannot_start_is_named_with_its_cause(
    run: Run, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE")  # the thinker waits for the talker's measurement
    broken = shutil.copytree(tiny_checkpoint, tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    tensors["talker.codec_head.weight"] = tensors["talker.codec_head.weight"][:, :3].contiguous()
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    program = run("generate", model=broken)
    (message,) = program.wait_for_event("talker failed: (.*)").groups()
    assert re.match(r"stage 'talker': did not start: \w+Error: .*\b3\b", message), message
    program.expect_only_the_parent_left()
    program.resume()
    assert program.wait_for_exit() == 0
    program.expect_nothing_left()


@pytest.mark.long
def test_stages_that_do_not_fit_are_named_with_their_needs(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE")
    program = run("generate", "talker.gpu_memory_utilization=0.000001")
    (message,) = program.wait_for_event("(?:thinker|talker) failed: (.*)").groups()
    assert re.match(
        r"stage '\w+': did not start: DoesNotFit: device cpu: .* are missing for its stages: talker: weights .*, "
        r"cache .* at least, -.* by its configuration; thinker: weights .*, cache .* at least; token2wav: weights .*: "
        r"give talker .* more \(gpu_memory_utilization, kv_cache_memory_bytes\)",
        message,
    ), message
    program.expect_only_the_parent_left()
    program.resume()
    assert program.wait_for_exit() == 0
    program.expect_nothing_left()


@pytest.mark.long
def test_stage_that_is_killed_while_it_starts_hints_at_memory(run: Run, one_stage: Path) -> None:
    program = run("generate", model=one_stage)
    program.wait_for_event("starting")
    wait_for("child", lambda: len(program.engine_cores()) == 1, START_TIMEOUT_S)
    program.engine_cores()[0].kill()
    program.wait_for_event(r"diffusion failed: stage 'diffusion': did not start: .*killed .*by the system if memory.+")
    program.expect_only_the_parent_left()
    program.resume()
    assert program.wait_for_exit() == 0


@pytest.mark.long
@pytest.mark.usefixtures("how_stages_start")
def test_worker_killed_fails_requests_at_once_and_its_stage_comes_back(run: Run, llava_checkpoint: Path) -> None:
    """One of two workers is killed; nothing of its engine stays while the server runs. (A core: test_stage_death.)

    Before, the server is without a free file descriptor for a moment.
    """
    program = run("lose a stage", "language.tensor_parallel_size=2", model=llava_checkpoint)
    (pid,) = program.wait_for_event(r"language has pid (\d+), life 1").groups()
    program.wait_for_event("generating")
    engine_core = psutil.Process(int(pid))
    processes = [engine_core, *(one for one in program.processes() if "::Worker_TP" in " ".join(one.cmdline()))]
    shared_memory = mapped_shared_memory(processes)
    assert len(processes) == 3
    assert any("/vllm-omni-" in path for path in shared_memory)
    num_sockets = len(program.sockets())
    with few_file_descriptors(program.process.pid):
        wait_for("supervisor", lambda: "language: cannot be watched: [Errno 24]" in program.log(), END_TIMEOUT_S)
    assert all(process.is_running() for process in processes), "the state of a process was unknown, not dead"
    processes[1].kill()
    died = "stage 'language': (restarting: )?its engine has died: .+"
    program.wait_for_event(f"request failed: {died}", END_TIMEOUT_S)
    program.wait_for_event("unhealthy: stage 'language': restarting: its engine .+", END_TIMEOUT_S)
    program.wait_for_event(r"language has pid \d+, life 2")
    assert not any(process.is_running() for process in processes)
    assert not [path for path in shared_memory if os.path.exists(path)]
    assert len(program.sockets()) <= num_sockets
    program.wait_for_event("closed", END_TIMEOUT_S)
    program.expect_only_the_parent_left()
    program.resume()
    assert program.wait_for_exit() == 0
    program.expect_nothing_left()
    assert "leaked" not in program.log()


def mapped_shared_memory(processes: Sequence[psutil.Process]) -> set[str]:
    return {
        path for one in processes for path in re.findall(r"/dev/shm/\S+", Path(f"/proc/{one.pid}/maps").read_text())
    }
