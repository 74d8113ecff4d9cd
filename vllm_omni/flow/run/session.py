"""Run the calls of a session one after the other, and keep the state that they share (a cache, a history).

Not yet served: a server opens its calls without a session.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

from vllm_omni.flow.graph.declarations import GlobalParameters


class GCScheduler:
    """A queue per session: its head runs, and the next call starts when the head has left. Sessions are independent.

    Calls are serialized before they enter the graph, so no node has to wait for another call.

    From: Omni-Flow section 3.5, Cross-GraphCall Serialization.
    """

    def __init__(self) -> None:
        self._queues: dict[str, dict[Hashable, Callable[[], None]]] = {}  # in the order of arrival

    def enter(self, session: str, call: Hashable, start: Callable[[], None]) -> None:
        """Run ``start`` now, or when all earlier calls of the session have left."""
        queue = self._queues.setdefault(session, {})
        queue[call] = start
        if len(queue) == 1:
            start()

    def leave(self, session: str, call: Hashable) -> None:
        """Remove a call that is over, even if it has not started."""
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


class ParameterStore:
    """The state that the calls of a session share, created by the first call. From: Omni-Flow section 3.1."""

    def __init__(self, declared: Iterable[GlobalParameters]) -> None:
        self._declared = {one.name: one for one in declared}
        self._of: dict[tuple[bool, str], Mapping[str, Any]] = {}  # (has a session, its name or the call's id)

    def of(self, session: str | None, call_id: str) -> Mapping[str, Any]:
        if not self._declared:
            return {}
        key = (session is not None, session or call_id)
        if key not in self._of:
            self._of[key] = {name: one.make() for name, one in self._declared.items()}
        return self._of[key]

    def leave(self, session: str | None, call_id: str) -> None:
        """End a call: release its parameters unless they belong to a session."""
        if session is None:
            self._release((False, call_id))

    def end(self, session: str) -> None:
        self._release((True, session))

    def end_all(self) -> None:
        for key in list(self._of):
            self._release(key)

    def __len__(self) -> int:
        return len(self._of)

    def _release(self, key: tuple[bool, str]) -> None:
        for name, value in self._of.pop(key, {}).items():
            release = self._declared[name].release
            if release is not None:
                release(value)
