"""Builders for the flow tests: graphs, nodes made of functions, a manual clock, a link that shuffles."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable

import pytest

from vllm_omni.flow import (
    Activation,
    Emission,
    EndReason,
    Field,
    Frame,
    Graph,
    GraphCall,
    GraphParser,
    InProcessLink,
    OutputFrame,
    Role,
    StaticPlan,
    TimerHandle,
    TransferFunction,
    interface,
)

over_every_link = pytest.mark.parametrize("make_runtime", ["in_process", "shuffled", "zmq"], indirect=True)

TEXT, ROWS, CODES, AUDIO = "text", "hidden_states", "codec", "audio"


class Thinker(Role):
    generate = interface(
        inputs_or=[["prompt"]],
        outputs={"text": Field(TEXT, streamed=True), "rows": Field(ROWS, dtype="float", streamed=True)},
    )


class Talker(Role):
    generate = interface(inputs_or=[["rows"]], outputs={"codes": Field(CODES, streamed=True)})


class Token2Wav(Role):
    decode = interface(inputs_or=[["codes"]], outputs={"audio": Field(AUDIO)})


def make_speech_graph(to_talker: TransferFunction | None = None, to_token2wav: TransferFunction | None = None) -> Graph:
    """prompt -> thinker -> (text), talker -> (codec_ids), token2wav -> (audio)"""
    graph = Graph("speech")
    prompt = graph.placeholder("prompt")
    thinker, talker = graph.role(Thinker, "thinker"), graph.role(Talker, "talker")
    token2wav = graph.role(Token2Wav, "token2wav")
    reply = thinker.generate(prompt=prompt)
    speech = talker.generate(rows=reply.rows.via(to_talker) if to_talker else reply.rows)
    sound = token2wav.decode(codes=speech.codes.via(to_token2wav) if to_token2wav else speech.codes)
    graph.output(text=reply.text, audio=sound.audio, codec_ids=speech.codes)
    return graph


def make_speech_plan(
    to_talker: TransferFunction | None = None, to_token2wav: TransferFunction | None = None
) -> StaticPlan:
    return GraphParser(make_speech_graph(to_talker, to_token2wav)).parse()


class FunctionNode:
    """A node whose forward is the given async generator function; records starts and clean-ups."""

    def __init__(self, forward: Callable[[Activation], AsyncIterator[Emission]]):
        self._forward = forward
        self.activations: list[Activation] = []
        self.events: list[str] = []

    async def forward(self, activation: Activation) -> AsyncIterator[Emission]:
        self.activations.append(activation)
        self.events.append("start")
        try:
            async for emission in self._forward(activation):
                yield emission
        except asyncio.CancelledError:
            self.events.append("cancelled")
            raise
        finally:
            try:
                await asyncio.sleep(0)  # clean-up takes time, and the cancellation may arrive here
            finally:
                self.events.append("clean")


async def think(activation: Activation) -> AsyncIterator[Emission]:
    """Three words of text, three rows."""
    async for chunk in activation.inputs["prompt"]:
        for step in range(3):
            await asyncio.sleep(0)
            yield Emission("text", f"{chunk.payload}{step}", last=step == 2)
            yield Emission("rows", step, last=step == 2)


async def talk(activation: Activation) -> AsyncIterator[Emission]:
    """Ten times each row."""
    async for chunk in activation.inputs["rows"]:
        yield Emission("codes", chunk.payload * 10, last=chunk.last)


async def vocode(activation: Activation) -> AsyncIterator[Emission]:
    """All codes in one piece."""
    yield Emission("audio", [chunk.payload async for chunk in activation.inputs["codes"]])


async def hang(activation: Activation) -> AsyncIterator[Emission]:
    """Never emits, never ends by itself."""
    await asyncio.get_running_loop().create_future()
    yield Emission("unreachable", None)


def make_speech_nodes(**nodes: FunctionNode) -> dict[str, FunctionNode]:
    """Nodes for make_speech_plan; keywords replace some."""
    return {"thinker": FunctionNode(think), "talker": FunctionNode(talk), "token2wav": FunctionNode(vocode), **nodes}


async def read(call: GraphCall) -> dict[str, list[OutputFrame]]:
    frames: dict[str, list[OutputFrame]] = {}
    async for frame in call:
        frames.setdefault(frame.field, []).append(frame)
    return frames


async def read_payloads(call: GraphCall) -> dict[str, list[object]]:
    """The payloads of each output, without its end: whether that is a frame of its own depends on timing."""
    return {
        field: [frame.payload for frame in frames if frame.reason is not EndReason.EMPTY]
        for field, frames in (await read(call)).items()
    }


async def spin(rounds: int = 20) -> None:
    """Run everything that is ready."""
    for _ in range(rounds):
        await asyncio.sleep(0)


def make_frame(seq: int, *, last: bool = False, field: str = "x", payload: object = None) -> Frame:
    return Frame("call", "a.run", "b.run", 0, field, 7, seq, last, payload)


class ManualTimer:
    def __init__(self, due: float, callback: Callable[[], None]):
        self.due = due
        self.callback = callback
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class ManualClock:
    """Stands still until a test moves it."""

    def __init__(self) -> None:
        self._now = 0.0
        self.timers: list[ManualTimer] = []

    def monotonic(self) -> float:
        return self._now

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> TimerHandle:
        timer = ManualTimer(self._now + delay_s, callback)
        self.timers.append(timer)
        return timer

    def advance(self, seconds: float) -> None:
        self._now += seconds
        due = [timer for timer in self.timers if timer.due <= self._now]
        self.timers = [timer for timer in self.timers if timer.due > self._now]
        for timer in due:
            if not timer.cancelled:
                timer.callback()

    @property
    def num_armed(self) -> int:
        return sum(not timer.cancelled for timer in self.timers)


class ShufflingLink(InProcessLink):
    """Delivers each frame some iterations of the event loop later, in random order, and some of them twice."""

    def __init__(self, rng: random.Random):
        super().__init__()
        self._rng = rng
        self._in_flight: list[Frame] = []

    def send(self, frame: Frame) -> None:
        for _ in range(self._rng.choice([1, 1, 2])):
            self._in_flight.append(frame)
            self._call_later(self._rng.randrange(4))

    def _call_later(self, rounds: int) -> None:
        loop = asyncio.get_running_loop()
        loop.call_soon(self._call_later, rounds - 1) if rounds else loop.call_soon(self._deliver_one)

    def _deliver_one(self) -> None:
        super().send(self._in_flight.pop(self._rng.randrange(len(self._in_flight))))
