"""When is a call over? When nothing of it is in flight any more."""

from collections.abc import Callable
from typing import NamedTuple, Protocol


class Activity(NamedTuple):
    """One thing in flight: an activation of a node, or (with ``node`` ENTRY) a graph output that has not ended."""

    node: str
    activation_id: int = 0
    output: str = ""


class Tracker(Protocol):
    """Where a controller reports its activations: the call's own, or what tells that of another process."""

    def begin(self, activity: Activity) -> None: ...

    def end(self, activity: Activity) -> None: ...


class ActivityTracker:
    """The in-flight set of one call; ``on_idle`` runs once, when the last activity ends.

    Outputs count as activities too: between the end of a producer and the firing of its consumer a frame may be under
    way on a link, and the call must not seem over then.

    From: Omni-Flow section 3.5, ActivityTracker.
    """

    def __init__(self, on_idle: Callable[[], None]):
        self._on_idle = on_idle
        self._inflight: set[Activity] = set()

    @property
    def inflight(self) -> frozenset[Activity]:
        return frozenset(self._inflight)

    def begin(self, activity: Activity) -> None:
        assert activity not in self._inflight, f"{activity} began twice"
        self._inflight.add(activity)

    def end(self, activity: Activity) -> None:
        """End an activity; ending it again does nothing, so that an abort may end what then ends by itself."""
        if activity in self._inflight:
            self._inflight.remove(activity)
            if not self._inflight:
                self._on_idle()
