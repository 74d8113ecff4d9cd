"""How a frame reaches another controller."""

from collections.abc import Callable
from typing import Protocol, TypeAlias

from vllm_omni.flow.frame import Frame

Receiver: TypeAlias = Callable[[Frame], None]


class Link(Protocol):
    """Carries frames to where their target lives.

    A link may reorder and repeat frames, never lose one. A frame of a call that is over is dropped by its receiver.
    """

    def bind(self, target: str, receive: Receiver) -> None:
        """Frames for ``target`` (a node, or ENTRY) go to ``receive``, on the event loop that bound it."""

    def send(self, frame: Frame) -> None:
        """Hand a frame over; never waits for the target."""


class InProcessLink:
    """Calls the receiver directly: a send returns once the next node has been fired, and no further."""

    def __init__(self) -> None:
        self._receivers: dict[str, Receiver] = {}

    def bind(self, target: str, receive: Receiver) -> None:
        self._receivers[target] = receive

    def send(self, frame: Frame) -> None:
        self._receivers[frame.target](frame)
