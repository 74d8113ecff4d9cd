"""``Router``: decide which instance does which tasks of each request. No I/O, no vLLM: an event loop or a simulator
carries the decisions out, and reports what came of them.

A request is assigned step by step: the instance with the least work takes the next tasks; when they are complete, the
rest is assigned. An assignment is withdrawn if its instance does not start it in time, and repeated or resumed if the
instance terminates.

From: HydraInfer, sections 4.1 (request processor), 4.3 (migration) and 4.4 (instances of any mix).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

from vllm_omni.config.epd import EPDDeployment, Tasks
from vllm_omni.epd.assignment import Candidate, RequestSize, find_candidates
from vllm_omni.epd.balance import InstanceBalance
from vllm_omni.epd.cost import CostModel
from vllm_omni.epd.held_pages import POOL, Content, HeldPages, content_of
from vllm_omni.messages.token_names import TokenNames

WORK_UNITS = 10**9  # in a token or a second: work is summed in integers, so that the sum returns to zero

POOL_SHARE = 0.9  # of the work of computing a page that reading it from a pool saves (docs/performance.md)

MAX_TERMINATIONS = 2  # instances that may terminate while they have a request; after the next, the request is failed


class Assignment(NamedTuple):
    """Tasks of a request that an instance does; pass it to ``Router.release`` at its end, whatever the end is."""

    instance: str
    tasks: Tasks
    work: int  # in WORK_UNITS


@dataclass
class RequestState:
    """What the router knows of one request."""

    size: RequestSize
    names: TokenNames | None = None  # of the prompt's tokens, by which caches are told apart; None: of no use
    todo: Tasks = Tasks.PD  # without the tasks that are complete
    keeps_together: bool = False  # prefill and decode stay on one instance
    is_resumable: bool = False  # a reply in progress can continue on another instance
    session: str | None = None
    reads_pool: bool = True  # whether pages of a pool may be loaded for it, if the stage has one
    reads_cache: bool = True  # whether what an engine finds says what it holds
    num_given: int = 0  # tokens of the reply that the user has
    num_assignments: int = 0
    num_terminations: int = 0  # of instances that had the request
    avoided: set[str] = field(default_factory=set)  # instances that did not start the next tasks in time
    recovery_deadline: float | None = None  # set while no instance can take the request


class Recovery(Enum):
    """What happens to a request whose instance terminated."""

    REPEAT = "another instance repeats the same tasks"
    RESUME = "another instance continues the reply, from a prompt that ends with the tokens that the user has"
    TOO_MANY = "the request fails: it may be the reason why instances terminate"
    NOT_RESUMABLE = "the request fails: its reply could continue differently"


class RouterStatistics(NamedTuple):
    """Counts since the start, and the work that is outstanding now."""

    num_tasks: Mapping[str, int]  # by instance: assignments
    num_redone: int  # assignments to another instance, because the first terminated or did not start in time
    work: Mapping[str, float]  # by instance, as ``RequestSize.work``
    num_chosen: Mapping[str, int]  # by reason (``balance.Reason``): assignments


class Router:
    """Assigns requests to the instances of one stage.

    Args:
        kinds: instance -> kind; may be replaced while requests run: an instance left out gets no new tasks.
        deployment: policy and time-outs.
        is_available: whether an instance runs at this moment.
        cost: measures work in seconds rather than in tokens.
        has_pool: whether instances read the pages that others have computed.
    """

    def __init__(
        self,
        kinds: Mapping[str, Tasks],
        deployment: EPDDeployment,
        is_available: Callable[[str], bool],
        cost: CostModel | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        has_pool: bool = False,
    ) -> None:
        self.kinds = kinds
        self.admission_timeout_s = deployment.admission_timeout_s
        self.recovery_timeout_s = deployment.recovery_timeout_s
        self._is_available = is_available
        self._cost = cost
        self._clock = clock
        self._balance = InstanceBalance(deployment.balance or "least_work")
        self._work: Counter[str] = Counter()  # instance -> outstanding work, in WORK_UNITS
        self._num_open: Counter[str] = Counter()  # instance -> assignments that are not released
        self._pages = HeldPages()
        self._has_pool = has_pool
        self._num_tasks: Counter[str] = Counter()
        self._num_chosen: Counter[str] = Counter()
        self._num_redone = 0

    def assign(self, request: RequestState) -> Assignment | None:
        """Assign the request's next tasks. None: no instance can take them; try again when one has recovered, for at
        most ``recovery_left_s``.
        """
        candidates = self._candidates(request)
        if not candidates:
            if request.recovery_deadline is None:
                request.recovery_deadline = self._clock() + self.recovery_timeout_s
            return None
        request.recovery_deadline = None
        tasks = {candidate.instance: candidate.tasks for candidate in candidates}
        content = self._content(request, candidates[0].tasks)
        saved = {name: self._saved(request, name, tasks[name], content) for name in tasks} if content.keys else {}
        name, reason = self._balance.choose(list(tasks), request.todo.first, self._work, request.session, saved)
        work = round(WORK_UNITS * request.size.work(tasks[name], self._cost)) - saved.get(name, 0)
        assignment = Assignment(name, tasks[name], work)
        self._work[name] += assignment.work
        self._num_open[name] += 1
        self._num_tasks[name] += 1
        self._num_chosen[reason] += 1
        self._pages.note_given(name, content)
        request.num_assignments += 1
        return assignment

    def _content(self, request: RequestState, tasks: Tasks) -> Content:
        """What caches may hold of the next tasks, if that matters."""
        return content_of(request.names if self._balance.policy == "affinity" else None, tasks)

    def _saved(self, request: RequestState, name: str, tasks: Tasks, content: Content) -> int:
        """The work of the tasks that an instance would not have, in WORK_UNITS."""
        held: float = self._pages.num_tokens(name, content)
        if request.reads_pool and content.is_chain:
            held += POOL_SHARE * max(self._pages.num_tokens(POOL, content) - held, 0)
        left = request.size.work(tasks, self._cost, round(held))
        return round(WORK_UNITS * (request.size.work(tasks, self._cost) - left))

    def note_found(self, request: RequestState, assignment: Assignment, num_found: int) -> None:
        """The request has its first output: of its prompt, the instance had so many tokens in its caches or the pool,
        and has computed the others.
        """
        content = self._content(request, assignment.tasks)
        if Tasks.P in assignment.tasks and request.reads_cache:
            self._pages.note_found(assignment.instance, content, num_found)
        self._note_computed(assignment.instance, content)

    def note_reply(self, request: RequestState, assignment: Assignment, token_ids: Sequence[int]) -> None:
        """The instance has computed these tokens behind the prompt: the prompt of the next turn has them, too."""
        if request.names is not None:
            names = TokenNames([*request.names.token_ids, *token_ids], request.names.parts, request.names.salt)
            self._note_computed(assignment.instance, self._content(replace(request, names=names), assignment.tasks))

    def _note_computed(self, name: str, content: Content) -> None:
        self._pages.note_computed(name, content)
        if self._has_pool and content.is_chain:
            self._pages.note_computed(POOL, content)

    def forget_pages(self, name: str) -> None:
        """The instance has terminated, and its caches with it, but for a pool."""
        self._pages.forget(name)

    def recovery_left_s(self, request: RequestState) -> float:
        """How much longer the request waits for an instance."""
        assert request.recovery_deadline is not None, "`assign` returned None"
        return max(0.0, request.recovery_deadline - self._clock())

    def release(self, assignment: Assignment) -> None:
        """The instance no longer has these tasks: complete, aborted, withdrawn or failed."""
        self._work[assignment.instance] -= assignment.work
        self._num_open[assignment.instance] -= 1

    def num_open(self, name: str) -> int:
        """Assignments that an instance has."""
        return self._num_open[name]

    def complete(self, request: RequestState, assignment: Assignment) -> None:
        """The tasks are complete; the rest of ``request.todo``, if any, is assigned next."""
        request.todo &= ~assignment.tasks
        request.avoided.clear()

    def may_withdraw(self, request: RequestState, assignment: Assignment) -> bool:
        """Whether another instance would have no more work with these tasks than this one has.

        Ask every ``admission_timeout_s`` until the instance has started the tasks.
        """
        others = [one.instance for one in self._candidates(request) if one.instance != assignment.instance]
        return any(self._work[name] + assignment.work <= self._work[assignment.instance] for name in others)

    def withdraw(self, request: RequestState, assignment: Assignment) -> None:
        """The instance did not start the tasks in time: another one does them, unless there is none left."""
        request.avoided.add(assignment.instance)
        self._num_redone += 1

    def recover(self, request: RequestState) -> Recovery:
        """The instance that had the request terminated. After RESUME, prompt and embeddings are computed again as far
        as they are lost: add E to ``request.todo`` if images must be encoded.
        """
        request.num_terminations += 1
        if request.num_terminations > MAX_TERMINATIONS:
            return Recovery.TOO_MANY
        if request.num_given and not request.is_resumable:
            return Recovery.NOT_RESUMABLE
        self._num_redone += 1
        if not request.num_given:
            return Recovery.REPEAT
        request.todo = Tasks.PD
        return Recovery.RESUME

    def statistics(self) -> RouterStatistics:
        work = {name: self._work[name] / WORK_UNITS for name in self.kinds}
        return RouterStatistics(dict(self._num_tasks), self._num_redone, work, dict(self._num_chosen))

    def _candidates(self, request: RequestState) -> list[Candidate]:
        kinds = {name: kind for name, kind in self.kinds.items() if self._is_available(name)}
        found = find_candidates(request.todo, kinds, keeps_together=request.keeps_together)
        return [candidate for candidate in found if candidate.instance not in request.avoided] or found
