"""Which of several instances gets a request's next tasks.

From: HydraInfer, section 4.3 (among several targets: round robin), and Omni-Flow, section 3.5 (sessions).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from typing import Literal, NamedTuple

from vllm_omni.config.epd import Balance, Tasks

MAX_SESSIONS = 1 << 16  # whose instance is remembered; the least recently used go first

Reason = Literal["load", "order", "session", "pages"]


class Choice(NamedTuple):
    instance: str
    reason: Reason  # the policy's; "pages": its caches hold some of the request


class InstanceBalance:
    """Choose by outstanding work, by round robin, by sessions, or by work and the contents of caches.

    Args:
        policy: "least_work"; "round_robin"; "session": a session stays on its instance; "affinity": the instance for
            which outstanding work, less what its caches save of the request, is least. A session of which no cache
            holds anything stays.
    """

    def __init__(self, policy: Balance) -> None:
        self.policy = policy
        # One counter for each task. With a common one, requests that alternate between two encoders and two other
        # instances would leave one of each idle.
        self._num_chosen: Counter[Tasks] = Counter()
        self._sessions: OrderedDict[Hashable, str] = OrderedDict()  # task and session -> the last instance

    def choose(
        self,
        names: Sequence[str],
        task: Tasks,
        work: Mapping[str, float],
        session: str | None = None,
        saved: Mapping[str, float] | None = None,
    ) -> Choice:
        """Choose one of the names.

        Args:
            task: the next task; a session has an instance for each.
            work: instance -> outstanding work.
            saved: instance -> work that it would not have with this request, as its caches hold the results.
        """
        if self.policy in ("least_work", "round_robin"):
            return self._next(names, task, work)
        if self.policy == "affinity" and saved and any(saved.get(name) for name in names):
            left = {name: work.get(name, 0) - saved.get(name, 0) for name in names}
            name = self._next(names, task, left).instance
            choice = Choice(name, "pages" if saved.get(name) else "load")
        else:
            bound = self._sessions.get((task, session)) if session is not None else None
            is_bound = bound is not None and bound in names
            choice = Choice(str(bound), "session") if is_bound else self._next(names, task, work)
        if session is not None:
            self._remember((task, session), choice.instance)
        return choice

    def _next(self, names: Sequence[str], task: Tasks, work: Mapping[str, float]) -> Choice:
        names = sorted(names)
        if self.policy != "round_robin":
            least = min(work.get(name, 0) for name in names)
            names = [name for name in names if work.get(name, 0) == least]
        self._num_chosen[task] += 1
        name = names[(self._num_chosen[task] - 1) % len(names)]
        return Choice(name, "order" if self.policy == "round_robin" else "load")

    def _remember(self, key: Hashable, name: str) -> None:
        self._sessions[key] = name
        self._sessions.move_to_end(key)
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
