"""Messages between the entry's runtime and hosts of roles, besides frames."""

from __future__ import annotations

import contextlib
from typing import Any, TypeAlias

import msgspec

from vllm_omni import errors
from vllm_omni.errors import RemoteError
from vllm_omni.flow.run.activity import Activity, Tracker
from vllm_omni.flow.run.frame import EdgeCredit, Frame, SlotEos


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

    @classmethod
    def of(cls, error: BaseException) -> Fault:
        return cls(type(error).__name__, str(error), list(getattr(error, "__notes__", ())))

    def to_error(self) -> Exception:
        """An ``OmniError`` of the same class, or ``RemoteError`` for other exceptions."""
        cls = getattr(errors, self.error_type, None)
        error: Exception = RemoteError(self.error_type, self.message)
        if isinstance(cls, type) and issubclass(cls, errors.OmniError):
            with contextlib.suppress(TypeError):  # a class that needs more than a message
                error = cls(self.message)
        for note in self.notes:
            error.add_note(note)
        return error


WireMessage: TypeAlias = (
    Frame | SlotEos | EdgeCredit | OpenCall | CancelCall | CloseCall | ShutdownHost | ActivityReport
)
