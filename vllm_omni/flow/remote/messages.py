"""Messages between the entry's runtime and hosts of roles, besides frames.

Not yet served: a server runs all controllers in its front end; tests and ``benchmarks/relay.py`` send these.
"""

from __future__ import annotations

import contextlib
from typing import Any, TypeAlias

import msgspec

from vllm_omni import errors
from vllm_omni.errors import RemoteError
from vllm_omni.flow.run.activity import Activity, Tracker
from vllm_omni.flow.run.frame import EdgeCredit, Frame, SlotEos


class OpenCall(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """To a host: accept frames of a call for a node from now on."""

    call_id: str
    target: str
    graph: str
    outputs: list[str]  # the graph outputs that the call asks for
    context: Any
    session: str | None


class CancelCall(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """To a host, see ``NodeController.cancel``; answered by ``CancelDone`` unless ``unfinished_only``."""

    call_id: str
    target: str
    unfinished_only: bool


class CancelDone(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """To the entry: no activation of the call runs in the node."""

    call_id: str
    target: str
    node: str

    def report_to(self, tracker: Tracker) -> None:
        tracker.end(cancellation(self.node))


class CloseCall(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """To a host: the call is over."""

    call_id: str
    target: str


class ShutdownHost(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """To a host: no more work follows. Belongs to no call."""

    call_id: str
    target: str


class ActivationStarted(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """To the entry: an activation is in flight."""

    call_id: str
    target: str
    node: str
    activation_id: int

    def report_to(self, tracker: Tracker) -> None:
        tracker.start(Activity(self.node, self.activation_id))


class ActivationEnded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """To the entry: an activation has ended."""

    call_id: str
    target: str
    node: str
    activation_id: int

    def report_to(self, tracker: Tracker) -> None:
        tracker.end(Activity(self.node, self.activation_id))


def cancellation(node: str) -> Activity:
    """The activity that keeps a call open until a host has answered ``CancelCall``."""
    return Activity(node, activation_id=-1)


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
    Frame
    | SlotEos
    | EdgeCredit
    | OpenCall
    | CancelCall
    | CancelDone
    | CloseCall
    | ActivationStarted
    | ActivationEnded
    | ShutdownHost
)
