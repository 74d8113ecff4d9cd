"""Deliver messages to controllers; within the process, by calling them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias


class Message(Protocol):
    """A ``Frame``, ``SlotEos``, ``EdgeCredit`` or ``Report``, or a message of ``flow.remote``."""

    @property
    def call_id(self) -> str: ...

    @property
    def target(self) -> str: ...


Receiver: TypeAlias = Callable[[Any], None]
"""Receives every message for its target."""


class Link(Protocol):
    """Carries messages to the process of their target.

    A link may reorder and repeat frames and credit, but never lose them; it delivers other messages from one process to
    another once and in order. Receivers drop messages of calls that are over.
    """

    def bind(self, target: str, receive: Receiver) -> None:
        """Deliver messages for ``target`` (a node, or ENTRY) to ``receive``, on the event loop of the caller."""

    def send(self, message: Message) -> None:
        """Send a message; never waits for the target."""


MAX_NESTING = 40  # deliveries within deliveries; Python's stack has room for about a hundred


class InProcessLink:
    """Calls the receiver directly: a send returns once the next node has been fired, and no further.

    A node that cannot fire reports this to the next nodes within the delivery. In a long chain of such nodes, the
    outermost send delivers the rest, so the stack stays small.
    """

    def __init__(self) -> None:
        self._receivers: dict[str, Receiver] = {}
        self._nesting = 0
        self._deferred: deque[Message] = deque()

    def bind(self, target: str, receive: Receiver) -> None:
        self._receivers[target] = receive

    def send(self, message: Message) -> None:
        if self._nesting == MAX_NESTING:
            self._deferred.append(message)
            return
        self._nesting += 1
        try:
            self._receivers[message.target](message)
            while self._nesting == 1 and self._deferred:
                message = self._deferred.popleft()
                self._receivers[message.target](message)
        finally:
            self._nesting -= 1
