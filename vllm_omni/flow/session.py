"""Calls of one session run one after the other, because they share what the session keeps (a cache, a history)."""

from collections.abc import Callable, Hashable


class GCScheduler:
    """A queue per session: its head runs, and the next one starts when that has wholly left. Sessions do not wait for
    one another.

    Serialising here, before a call enters the graph, leaves nothing for nodes to wait for within it.

    From: Omni-Flow section 3.5, Cross-GraphCall Serialization.
    """

    def __init__(self) -> None:
        self._queues: dict[str, dict[Hashable, Callable[[], None]]] = {}  # in the order of arrival; the head runs

    def enter(self, session: str, call: Hashable, start: Callable[[], None]) -> None:
        """Run ``start`` now, or when all calls of the session that came before have left."""
        queue = self._queues.setdefault(session, {})
        queue[call] = start
        if len(queue) == 1:
            start()

    def leave(self, session: str, call: Hashable) -> None:
        """The call is over, be it before it started."""
        queue = self._queues[session]
        was_head = next(iter(queue)) == call
        del queue[call]
        if not queue:
            del self._queues[session]
        elif was_head:
            next(iter(queue.values()))()

    @property
    def num_waiting(self) -> int:
        return sum(len(queue) - 1 for queue in list(self._queues.values()))
