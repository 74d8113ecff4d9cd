"""``FrontEnd``: a process that serves HTTP, as the process of the engines sees it."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, MutableSequence
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.process import BaseProcess

from vllm.platforms import current_platform

from vllm_omni import envs
from vllm_omni.entrypoints.front_ends.calls import Calls, Served
from vllm_omni.entrypoints.front_ends.host import Blueprint, serve
from vllm_omni.entrypoints.front_ends.messages import Held, Measure, Message, Ready, Stop, encode_message
from vllm_omni.errors import StageFailed
from vllm_omni.process.channel import Channel
from vllm_omni.process.child import ChildProcess
from vllm_omni.process.fork_server import child_context
from vllm_omni.process.proc import cpu_s
from vllm_omni.process.stage_processes import StageProcesses, killed_by
from vllm_omni.process.status import StageState, StageStatus
from vllm_omni.process.tether import ServerTether
from vllm_omni.process.watchdog import Watchdog

logger = logging.getLogger(__name__)

MEASURE_TIMEOUT_S = 1.0
BACKLOG = 2048  # uvicorn's
NOT_ACCEPTING = 2**31 - 1
"""The load of a front end that accepts no connections (vLLM's servers leave them to the least loaded one)."""


class FrontEnd:
    """Starts the process, answers its calls, reports its health; a ``Supervisor`` restarts it.

    A process that answers no message for ``VLLM_OMNI_STAGE_STUCK_S``, because it is stopped or waits for ever, is
    killed (``Watchdog``).

    ``start`` and ``restart`` block and belong in a thread; everything else belongs to one event loop.

    Args:
        index: of it among the front ends.
        served: what its calls reach.
        loads: open connections of each front end, in shared memory.
        on_change: called in the event loop when the process is ready, has ended, or is not started again.

    Attributes:
        was_ended: see ``Supervised``.
        num_held: bytes of bodies and files, and of decoded media, that it reported last.
    """

    was_ended = False

    def __init__(
        self,
        index: int,
        blueprint: Blueprint,
        listener: socket.socket,
        loads: MutableSequence[int],
        served: Served,
        tether: ServerTether,
        on_change: Callable[[], None],
    ) -> None:
        self.name = tether.stage
        self.num_held = (0, 0)
        self._index = index
        self._blueprint = blueprint
        self._listener = listener
        self._loads = loads
        self._served = served
        self._tether = tether
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()
        self._processes = StageProcesses(tether)
        self._status = StageStatus()
        self._is_closing = False
        self._held: asyncio.Future[None] = self._loop.create_future()  # the answer to ``Measure``
        self._host: _Host | None = None
        self._watchdog = Watchdog(self)
        self._stuck: str | None = None  # why the watchdog has killed the process, until it is restarted

    # -- start and end ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the process; blocks until it accepts connections.

        Raises:
            StageFailed: it does not, or not within ``VLLM_OMNI_STAGE_READY_TIMEOUT_S``.
        """
        started = time.monotonic()
        host = self._host = _Host(self, self._loop)
        timeout_s = envs.VLLM_OMNI_STAGE_READY_TIMEOUT_S
        try:
            error = host.ready.result(timeout_s)
        except TimeoutError:
            error = f"not ready after {timeout_s:g} s (VLLM_OMNI_STAGE_READY_TIMEOUT_S)"
        if error is not None:
            host.process.end()
            raise StageFailed(self.name, f"did not start: {error}")
        self._listener.listen(BACKLOG)  # it is about to; a client that has waited for it need not be refused
        logger.info("%s: ready after %.1f s", self.name, time.monotonic() - started)
        self._loop.call_soon_threadsafe(self._note_started)

    def _note_started(self) -> None:
        self._watchdog.start()
        self._on_change()

    def restart(self) -> None:
        """Clear away what is left of a process that died, and start another. Blocks as ``start`` does."""
        self.kill()
        self._stuck = None
        if self._host is not None:
            self._host.process.end()
        self._processes.end()
        self.start()

    def make_process(self, sock: socket.socket) -> BaseProcess:
        """The process, not started: forked where vLLM has been imported, on a CPU, and spawned elsewhere."""
        args = (self._tether, sock, self._listener, self._loads, self._index, self._blueprint)
        context = child_context(current_platform.device_type)
        process: BaseProcess = context.Process(target=serve, args=args, name=self.name, daemon=True)
        return process

    def make_calls(self, send: Callable[[bytes], None], on_ready: Callable[[Ready], None]) -> Calls:
        return Calls(self._served, send, on_ready, self._note_held)

    def note_lost(self) -> None:
        """Called in the event loop by the host."""
        self._loads[self._index] = NOT_ACCEPTING
        self._note_held(Held(0, 0, 0))
        self._on_change()

    def kill(self) -> None:
        if self._host is not None:
            self._host.process.kill()

    def stop(self) -> None:
        """Have it end once its open requests have; it accepts no others. One that is not ready is killed."""
        self._is_closing = True
        if self._host is not None and not self._host.ready.done():
            self._host.process.kill()
        self.send(Stop(0))

    async def wait_until_ended(self) -> None:
        """Wait until the process has ended, and what it had opened was released."""
        if self._host is not None:
            await self._host.has_ended.wait()

    async def aclose(self) -> None:
        """Stop watching the process."""
        await self._watchdog.stop()

    def end(self) -> None:
        """End the process, whatever it does. Blocks for a second at most."""
        self._is_closing = True
        if self._host is not None:
            self._host.process.end()

    # -- messages -----------------------------------------------------------------------------------------------------

    def send(self, message: Message) -> None:
        """Send a message to the process, if it is there."""
        if self._host is not None:
            self._host.send(encode_message(message))

    async def measure(self) -> None:
        """Update ``num_held``; it stays as it was if the process does not answer in time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(MEASURE_TIMEOUT_S):
                await self.answer()

    def _note_held(self, held: Held) -> None:
        self.num_held = (held.received_bytes, held.media_bytes)
        if not self._held.done():
            self._held.set_result(None)

    # -- health -------------------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        return 0 if self._host is None else self._host.process.pid

    @property
    def has_died(self) -> bool:
        return not self._is_closing and self._host is not None and self._host.process.has_died

    # For the watchdog (``Watched``).

    def has_requests(self) -> bool:
        """Whether there is a process: it is to answer at any time, also while it has no requests."""
        return not self._is_closing and self._host is not None and not self._host.process.has_died

    async def answer(self) -> None:
        """Return when the process has said what it holds, or is lost."""
        if not self.has_requests():
            return
        if self._held.done():
            self._held = self._loop.create_future()
        self.send(Measure(0))
        await asyncio.wait([self._held])

    def cpu_s(self) -> float:
        return cpu_s([self.pid])

    def end_stuck(self, after_s: float) -> None:
        self._stuck = f"its process answered nothing for {after_s:g} s"
        logger.error("%s: %s", self.name, self._stuck)
        self.kill()

    # For the supervisor (``Supervised``).

    def has_lost_process(self) -> bool:
        return False  # there is one, and ``has_died`` is about it

    def can_start(self) -> bool:
        return True

    def termination_reason(self) -> str:
        if self._stuck is not None:
            return self._stuck
        cause = None if self._host is None else killed_by([self._host.process.exit_code or 0])
        return f"its process has died: {cause}" if cause else "its process has died"

    def current_status(self) -> StageStatus:
        if self._status.state is StageState.RUNNING and self.has_died:  # the supervisor has not noticed yet
            return StageStatus(StageState.RESTARTING, self.termination_reason(), self._status.num_restarts)
        return self._status

    def set_status(self, status: StageStatus) -> None:
        """For the supervisor, from its thread."""
        self._status = status
        if status.state is StageState.FAILED:
            self._loop.call_soon_threadsafe(self._on_change)


class _Host:
    """One process, from its start to its end, and its calls.

    Attributes:
        ready: None once it accepts connections, or why it does not.
        has_ended: its channel is closed, and its calls have ended.
    """

    def __init__(self, front_end: FrontEnd, loop: asyncio.AbstractEventLoop) -> None:
        self.ready: Future[str | None] = Future()
        self.has_ended = asyncio.Event()
        self._front_end = front_end
        self._loop = loop
        self._channel: Channel | None = None
        self._socket, theirs = socket.socketpair()
        with theirs:
            self.process = ChildProcess(front_end.make_process(theirs))
        self._calls = front_end.make_calls(self.send, self._note_ready)
        asyncio.run_coroutine_threadsafe(self._connect(), loop).result()

    async def _connect(self) -> None:
        self._channel = await Channel.over(self._socket, self._calls.receive, self._lose)

    def send(self, message: bytes) -> None:
        if self._channel is not None:
            self._channel.send(message)

    def _note_ready(self, message: Ready) -> None:
        if not self.ready.done():
            self.ready.set_result(message.error)

    def _lose(self) -> None:
        self.process.is_lost, self._channel = True, None
        self._front_end.note_lost()
        self._ending = self._loop.create_task(self._end())

    async def _end(self) -> None:
        if num_open := self._calls.num_open:
            logger.warning("%s has ended: %d of its calls are aborted", self._front_end.name, num_open)
        await self._calls.aclose()
        await asyncio.to_thread(self.process.join)
        if not self.ready.done():
            self.ready.set_result(killed_by([self.process.exit_code or 0]) or "see its log above")
        self.has_ended.set()
