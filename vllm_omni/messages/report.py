"""``NodeReport``: what a node found out about a request; the front end alone adds reports up."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import msgspec

from vllm_omni.messages.payload import Payload
from vllm_omni.messages.span import Span
from vllm_omni.messages.timeline import TaskTimes


class NodeReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """One piece of news of a node about a request; there are several, each with what is new.

    It reaches the front end before the output that the node yields next, and before the end of the activation.
    """

    node: str  # the stage or function
    seconds: float | None = None  # that an activation has taken, without waits for its input; they add up
    task: TaskTimes | None = None  # a task of an autoregressive engine has ended, successfully or not
    published: list[Payload] = []  # leased by its engine; the front end releases them when the request is over
    spans: list[Span] = []  # of what has ended
    held_s: float = 0.0  # that an activation has waited for credit of its readers


Reporter: TypeAlias = Callable[[NodeReport], None]


def ignore(report: NodeReport) -> None:
    """A ``Reporter`` for requests without a front end."""
