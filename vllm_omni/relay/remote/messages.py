"""The messages between relays of different hosts. Tags are class names, or older names of these.

Every message is checked against its type when it is decoded, and its numbers by the code that handles it. An invalid
message is dropped with a warning: the other side, or anyone else that reaches the port, may send anything.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from typing import Annotated, Any, TypeAlias

import msgspec

from vllm_omni.errors import RelayBroken
from vllm_omni.messages.payload import MAX_NUM_BYTES, TensorRef

TOKEN_BYTES = 16
MAX_LEASE = 1 << 62
MAX_ADDRESS = 64  # characters: tcp://, a numeric address, a port
MAX_CONTROL_BYTES = 4096  # a message to a producer
MAX_BODY_BYTES = 64 << 20  # a message to a consumer
MAX_TEXT = 1000

Token: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
Request: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=MAX_LEASE)]
LeaseNumber: TypeAlias = Annotated[int, msgspec.Meta(gt=0, lt=MAX_LEASE)]
NumBytes: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_NUM_BYTES)]
Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]


class Location(msgspec.Struct, frozen=True, array_like=True):
    """Where the producer of a reference listens."""

    address: Annotated[str, msgspec.Meta(max_length=MAX_ADDRESS)]
    token: Token  # of this producer, random: distinguishes it from a later one at the same address


# -- to a producer ----------------------------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The first message; answered by ``Welcome``, or by ``Rejected`` with request 0."""

    producer: Token  # the producer that the consumer means; known only to processes with a reference
    reader: Token  # identity of the connecting reader, the same for all connections of a relay


class Fetch(msgspec.Struct, frozen=True, array_like=True, tag="Begin"):
    """Keep a tensor until it is released; answered by ``Granted`` or ``Rejected``."""

    request: Request
    lease: LeaseNumber
    num_bytes: NumBytes  # of the whole tensor, as its reference says


class Fetched(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The read that ``Fetch`` started has ended; the tensor stays until it is released."""

    request: Request


class Read(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """``Fetch``, and send a piece of the tensor; answered by ``Piece`` or ``Rejected``."""

    request: Request
    lease: LeaseNumber
    num_bytes: NumBytes  # of the whole tensor
    offset: NumBytes  # of the piece, in the tensor
    size: NumBytes  # of the piece


class Abandon(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A read has failed, and may be tried again."""

    lease: LeaseNumber


class Release(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """This reader has finished."""

    lease: LeaseNumber
    for_all: bool = False  # and no other reader may start


class Subscribe(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Send a stream's rows as they are written; answered by ``Granted`` or ``Rejected``."""

    request: Request
    lease: LeaseNumber
    num_bytes: NumBytes  # of the ring


class Credit(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """How many rows of a stream have been read."""

    lease: LeaseNumber
    num_read: NumBytes  # rows since its start


# -- to a consumer ----------------------------------------------------------------------------------------------------


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The connection is accepted."""

    num_bytes: NumBytes  # of the slab
    access: bytes  # what else a backend needs to read the slab


class Granted(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The lease is kept for this reader."""

    request: Request
    offset: NumBytes  # of the tensor or ring in the slab


class Piece(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Part of a tensor; its bytes are the message's second frame."""

    request: Request
    offset: NumBytes  # in the tensor


class Rejected(msgspec.Struct, frozen=True, array_like=True, tag="Refused"):
    """A request was rejected; request 0 is the connection itself."""

    request: Request
    reason: Text


class Rows(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Rows of a stream; their bytes are the message's second frame."""

    lease: LeaseNumber
    first: NumBytes  # number of the first one since the stream's start
    num_rows: NumBytes


class End(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The stream has ended."""

    lease: LeaseNumber
    num_rows: NumBytes  # since its start
    error: Text | None  # None: a normal end


class Probe(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Makes ZMQ notice whether a consumer is still connected; it has no answer."""


ToProducer: TypeAlias = Hello | Fetch | Fetched | Read | Abandon | Release | Subscribe | Credit
ToConsumer: TypeAlias = Welcome | Granted | Piece | Rejected | Rows | End | Probe

encode = msgspec.msgpack.Encoder().encode
decode_to_producer: Callable[[Any], ToProducer] = msgspec.msgpack.Decoder(ToProducer).decode
decode_to_consumer: Callable[[Any], ToConsumer] = msgspec.msgpack.Decoder(ToConsumer).decode
_decode_location = msgspec.msgpack.Decoder(Location).decode

_ADDRESS = re.compile(r"tcp://(?:\[([0-9a-fA-F:.]+)\]|([0-9.]+)):([0-9]{1,5})")


def parse_location(ref: TensorRef) -> Location:
    """Raises ``RelayBroken`` for an invalid location. Addresses must be numeric, so that no name is looked up."""
    try:
        location = _decode_location(ref.location)
        match = _ADDRESS.fullmatch(location.address)
        if match is None or not 0 < int(match[3]) < 1 << 16:
            raise ValueError(f"{location.address!r} is not an address")
        ipaddress.ip_address(match[1] or match[2])
    except ValueError as exc:  # msgspec's and Unicode's errors are ValueErrors, too
        raise RelayBroken(f"a reference has a malformed location: {exc}") from exc
    if not 0 < ref.lease < MAX_LEASE:
        raise RelayBroken(f"a reference names lease {ref.lease}: must be at least 1 and below 2**62")
    return location
