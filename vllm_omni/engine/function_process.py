"""``FunctionProcess``: a process in which a function of the pipeline runs, as the front end sees it."""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import time
from collections.abc import AsyncGenerator, Callable
from ctypes import c_uint64

from vllm.platforms import current_platform

from vllm_omni import envs
from vllm_omni.engine import function_host
from vllm_omni.engine.function_messages import (
    NOT_ENCODED,
    CancelRun,
    Input,
    InputEnd,
    ReadInput,
    Ready,
    RunEnded,
    RunMessage,
    StartRun,
    Taken,
    Yielded,
    decode_for_front_end,
    encode_message,
    find,
)
from vllm_omni.errors import StageFailed, StageUnavailable
from vllm_omni.flow import Activation, Emission, Yield
from vllm_omni.flow.remote.messages import Fault, PayloadCodec
from vllm_omni.process.channel import Channel, receive_blocking
from vllm_omni.process.child import END_TIMEOUT_S, ChildProcess
from vllm_omni.process.fork_server import child_context
from vllm_omni.process.stage_processes import StageProcesses, killed_by
from vllm_omni.process.status import StageState, StageStatus
from vllm_omni.process.tether import ServerTether

logger = logging.getLogger(__name__)

ABORT_TIMEOUT_S = 1.0
"""How long an aborted run may take to end before its request is over without it."""

KILL_TIMEOUT_S = 10.0
"""How long it may take before its process is killed, unless another run computes there."""


