"""The process of a function: runs it on an event loop of its own, for the front end (``function_process.py``)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Generator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from ctypes import c_uint64
from types import FrameType
from typing import Any

from vllm_omni.engine.function_messages import (
    NOT_ENCODED,
    WINDOW,
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
    decode_for_process,
    encode_message,
    find,
)
from vllm_omni.flow import Activation, Chunk, Emission, Yield
from vllm_omni.flow.remote.messages import Fault, PayloadCodec
from vllm_omni.process.channel import HEADER_BYTES, Channel
from vllm_omni.process.logs import name_stage_process
from vllm_omni.process.tether import ServerTether, enter_stage_process

logger = logging.getLogger(__name__)

Forward = Callable[[Activation], AsyncIterator[Yield]]


def serve(tether: ServerTether, sock: socket.socket, function: str, codec: str, computing: c_uint64) -> None:
    """The process, from its start to its end.

    Args:
        function: its name, see ``name_of``.
        codec: the name of the ``PayloadCodec`` of what it reads and yields.
        computing: shared with the front end: the number of the run that computes now; 0: none.
    """
    signal.signal(signal.SIGTERM, _exit)
    enter_stage_process()
    error = None
    try:
        payloads: PayloadCodec = find(codec)()
        forward: Forward = find(function)
        _name_process(tether.stage)
    except Exception as exc:
        logger.exception("importing %s failed", function)
        error = f"importing {function} failed: {exc!r}"
    ready = encode_message(Ready(0, error))
    sock.sendall(len(ready).to_bytes(HEADER_BYTES) + ready)
    if error is None:
        asyncio.run(_Host(tether.stage, forward, payloads, computing).serve(sock))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as it ends: what libraries do at exit must not be interrupted


def _name_process(function: str) -> None:
    """Name the process and its lines, if it uses vLLM, whose handlers then log: VLLM::rank::Function."""
    if "vllm" not in sys.modules:
        return
    from vllm.utils.system_utils import set_process_title

    name_stage_process(function)
    set_process_title("Function")
    logging.getLogger("vllm_omni").parent = logging.getLogger("vllm")


def _exit(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)
    sys.exit()


class _NotSent(Exception):
    """What the function yields cannot leave the process."""


class _Host:
    """The runs in this process."""

    def __init__(self, name: str, forward: Forward, payloads: PayloadCodec, computing: c_uint64) -> None:
        self.name = name
        self.forward = forward
        self.payloads = payloads
        self._computing = computing
        self._runs: dict[int, _Run] = {}
        self._lost = asyncio.Event()
        self._channel: Channel | None = None

    async def serve(self, sock: socket.socket) -> None:
        """Serve until the front end closes the channel; then cancel what runs."""
        self._channel = await Channel.over(sock, self._receive, self._lost.set)
        await self._lost.wait()
        tasks = [run.task for run in self._runs.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def send(self, message: RunMessage) -> None:
        assert self._channel is not None
        self._channel.send(encode_message(message))

    def _receive(self, data: bytes) -> None:
        message = decode_for_process(data)
        if isinstance(message, StartRun):
            run = self._runs[message.run] = _Run(self, message)
            steps = _Steps(run.work(), message.run, self._computing)
            run.task = asyncio.get_running_loop().create_task(steps, name=f"{message.call_id}/{message.node}")
            run.task.add_done_callback(lambda _: self._end(message.run, run))
            return
        if message.run not in self._runs:
            return  # it has ended meanwhile
        run = self._runs[message.run]
        match message:
            case CancelRun():
                run.task.cancel()
            case Input():
                run.inputs[message.field].give(message)
            case InputEnd():
                run.inputs[message.field].end(message.error)
            case Taken():
                run.room.release()

    def _end(self, number: int, run: _Run) -> None:
        del self._runs[number]
        self.send(run.ended)


class _Run:
    """One activation of the function."""

    task: asyncio.Task[None]

    def __init__(self, host: _Host, start: StartRun) -> None:
        self.number = start.run
        self.ended = RunEnded(start.run)
        self.inputs = {field: _Input(host, start.run, field) for field in start.inputs}
        self.room = asyncio.Semaphore(WINDOW)
        self._host = host
        self._start = start

    async def work(self) -> None:
        try:
            await self._work()
        except Exception as exc:
            broken = next((name for name, one in self.inputs.items() if one.error is exc), None)
            if broken is None:
                logger.exception("request %s: function %s failed", self._start.call_id, self._host.name)
            self.ended = RunEnded(self.number, str(exc) if isinstance(exc, _NotSent) else repr(exc), broken)

    async def _work(self) -> None:
        async with _closed_at_end(self._host.forward(self._activation())) as yields:
            async for one in yields:
                emissions = [one] if isinstance(one, Emission) else _listed(one)
                packed = [(each.field, self._encode(each), each.last) for each in emissions]
                self._host.send(Yielded(self.number, packed))
                await self.room.acquire()

    def _activation(self) -> Activation:
        start = self._start
        return Activation(
            start.call_id,
            start.node,
            start.interface,
            start.activation_id,
            dict(self.inputs),
            frozenset(start.wanted),
            self._host.payloads.decode(start.context),
            start.session,
            tuple(start.path),
            iteration=start.iteration,
            is_of_producer=lambda error: any(one.error is error for one in self.inputs.values()),
        )

    def _encode(self, emission: Emission) -> bytes:
        if not isinstance(emission, Emission):
            raise _NotSent(f"it yielded a {type(emission).__name__}: an Emission is needed, or a list of them")
        try:
            return self._host.payloads.encode(emission.payload)
        except NOT_ENCODED as exc:
            raise _NotSent(f"output {emission.field!r}: {exc}") from exc


class _Input:
    """The chunks of one field; each is fetched when it is read, so that a slow function holds its producer back."""

    def __init__(self, host: _Host, run: int, field: str) -> None:
        self.error: Exception | None = None  # with which it broke off
        self._host = host
        self._run = run
        self._field = field
        self._next: asyncio.Future[Input | None] | None = None  # None: the end
        self._is_over = False

    def __aiter__(self) -> _Input:
        return self

    async def __anext__(self) -> Chunk:
        if self._next is None and not self._is_over:
            self._next = asyncio.get_running_loop().create_future()
            self._host.send(ReadInput(self._run, self._field))
        # A reader that is cancelled, by a timeout of its own, leaves the chunk to the next one.
        given = None if self._next is None else await asyncio.shield(self._next)
        self._next = None
        if given is not None:
            return Chunk(self._host.payloads.decode(given.payload), given.seq, given.last)
        if self.error is not None:
            raise self.error
        raise StopAsyncIteration

    def give(self, given: Input | None) -> None:
        if self._next is not None and not self._next.done():
            self._next.set_result(given)

    def end(self, fault: Fault | None) -> None:
        self._is_over = True
        if fault is not None:
            self.error = fault.to_error()
        self.give(None)


class _Steps(Coroutine[Any, Any, None]):
    """A coroutine that notes which run computes while it does: the front end can see it when this process is busy."""

    def __init__(self, coroutine: Coroutine[Any, Any, None], number: int, computing: c_uint64) -> None:
        self._coroutine = coroutine
        self._number = number
        self._computing = computing

    def send(self, value: Any) -> Any:
        with self._noted():
            return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        with self._noted():
            return self._coroutine.throw(*error)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, None]:
        return self._coroutine.__await__()

    @contextlib.contextmanager
    def _noted(self) -> Generator[None]:
        self._computing.value = self._number
        try:
            yield
        finally:
            self._computing.value = 0


def _listed(one: Yield) -> Sequence[Emission]:
    if isinstance(one, Emission):
        return [one]
    if isinstance(one, str | bytes) or not isinstance(one, Sequence):
        raise _NotSent(f"it yielded a {type(one).__name__}: an Emission is needed, or a list of them")
    return one


def _closed_at_end(yields: AsyncIterator[Yield]) -> AbstractAsyncContextManager[AsyncIterator[Yield]]:
    return aclosing(yields) if isinstance(yields, AsyncGenerator) else nullcontext(yields)
