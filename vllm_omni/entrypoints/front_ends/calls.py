"""``Calls``: the calls of one front end, answered by the process that has the engines."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from vllm.exceptions import VLLMClientError
from vllm.lora.request import LoRARequest

from vllm_omni.engine.function_messages import NOT_ENCODED
from vllm_omni.engine.rejection import rejection
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
    Message,
    PromptRead,
    Ready,
    Rejected,
    Taken,
    TakePlace,
    TakeTurn,
    decode_for_engines,
    encode_message,
    encode_output,
    make_payloads,
)
from vllm_omni.entrypoints.openai.fair_keys import FairShare
from vllm_omni.entrypoints.openai.job_places import TakePlace as JobPlace
from vllm_omni.errors import OmniError
from vllm_omni.flow.remote.messages import Fault
from vllm_omni.messages.outputs import OmniRequestOutput

logger = logging.getLogger(__name__)

HttpHeaders = list[tuple[str, str]]


class Served(Protocol):
    """What the calls of all front ends ask of the engines, and report."""

    share: FairShare
    take_place: JobPlace

    def generate(self, prompt: Any, params: Any, request_id: str, /, **arguments: Any) -> AsyncGenerator[Any, None]:
        """``Orchestrator.generate``."""
        ...

    async def answer(self, method: str, url: str, headers: HttpHeaders, body: bytes) -> Answered:
        """Answer an HTTP request about the server as a whole; the answer's number is still to be set."""
        ...

    async def add_adapter(self, adapter: LoRARequest) -> None: ...

    def note_read(self, seconds: float) -> None: ...

    def note_rejected(self, stage: str) -> None: ...


class Calls:
    """Runs the calls of a front end; when it is lost, all that it has opened is aborted.

    Args:
        send: sends a message to the front end.
        on_ready: called with its first message.
        on_held: called with each report of what it holds.

    Attributes:
        num_open: of its calls.
    """

    def __init__(
        self,
        served: Served,
        send: Callable[[bytes], None],
        on_ready: Callable[[Ready], None],
        on_held: Callable[[Held], None],
    ) -> None:
        self._served = served
        self._send = send
        self._on_ready = on_ready
        self._on_held = on_held
        self._payloads = make_payloads()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._rooms: dict[int, asyncio.Semaphore] = {}  # of requests: outputs that may still be sent

    def receive(self, data: bytes) -> None:
        message = decode_for_engines(data)
        match message:
            case Taken() if (room := self._rooms.get(message.call)) is not None:
                for _ in range(message.num_outputs):
                    room.release()
            case Cancel() if (task := self._tasks.get(message.call)) is not None:
                task.cancel()
            case Ready():
                self._on_ready(message)
            case Held():
                self._on_held(message)
            case PromptRead():
                self._served.note_read(message.seconds)
            case Rejected():
                self._served.note_rejected(message.stage)
            case Generate():
                self._start(message.call, self._generate(message))
            case Forward():
                self._start(message.call, self._forward(message))
            case AddAdapter():
                self._start(message.call, self._served.add_adapter(self._payloads.decode(message.adapter)))
            case TakeTurn():
                self._start(message.call, self._give_turn(message))
            case TakePlace():
                self._start(message.call, self._give_place(message))

    @property
    def num_open(self) -> int:
        return len(self._tasks)

    async def aclose(self) -> None:
        """Abort all calls, and wait until every stage has released them."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _start(self, number: int, work: Coroutine[Any, Any, None]) -> None:
        task = self._tasks[number] = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(lambda task: self._end(number, task))

    def _end(self, number: int, task: asyncio.Task[None]) -> None:
        del self._tasks[number]
        self._rooms.pop(number, None)
        error = None if task.cancelled() else task.exception()
        self.send(Ended(number, None if error is None else _fault_of(error)))

    def send(self, message: Message) -> None:
        self._send(encode_message(message))

    async def _generate(self, message: Generate) -> None:
        room = self._rooms[message.call] = asyncio.Semaphore(WINDOW)
        request: Sequence[Any] = self._payloads.decode(message.request)
        prompt, params, request_id, arguments = request
        outputs: AsyncGenerator[OmniRequestOutput, None] = self._served.generate(
            prompt, params, request_id, **arguments
        )
        async with aclosing(outputs):
            async for output in outputs:
                await room.acquire()
                self._send(self._encode(message.call, output))

    def _encode(self, number: int, output: OmniRequestOutput) -> bytes:
        try:
            return encode_output(number, output, self._payloads)
        except NOT_ENCODED as exc:
            raise OmniError(f"the answer cannot be sent to the front end: {exc}") from exc

    async def _forward(self, message: Forward) -> None:
        answered = await self._served.answer(message.method, message.url, message.headers, message.body)
        self.send(Answered(message.call, answered.status, answered.headers, answered.body))

    async def _give_turn(self, message: TakeTurn) -> None:
        with self._served.share.tag(message.key) as priority:
            await self._grant(Granted(message.call, priority))

    async def _give_place(self, message: TakePlace) -> None:
        async with self._served.take_place():
            await self._grant(Granted(message.call))

    async def _grant(self, granted: Granted) -> None:
        """Until the call is cancelled."""
        self.send(granted)
        await asyncio.get_running_loop().create_future()


def _fault_of(error: BaseException) -> Fault:
    if isinstance(error, OmniError):
        return Fault.of(error)
    if isinstance(error, VLLMClientError):
        return Fault.of(rejection(error))
    logger.error("a call of a front end failed", exc_info=error)
    return Fault.of(OmniError(f"the server failed: {error!r}"))