class FunctionProcess:
    """Starts the process, runs the function in it, reports its health; a ``Supervisor`` restarts it.

    ``start`` and ``restart`` block and belong in a thread; ``run`` and ``aclose`` belong to one event loop.

    Args:
        name: of the function; of one with several processes, "tool/0".
        function: the name by which the process imports it, see ``name_of``.
        codec: the name of the ``PayloadCodec`` of what it reads and yields.

    Attributes:
        was_ended: see ``Supervised``.
        on_status: called after each change of status, by the supervisor.
    """

    def __init__(self, name: str, function: str, codec: str) -> None:
        self.name = name
        self.was_ended = False
        self._function = function
        self._codec = codec
        self._status = StageStatus()
        self.on_status: Callable[[], None] = lambda: None
        self._ended_because: str | None = None
        self._is_closing = False
        self._host: _Host | None = None
        self._tether: ServerTether | None = None
        self._processes: StageProcesses | None = None

    # -- start and end ------------------------------------------------------------------------------------------------

    def start(self, tether: ServerTether) -> None:
        """Start the process; blocks until it has imported the function.

        Raises:
            StageFailed: it has not.
        """
        self._tether, self._processes = tether, StageProcesses(tether)
        started = time.monotonic()
        self._start_host()
        logger.info("function %s: its process is ready after %.1f s", self.name, time.monotonic() - started)

    def _start_host(self) -> None:
        assert self._tether is not None
        self._host = _Host(self.name, self._function, self._codec, self._tether)
        self._host.wait_until_ready()

    def can_start(self) -> bool:
        return True

    def restart(self) -> None:
        """Clear away what is left of a process that died, and start another. Blocks as ``start`` does.

        Raises:
            StageFailed: it did not start.
        """
        assert self._processes is not None
        self.was_ended, self._ended_because = False, None
        started = time.monotonic()
        self._started.process.kill()
        self._started.end()
        try:
            self._processes.end()
        except TimeoutError as exc:
            raise StageFailed(self.name, str(exc)) from exc
        self._start_host()
        logger.info("function %s: its process is ready again after %.1f s", self.name, time.monotonic() - started)

    def kill(self) -> None:
        if self._host is not None:
            self._host.process.kill()

    async def aclose(self) -> None:
        """Close the channel once no run is left; the process then ends. Call it before ``shutdown``."""
        self._is_closing = True
        if self._host is not None:
            await self._host.aclose()

    def shutdown(self) -> None:
        """End the process; does nothing when it was not started."""
        self._is_closing = True
        if self._host is not None:
            self._host.end()

    @property
    def _started(self) -> _Host:
        assert self._host is not None, "the process has not been started"
        return self._host

    # -- health -------------------------------------------------------------------------------------------------------

    @property
    def has_died(self) -> bool:
        """Whether runs in it fail; one that belongs to another server's process has not been started here."""
        return not self._is_closing and self._host is not None and self._host.process.has_died

    def has_lost_process(self) -> bool:
        return False  # there is one, and ``has_died`` is about it

    def pids(self) -> list[int]:
        """The process, if it lives."""
        return [] if self._host is None or self._host.process.has_died else [self._host.process.pid]

    def termination_reason(self) -> str:
        if self._ended_because is not None:
            return self._ended_because
        cause = killed_by([self._started.process.exit_code or 0])
        return f"its process has died: {cause}" if cause else "its process has died"

    def current_status(self) -> StageStatus:
        if self._status.state is StageState.RUNNING and self.has_died:  # the supervisor has not noticed yet
            return StageStatus(StageState.RESTARTING, self.termination_reason(), self._status.num_restarts)
        return self._status

    def set_status(self, status: StageStatus) -> None:
        """For the supervisor, from its thread."""
        self._status = status
        self.on_status()

    # -- runs ---------------------------------------------------------------------------------------------------------

    @property
    def load(self) -> tuple[int, int]:
        """Processes with less of it get new runs: those that did not end when they were cancelled, then all."""
        runs = self._started.runs.values()
        return sum(run.is_late for run in runs), len(runs)

    async def run(self, activation: Activation) -> AsyncGenerator[Yield, None]:
        """Run the function once; closing it early cancels the run, and waits ``ABORT_TIMEOUT_S`` for its end.

        Raises:
            StageUnavailable: the process is being restarted, or could not be.
            StageFailed: the function raised, its process died, or a value cannot be sent.
            Exception: its input broke off with this error of an earlier node.
        """
        status = self.current_status()
        if status.state is not StageState.RUNNING:
            raise StageUnavailable(self.name, f"{status.state}: {status.reason}")
        host = self._started
        run = await host.start_run(activation)
        try:
            while True:
                event = await run.events.get()
                if event is None:
                    await host.process.wait_until_exited(END_TIMEOUT_S)
                    raise StageFailed(self.name, self.termination_reason())
                if isinstance(event, Exception):
                    raise event
                if isinstance(event, RunEnded):
                    self._check_end(event, run)
                    return
                yield [Emission(field, host.opened(field, data), last=last) for field, data, last in event.emissions]
                host.send(Taken(run.number))
        finally:
            await self._end(host, run)

    def _check_end(self, ended: RunEnded, run: _Run) -> None:
        if ended.broken_input is not None:
            raise run.broken_inputs[ended.broken_input]
        if ended.error is not None:
            raise StageFailed(self.name, f"the pipeline's function failed: {ended.error}")

    async def _end(self, host: _Host, run: _Run) -> None:
        await run.stop_reading()
        if run.has_ended.is_set():
            return
        host.send(CancelRun(run.number))
        try:
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                await run.has_ended.wait()
        except TimeoutError:
            run.is_late = True
            where = f"request {run.call_id}: function {self.name}"
            logger.warning("%s has not ended %g s after it was cancelled", where, ABORT_TIMEOUT_S)
            self._watch(host, run, KILL_TIMEOUT_S - ABORT_TIMEOUT_S)

    def _watch(self, host: _Host, run: _Run, delay_s: float, *, is_suspect: bool = False) -> None:
        asyncio.get_running_loop().call_later(delay_s, self._kill_if_blocked, host, run, is_suspect)

    def _kill_if_blocked(self, host: _Host, run: _Run, is_suspect: bool) -> None:
        """Kill the process for a run that did not end, unless another one computes there, for which it waits, too.

        Args:
            is_suspect: no other did when it was looked at last; one may just have paused, and this run be about to end.
        """
        if run.has_ended.is_set() or self._is_closing:
            return
        if host.computing.value not in (0, run.number):
            self._watch(host, run, KILL_TIMEOUT_S)
        elif not is_suspect:
            self._watch(host, run, ABORT_TIMEOUT_S, is_suspect=True)
        else:
            what = f"request {run.call_id} had not ended {KILL_TIMEOUT_S:g} s after it was cancelled"
            self._ended_because = f"its process was killed: {what}"
            logger.error("function %s: %s", self.name, self._ended_because)
            self.was_ended = True
            host.process.kill()


