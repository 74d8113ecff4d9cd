"""Detect the end of a call: nothing of it is in flight."""

from collections.abc import Callable
from typing import Protocol

import msgspec


class Activity(msgspec.Struct, frozen=True):
    """One thing in flight: an activation of a node, or (with ``node`` ENTRY) a graph output that has not ended."""

    node: str
    activation_id: int = 0
    output: str = ""


class Tracker(Protocol):
    """Receives the reports of a controller: the call's own tracker, or the one of a host, which sends them on."""

    def start(self, activity: Activity) -> None: ...

    def end(self, activity: Activity) -> None: ...


class ActivityTracker:
    """The in-flight set of one call; ``on_idle`` runs once, when the last activity ends.

    Outputs count as activities too: between the end of a producer and the firing of its consumer a frame may be in
    flight on a link, and the call must not seem over then.

    From: Omni-Flow section 3.5, ActivityTracker.
    """

    def __init__(self, on_idle: Callable[[], None]):
        self._on_idle = on_idle
        self._inflight: set[Activity] = set()

    @property
    def inflight(self) -> frozenset[Activity]:
        return frozenset(self._inflight)

    def start(self, activity: Activity) -> None:
        assert activity not in self._inflight, f"{activity} started twice"
        self._inflight.add(activity)

    def end(self, activity: Activity) -> None:
        """End an activity. Ending it again does nothing: an abort may end an activity that later ends by itself."""
        if activity in self._inflight:
            self._inflight.remove(activity)
            if not self._inflight:
                self._on_idle()
