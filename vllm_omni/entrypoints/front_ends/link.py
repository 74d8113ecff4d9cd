"""``EngineLink``: what a front end asks of the process that has the engines."""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

from vllm.lora.request import LoRARequest

from vllm_omni.engine.function_messages import NOT_ENCODED
from vllm_omni.engine.media_budget import HOLDING
from vllm_omni.entrypoints.front_ends.messages import (
    WINDOW,
    AddAdapter,
    Answered,
    Cancel,
    Ended,
    Forward,
    Generate,
    Granted,
    Held,
    Measure,
    Message,
    Output,
    PromptRead,
    Ready,
    Rejected,
    Status,
    Stop,
    Taken,
    TakePlace,
    TakeTurn,
    decode_for_front_end,
    decode_output,
    encode_message,
    make_payloads,
)
from vllm_omni.errors import InvalidRequest, OmniError, ShuttingDown
from vllm_omni.messages.outputs import OmniRequestOutput
from vllm_omni.process.channel import Channel

logger = logging.getLogger(__name__)

END_TIMEOUT_S = 15.0
"""How long a call that is left waits for its end: an abort has deadlines of its own, stage by stage."""

LOST = "the process of the engines has ended"


class EngineLink:
    """The calls of one front end, over a socket that it was started with.

    Args:
        on_status: called with each state of the engines.
        on_stop: called when the front end is to end.
        measure: the bytes of bodies and files, and of decoded media, that it holds now.

    Attributes:
        on_status: may be replaced.
    """

    def __init__(
        self,
        on_status: Callable[[Status], None],
        on_stop: Callable[[], None],
        measure: Callable[[], tuple[int, int]],
    ) -> None:
        self.on_status = on_status
        self._on_stop = on_stop
        self._measure = measure
        self._payloads = make_payloads()
        self._numbers = itertools.count(1)
        self._calls: dict[int, _Call] = {}
        self._channel: Channel | None = None

    async def connect(self, sock: socket.socket) -> None:
        self._channel = await Channel.over(sock, self._receive, self._lose)

    def report_ready(self, error: str | None = None) -> None:
        self.send(Ready(0, error))

    def note_read(self, seconds: float) -> None:
        """Count a prompt that was read in so many seconds."""
        self.send(PromptRead(0, seconds))

    def note_rejected(self, stage: str) -> None:
        """Count a request that was rejected because of a stage's limit."""
        self.send(Rejected(0, stage))

    # -- calls --------------------------------------------------------------------------------------------------------

    async def generate(
        self, prompt: Any, params: Mapping[str, Any], request_id: str, arguments: Mapping[str, Any]
    ) -> AsyncGenerator[OmniRequestOutput, None]:
        """``Orchestrator.generate`` there; closed early, it returns once every stage has released the request.

        Raises:
            OmniError: as there; or the request cannot be sent.
        """
        try:
            request = self._payloads.encode([prompt, dict(params), request_id, dict(arguments)])
        except NOT_ENCODED as exc:
            raise OmniError(f"the request cannot be sent to the engines: {exc}") from exc
        async with self._call(request_id) as call:
            self._send_request(Generate(call.number, request))
            del request  # as long as the answer
            if (holding := HOLDING.get()) is not None:
                holding.release()
            num_taken = 0
            while isinstance(message := await call.next(), Output):
                yield decode_output(message, self._payloads)
                num_taken += 1
                if num_taken == WINDOW // 2:
                    self.send(Taken(call.number, num_taken))
                    num_taken = 0

    async def forward(self, method: str, url: str, headers: list[tuple[str, str]], body: bytes) -> Answered:
        """Have the process of the engines answer an HTTP request."""
        async with self._call() as call:
            self._send_request(Forward(call.number, method, url, headers, body))
            message = await call.next()
            assert isinstance(message, Answered)
            return message

    async def add_adapter(self, adapter: LoRARequest) -> None:
        """Raises:
        StageFailed: the first stage runs without adapters, or cannot load this one.
        """
        async with self._call() as call:
            self.send(AddAdapter(call.number, self._payloads.encode(adapter)))
            await call.next()

    @asynccontextmanager
    async def turn(self, key: str) -> AsyncIterator[int]:
        """The priority of a request of an API key, which is open inside the block (``FairShare.tag``)."""
        async with self._call() as call:
            self.send(TakeTurn(call.number, key))
            message = await call.next()
            assert isinstance(message, Granted)
            yield message.priority

    @asynccontextmanager
    async def take_place(self) -> AsyncIterator[None]:
        """The place of a job, which it has inside the block (``JobPlaces.take``)."""
        async with self._call() as call:
            self.send(TakePlace(call.number))
            await call.next()
            yield

    async def abort(self, request_id: str) -> None:
        """Abort a request of this front end, and wait for its end; an unknown id is ignored."""
        for call in [one for one in self._calls.values() if one.request_id == request_id]:
            self.send(Cancel(call.number))
            await call.wait_until_ended()

    def fail_all(self, error: Exception) -> None:
        """End all calls with an error."""
        for call in self._calls.values():
            call.fail(error)

    @asynccontextmanager
    async def _call(self, request_id: str | None = None) -> AsyncIterator[_Call]:
        call = _Call(next(self._numbers), request_id)
        self._calls[call.number] = call
        if self._channel is None:
            call.fail(ShuttingDown(LOST))
        try:
            yield call
        finally:
            # A task of its own: where a client leaves, anyio cancels the reader again at each of its awaits.
            await asyncio.shield(asyncio.ensure_future(self._end(call)))

    async def _end(self, call: _Call) -> None:
        if not call.has_ended.is_set() and self._channel is not None:
            self.send(Cancel(call.number))
            await call.wait_until_ended()
        self._calls.pop(call.number, None)

    # -- the channel --------------------------------------------------------------------------------------------------

    def send(self, message: Message) -> None:
        if self._channel is not None:
            self._channel.send(encode_message(message))

    def _send_request(self, message: Message) -> None:
        try:
            self.send(message)
        except ValueError as exc:
            raise InvalidRequest(f"the request is too large to be sent to the engines: {exc}") from exc

    def _receive(self, data: bytes) -> None:
        message = decode_for_front_end(data)
        match message:
            case Status():
                self.on_status(message)
            case Measure():
                self.send(Held(0, *self._measure()))
            case Stop():
                self._on_stop()
            case _ if (call := self._calls.get(message.call)) is not None:
                call.receive(message)

    def _lose(self) -> None:
        """The process of the engines has ended, and this one is about to (``ServerTether``)."""
        self._channel = None
        for call in self._calls.values():
            call.fail(ShuttingDown(LOST))
            call.has_ended.set()


class _Call:
    def __init__(self, number: int, request_id: str | None) -> None:
        self.number = number
        self.request_id = request_id
        self.has_ended = asyncio.Event()
        self._messages: asyncio.Queue[Message | Exception] = asyncio.Queue()

    def receive(self, message: Message) -> None:
        self._messages.put_nowait(message)
        if isinstance(message, Ended):
            self.has_ended.set()

    def fail(self, error: Exception) -> None:
        """Have the next reader raise an error, before what else has arrived."""
        while not self._messages.empty():
            self._messages.get_nowait()
        self._messages.put_nowait(error)

    async def next(self) -> Message:
        """The next message.

        Raises:
            Exception: with which the call ended.
        """
        message = await self._messages.get()
        if isinstance(message, Exception):
            raise message
        if isinstance(message, Ended) and message.fault is not None:
            raise message.fault.to_error()
        return message

    async def wait_until_ended(self) -> None:
        """Wait for the end; returns without it after ``END_TIMEOUT_S``."""
        with suppress(TimeoutError):
            async with asyncio.timeout(END_TIMEOUT_S):
                await self.has_ended.wait()
