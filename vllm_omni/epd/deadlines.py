"""``Deadlines``: how requests stand to their SLOs, whose turn it is, and how long an iteration may take for them.

From: HydraInfer, section 2.3 (when a request meets its SLO).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from vllm.v1.request import Request

from vllm_omni.epd.budget import Budgets
from vllm_omni.epd.cost import LanguageLoad
from vllm_omni.messages.slo import SHARE_OF_GAPS, Slo, enough_in_time

TPOT_FACTOR_OF_LOST = 2.0
OVERLOAD = 3  # times the TTFT, to the tokens of those who wait
NUM_ANSWERS_EXPECTED = 16  # as long as about so many before them were
MIN_PACE = 0.1  # of prompts and encodes, beside decodes that take the whole of their TPOT themselves


@dataclass
class SloState:
    """How a request stands to its SLO. Times are those of the scheduler's clock.

    From: HydraInfer, section 2.3.
    """

    arrived_at: float
    ttft_s: float | None
    tpot_s: float | None
    max_gaps: int  # between tokens, if the request takes all it may
    tpot_share: float = SHARE_OF_GAPS
    needed_s: float | None = None  # to its first token, with the machine to itself, when it was first looked at
    last_token_at: float | None = None
    is_first_late: bool = False
    num_gaps: int = 0
    num_late_gaps: int = 0
    num_steps_given_way: int = 0  # to requests that can still meet theirs

    def add_tokens(self, num_tokens: int, now: float) -> None:
        """Tokens came; several of one iteration have gaps of nothing between them."""
        if self.last_token_at is None:
            self.is_first_late = self.ttft_s is not None and now - self.arrived_at > self.ttft_s
            self.num_gaps = num_tokens - 1
        else:
            self.num_gaps += num_tokens
            if self.tpot_s is not None and now - self.last_token_at > self.tpot_s:
                self.num_late_gaps += 1
        self.last_token_at = now

    @property
    def deadline(self) -> float:
        """When the next token is due; infinite without an SLO."""
        if self.last_token_at is None:
            return self.arrived_at + self.ttft_s if self.ttft_s is not None else float("inf")
        return self.last_token_at + self.tpot_s if self.tpot_s is not None else float("inf")

    def is_lost(self, now: float, seconds_left: float = 0.0) -> bool:
        """Whether no schedule can meet the SLO any more, if the next token takes at least ``seconds_left``."""
        if self.is_first_late:
            return True
        num_late = self.num_late_gaps
        if now + seconds_left > self.deadline:
            if self.last_token_at is None:
                return True
            num_late += 1
        return not enough_in_time(num_late, self.max_gaps, self.tpot_share)

    def can_spare_a_gap(self, expected_gaps: float) -> bool:
        """Whether one more late gap leaves it its SLO.

        Args:
            expected_gaps: of an answer; nobody knows when this one ends.
        """
        if self.tpot_s is None:
            return True
        num_gaps = min(self.max_gaps, max(self.num_gaps + 1, int(expected_gaps)))
        return enough_in_time(self.num_late_gaps + 1, num_gaps, self.tpot_share)


class Deadlines:
    """Of the requests that have an SLO. Times are those of the scheduler's clock.

    Args:
        patience: steps for which a request that is too late gives way, in a row.
        seconds_to_token: what a request's next token takes at least, with the machine to itself.
    """

    def __init__(self, patience: int, seconds_to_token: Callable[[Request], float]) -> None:
        self.states: dict[str, SloState] = {}  # by request
        self.expected_gaps = 0.0  # of an answer, by those that have ended
        self._patience = patience
        self._seconds_to_token = seconds_to_token
        self._known: dict[str, float] = {}  # seconds to a request's token, while one step is planned

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.states

    # -- requests come and go -----------------------------------------------------------------------------------------

    def add(self, request: Request, slo: Slo) -> None:
        self.states[request.request_id] = SloState(
            arrived_at=request.arrival_time,
            ttft_s=slo.ttft_ms / 1000 if slo.ttft_ms is not None else None,
            tpot_s=slo.tpot_ms / 1000 if slo.tpot_ms is not None else None,
            max_gaps=max(0, request.max_tokens - 1),
            tpot_share=slo.share,
        )

    def add_tokens(self, request_id: str, num_tokens: int, now: float) -> None:
        if (slo := self.states.get(request_id)) is not None:
            slo.add_tokens(num_tokens, now)

    def remove(self, request_id: str) -> None:
        slo = self.states.pop(request_id, None)
        if slo is not None and slo.last_token_at is not None:
            self.expected_gaps += (slo.num_gaps - self.expected_gaps) / NUM_ANSWERS_EXPECTED

    # -- whose turn it is ---------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """What requests need is looked up anew, once in a step."""
        self._known.clear()

    def seconds_to_token(self, request: Request) -> float:
        seconds = self._known.get(request.request_id)
        if seconds is None:
            seconds = self._known[request.request_id] = self._seconds_to_token(request)
        return seconds

    def in_order(self, requests: Iterable[Request], now: float) -> list[Request]:
        """Least slack first; behind them who cannot meet its SLO any more, for a while.

        Slack is what it was when the request came: whoever has its image by now would otherwise stand behind those who
        have none yet, and lose it to them.
        """
        keys = {request: self._urgency(request, now) for request in requests}
        for request, (gives_way, _) in keys.items():
            if gives_way:
                self.states[request.request_id].num_steps_given_way += 1
        return sorted(keys, key=keys.__getitem__)

    def _urgency(self, request: Request, now: float) -> tuple[bool, float]:
        slo = self.states.get(request.request_id)
        if slo is None:
            return False, math.inf
        if slo.needed_s is None:
            slo.needed_s = self.seconds_to_token(request)
        gives_way = (
            slo.num_steps_given_way < self._patience
            and slo.is_lost(now, slo.needed_s)
            and slo.is_lost(now, self.seconds_to_token(request))
        )
        return gives_way, slo.deadline - slo.needed_s

    def is_first_token_made_late(self, request_ids: Iterable[str], now: float, without_s: float, with_s: float) -> bool:
        """Whether a first token would be late that comes in ``with_s``, and not if it comes in ``without_s``."""
        slos = (self.states.get(request_id) for request_id in request_ids)
        waiting = [slo for slo in slos if slo is not None and slo.last_token_at is None]
        return any(slo.is_lost(now, with_s) and not slo.is_lost(now, without_s) for slo in waiting)

    # -- how long an iteration may take -------------------------------------------------------------------------------

    def limit_s(
        self,
        budgets: Budgets,
        decodes: Collection[Request],
        load: LanguageLoad,
        prefills: Collection[Request],
        waiting: Collection[Request],
        now: float,
    ) -> float | None:
        """What the iteration is planned to take; None: no limit.

        Args:
            load: of the decodes.
            prefills: those that run, in order; ``waiting`` likewise.
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
        if not self._can_spare_a_gap(decodes, now):
            return hurried_s
        # Each decode loses a gap, however long that is: so the next request is brought to its token in it.
        following = next(itertools.chain(prefills, waiting))
        return max(hurried_s, decodes_s + self.seconds_to_token(following))

    def _tpot_s(self, decodes: Iterable[Request], waiting: Iterable[Request], now: float) -> float | None:
        """The shortest gap that a decode asks for; None: none does."""
        factor_of_lost = math.inf if self._is_overloaded(waiting, now) else TPOT_FACTOR_OF_LOST
        gaps = []
        for request in decodes:
            slo = self.states.get(request.request_id)
            if slo is not None and slo.tpot_s is not None:
                # Who cannot meet its SLO any more gives way, and yet does not stand still for a whole encode.
                gaps.append(slo.tpot_s * (factor_of_lost if slo.is_lost(now) else 1))
        shortest = min(gaps, default=math.inf)
        return shortest if shortest < math.inf else None

    def _is_overloaded(self, waiting: Iterable[Request], now: float) -> bool:
        """Whether who waits with an SLO cannot meet it any more, and is much: then what is done per second counts."""
        slos = [slo for request in waiting if (slo := self.states.get(request.request_id)) is not None]
        ttft_s = min((slo.ttft_s for slo in slos if slo.ttft_s is not None), default=math.inf)
        if ttft_s == math.inf or not all(slo.is_lost(now) for slo in slos):
            return False
        return sum(map(self.seconds_to_token, waiting)) > OVERLOAD * ttft_s

    def _is_hurried(self, requests: Iterable[Request], pace: float, now: float) -> bool:
        """Whether a first token would be late if everything before it went on at this pace."""
        until = now
        for request in requests:
            left_s = self.seconds_to_token(request)
            until += left_s / pace
            slo = self.states.get(request.request_id)
            is_late = slo is not None and slo.last_token_at is None and slo.deadline < until
            if slo is not None and is_late and not slo.is_lost(now, left_s):
                return True
        return False

    def _can_spare_a_gap(self, decodes: Iterable[Request], now: float) -> bool:
        """Whether the decodes that have an SLO to lose, if there are any, keep it with one more gap that is late."""
        slos = [self.states.get(request.request_id) for request in decodes]
        to_lose = [slo for slo in slos if slo is not None and not slo.is_lost(now)]
        return bool(to_lose) and all(slo.can_spare_a_gap(self.expected_gaps) for slo in to_lose)
