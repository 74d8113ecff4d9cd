"""When a stage is restarted. Restarts of real engines: tests/e2e/test_lifecycle.py."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest

from tests.process.programs import LIFE_S, TIMEOUT_S, wait_for
from tests.processes import few_file_descriptors
from vllm_omni.errors import StageFailed
from vllm_omni.process import supervisor
from vllm_omni.process.run_directory import RunDirectory
from vllm_omni.process.status import StageState, StageStatus
from vllm_omni.process.supervisor import (
    FIRST_DELAY_S,
    MAX_DELAY_S,
    NUM_DESCRIPTORS,
    RestartBudget,
    Supervisor,
    in_thread,
)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_delays_double_up_to_a_limit() -> None:
    budget = RestartBudget(8, window_s=1000.0, clock=Clock())
    delays = [budget.next_delay_s() for _ in range(9)]
    assert delays[:4] == [FIRST_DELAY_S, 2 * FIRST_DELAY_S, 4 * FIRST_DELAY_S, 8 * FIRST_DELAY_S]
    assert delays[7] == MAX_DELAY_S
    assert delays[8] is None


def test_an_attempt_does_not_count_after_the_window() -> None:
    clock = Clock()
    budget = RestartBudget(2, window_s=10.0, clock=clock)
    assert budget.next_delay_s() == FIRST_DELAY_S
    clock.now = 9.0
    assert budget.next_delay_s() == 2 * FIRST_DELAY_S
    assert budget.next_delay_s() is None
    clock.now = 10.0
    assert budget.next_delay_s() == 2 * FIRST_DELAY_S
    clock.now = 30.0
    assert budget.next_delay_s() == FIRST_DELAY_S


def test_a_budget_of_zero_allows_no_restart() -> None:
    assert RestartBudget(0, window_s=10.0, clock=Clock()).next_delay_s() is None


class Engine:
    """An engine that a supervisor watches; ``outcomes``: what each restart does."""

    name = "talker"
    was_ended = False

    def __init__(self, outcomes: list[Callable[[], None]]) -> None:
        self.has_died = False
        self.lost_process = threading.Event()
        self.has_host = threading.Event()
        self.has_host.set()
        self.statuses: list[StageStatus] = []
        self.settled = threading.Event()  # it runs again, or has failed for good
        self._outcomes = iter(outcomes)

    def has_lost_process(self) -> bool:
        return self.lost_process.is_set()

    def termination_reason(self) -> str:
        return "its engine has died"

    def current_status(self) -> StageStatus:
        return self.statuses[-1] if self.statuses else StageStatus()

    def set_status(self, status: StageStatus) -> None:
        self.statuses.append(status)
        if status.state is not StageState.RESTARTING:
            self.settled.set()

    def kill(self) -> None:
        self.lost_process.clear()
        self.has_died = True

    def can_start(self) -> bool:
        return self.has_host.is_set()

    def restart(self) -> None:
        next(self._outcomes)()
        self.has_died = False


def succeed() -> None:
    pass


def fail() -> None:
    raise StageFailed("talker", "did not start: no memory")


def fail_unexpectedly() -> None:
    raise ZeroDivisionError


def supervise(
    engine: Engine, directory: RunDirectory, is_ready: Callable[[], bool] = lambda: True
) -> list[StageStatus]:
    """Statuses until the engine runs again or has failed, after it has lost a worker once ``is_ready``."""
    watcher = Supervisor(engine, directory)
    wait_for(is_ready)
    engine.settled.clear()
    engine.lost_process.set()
    assert engine.settled.wait(TIMEOUT_S)
    watcher.stop()
    watcher.join()
    return engine.statuses


@pytest.fixture
def no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "MAX_DELAY_S", 0.0)
    monkeypatch.setattr(supervisor, "POLL_S", 0.001)


@pytest.mark.usefixtures("no_delay")
def test_an_engine_that_lost_a_worker_is_killed_and_restarted_until_it_runs(directory: RunDirectory) -> None:
    assert supervise(Engine([fail, fail_unexpectedly, succeed]), directory) == [
        StageStatus(StageState.RESTARTING, "its engine has died", 1),
        StageStatus(StageState.RESTARTING, "did not start: no memory", 2),
        StageStatus(StageState.RESTARTING, "did not start: ZeroDivisionError()", 3),
        StageStatus(StageState.RUNNING, None, 3),
    ]


@pytest.mark.usefixtures("no_delay")
def test_an_engine_that_cannot_restart_has_failed(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_OMNI_STAGE_RESTARTS", "1")
    reason = "did not start: no memory; given up after 1 restarts (VLLM_OMNI_STAGE_RESTARTS)"
    assert supervise(Engine([fail]), directory)[-1] == StageStatus(StageState.FAILED, reason, 1)


@pytest.mark.usefixtures("no_delay")
def test_an_engine_without_a_host_is_restarted_when_it_has_one(directory: RunDirectory) -> None:
    engine = Engine([succeed])
    engine.has_host.clear()
    looked = threading.Event()

    def can_start() -> bool:
        looked.set()
        return engine.has_host.is_set()

    engine.can_start = can_start  # type: ignore[method-assign]
    watcher = Supervisor(engine, directory)
    engine.lost_process.set()
    assert looked.wait(TIMEOUT_S)
    assert [status.state for status in engine.statuses] == [StageState.RESTARTING]
    engine.has_host.set()
    assert engine.settled.wait(TIMEOUT_S)
    assert engine.statuses[-1] == StageStatus(StageState.RUNNING, None, 1)
    watcher.stop()
    watcher.join()


@pytest.mark.usefixtures("no_delay")
def test_a_supervisor_that_is_stopped_waits_for_no_host(directory: RunDirectory) -> None:
    engine = Engine([])
    engine.has_host.clear()
    looked = threading.Event()
    engine.can_start = looked.set  # type: ignore[method-assign,assignment]
    watcher = Supervisor(engine, directory)
    engine.lost_process.set()
    assert looked.wait(TIMEOUT_S)
    watcher.stop()
    watcher.join()
    assert [status.state for status in engine.statuses] == [StageState.RESTARTING]


@pytest.mark.usefixtures("no_delay")
def test_a_supervisor_that_is_stopped_kills_an_attempt(directory: RunDirectory) -> None:
    started, released = threading.Event(), threading.Event()

    def hang() -> None:
        started.set()
        released.wait(TIMEOUT_S)
        fail()

    engine = Engine([hang])
    watcher = Supervisor(engine, directory)
    engine.lost_process.set()
    assert started.wait(TIMEOUT_S)
    engine.kill = released.set  # type: ignore[method-assign]
    watcher.stop()
    watcher.join()
    assert released.is_set()
    assert [status.state for status in engine.statuses] == [StageState.RESTARTING]


@pytest.mark.usefixtures("no_delay")
def test_a_supervisor_that_is_stopped_kills_a_process_that_is_not_tethered_yet(directory: RunDirectory) -> None:
    """vLLM's engine core imports for seconds before it reads its tether. Another server's children are left alone."""
    start = partial(
        multiprocessing.get_context("spawn").Process, target=time.sleep, args=(LIFE_S,), name="EngineCore", daemon=True
    )
    another, children, started = start(), [], threading.Event()
    another.start()

    def restart() -> None:
        children.append(child := start())
        child.start()
        started.set()
        child.join()
        fail()

    engine = Engine([restart])
    watcher = Supervisor(engine, directory)
    engine.lost_process.set()
    assert started.wait(TIMEOUT_S)
    watcher.stop()
    watcher.join()
    assert children[0].exitcode == -signal.SIGKILL
    assert another.is_alive()
    another.kill()


@pytest.mark.usefixtures("no_delay")
def test_a_restart_waits_until_enough_file_descriptors_are_free(
    directory: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine([succeed])
    with few_file_descriptors(os.getpid(), NUM_DESCRIPTORS // 2):
        watcher = Supervisor(engine, directory)
        engine.lost_process.set()
        wait_for(lambda: f"file descriptors are free, {NUM_DESCRIPTORS} are needed" in caplog.text)
    assert engine.settled.wait(TIMEOUT_S)
    watcher.stop()
    watcher.join()
    assert [(status.state, status.num_restarts) for status in engine.statuses] == [
        (StageState.RESTARTING, 1),
        (StageState.RUNNING, 1),
    ]
    assert caplog.text.count("the restart waits") == 1


@pytest.mark.usefixtures("no_delay")
def test_a_supervisor_survives_errors_and_reports_them_meanwhile(directory: RunDirectory) -> None:
    engine = Engine([succeed])
    errors = iter([OSError(24, "Too many open files")] * 3)

    def look() -> bool:
        for error in errors:
            raise error
        return engine.lost_process.is_set()

    engine.has_lost_process = look  # type: ignore[method-assign]
    unknown = StageStatus(StageState.RUNNING, "cannot be watched: [Errno 24] Too many open files", 0)
    died = StageStatus(StageState.RESTARTING, "its engine has died", 1)
    statuses = supervise(engine, directory, lambda: len(engine.statuses) == 2)
    assert statuses == [unknown, StageStatus(), died, StageStatus(StageState.RUNNING, None, 1)]


@pytest.mark.usefixtures("no_delay")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_end_of_a_supervisor_is_reported(directory: RunDirectory) -> None:
    engine = Engine([])

    def end() -> bool:
        raise SystemExit

    engine.has_lost_process = end  # type: ignore[method-assign]
    supervisor = Supervisor(engine, directory)
    assert engine.settled.wait(TIMEOUT_S)
    supervisor.join()  # its exception is reported to this test, not to the next one
    assert engine.statuses == [StageStatus(StageState.FAILED, "its supervisor ended", 0)]


def test_processes_of_an_engine_do_not_see_the_servers_signals() -> None:
    signals = {signal.SIGINT, signal.SIGTERM}

    def start() -> None:
        program = f"import signal; assert {set(map(int, signals))} <= signal.pthread_sigmask(signal.SIG_BLOCK, [])"
        subprocess.run([sys.executable, "-c", program], check=True)

    in_thread(start).result(TIMEOUT_S)
    assert not signals & signal.pthread_sigmask(signal.SIG_BLOCK, [])
