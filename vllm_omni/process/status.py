"""``StageStatus``: whether a stage runs, and why not."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class StageState(StrEnum):
    RUNNING = "running"
    RESTARTING = "restarting"
    DRAINED = "drained"  # runs, and gets no new requests
    FAILED = "failed"


@dataclass(frozen=True)
class StageStatus:
    """The state of a stage; replaced as a whole, because the supervisor's thread writes it."""

    state: StageState = StageState.RUNNING
    reason: str | None = None  # why it is not running, or cannot be watched
    num_restarts: int = 0  # since the server's start
