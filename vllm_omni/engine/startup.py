"""``start_engines``: start a server's engines and functions in processes, supervise and end them together."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait

from msgspec import to_builtins

from vllm_omni import envs
from vllm_omni.engine.function_process import FunctionProcess
from vllm_omni.engine.metrics import METRICS
from vllm_omni.engine.stage import StageEngine
from vllm_omni.errors import StageFailed
from vllm_omni.model_executor.step_threads import NUM_STAGES
from vllm_omni.process.memory import name_rank
from vllm_omni.process.memory_division import MEMORY, MemoryDivision, MemorySection
from vllm_omni.process.run_directory import RunDirectory
from vllm_omni.process.supervisor import Supervisor, in_thread
from vllm_omni.process.tether import ServerTether
from vllm_omni.relay.hub import OPTIONS, RelayHub, RelayOptions

logger = logging.getLogger(__name__)

# How long a failed start waits for the processes that it ended; they need no more than a moment.
START_ABORTED_TIMEOUT_S = 10.0


class RunningEngines:
    """A server's engines and processes of functions, with their supervisors once all have started, and their run
    directory.
    """

    def __init__(
        self, engines: Iterable[StageEngine], functions: Iterable[FunctionProcess], run_directory: RunDirectory
    ) -> None:
        self._engines: list[StageEngine | FunctionProcess] = [*engines, *functions]
        self._run_directory = run_directory
        self._supervisors: list[Supervisor] = []
        self.server_id = str(run_directory.path)  # distinguishes the servers of one process

    def supervise(self) -> None:
        self._supervisors = [Supervisor(engine, self._run_directory) for engine in self._engines]

    def shutdown(self) -> None:
        """End the engines and remove the run directory; does nothing in a child that the user's program forked."""
        if os.getpid() != self._run_directory.server_pid:
            return
        self._run_directory.announce_end()
        for supervisor in self._supervisors:  # before the engines, whose end would look like a failure
            supervisor.stop()
        for supervisor in self._supervisors:
            supervisor.join()
        try:
            with ThreadPoolExecutor(thread_name_prefix="stage-shutdown") as pool:
                pool.map(_shutdown_engine, self._engines)
        except RuntimeError:  # at the interpreter's exit, no thread can be started
            for engine in self._engines:
                _shutdown_engine(engine)
        self._run_directory.kill_starting()
        self._run_directory.remove()
        METRICS.remove_server(self.server_id)


def start_engines(
    engines: Mapping[str, StageEngine],
    options: Mapping[str, RelayOptions],
    hub: RelayHub,
    memory: Mapping[str, MemorySection],
    functions: Sequence[FunctionProcess] = (),
) -> RunningEngines:
    """Start the processes of functions, and then all engines at once; on any failure, including Ctrl-C, end those that
    started.

    Args:
        options: how each engine publishes.
        hub: the front end's.
        memory: of those that divide the memory of their devices.
        functions: first, because they start within seconds or fail for good.

    Raises:
        StageFailed: an engine or process did not start, or not within ``VLLM_OMNI_STAGE_READY_TIMEOUT_S``.
    """
    # Stages share the cores (model_executor/step_threads.py): a waiting thread must not keep one busy.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # vLLM forks by default where the platform is not a CPU; a forked process does not read its tether.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    run_directory = RunDirectory()
    running = RunningEngines(engines.values(), functions, run_directory)
    starts: dict[str, Future[None]] = {}
    with run_directory.inherited():
        try:
            for function in functions:
                tether = ServerTether(run_directory.path, function.name, is_of_engine=False)
                starts[function.name] = in_thread(function.start, tether)
            _await_starts(starts, lambda name: False)
            for name, engine in engines.items():
                tether = ServerTether(run_directory.path, name)
                tether[NUM_STAGES] = len(engines)
                tether[OPTIONS] = to_builtins(options[name])
                if name in memory:
                    tether[MEMORY] = to_builtins(memory[name])
                starts[name] = in_thread(engine.start, tether, hub)
            _await_starts(starts, lambda name: _has_measured(run_directory, name, memory))
            _log_memory(run_directory, memory)
            running.supervise()
        except BaseException:
            running.shutdown()
            # Processes that are still starting end with the directory; wait, so that they do not outlive this call. A
            # thread that has not created its sockets yet fails at that: elsewhere, nothing would remove them.
            wait(starts.values(), timeout=START_ABORTED_TIMEOUT_S)
            raise
    return running


def _await_starts(starts: Mapping[str, Future[None]], has_measured: Callable[[str], bool]) -> None:
    """Wait until all have started; raises the error of the first that fails.

    Args:
        has_measured: whether an engine is loaded, and may wait for another that is not.
    """
    timeout_s = envs.VLLM_OMNI_STAGE_READY_TIMEOUT_S
    done, pending = wait(starts.values(), timeout_s, FIRST_EXCEPTION)
    for future in done:
        future.result()
    late = sorted((name for name, future in starts.items() if future in pending), key=has_measured)
    if late:
        raise StageFailed(late[0], f"not ready after {timeout_s:g} s (VLLM_OMNI_STAGE_READY_TIMEOUT_S)")


def _has_measured(run_directory: RunDirectory, name: str, memory: Mapping[str, MemorySection]) -> bool:
    if name not in memory:
        return False
    devices, ranks = memory[name].devices, memory[name].ranks
    return all(
        MemoryDivision(run_directory.path, device, ranks[device]).has_measured(name_rank(name, rank, len(devices)))
        for rank, device in enumerate(devices)
    )


def _log_memory(run_directory: RunDirectory, memory: Mapping[str, MemorySection]) -> None:
    for device, ranks in {device: ranks for one in memory.values() for device, ranks in one.ranks.items()}.items():
        if (plan := MemoryDivision(run_directory.path, device, ranks).plan()) is not None:
            logger.info("memory of %s: %s", device, plan.summary())


def _shutdown_engine(engine: StageEngine | FunctionProcess) -> None:
    try:
        engine.shutdown()
    except Exception:  # the other stages and the directory still have to be removed
        logger.exception("stage %s: shutdown failed", engine.name)
