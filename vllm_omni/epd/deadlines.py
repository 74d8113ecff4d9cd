"""``Deadlines``: the order of requests by their SLOs, and how long an iteration may take for them.

From: HydraInfer, section 2.3 (when a request meets its SLO).
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_omni.epd.budget import Budgets
from vllm_omni.epd.cost import LanguageLoad
from vllm_omni.epd.engine_request import Request
from vllm_omni.errors import InvalidRequest
from vllm_omni.messages.slo import Slo, SloState, slo_of

logger = logging.getLogger(__name__)

TPOT_FACTOR_OF_LOST = 2.0
OVERLOAD = 3  # overload: the waiting requests' first tokens need more than this many TTFT targets
NUM_ANSWERS_EXPECTED = 16  # the expected length of an answer averages about this many before it
MIN_PACE = 0.1  # of prompts and encodes, beside decodes that take all of their TPOT themselves


@dataclass
class _Deadline:
    """A request with an SLO."""

    state: SloState
    needed_s: float | None = None  # to its first token, with the machine to itself, when it was first looked at
    num_deferrals: int = 0  # steps for which requests that can still meet their SLO went first


class Deadlines:
    """The requests with an SLO. Times are those of the scheduler's clock.

    Args:
        patience: steps in a row for which a request that is too late is deferred.
        seconds_to_token: the least time to a request's next token, with the machine to itself.
    """

    def __init__(self, patience: int, seconds_to_token: Callable[[Request], float]) -> None:
        self.expected_gaps = 0.0  # of an answer, by those that have ended
        self._requests: dict[str, _Deadline] = {}
        self._patience = patience
        self._seconds_to_token = seconds_to_token
        self._known: dict[str, float] = {}  # seconds to a request's next token, while one step is planned

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def __len__(self) -> int:
        return len(self._requests)

    # -- start and end of a request -----------------------------------------------------------------------------------

    def add_request(self, request: Request, extra_args: Mapping[str, Any] | None, default: Slo) -> None:
        """Add a request with these ``SamplingParams.extra_args``, if it has an SLO."""
        slo = default
        try:
            slo = slo_of(extra_args, default)
        except InvalidRequest as exc:  # the front end rejects these; an exception here would end the engine
            logger.warning("request %s: its own SLO is ignored: %s", request.request_id, exc)
        if slo:
            self.add(request, slo)

    def add(self, request: Request, slo: Slo) -> None:
        state = SloState(slo, request.arrival_time, max(0, request.max_tokens - 1))
        self._requests[request.request_id] = _Deadline(state)

    def add_tokens(self, request_id: str, num_tokens: int, now: float) -> None:
        if (deadline := self._requests.get(request_id)) is not None:
            deadline.state.add_tokens(num_tokens, now)

    def remove(self, request_id: str) -> None:
        deadline = self._requests.pop(request_id, None)
        if deadline is not None and deadline.state.has_token:
            self.expected_gaps += (deadline.state.num_gaps - self.expected_gaps) / NUM_ANSWERS_EXPECTED

    def state_of(self, request: Request) -> SloState | None:
        deadline = self._requests.get(request.request_id)
        return deadline.state if deadline is not None else None

    # -- order --------------------------------------------------------------------------------------------------------

    def start_step(self) -> None:
        """Look up anew, once in a step, what requests need."""
        self._known.clear()

    def seconds_to_token(self, request: Request) -> float:
        seconds = self._known.get(request.request_id)
        if seconds is None:
            seconds = self._known[request.request_id] = self._seconds_to_token(request)
        return seconds

    def in_order(self, requests: Iterable[Request], now: float) -> list[Request]:
        """Sort by slack, least first; requests whose SLO is already missed come last, for ``patience`` steps.

        Slack is computed with the time that a request needed when it came. By what is left, a request whose image is
        encoded would stand behind those without theirs, and lose the image to them.
        """
        keys = {request: self._urgency(request, now) for request in requests}
        for request, (is_deferred, _) in keys.items():
            if is_deferred:
                self._requests[request.request_id].num_deferrals += 1
        return sorted(keys, key=keys.__getitem__)

    def _urgency(self, request: Request, now: float) -> tuple[bool, float]:
        deadline = self._requests.get(request.request_id)
        if deadline is None:
            return False, math.inf
        if deadline.needed_s is None:
            deadline.needed_s = self.seconds_to_token(request)
        is_deferred = (
            deadline.num_deferrals < self._patience
            and deadline.state.is_lost(now, deadline.needed_s)
            and deadline.state.is_lost(now, self.seconds_to_token(request))
        )
        return is_deferred, deadline.state.deadline - deadline.needed_s

    def is_first_token_made_late(
        self, requests: Iterable[Request], now: float, without_s: float, with_s: float
    ) -> bool:
        """Whether a first token that is in time after ``without_s`` would be late after ``with_s``."""
        return any(
            state.is_lost(now, with_s) and not state.is_lost(now, without_s)
            for state in self._states(requests)
            if not state.has_token
        )

    # -- duration of an iteration -------------------------------------------------------------------------------------

    def limit_s(
        self,
        budgets: Budgets,
        decodes: Collection[Request],
        load: LanguageLoad,
        prefills: Collection[Request],
        waiting: Collection[Request],
        now: float,
    ) -> float | None:
        """Plan how long the iteration may take; None: no limit.

        Args:
            load: of the decodes.
            prefills: running requests whose prompt is not complete, in order; ``waiting`` likewise.
        """
        tpot_s = self._tpot_s(decodes, waiting, now)
        limit_s = budgets.limit_s(tpot_s)
        if limit_s is None:
            return None
        decodes_s = budgets.seconds_alone(load, 0)
        pace = max(MIN_PACE, 1 - decodes_s / limit_s)
        if not self._is_hurried(itertools.chain(prefills, waiting), pace, now):
            return limit_s
        hurried_s = budgets.limit_s(tpot_s, is_hurried=True)
        assert hurried_s is not None
        if not self._can_spare_gap(decodes, now):
            return hurried_s
        # Each decode loses a gap, however long it is, so the next request is brought to its first token in this one.
        following = next(itertools.chain(prefills, waiting))
        return max(hurried_s, decodes_s + self.seconds_to_token(following))

    def _states(self, requests: Iterable[Request]) -> list[SloState]:
        return [state for request in requests if (state := self.state_of(request)) is not None]

    def _tpot_s(self, decodes: Iterable[Request], waiting: Collection[Request], now: float) -> float | None:
        """The shortest gap that a decode asks for; None: none does."""
        # Decodes whose SLO is missed yield to the others, but do not stand still for a whole encode.
        factor_of_lost = math.inf if self._is_overloaded(waiting, now) else TPOT_FACTOR_OF_LOST
        gaps = (state.tpot_limit_s * (factor_of_lost if state.is_lost(now) else 1) for state in self._states(decodes))
        shortest = min(gaps, default=math.inf)
        return shortest if shortest < math.inf else None

    def _is_overloaded(self, waiting: Collection[Request], now: float) -> bool:
        """Whether the waiting requests miss their SLO already, and are so many that throughput matters."""
        states = self._states(waiting)
        ttft_s = min((state.ttft_limit_s for state in states), default=math.inf)
        if ttft_s == math.inf or not all(state.is_lost(now) for state in states):
            return False
        return sum(map(self.seconds_to_token, waiting)) > OVERLOAD * ttft_s

    def _is_hurried(self, requests: Iterable[Request], pace: float, now: float) -> bool:
        """Whether a first token would be late if everything before it continued at this pace."""
        until = now
        for request in requests:
            left_s = self.seconds_to_token(request)
            until += left_s / pace
            state = self.state_of(request)
            is_late = state is not None and not state.has_token and state.deadline < until
            if state is not None and is_late and not state.is_lost(now, left_s):
                return True
        return False

    def _can_spare_gap(self, decodes: Iterable[Request], now: float) -> bool:
        """Whether there are decodes with an SLO that is not missed, and all of them keep it with one more late gap."""
        can_lose = [state for state in self._states(decodes) if not state.is_lost(now)]
        return bool(can_lose) and all(state.can_spare_gap(self.expected_gaps) for state in can_lose)
