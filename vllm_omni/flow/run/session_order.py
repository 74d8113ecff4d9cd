"""Run the activations of a node one at a time, in the order of their paths.

From: Omni-Flow section 3.2.2, Algorithm 1.
"""

import functools
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from vllm_omni.flow.run.activation import ActivationRun
from vllm_omni.flow.run.frame import Path
from vllm_omni.flow.run.inbound import InboundCredit
from vllm_omni.flow.run.order import PathOrder


class _Place(NamedTuple):
    """A place in the order; each is a complete leaf of PathOrder."""

    run: ActivationRun | None  # None: unreachable
    seq: int = 0
    last: bool = True


class SessionOrder:
    """The activations of one call at a node with session scheduling.

    Args:
        start: starts an activation.
    """

    __slots__ = ("_credit", "_due", "_pending", "_places", "_running", "_start", "closed")

    def __init__(self, start: Callable[[ActivationRun], None], credit: InboundCredit):
        self._start = start
        self._credit = credit
        self._places: PathOrder[_Place] = PathOrder()
        self._pending: dict[int, ActivationRun] = {}  # fired, but not started
        self._due: deque[ActivationRun] = deque()  # those of them that are next, in order
        self._running: ActivationRun | None = None
        self.closed = False  # nothing is started

    def add(self, run: ActivationRun, *, in_loop: bool) -> None:
        """Queue an activation that has fired."""
        for slot in run.bucket.slots.values():
            slot.stream.on_wait = functools.partial(self._on_wait, run)
        if in_loop:
            run.bucket.open_windows()
        self._pending[run.activation_id] = run
        self._advance(self._places.push(run.trace.path, _Place(run), run.trace.loops))

    def skip(self, path: Path, loops: tuple[int, ...]) -> None:
        """Fill the place of an unreachable activation."""
        self._advance(self._places.push(path, _Place(None), loops))

    def set_count(self, path: Path, count: int, loops: tuple[int, ...]) -> None:
        """Set the number of activations below a path."""
        self._advance(self._places.set_count(path, count, loops))

    def on_done(self, run: ActivationRun) -> None:
        if self._running is run:
            self._running = None
            self._start_next()

    def open_pending(self) -> None:
        """Open the windows of activations that wait for their place: earlier ones may depend on their producers.

        While an earlier one runs and does not wait for input it depends on none; but in a loop the waiting activation
        may be its own next iteration, which is always open.
        """
        if self._running is None or self._running.bucket.is_waited_for:
            for run in self._pending.values():
                run.bucket.open_windows()
            self._credit.open_forks()

    def _advance(self, due: Sequence[_Place]) -> None:
        self._due.extend(place.run for place in due if place.run is not None)
        self._start_next()

    def _start_next(self) -> None:
        if self._running is None and self._due and not self.closed:
            self._running = self._due.popleft()
            del self._pending[self._running.activation_id]
            self._start(self._running)
        self.open_pending()

    def _on_wait(self, run: ActivationRun) -> None:
        run.bucket.open_windows()
        self.open_pending()
