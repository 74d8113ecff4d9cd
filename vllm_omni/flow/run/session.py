"""Run the calls of a session one after the other, and keep the state that they share (a cache, a history)."""

import logging
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

from vllm_omni.errors import OmniError
from vllm_omni.flow.graph.declarations import GlobalParameters

logger = logging.getLogger(__name__)


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
        """The parameters of a session, or of a call without one.

        Raises:
            OmniError: one cannot be made.
        """
        if not self._declared:
            return {}
        key = (False, call_id) if session is None else (True, session)
        if key not in self._of:
            made: dict[str, Any] = {}
            for name, one in self._declared.items():
                try:
                    made[name] = one.make()
                except Exception as exc:
                    self._release(made)
                    raise OmniError(f"parameters {name!r} could not be made: {exc!r}") from exc
            self._of[key] = made
        return self._of[key]

    def leave(self, session: str | None, call_id: str) -> None:
        """End a call: release its parameters unless they belong to a session."""
        if session is None:
            self._release(self._of.pop((False, call_id), {}))

    def end(self, session: str) -> None:
        self._release(self._of.pop((True, session), {}))

    def end_all(self) -> None:
        while self._of:
            self._release(self._of.popitem()[1])

    def __len__(self) -> int:
        return len(self._of)

    def _release(self, made: Mapping[str, Any]) -> None:
        for name, value in made.items():
            release = self._declared[name].release
            try:
                if release is not None:
                    release(value)
            except Exception:  # the call, or the runtime, is closing: both must come to their end
                logger.exception("parameters %r could not be released", name)
