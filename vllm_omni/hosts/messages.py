"""The messages between a front end and the hosts that join it.

Each is one message of ZMQ: a struct, and behind it frames that belong to it. A frame of vLLM's may be long; it travels
in parts, so that a long one does not look like silence, and no part has more than ``MAX_PART_BYTES``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, TypeAlias

import msgspec
import zmq

PROTOCOL = 4
PART_BYTES = 1 << 20
MAX_PART_BYTES = 4 << 20  # also of a struct: the deployment is one
MAX_STAGES = 4096
MAX_TEXT = 4000

Number: TypeAlias = Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]
"""Of one start of an engine, given by the front end and never again: what an earlier one sends is not heard."""
Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
Parts: TypeAlias = list[Annotated[int, msgspec.Meta(ge=1)]]
"""Of each frame, in how many parts it follows."""


Session: TypeAlias = Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]
"""Of one connection of a host, from the front end's clock: a later one has a larger number."""


class Identity(msgspec.Struct, frozen=True):
    """What must be equal on all hosts of a deployment."""

    package: Text  # version of vllm_omni
    vllm: Text  # version of vLLM
    device: Text  # kind of the devices: "cpu", "cuda"
    checkpoint: Text  # hash of its configuration, of the headers of its weights and of a sample of each tensor

    def differences(self, other: Identity) -> list[str]:
        """What differs, with both values; the other's first."""
        names = {"package": "vllm-omni-flow", "vllm": "vLLM", "device": "kind of devices", "checkpoint": "checkpoint"}
        pairs = {said: (getattr(other, name), getattr(self, name)) for name, said in names.items()}
        return [f"{said}: {theirs} there, {ours} here" for said, (theirs, ours) in pairs.items() if theirs != ours]


# -- to the front end -------------------------------------------------------------------------------------------------


class Join(msgspec.Struct, frozen=True, tag=True):
    """The first message of a host; answered by ``Joined`` or ``Rejected``."""

    protocol: int
    identity: Identity
    stages: Annotated[list[Text], msgspec.Meta(min_length=1, max_length=MAX_STAGES)]
    address: Text  # where the host's relays listen
    program: Text  # of the host, unlike any other's: its next connection takes the place of one that is not yet lost
    link: Text = ""  # where the controllers of other hosts connect to those of this one: "tcp://..."


class Ready(msgspec.Struct, frozen=True, tag=True):
    """An engine core has connected; frames: its first message."""

    number: Number
    parts: Parts


class Output(msgspec.Struct, frozen=True, tag=True):
    """Frames: what an engine core sent to its client."""

    number: Number
    parts: Parts


class Ended(msgspec.Struct, frozen=True, tag=True):
    """An engine did not start, or has ended."""

    number: Number
    reason: Text


class Usage(msgspec.Struct, frozen=True, tag=True):
    """What an engine's processes use, sent each second."""

    number: Number
    pids: list[int]
    cpu_s: float  # since they were started
    resident_bytes: int


class Statistics(msgspec.Struct, frozen=True, tag=True):
    """What an engine whose controller is on its host has counted (``engine/host_statistics.py``), twice a second."""

    number: Number
    parts: Parts


class Flow(msgspec.Struct, frozen=True, tag=True):
    """In both directions, and between hosts. Frame: messages of the graph, as ``EncodedLink`` packs them."""

    parts: Parts


# -- to a host --------------------------------------------------------------------------------------------------------


class Joined(msgspec.Struct, frozen=True, tag=True):
    """The host belongs to the deployment."""

    engines: list[Text]  # that it serves
    config: bytes  # the deployment (``config/travel.py``)
    host: Text  # its name in the deployment
    session: Session


class Rejected(msgspec.Struct, frozen=True, tag=True):
    reason: Text


class Node(msgspec.Struct, frozen=True):
    """The place of a host among those that an engine spans."""

    rank: Annotated[int, msgspec.Meta(ge=0)]  # 0: it runs the engine core
    store_host: Text  # where the ranks exchange their addresses
    store_port: int


class Start(msgspec.Struct, frozen=True, tag=True):
    """Start an engine, or the part of it that is on this host; one that was started before under its name is ended
    first."""

    number: Number
    engine: Text
    options: dict[str, Any]  # ``RelayOptions``, without host and secret, as plain types
    log_stats: bool
    node: Node | None = None  # None: the engine is on this host alone


class Request(msgspec.Struct, frozen=True, tag=True):
    """Frames: what a client sends to its engine core."""

    number: Number
    parts: Parts


class Kill(msgspec.Struct, frozen=True, tag=True):
    """Kill the processes of an engine."""

    number: Number


class Bye(msgspec.Struct, frozen=True, tag=True):
    """The front end has ended: end all engines."""


class Peer(msgspec.Struct, frozen=True):
    """A host, as the controllers of others reach it."""

    link: Text  # empty: it is lost
    session: Session  # earlier ones are not to be heard


class Peers(msgspec.Struct, frozen=True, tag=True):
    """What has changed about the hosts, by their names in the deployment: after ``Joined``, all of them."""

    hosts: dict[Text, Peer]


class Probe(msgspec.Struct, frozen=True, tag=True):
    """Makes ZMQ notice whether a host is still connected; it has no answer."""


# -- between hosts ----------------------------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The first message of a connection."""

    host: Text  # its name in the deployment
    session: Session


ToFrontEnd: TypeAlias = Join | Ready | Output | Ended | Usage | Statistics | Flow
ToHost: TypeAlias = Joined | Rejected | Start | Request | Kill | Bye | Peers | Probe | Flow
BetweenHosts: TypeAlias = Hello | Flow

encode = msgspec.msgpack.Encoder().encode
decode_to_front_end = msgspec.msgpack.Decoder(ToFrontEnd).decode
decode_to_host = msgspec.msgpack.Decoder(ToHost).decode
decode_between_hosts = msgspec.msgpack.Decoder(BetweenHosts).decode


def pack_flow(data: bytes) -> list[Any]:
    """The frames of a ``Flow``."""
    counts, parts = split([data])
    return [encode(Flow(counts)), *parts]


def split(frames: Sequence[Any]) -> tuple[list[int], list[Any]]:
    """Cut frames into parts; returns the number of parts of each, and the parts."""
    counts: list[int] = []
    parts: list[Any] = []
    for frame in frames:
        own = list(_parts_of(frame))
        counts.append(len(own))
        parts += own
    return counts, parts


def _parts_of(frame: Any) -> Iterator[Any]:
    view = _view(frame)
    if view.nbytes <= PART_BYTES:
        yield frame
        return
    for start in range(0, view.nbytes, PART_BYTES):
        yield view[start : start + PART_BYTES]


def _view(frame: Any) -> memoryview:
    return memoryview(frame.buffer if isinstance(frame, zmq.Frame) else frame).cast("B")


def join_parts(counts: Sequence[int], parts: Sequence[Any]) -> list[Any]:
    """The frames of ``split``. Raises ``ValueError``: the numbers do not fit."""
    if sum(counts) != len(parts):
        raise ValueError(f"{len(parts)} parts, of {sum(counts)} that were announced")
    frames: list[Any] = []
    place = 0
    for count in counts:
        own = parts[place : place + count]
        frames.append(own[0] if count == 1 else b"".join(map(_view, own)))
        place += count
    return frames


def join_one(counts: Sequence[int], parts: Sequence[Any]) -> memoryview:
    """The only frame of ``split``. Raises ``ValueError``: the numbers do not fit."""
    (frame,) = join_parts(counts, parts)
    return _view(frame)
