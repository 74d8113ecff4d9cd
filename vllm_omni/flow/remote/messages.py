"""Messages between the entry's runtime and hosts of roles, besides frames."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, TypeAlias

import msgspec
from msgspec import structs

from vllm_omni import errors
from vllm_omni.errors import RemoteError
from vllm_omni.flow.run.activity import Activity, Tracker
from vllm_omni.flow.run.frame import EdgeCredit, EndReason, Frame, Report, SlotEos


class HostMessage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """About a call (``ShutdownHost`` excepted), to a host's node or to the entry."""

    call_id: str
    target: str


class OpenCall(HostMessage, frozen=True):
    """To a host: accept frames of a call for a node from now on."""

    graph: str
    outputs: list[str]  # the graph outputs that the call asks for
    context: Any
    session: str | None


class CancelCall(HostMessage, frozen=True):
    """To a host, see ``NodeController.cancel``. Unless ``unfinished_only``, the end of ``CANCELLATION`` answers it."""

    unfinished_only: bool


class CloseCall(HostMessage, frozen=True):
    """To a host: the call is over."""


class ShutdownHost(HostMessage, frozen=True):
    """To a host: no more work follows."""


class ActivityReport(HostMessage, frozen=True):
    """To the entry: an activation of a node is in flight, or has ended."""

    node: str
    activation_id: int
    has_ended: bool

    def report_to(self, tracker: Tracker) -> None:
        report = tracker.end if self.has_ended else tracker.start
        report(Activity(self.node, self.activation_id))


CANCELLATION = -1
"""In place of an activation's id: keeps a call open until a host has answered ``CancelCall``."""


class Fault(msgspec.Struct, frozen=True, array_like=True):
    """An exception, reduced to text for another process: the payload of a frame with reason ERROR."""

    error_type: str
    message: str
    notes: list[str]
    fields: dict[str, str | bool | int | None] = {}  # its attributes, e.g. the stage of ``StageFailed``

    @classmethod
    def of(cls, error: BaseException) -> Fault:
        fields = {name: one for name, one in vars(error).items() if one is None or isinstance(one, str | int)}
        return cls(type(error).__name__, str(error), list(getattr(error, "__notes__", ())), fields)

    def to_error(self) -> Exception:
        """An ``OmniError`` of the same class, or ``RemoteError`` for other exceptions."""
        cls = getattr(errors, self.error_type, None)
        error: Exception = RemoteError(self.error_type, self.message)
        if isinstance(cls, type) and issubclass(cls, errors.OmniError):
            error = cls.__new__(cls)  # the arguments of some classes are not their message
            Exception.__init__(error, self.message)
            vars(error).update(self.fields)
        for note in self.notes:
            error.add_note(note)
        return error


WireMessage: TypeAlias = (
    Frame | SlotEos | EdgeCredit | Report | OpenCall | CancelCall | CloseCall | ShutdownHost | ActivityReport
)


class Unreadable(NamedTuple):
    """A message that cannot be decoded, or whose payload cannot."""

    call_id: str | None  # None: not even this can be read
    reason: str


NOT_VALID = (msgspec.MsgspecError, ValueError, RecursionError)
"""What decoding raises; errors of Unicode are ValueErrors."""


class PayloadCodec(Protocol):
    """Encodes what flow does not look into: payloads of frames and reports, and contexts of calls."""

    def encode(self, value: Any) -> bytes:
        """Raises:
        TypeError, ValueError: the value cannot leave this process.
        """

    def decode(self, data: bytes) -> Any:
        """Raises:
        ValueError: not what ``encode`` returns.
        """


class MessageCodec:
    """Messages as bytes, for a link between processes.

    Args:
        payloads: encodes payloads and contexts; None: they are msgpack types.
    """

    def __init__(self, payloads: PayloadCodec | None = None) -> None:
        self._payloads = payloads
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(list[WireMessage])
        self._splitter = msgspec.msgpack.Decoder(list[msgspec.Raw])
        self._single_decoder = msgspec.msgpack.Decoder(WireMessage)

    def encode(self, message: Any) -> bytes:
        """Encode one message.

        Raises:
            TypeError, ValueError, OverflowError, RecursionError: it cannot leave this process.
        """
        return self._encoder.encode(self._packed(message))

    def decode(self, data: bytes | memoryview) -> list[Any]:
        """Decode a msgpack array of messages; in the place of one that is not valid stands an ``Unreadable``.

        Raises:
            ValueError, RecursionError: it is not such an array.
        """
        try:
            messages: list[Any] = self._decoder.decode(data)
        except NOT_VALID:  # of one of them, or of the array
            messages = [self._decode_single(raw) for raw in self._splitter.decode(data)]
        return [self._opened(message) for message in messages]

    def _decode_single(self, raw: msgspec.Raw) -> Any:
        try:
            return self._single_decoder.decode(raw)
        except NOT_VALID as exc:
            return Unreadable(_call_id_of(raw), str(exc))

    def _opened(self, message: Any) -> Any:
        try:
            return self._unpacked(message)
        except NOT_VALID as exc:
            return Unreadable(message.call_id, f"the payload of a {type(message).__name__}: {exc}")

    def _packed(self, message: Any) -> Any:
        if isinstance(message, Frame) and isinstance(message.payload, BaseException):
            return structs.replace(message, payload=Fault.of(message.payload))
        if self._payloads is None:
            return message
        match message:
            case Frame() if message.reason is EndReason.NONE:
                return structs.replace(message, payload=self._payloads.encode(message.payload))
            case Report():
                return structs.replace(message, payload=self._payloads.encode(message.payload))
            case OpenCall():
                return structs.replace(message, context=self._payloads.encode(message.context))
        return message

    def _unpacked(self, message: Any) -> Any:
        if isinstance(message, Frame) and message.reason in (EndReason.ERROR, EndReason.CANCEL) and message.payload:
            return structs.replace(message, payload=msgspec.convert(message.payload, Fault).to_error())
        if self._payloads is None:
            return message
        match message:
            case Frame() if message.reason is EndReason.NONE:
                return structs.replace(message, payload=self._payloads.decode(message.payload))
            case Report():
                return structs.replace(message, payload=self._payloads.decode(message.payload))
            case OpenCall():
                return structs.replace(message, context=self._payloads.decode(message.context))
        return message


def _call_id_of(raw: msgspec.Raw) -> str | None:
    """The first field of all messages, behind their tag."""
    try:
        match msgspec.msgpack.decode(raw):
            case [str(), str(call_id), *_]:
                return call_id
    except NOT_VALID:
        pass
    return None
