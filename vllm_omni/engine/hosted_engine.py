"""``HostedEngine``: an engine that this host starts for a front end on another one."""

from __future__ import annotations

import copy
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec import structs, to_builtins
from vllm.config import VllmConfig
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequestType, UtilityOutput
from vllm.v1.engine.utils import CoreEngineProcManager, EngineZmqAddresses, launch_core_engines
from vllm.v1.executor.abstract import Executor
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from vllm_omni.engine.engine_args import shares_blocks
from vllm_omni.engine.host_controllers import HostControllers
from vllm_omni.engine.node_ranks import NodeRanks, set_node
from vllm_omni.engine.stage import StageEngine
from vllm_omni.hosts import messages as msg
from vllm_omni.hosts.connection import HostConnection
from vllm_omni.model_executor.step_threads import NUM_STAGES
from vllm_omni.process.memory_division import MEMORY, MemorySection
from vllm_omni.process.proc import resident_bytes
from vllm_omni.process.run_directory import RunDirectory
from vllm_omni.process.stage_processes import StageProcesses, ended_early, killed_by
from vllm_omni.process.supervisor import in_thread
from vllm_omni.process.tether import ServerTether
from vllm_omni.relay.hub import OPTIONS, RelayOptions

logger = logging.getLogger(__name__)

POLL_S = 0.1  # how late a termination is noticed
USAGE_S = 1.0
CONTINUE_TIMEOUT_S = 10.0  # for the step that an engine makes, before it answers
LAST_CALL = 5
END_TIMEOUT_S = 30.0  # for processes that are killed, and a start that notices it


