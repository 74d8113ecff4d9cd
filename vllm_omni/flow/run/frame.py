"""Messages of the runtime: nodes yield emissions, frames travel on edges, users read output frames."""

import enum
from typing import Any, TypeAlias

import msgspec

ITERATION = 1 << 30
"""Added to the number of a loop: in a path, an iteration sorts behind all yields of the iteration before."""

REPEATED = 1 << 20
"""Added to the number of a loop: its iterations below which the iterations of an outer loop stand (see ``Path``)."""

Path: TypeAlias = tuple[int, ...]
"""The place of an activation in the order of its call: the yield index at every fork above it, the alternative at every
node with several OR groups, ITERATION + loop for every iteration of a loop. Activations are in the order of paths.

Where each frame of an edge starts an iteration, ITERATION + loop is followed by the path of the frame below the header;
iterations of inner loops in it are REPEATED, as they are none of the inner loop's new start.
"""


def place_of(path: Path) -> str:
    """A path as a part of an id: ".2" for a yield, "+0" for an iteration of the first loop."""
    return "".join(f"+{key - ITERATION}" if key >= ITERATION else f".{key}" for key in path)


class EndReason(enum.Enum):
    """The reason for which a frame without a payload ends its field.

    From: Omni-Flow section 3.5, the signal UNREACHABLE (distinguishing empty, error and cancel).
    """

    NONE = "none"  # the frame carries a payload
    EMPTY = "empty"  # the producer finished without marking a last frame
    ERROR = "error"  # the producer raised; the payload is the exception
    CANCEL = "cancel"  # the producer was cancelled
    UNREACHABLE = "unreachable"  # the producer was never activated: an input that it needs ended without a payload


Termination: TypeAlias = int
"""The reason for which the sender of a frame never ran: NOT_ACTIVATED, or NO_ITERATION + the depth of a loop.

No iteration: this loop did not start it. So nothing is sent around this loop again, nor around one within it.
"""
RAN: Termination = 0
NOT_ACTIVATED: Termination = 1  # an input that it needs ended without a payload
NO_ITERATION: Termination = 1  # + the number of loops around the header of the loop, itself included


def leads_nowhere(termination: Termination, depth: int) -> bool:
    """Whether a loop of this depth has no further iteration below a sender."""
    return NO_ITERATION < termination <= NO_ITERATION + depth


class Root(msgspec.Struct, frozen=True, array_like=True):
    """A yield of a fork source, for the joins below it. From: Omni-Flow appendix A, DiamondRootEntry."""

    node: str
    activation_id: int
    index: int  # of the yield
    depth: int  # length of the activation's path
    loops: tuple[int, ...]  # see Trace; of the activation


class Trace(msgspec.Struct, frozen=True, array_like=True):
    """The origin of a frame: its receiver joins and orders frames by it."""

    path: Path = ()
    roots: tuple[Root, ...] = ()  # the nearest last
    loops: tuple[int, ...] = ()  # loops of which an iteration below this path follows, or is reported as not started
    termination: Termination = RAN


class Frame(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One piece of one field on one edge: ARRIVED, or with a reason UNREACHABLE. From: Omni-Flow sections 3.2, 3.4."""

    call_id: str  # the graph call it belongs to
    source: str  # producing node, or ENTRY
    target: str  # consuming node, or ENTRY
    slot: int  # index of the edge in NodePlan.slots of `target`; for ENTRY 0
    field: str  # input field of `target`; for ENTRY the graph output, or "" where a node reports failure
    activation_id: int  # the activation of `target` that it feeds
    seq: int  # 0, 1, 2, ... per edge and path: the receiver restores this order
    last: bool  # the last frame on this edge at this path
    payload: Any  # opaque to flow: in process by reference, otherwise any type that the link can encode
    reason: EndReason = EndReason.NONE  # otherwise there is no payload to deliver, and `last` is true
    origin: int = 0  # the activation of `source` that sent it, which receives credit for it
    trace: Trace = Trace()


class SlotEos(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The number of yields below a path. From: Omni-Flow section 3.2, SLOT_EOS."""

    call_id: str
    source: str
    target: str
    slot: int  # as in Frame
    field: str
    activation_id: int  # the bucket that it is for; NO_BUCKET: it concerns the nodes below `target`
    trace: Trace  # of the activation that yielded
    count: int


NO_BUCKET = -1


class EdgeCredit(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """How far the reader of a streamed edge lets its producer advance; sent to the producer.

    The limit is absolute and only grows, so a link may repeat and reorder these messages, too.
    """

    call_id: str
    target: str  # the producing node
    activation_id: int  # its activation
    reader: str  # the consuming node, or ENTRY
    slot: int  # of the reader, see Frame
    field: str  # its input field, or the graph output
    limit: int  # the number of frames that may be sent on this edge in total


class Report(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What an activation reports to the reader of its call, in order with its other reports; see ``Activation``."""

    call_id: str
    target: str  # ENTRY
    payload: Any  # opaque to flow, as in Frame


class Emission(msgspec.Struct, frozen=True):
    """One item that ``Node.forward`` yields: a piece of a declared output field. A piece of a field that is not
    streamed is always the last.

    Emissions yielded together, as a list, belong together: they meet again at a join.
    """

    field: str
    payload: Any
    last: bool = False


class OutputFrame(msgspec.Struct, frozen=True):
    """A piece of a graph output. ``reason`` other than NONE: the output ended here and ``payload`` is None."""

    field: str
    payload: Any
    seq: int
    last: bool
    reason: EndReason = EndReason.NONE
