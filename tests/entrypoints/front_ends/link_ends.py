"""Both ends of a link in one process, over a real pair of sockets."""

import asyncio
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, RequestOutput

from vllm_omni.entrypoints.front_ends.calls import Calls, HttpHeaders
from vllm_omni.entrypoints.front_ends.link import EngineLink
from vllm_omni.entrypoints.front_ends.messages import Answered, Held, Ready, Status
from vllm_omni.entrypoints.openai.fair_keys import FairShare
from vllm_omni.entrypoints.openai.job_places import JobPlaces, TakePlace
from vllm_omni.messages.outputs import OmniRequestOutput
from vllm_omni.process.channel import Channel


def make_output(request_id: str, token: int, **media: Any) -> OmniRequestOutput:
    text = CompletionOutput(0, f"<{token}>", [token], None, None)
    output = OmniRequestOutput.of(RequestOutput(request_id, None, [1, 2], None, [text], finished=False))
    output.multimodal_output = media
    return output


@dataclass
class Engines:
    """What a front end's calls reach: generators of the test, and what they have done.

    Attributes:
        made: outputs that have been made so far.
        released: ids of requests that have been released.
    """

    num_outputs: int = 3
    error: Exception | None = None
    share: FairShare = field(default_factory=FairShare)
    take_place: TakePlace = field(default_factory=lambda: JobPlaces().take)
    requests: list[Any] = field(default_factory=list)
    made: int = 0
    released: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    rejected: list[str] = field(default_factory=list)
    adapters: list[LoRARequest] = field(default_factory=list)

    async def generate(
        self, prompt: Any, params: Any, request_id: str, /, **arguments: Any
    ) -> AsyncGenerator[OmniRequestOutput, None]:
        self.requests.append((prompt, params, arguments))
        try:
            for index in range(self.num_outputs):
                self.made += 1
                yield make_output(request_id, index)
            if self.error is not None:
                raise self.error
        finally:
            await asyncio.sleep(0)
            self.released.append(request_id)

    async def answer(self, method: str, url: str, headers: HttpHeaders, body: bytes) -> Answered:
        return Answered(0, 207, [("x-url", url), *headers], method.encode() + body)

    async def add_adapter(self, adapter: LoRARequest) -> None:
        if self.error is not None:
            raise self.error
        self.adapters.append(adapter)

    def note_read(self, seconds: float) -> None:
        self.seconds.append(seconds)

    def note_rejected(self, stage: str) -> None:
        self.rejected.append(stage)


@dataclass
class Ends:
    engines: Engines
    link: EngineLink
    calls: Calls
    channel: Channel  # of the engines' end
    statuses: list[Status] = field(default_factory=list)
    is_ready: list[Ready] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)
    num_stops: list[None] = field(default_factory=list)


@asynccontextmanager
async def connected(engines: Engines) -> AsyncIterator[Ends]:
    ours, theirs = socket.socketpair()
    statuses: list[Status] = []
    stops: list[None] = []
    ready: list[Ready] = []
    held: list[Held] = []
    lost = asyncio.Event()
    link = EngineLink(statuses.append, lambda: stops.append(None), lambda: (3, 4))
    channel: Channel
    calls = Calls(engines, lambda data: channel.send(data), ready.append, held.append)
    channel = await Channel.over(ours, calls.receive, lost.set)
    await link.connect(theirs)
    try:
        yield Ends(engines, link, calls, channel, statuses, ready, held, stops)
    finally:
        channel.close()
        await lost.wait()
        await calls.aclose()
        await asyncio.sleep(0)
