"""What a front end, the process that speaks to Ray for it, and the programs on Ray's nodes say to each other.

Lines of JSON over pipes; the actors carry bytes of them. Nothing of ours is pickled.
"""

from __future__ import annotations

import os
import sys
from typing import Any, BinaryIO, TypeAlias

import msgspec


class Node(msgspec.Struct, frozen=True):
    """A node of the cluster that is alive, with what is free on it."""

    id: str
    name: str  # as `ray start --node-name` says; by default its address
    address: str
    hostname: str
    has_cards: bool  # whether any is free or not
    num_cards: int
    num_cpus: float
    memory: int


class Bundle(msgspec.Struct, frozen=True):
    """What one host needs of a node."""

    host: str  # its name in the deployment
    node: str  # id of the node; empty: any that has the resources, which is never so for a part of an engine
    resources: dict[str, float]


class Work(msgspec.Struct, frozen=True):
    """What a host runs: the arguments of ``serve_stages``."""

    host: str
    model: str
    stages: list[str]
    join: str
    revision: str | None
    secret: bytes


class Outcome(msgspec.Struct, frozen=True):
    """How the program of a host has ended."""

    host: str
    reason: str  # empty: because the front end has ended
    is_rejected: bool = False  # the host is not as the front end; another attempt would end in the same way


# -- to the process that speaks to Ray --------------------------------------------------------------------------------


class Connect(msgspec.Struct, frozen=True, tag=True):
    """Answered by ``Connected``."""

    address: str  # empty: that of RAY_ADDRESS, or of the cluster on this machine


class ListNodes(msgspec.Struct, frozen=True, tag=True):
    """Answered by ``Nodes``."""


class Reserve(msgspec.Struct, frozen=True, tag=True):
    """Make one placement group of these bundles, all or none; answered by ``Reserved``."""

    bundles: list[Bundle]
    timeout_s: float


class Run(msgspec.Struct, frozen=True, tag=True):
    """Start an actor in the bundle of a host, and its program; answered by ``Running``."""

    work: Work


class Watch(msgspec.Struct, frozen=True, tag=True):
    """Wait until a host's program has ended; answered by ``Ended``."""

    timeout_s: float


class Finish(msgspec.Struct, frozen=True, tag=True):
    """Wait for programs that are ending, remove actors and placement groups, and exit."""

    timeout_s: float


Order: TypeAlias = Connect | ListNodes | Reserve | Run | Watch | Finish

# -- from it ----------------------------------------------------------------------------------------------------------


class Connected(msgspec.Struct, frozen=True, tag=True):
    address: str  # of this machine, where the other nodes reach it


class Nodes(msgspec.Struct, frozen=True, tag=True):
    nodes: list[Node]


class Reserved(msgspec.Struct, frozen=True, tag=True):
    is_ready: bool  # False: nothing is reserved


class Running(msgspec.Struct, frozen=True, tag=True):
    pass


class Ended(msgspec.Struct, frozen=True, tag=True):
    outcomes: list[Outcome]


class Failed(msgspec.Struct, frozen=True, tag=True):
    reason: str


Answer: TypeAlias = Connected | Nodes | Reserved | Running | Ended | Failed


def encode(message: Any) -> bytes:
    """One line, without its end."""
    return msgspec.json.encode(message)


def decode(line: bytes, kind: Any) -> Any:
    return msgspec.json.decode(line, type=kind)


def take_stdout() -> BinaryIO:
    """Keep this process's standard output for messages; what libraries print goes to standard error."""
    sys.stdout.flush()
    kept = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    return kept
