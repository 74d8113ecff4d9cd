"""A stage's processes, as the server finds and ends them; with real processes, without engines."""

import multiprocessing
import resource
import signal
import socket
from collections.abc import Callable

import pytest

from tests.process.programs import TIMEOUT_S, fail, share, start_stage, survive, survive_in_vllm, wait_for
from vllm_omni.process.proc import SHM, is_dying
from vllm_omni.process.run_directory import RunDirectory
from vllm_omni.process.stage_processes import NO_REPORT, StageProcesses, ended_early, killed_by
from vllm_omni.process.tether import ServerTether


def test_the_rest_of_a_stage_is_ended_and_removed_and_other_stages_continue(directory: RunDirectory) -> None:
    tether, other_tether = ServerTether(directory.path, "talker"), ServerTether(directory.path, "thinker")
    processes, others = StageProcesses(tether), StageProcesses(other_tether)
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=share, args=(tether, there), daemon=True)
    process.start()
    other = start_stage(other_tether)
    blocks = [SHM / name for name in here.recv()]
    wait_for(lambda: any(directory.path.glob("thinker.*.process")))
    processes.note()
    assert not processes.has_lost_one()
    process.kill()  # its shared memory cannot be found afterwards
    process.join()
    assert processes.has_lost_one()
    assert all(block.exists() for block in blocks)
    (directory.path / "talker.failure").write_text("the cause")
    processes.end()
    assert not any(block.exists() for block in blocks)
    assert processes.failure() is None
    assert not list(directory.path.glob("talker.*"))
    assert other.is_alive()
    others.end()
    other.join(TIMEOUT_S)
    assert other.exitcode == -signal.SIGKILL


def test_without_a_file_descriptor_no_process_is_taken_for_dead(directory: RunDirectory) -> None:
    tether = ServerTether(directory.path, "talker")
    processes, process = StageProcesses(tether), start_stage(tether)
    wait_for(lambda: bool(processes.pids()))
    processes.note()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for look in (processes.has_lost_one, processes.pids, processes.kill, lambda: is_dying(process.pid or 0)):
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        try:
            with pytest.raises(OSError, match="Too many open files"):
                look()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not processes.has_lost_one()
    processes.end()
    process.join(TIMEOUT_S)


def test_a_socket_that_no_process_holds_is_removed(directory: RunDirectory) -> None:
    with socket.socket(socket.AF_UNIX) as dead, socket.socket(socket.AF_UNIX) as alive:
        dead.bind(str(directory.path / "dead"))
        alive.bind(str(directory.path / "alive"))
        dead.close()
        StageProcesses(ServerTether(directory.path, "talker")).remove_dead_sockets()
        assert not (directory.path / "dead").exists()
        assert (directory.path / "alive").exists()


def survives(directory: RunDirectory, program: Callable[[ServerTether], None], timeout_s: float) -> bool:
    """Whether a process of a stage ends well and has reported no failure."""
    tether = ServerTether(directory.path, "talker")
    process = multiprocessing.get_context("spawn").Process(target=program, args=(tether,))
    process.start()
    process.join(timeout_s)
    return process.exitcode == 0 and StageProcesses(tether).failure() is None


def test_a_call_that_an_engine_answers_with_a_failure_is_no_termination_reason(directory: RunDirectory) -> None:
    assert survives(directory, survive, TIMEOUT_S)


@pytest.mark.long  # it imports vLLM
def test_vllm_answers_calls_in_the_functions_that_survive(directory: RunDirectory) -> None:
    assert survives(directory, survive_in_vllm, 6 * TIMEOUT_S)


def test_first_reason_of_a_failure_is_reported_per_stage(directory: RunDirectory) -> None:
    tether = ServerTether(directory.path, "talker")
    processes = StageProcesses(tether)
    assert processes.failure() is None
    process = multiprocessing.get_context("spawn").Process(target=fail, args=(tether,))
    process.start()
    process.join(TIMEOUT_S)
    assert process.exitcode == 1
    assert processes.failure() == "ValueError: the cause"
    assert StageProcesses(ServerTether(directory.path, "thinker")).failure() is None


def test_a_signal_that_the_system_sends_without_memory_is_described() -> None:
    assert killed_by([0, 1, -signal.SIGKILL]) == "killed by SIGKILL (by the system if memory ran out: see dmesg)"
    assert killed_by([-signal.SIGSEGV]) == "killed by SIGSEGV"
    assert killed_by([1]) is None
    for codes, reason in [
        ("{'EngineCore_DP0': -9}", "killed by SIGKILL (by the system if memory ran out: see dmesg)"),
        ("{}", "its process ended without a report (killed by the system if memory ran out: see dmesg)"),
        ("{'EngineCore_DP0': 1}", None),
    ]:
        failed = RuntimeError(f"Engine core initialization failed. See root cause above. Failed core proc(s): {codes}")
        assert ended_early(failed) == reason
    assert ended_early(ValueError("no such model")) is None
    for error in (EOFError("unexpected EOF"), BrokenPipeError(32, "Broken pipe")):  # before it had read what to do
        assert ended_early(error) == NO_REPORT
