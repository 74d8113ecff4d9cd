"""How messages reach another controller; within the process, by calling it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias


class Message(Protocol):
    """A ``Frame``, ``SlotEos`` or ``Credit``, or a message of ``flow.remote``."""

    @property
    def call_id(self) -> str: ...

    @property
    def target(self) -> str: ...


Receiver: TypeAlias = Callable[[Any], None]
"""Takes every ``Message`` that is for its target."""


class Link(Protocol):
    """Carries messages to where their target lives.

    A link may reorder and repeat frames and credit, never lose one; of other messages, those from one process to
    another come once and in order. What is of a call that is over is dropped by its receiver.
    """

    def bind(self, target: str, receive: Receiver) -> None:
        """What is for ``target`` (a node, or ENTRY) goes to ``receive``, on the event loop that bound it."""

    def send(self, message: Message) -> None:
        """Hand a message over; never waits for the target."""


MAX_NESTING = 40  # deliveries within deliveries; Python's stack holds about a hundred


class InProcessLink:
    """Calls the receiver directly: a send returns once the next node has been fired, and no further.

    What a node never fired for is told on by who hears of it, node by node. Where such a chain is long, the rest of it
    is delivered by the first send rather than the last.
    """

    def __init__(self) -> None:
        self._receivers: dict[str, Receiver] = {}
        self._nesting = 0
        self._postponed: deque[Message] = deque()

    def bind(self, target: str, receive: Receiver) -> None:
        self._receivers[target] = receive

    def send(self, message: Message) -> None:
        if self._nesting == MAX_NESTING:
            self._postponed.append(message)
            return
        self._nesting += 1
        try:
            self._receivers[message.target](message)
            while self._nesting == 1 and self._postponed:
                message = self._postponed.popleft()
                self._receivers[message.target](message)
        finally:
            self._nesting -= 1