class _Run:
    """One activation in the process."""

    def __init__(self, number: int, activation: Activation, host: _Host) -> None:
        self.number = number
        self.call_id = activation.call_id
        self.events: asyncio.Queue[Yielded | RunEnded | Exception | None] = asyncio.Queue()  # None: the process died
        self.has_ended = asyncio.Event()
        self.is_late = False  # it did not end when it was cancelled
        self.broken_inputs: dict[str, Exception] = {}
        self._activation = activation
        self._host = host
        self._reads: dict[str, asyncio.Task[None]] = {}
        self._is_over = False  # its activation

    def receive(self, message: RunMessage) -> None:
        match message:
            case ReadInput() if self._is_over:  # in its clean-up
                self._host.send(InputEnd(self.number, message.field, None))
            case ReadInput():
                self._reads[message.field] = asyncio.ensure_future(self._read(message.field))
            case Yielded() | RunEnded():
                self.events.put_nowait(message)
        if isinstance(message, RunEnded):
            self.has_ended.set()

    def lose(self) -> None:
        self.events.put_nowait(None)
        self.has_ended.set()

    async def stop_reading(self) -> None:
        """Read nothing more: the activation is over."""
        self._is_over = True
        for task in self._reads.values():
            task.cancel()
        await asyncio.gather(*self._reads.values(), return_exceptions=True)

    async def _read(self, field: str) -> None:
        try:
            chunk = await anext(self._activation.inputs[field])
        except StopAsyncIteration:
            self._host.send(InputEnd(self.number, field, None))
            return
        except Exception as exc:
            self.broken_inputs[field] = exc
            self._host.send(InputEnd(self.number, field, Fault.of(exc)))
            return
        try:
            payload = self._host.payloads.encode(chunk.payload)
            self._host.send(Input(self.number, field, payload, chunk.seq, chunk.last))
        except NOT_ENCODED as exc:
            self.events.put_nowait(StageFailed(self._host.name, f"input {field!r}: {exc}"))


class _Host:
    """One process, from its start to its end, and the runs in it."""

    def __init__(self, name: str, function: str, codec: str, tether: ServerTether) -> None:
        self.name = name
        self.payloads: PayloadCodec = find(codec)()
        self.runs: dict[int, _Run] = {}
        context = child_context(current_platform.device_type)
        self.computing: c_uint64 = context.RawValue(c_uint64, 0)
        self._numbers = itertools.count(1)
        self._socket, theirs = socket.socketpair()
        self._channel: asyncio.Future[Channel] | None = None  # on the event loop of the runs
        with theirs:
            args = (tether, theirs, function, codec, self.computing)
            process = context.Process(target=function_host.serve, args=args, name=f"function-{name}", daemon=True)
            self.process = ChildProcess(process)

    def wait_until_ready(self) -> None:
        """Raises:
        StageFailed: the process has not imported the function, or not in time.
        """
        timeout_s = envs.VLLM_OMNI_STAGE_READY_TIMEOUT_S
        try:
            data = receive_blocking(self._socket, timeout_s)
        except TimeoutError:
            self.end()
            raise StageFailed(self.name, f"its process is not ready after {timeout_s:g} s") from None
        ready = None if data is None else decode_for_front_end(data)
        if isinstance(ready, Ready) and ready.error is None:
            return
        self.process.join()
        cause = (
            ready.error if isinstance(ready, Ready) else killed_by([self.process.exit_code or 0]) or "see its log above"
        )
        self.end()
        raise StageFailed(self.name, f"its process did not start: {cause}")

    def opened(self, field: str, data: bytes) -> object:
        """The payload of an emission.

        Raises:
            StageFailed: it cannot be decoded here.
        """
        try:
            return self.payloads.decode(data)
        except Exception as exc:
            raise StageFailed(self.name, f"output {field!r} cannot be read here: {exc!r}") from exc

    async def start_run(self, activation: Activation) -> _Run:
        """Start a run.

        Raises:
            StageFailed: the data of the request cannot be sent.
        """
        await self._connect()
        run = _Run(next(self._numbers), activation, self)
        try:
            context = self.payloads.encode(activation.context)
        except NOT_ENCODED as exc:
            raise StageFailed(self.name, f"the request's context: {exc}") from exc
        self.runs[run.number] = run
        if self.process.is_lost:
            run.lose()
            return run
        self.send(
            StartRun(
                run.number,
                activation.call_id,
                activation.node,
                activation.interface,
                activation.activation_id,
                list(activation.inputs),
                list(activation.wanted),
                context,
                activation.session,
                list(activation.path),
                activation.iteration,
            )
        )
        return run

    async def _connect(self) -> None:
        if self._channel is None:
            self._channel = asyncio.ensure_future(Channel.over(self._socket, self._receive, self._lose))
        await asyncio.shield(self._channel)

    def send(self, message: RunMessage) -> None:
        assert self._channel is not None
        self._channel.result().send(encode_message(message))

    def _receive(self, data: bytes) -> None:
        message = decode_for_front_end(data)
        run = self.runs.get(message.run)
        if run is not None:
            run.receive(message)
        if isinstance(message, RunEnded):
            self.runs.pop(message.run, None)

    def _lose(self) -> None:
        self.process.is_lost = True
        for run in self.runs.values():
            run.lose()
        self.runs.clear()

    async def aclose(self) -> None:
        if self._channel is not None:
            (await asyncio.shield(self._channel)).close()
            await asyncio.sleep(0)  # asyncio then closes the socket

    def end(self) -> None:
        """End the process, politely first."""
        self.process.end()
        if self._channel is None:
            self._socket.close()
