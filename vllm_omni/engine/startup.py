"""``start_engines``: start a server's engines and functions in processes, supervise and end them together."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from functools import partial

from msgspec import to_builtins
from msgspec.structs import replace

from vllm_omni import envs
from vllm_omni.engine.engine_args import shares_blocks
from vllm_omni.engine.function_process import FunctionProcess
from vllm_omni.engine.metrics import METRICS
from vllm_omni.engine.stage import StageEngine
from vllm_omni.errors import StageFailed
from vllm_omni.hosts.listener import HostListener
from vllm_omni.hosts.remote_engine import RemoteEngine
from vllm_omni.model_executor.step_threads import NUM_STAGES
from vllm_omni.process.memory import name_rank
from vllm_omni.process.memory_division import MEMORY, MemoryDivision, MemorySection
from vllm_omni.process.run_directory import RunDirectory
from vllm_omni.process.supervisor import Supervisor, in_thread, run_within_deadline
from vllm_omni.process.tether import ServerTether
from vllm_omni.relay.hub import OPTIONS, RelayHub, RelayOptions

logger = logging.getLogger(__name__)

# How long a failed start waits for the processes that it ended; they need no more than a moment.
START_ABORTED_TIMEOUT_S = 10.0


class RunningEngines:
    """A server's engines and processes of functions, with their supervisors once all have started.

    Attributes:
        run_directory: of all processes.
        server_id: distinguishes the servers of one process.
    """

    def __init__(
        self,
        engines: Iterable[StageEngine],
        functions: Iterable[FunctionProcess],
        run_directory: RunDirectory,
        hub: RelayHub,
    ) -> None:
        self._engines: list[StageEngine | FunctionProcess] = [*engines, *functions]
        self.run_directory = run_directory
        self.listener: HostListener | None = None  # where the hosts of some engines join
        self._hub = hub
        self._supervisors: dict[str, Supervisor] = {}
        self._ending = threading.Event()
        self._num_added = 0
        self.server_id = str(run_directory.path)  # distinguishes the servers of one process

    def supervise(self) -> None:
        self._supervisors = {engine.name: Supervisor(engine, self.run_directory) for engine in self._engines}

    def hosts(self) -> dict[str, str | None]:
        """The other hosts of the deployment -> the address of one that has joined."""
        remotes = [] if self.listener is None else self.listener.engines.values()
        return {one.host: one.address for one in remotes}

    def remote(self, name: str) -> RemoteEngine | None:
        """An engine on another host, which runs or may be added; None: it is on this one."""
        return None if self.listener is None else self.listener.engines.get(name)

    def add(self, engine: StageEngine, options: RelayOptions, memory: MemorySection | None) -> None:
        """Start one more engine, and supervise it. Blocks until it is ready; one call at a time.

        Args:
            memory: if it measures: it gets of its devices what is free now.

        Raises:
            StageFailed: it did not start, or not within ``VLLM_OMNI_STAGE_READY_TIMEOUT_S``; nothing of it stays.
        """
        self._num_added += 1
        if memory is not None:
            memory = replace(memory, division=f"added-{self._num_added}")
        engine.remote = self.remote(engine.name)
        tether = _make_tether(self.run_directory, engine.name, len(self._engines) + 1, options, memory)
        deadline = time.monotonic() + envs.VLLM_OMNI_STAGE_READY_TIMEOUT_S
        start = partial(engine.start, tether, self._hub)
        try:
            run_within_deadline(start, engine, self.run_directory, deadline, self._ending)
        except BaseException:
            engine.remove()
            raise
        self._engines.append(engine)
        self._supervisors[engine.name] = Supervisor(engine, self.run_directory)
        if self._ending.is_set():  # ``shutdown`` may have missed it
            self.remove(engine)
            raise StageFailed(engine.name, "the server is shut down")

    def remove(self, engine: StageEngine) -> None:
        """End an engine that no request uses, and remove what it left. Blocks."""
        supervisor = self._supervisors.pop(engine.name)
        supervisor.stop()  # before the engine, whose end would look like a failure
        supervisor.join()
        self._engines.remove(engine)
        engine.remove()
        METRICS.remove_stage(self.server_id, engine.name)

    def shutdown(self) -> None:
        """End the engines and remove the run directory; does nothing in a child that the user's program forked."""
        if os.getpid() != self.run_directory.server_pid:
            return
        self._ending.set()
        self.run_directory.announce_end()
        supervisors = list(self._supervisors.values())
        for supervisor in supervisors:  # before the engines, whose end would look like a failure
            supervisor.stop()
        for supervisor in supervisors:
            supervisor.join()
        if self.listener is not None:  # stages that wait for their hosts do so no longer
            self.listener.close()
        try:
            with ThreadPoolExecutor(thread_name_prefix="stage-shutdown") as pool:
                pool.map(_shutdown_engine, self._engines)
        except RuntimeError:  # at the interpreter's exit, no thread can be started
            for engine in self._engines:
                _shutdown_engine(engine)
        self.run_directory.kill_starting()
        self.run_directory.remove()
        METRICS.remove_server(self.server_id)


def start_engines(
    engines: Mapping[str, StageEngine],
    options: Mapping[str, RelayOptions],
    hub: RelayHub,
    memory: Mapping[str, MemorySection],
    functions: Sequence[FunctionProcess] = (),
    listen: Callable[[], HostListener | None] = lambda: None,
) -> RunningEngines:
    """Start the processes of functions, and then all engines at once; on any failure, including Ctrl-C, end those that
    started.

    Args:
        options: how each engine publishes.
        hub: the front end's.
        memory: of those that divide the memory of their devices.
        functions: first, because they start within seconds or fail for good.
        listen: makes the listener for the hosts of some engines.

    Raises:
        StageFailed: an engine or process did not start, or not within ``VLLM_OMNI_STAGE_READY_TIMEOUT_S``.
    """
    prepare_environment()
    run_directory = RunDirectory()
    running = RunningEngines(engines.values(), functions, run_directory, hub)
    starts: dict[str, Future[None]] = {}
    with run_directory.inherited():
        try:
            running.listener = listen()
            num_here = sum(engine.remote is None for engine in engines.values())
            if any(engine.remote is None and shares_blocks(engine.vllm_config) for engine in engines.values()):
                run_directory.hold_blocks()
            for function in functions:
                tether = ServerTether(run_directory.path, function.name, is_of_engine=False)
                starts[function.name] = in_thread(function.start, tether)
            _await_starts(starts, lambda name: False)
            for name, engine in engines.items():
                tether = _make_tether(run_directory, name, num_here, options[name], memory.get(name))
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


def _make_tether(
    run_directory: RunDirectory, name: str, num_engines: int, options: RelayOptions, memory: MemorySection | None
) -> ServerTether:
    tether = ServerTether(run_directory.path, name)
    tether[NUM_STAGES] = num_engines
    tether[OPTIONS] = to_builtins(options)
    if memory is not None:
        tether[MEMORY] = to_builtins(memory)
    return tether


def prepare_environment() -> None:
    """Set what the processes of stages inherit."""
    # Stages share the cores (model_executor/step_threads.py): a waiting thread must not keep one busy.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # vLLM forks by default where the platform is not a CPU; a forked process does not read its tether.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"


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
