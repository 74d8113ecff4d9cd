"""Messages between a front end and the process that has the engines. Nothing is pickled."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from vllm_omni.engine.wire import ServedPayloads
from vllm_omni.entrypoints.voice_cloning import ClonedVoice
from vllm_omni.flow.remote.messages import Fault
from vllm_omni.messages.outputs import OmniRequestOutput
from vllm_omni.messages.slo import SloReport
from vllm_omni.messages.stage_output import StageOutput
from vllm_omni.process.status import StageStatus

WINDOW = 16
"""Outputs of a request that may be on their way, before its reader has taken the first of them."""


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """About one call of a front end."""

    call: int  # its number, from 1; 0: about none


# -- to the engines ---------------------------------------------------------------------------------------------------


class Ready(Message, frozen=True):
    """The front end accepts connections, or why it cannot."""

    error: str | None = None


class Generate(Message, frozen=True):
    """Run a request; ``Output``s and ``Ended`` answer it."""

    request: bytes  # prompt, parameters, id and other arguments of ``Orchestrator.generate``


class Taken(Message, frozen=True):
    """So many more outputs may be sent."""

    num_outputs: int


class Cancel(Message, frozen=True):
    """End the call; ``Ended`` answers it once every stage has released the request."""


class Forward(Message, frozen=True):
    """Answer an HTTP request about the server as a whole; ``Answered`` answers it."""

    method: str
    url: str  # path and query
    headers: list[tuple[str, str]]
    body: bytes


class AddAdapter(Message, frozen=True):
    """Load an adapter; ``Ended`` answers it."""

    adapter: bytes  # ``LoRARequest``


class TakeTurn(Message, frozen=True):
    """Give a request of an API key its turn, until ``Cancel``; ``Granted`` answers it."""

    key: str


class TakePlace(Message, frozen=True):
    """Give a video that is made as a job its place, until ``Cancel``; ``Granted`` answers it."""


class PromptRead(Message, frozen=True):
    """A prompt was read, in so many seconds."""

    seconds: float


class Rejected(Message, frozen=True):
    """A request was rejected as a stage had as many as it may."""

    stage: str


class Held(Message, frozen=True):
    """Answers ``Measure``."""

    received_bytes: int
    media_bytes: int


# -- to the front end -------------------------------------------------------------------------------------------------


class Output(Message, frozen=True):
    """One output of a request."""

    output: bytes  # ``StageOutput``
    stage_durations: dict[str, float]
    latency_parts: dict[str, dict[str, float]]
    slo_reports: dict[str, SloReport]


class Ended(Message, frozen=True):
    """The call is over."""

    fault: Fault | None = None  # why it failed


class Answered(Message, frozen=True):
    status: int
    headers: list[tuple[str, str]]
    body: bytes


class Granted(Message, frozen=True):
    priority: int = 0  # of a turn


class Status(Message, frozen=True):
    """The state of the engines, after each change of it."""

    engines: dict[str, StageStatus]  # and of the processes of functions
    limits: dict[str, tuple[int, int]]  # stage with a limit -> open requests, seconds after which to try again


class Measure(Message, frozen=True):
    """Report what the front end holds for requests that it reads."""


class Stop(Message, frozen=True):
    """Let the open requests end, and then the process."""


ToEngines: TypeAlias = (
    Ready | Generate | Taken | Cancel | Forward | AddAdapter | TakeTurn | TakePlace | PromptRead | Rejected | Held
)
ToFrontEnd: TypeAlias = Output | Ended | Answered | Granted | Status | Measure | Stop

encode_message = msgspec.msgpack.Encoder().encode
decode_for_engines = msgspec.msgpack.Decoder(ToEngines).decode
decode_for_front_end = msgspec.msgpack.Decoder(ToFrontEnd).decode


# -- what they carry --------------------------------------------------------------------------------------------------

_CLONED_VOICE = 32  # its code, beside those of ``ServedPayloads``


def make_payloads() -> ServedPayloads:
    """The codec of both ends."""
    return ServedPayloads({_CLONED_VOICE: ClonedVoice})


def encode_output(call: int, output: OmniRequestOutput, payloads: ServedPayloads) -> bytes:
    """Raises:
    TypeError: the pipeline has put a value into it that cannot travel.
    """
    data = payloads.encode(StageOutput.of(output))
    return encode_message(Output(call, data, output.stage_durations, output.latency_parts, output.slo_reports))


def decode_output(message: Output, payloads: ServedPayloads) -> OmniRequestOutput:
    made: StageOutput = payloads.decode(message.output)
    output = made.to_request_output(made.request_id)
    output.multimodal_output = made.multimodal_output
    output.stage_durations = message.stage_durations
    output.latency_parts, output.slo_reports = message.latency_parts, message.slo_reports
    return output
