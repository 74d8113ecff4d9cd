"""What moves through a graph: nodes emit, frames travel, nodes read chunks, users read output frames."""

import enum
from typing import Any, TypeAlias

import msgspec

TURN = 1 << 30
"""Added to the number of a loop: in a path, a turn comes behind all yields of the turn before."""

Path: TypeAlias = tuple[int, ...]
"""Where an activation stands in the order of its call: the yield index at every fork above it, the alternative at every
node with several OR groups, TURN + loop for every turn of a loop. Activations are in the order of their paths."""


class EndReason(enum.Enum):
    """Why a frame ends its field, where the payload does not say it.

    From: Omni-Flow section 3.5, the signal UNREACHABLE (distinguishing empty, error and cancel).
    """

    NONE = "none"  # the frame carries a payload
    EMPTY = "empty"  # the producer finished without marking a last frame
    ERROR = "error"  # the producer raised; the payload is the exception
    CANCEL = "cancel"  # the producer was cancelled
    UNREACHABLE = "unreachable"  # the producer was never activated: an input that it needs ended without a payload


class Death(enum.IntEnum):
    """Whether the activation that speaks has ever lived; the larger one passes on."""

    ALIVE = 0
    NEVER_LIVED = 1  # an input that it needs ended without a payload
    NO_TURN = 2  # it belongs to a turn that a loop did not take: this is not told around the loop again


class Root(msgspec.Struct, frozen=True, array_like=True):
    """A yield of a fork source, for the joins below it. From: Omni-Flow appendix A, DiamondRootEntry."""

    node: str
    activation_id: int
    index: int  # of the yield
    depth: int  # length of the path of the activation
    turns: tuple[int, ...]  # of the activation, see Lineage


class Lineage(msgspec.Struct, frozen=True, array_like=True):
    """Where a frame comes from: what its receiver needs to bring together what belongs together, and to order it."""

    path: Path = ()
    roots: tuple[Root, ...] = ()  # the nearest last
    turns: tuple[int, ...] = ()  # loops of which a turn below this path follows, or is told not to
    death: Death = Death.ALIVE


class Frame(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One piece of one field on one edge: ARRIVED, or with a reason UNREACHABLE. From: Omni-Flow sections 3.2, 3.4."""

    call_id: str  # the graph call it belongs to
    source: str  # producing node, or ENTRY
    target: str  # consuming node, or ENTRY
    slot: int  # which of the edges into `target`, see NodePlan.slots; for ENTRY 0
    field: str  # input field of `target`; for ENTRY the graph output, or "" where a node reports failure
    activation_id: int  # the activation of `target` that it feeds
    seq: int  # 0, 1, 2, ... per edge and path: the receiver restores this order
    last: bool  # nothing follows on this edge at this path
    payload: Any  # opaque to flow: in process by reference, otherwise what the link can encode
    reason: EndReason = EndReason.NONE  # anything else: there is no payload to deliver and `last` is true
    origin: int = 0  # the activation of `source` that made it: where credit for it goes
    lineage: Lineage = Lineage()


class SlotEos(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """How many yields there were below a path. From: Omni-Flow section 3.2, SLOT_EOS."""

    call_id: str
    source: str
    target: str
    slot: int  # as in Frame
    field: str
    activation_id: int  # the bucket that it is for; NO_BUCKET: for what is below `target`
    lineage: Lineage  # of whoever yielded
    count: int


NO_BUCKET = -1


class Credit(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The way back of a streamed edge: how far its reader lets the producer go.

    The limit is absolute and only grows, so that a link may repeat and reorder these, too.
    """

    call_id: str
    target: str  # the node that produces
    activation_id: int  # its activation
    reader: str  # the consuming node, or ENTRY
    slot: int  # of the reader, see Frame
    field: str  # its input field, or the graph output
    limit: int  # so many frames may be sent on this edge


class Emission(msgspec.Struct, frozen=True):
    """What ``Node.forward`` yields: a piece of a declared output field. What is not streamed is always last.

    Pieces that belong together are yielded together, as a list: those of one yield meet again at a join.
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