class HostedEngine:
    """One engine, started when the front end says so; the processes are those that a server on one host starts.

    Its methods belong to the host's main thread.

    Args:
        engine: not started.
        num_here: engines on this host.
        memory: how it divides the memory of its devices with the others here.
        address: where its relays listen.
        secret_file: of the deployment, here.
        controllers: of this host, if that of the engine is among them; None: it is the front end's.
    """

    def __init__(
        self,
        engine: StageEngine,
        connection: HostConnection,
        run_directory: RunDirectory,
        *,
        num_here: int,
        memory: MemorySection | None,
        address: str,
        secret_file: str,
        controllers: HostControllers | None = None,
    ) -> None:
        self.name = engine.name
        self._engine, self._controllers = engine, controllers
        self._connection = connection
        self._run_directory = run_directory
        self._address, self._secret_file = address, secret_file
        tether = ServerTether(run_directory.path, engine.name)
        tether[NUM_STAGES] = num_here
        if memory is not None:
            tether[MEMORY] = to_builtins(memory)
        if shares_blocks(engine.vllm_config):
            run_directory.hold_blocks()
        engine.bind_config(tether)
        self._config = engine.vllm_config
        self._processes = StageProcesses(tether)
        self._number = 0  # of the start
        self._start: msg.Start | None = None
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, start: msg.Start) -> None:
        """Start it; one that still runs, started in the same way, continues without its requests. Returns soon."""
        if self._continues(start):
            return
        self.end()
        self._start, self._number, self._ending = start, start.number, threading.Event()
        started = threading.Event()
        # As a server starts its engines: the processes do not see Ctrl-C.
        in_thread(self._run, start, self._ending, started)
        started.wait()

    def _continues(self, start: msg.Start) -> bool:
        """Let the engine that runs serve another connection of the front end, if it can.

        Its requests are aborted; their answers, and those to calls of the earlier connection, are dropped before
        anything of this one is answered.
        """
        if self._thread is None or not self._thread.is_alive() or not self._is_as_started(start):
            return False
        if not self._aborts_requests():
            return False
        number, self._number, self._start = self._number, start.number, start
        self._connection.continue_as(number, start.number)
        logger.info("stage %s: continues for the front end", self.name)
        return True

    def _is_as_started(self, start: msg.Start) -> bool:
        """Whether a start asks for what runs; not if it has parts on other hosts, which start again."""
        before = self._start
        return (
            before is not None
            and start.node is None
            and (before.options, before.log_stats) == (start.options, start.log_stats)
        )

    def _aborts_requests(self) -> bool:
        """Whether the engine has aborted all requests, and neither failed nor sleeps."""
        answers: queue.Queue[UtilityOutput] = queue.Queue()
        decoder = MsgpackDecoder(EngineCoreOutputs)

        def take(frames: Sequence[Any]) -> None:
            if (answer := decoder.decode(frames).utility_output) is not None:
                answers.put(answer)

        if not self._connection.ask_engine(self._number, _calls(), take):
            return False
        deadline = time.monotonic() + CONTINUE_TIMEOUT_S
        missing = set(range(1, LAST_CALL + 1))  # the answer to the first comes last if a step is under way
        while missing and (left_s := deadline - time.monotonic()) > 0:
            try:
                answer = answers.get(timeout=left_s)
            except queue.Empty:
                break
            missing.discard(answer.call_id)
            if answer.call_id == LAST_CALL and (answer.result is None or answer.result.result):  # it failed, or sleeps
                return False
        return not missing

    def kill(self, number: int) -> None:
        """Kill the processes of a start, which then reports its end."""
        if number == self._number:
            self._start = None  # it serves no other connection
            self._processes.kill()

    def end(self, *, is_last: bool = False) -> None:
        """End it, and remove what it left; does nothing if it does not run.

        Args:
            is_last: the host ends: also kill processes that are just being started, whichever engine's they are.
        """
        thread = self._thread
        if thread is None:
            return
        self._ending.set()
        deadline = time.monotonic() + END_TIMEOUT_S
        while thread.is_alive() and time.monotonic() < deadline:
            self._processes.kill()
            if is_last:
                self._run_directory.kill_starting()
            thread.join(POLL_S)
        self._thread = None

    # -- in a thread for each start -----------------------------------------------------------------------------------

    def _run(self, start: msg.Start, ending: threading.Event, started: threading.Event) -> None:
        self._thread = threading.current_thread()
        started.set()
        logger.info("stage %s: starting", self.name)
        since = time.monotonic()
        manager: CoreEngineProcManager | NodeRanks | None = None
        try:
            manager = self._launch(start)
            self._processes.note()
            logger.info("stage %s: ready after %.1f s", self.name, time.monotonic() - since)
            reason = self._watch(manager, ending)
        except Exception as exc:
            logger.debug("stage %s did not start", self.name, exc_info=True)
            reason = self._processes.failure() or ended_early(exc) or str(exc) or repr(exc)
        self._clear(manager, reason)
        if not ending.is_set():
            logger.error("stage %s: ended: %s", self.name, reason)
            self._connection.send(msg.Ended(self._number, reason[: msg.MAX_TEXT]))

    def _launch(self, start: msg.Start) -> CoreEngineProcManager | NodeRanks:
        """Start the engine core as vLLM's client does, or the ranks without it, and wait until they are ready."""
        config = copy.deepcopy(self._config)  # a start writes what it measured into it
        options = structs.replace(
            msgspec.convert(start.options, RelayOptions), host=self._address, secret_file=self._secret_file
        )
        config.additional_config[OPTIONS] = to_builtins(options)
        if start.node is not None:
            set_node(config, start.node, self._address)
            if start.node.rank > 0:
                return self._launch_ranks(config)
        directory, controllers = self._run_directory.path, self._controllers
        bridge = self._connection.open_bridge(start.number, directory, is_held=controllers is not None)
        addresses = EngineZmqAddresses(**bridge)
        if controllers is not None:
            own = controllers.addresses(directory, start.number)
            addresses.inputs.append(own["input_address"])
            addresses.outputs.append(own["output_address"])
        manager: CoreEngineProcManager | None = None
        try:
            with (
                self._processes.starting(config.device_config.device_type),
                launch_core_engines(config, Executor.get_class(config), start.log_stats, addresses) as launch,
            ):
                assert isinstance(launch.engine_manager, CoreEngineProcManager), "one engine, without Ray"
                manager = launch.engine_manager
            if controllers is not None:
                controllers.attach(
                    self._engine, start.number, config, self._processes, directory, log_stats=start.log_stats
                )
                self._connection.release_bridge(start.number)
        except BaseException:
            if manager is not None:
                manager.shutdown(timeout=0)
            raise
        assert manager is not None, "launch_core_engines has set it"
        return manager

    def _launch_ranks(self, config: VllmConfig) -> NodeRanks:
        with self._processes.starting(config.device_config.device_type):
            ranks = NodeRanks(config)
            try:
                ranks.wait_until_loaded()
            except BaseException:
                ranks.shutdown(timeout=0)
                raise
        return ranks

    def _watch(self, manager: CoreEngineProcManager | NodeRanks, ending: threading.Event) -> str:
        """Wait until the engine has ended, or is to end; returns why."""
        report_at = 0.0
        while not ending.wait(POLL_S):
            codes = manager.finished_procs()
            if codes or self._processes.has_lost_one():
                self._processes.kill()  # without a worker the engine core would hang
                return self._processes.failure() or killed_by(codes.values()) or "one of its processes has ended"
            if time.monotonic() >= report_at:
                report_at = time.monotonic() + USAGE_S
                pids = self._processes.pids()
                self._connection.send(msg.Usage(self._number, pids, self._processes.cpu_s(), resident_bytes(pids)))
        return "it was ended"

    def _clear(self, manager: CoreEngineProcManager | NodeRanks | None, reason: str) -> None:
        """Remove what the engine left. Whatever fails here, the front end is notified of the end afterwards."""
        steps: list[Callable[[], None]] = [partial(self._connection.close_bridge, self._number), self._processes.end]
        if manager is not None:  # upstream's, which fails if a process ends just before it is killed
            steps.insert(0, partial(manager.shutdown, timeout=0))
        if self._controllers is not None:
            steps.insert(0, partial(self._controllers.detach, self._engine, reason))
        for step in steps:
            try:
                step()
            except Exception as exc:
                logger.warning("stage %s: %r", self.name, exc)


def _calls() -> list[list[Any]]:
    """Calls of an engine core, as its client sends them: forget all requests, what was published for them, and media,
    and say whether it sleeps. The front end could not release what it was not told of."""
    calls = [
        (1, "pause_scheduler", ("abort", False)),
        (2, "collective_rpc", ("abort_published",)),
        (3, "reset_mm_cache", ()),
        (4, "resume_scheduler", ()),
        (LAST_CALL, "is_sleeping", ()),
    ]
    encode = MsgpackEncoder().encode
    return [[EngineCoreRequestType.UTILITY.value, *encode((0, *call))] for call in calls]
