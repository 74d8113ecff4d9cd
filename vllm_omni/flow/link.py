"""How a frame reaches another controller."""

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

from vllm_omni.flow.frame import Credit, Frame

Message: TypeAlias = Frame | Credit
Receiver: TypeAlias = Callable[[Any], None]
"""Takes what its target is sent: an entry frames alone, a node ``Message``."""


class Link(Protocol):
    """Carries frames to where their target lives, and credit back.

    A link may reorder and repeat messages, never lose one. One of a call that is over is dropped by its receiver.
    """

    def bind(self, target: str, receive: Receiver) -> None:
        """What is for ``target`` (a node, or ENTRY) goes to ``receive``, on the event loop that bound it."""

    def send(self, message: Message) -> None:
        """Hand a message over; never waits for the target."""


class InProcessLink:
    """Calls the receiver directly: a send returns once the next node has been fired, and no further."""

    def __init__(self) -> None:
        self._receivers: dict[str, Receiver] = {}

    def bind(self, target: str, receive: Receiver) -> None:
        self._receivers[target] = receive

    def send(self, message: Message) -> None:
        self._receivers[message.target](message)
