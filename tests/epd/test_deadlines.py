from dataclasses import replace

import pytest
from vllm.v1.request import Request

from tests.core.sched.drive import make_request
from tests.core.sched.random_requests import Engine, PlannedRequest
from vllm_omni.epd.deadlines import Deadlines, SloState
from vllm_omni.messages.slo import Slo

# -- a request's SLO --------------------------------------------------------------------------------------------------


def make_slo(max_gaps: int = 20) -> SloState:
    return SloState(arrived_at=100.0, ttft_s=1.0, tpot_s=0.1, max_gaps=max_gaps)


def test_the_first_token_is_due_a_ttft_after_the_arrival_and_each_other_a_tpot_after_the_last() -> None:
    slo = make_slo()
    assert slo.deadline == 101.0
    slo.add_tokens(1, 100.5)
    assert slo.deadline == 100.6


def test_a_late_first_token_loses_the_slo() -> None:
    slo = make_slo()
    assert not slo.is_lost(101.0)
    assert slo.is_lost(101.01)
    slo.add_tokens(1, 101.01)
    assert slo.is_lost(101.02)


def test_a_first_token_that_cannot_come_in_time_loses_the_slo_before_it_is_due() -> None:
    assert make_slo().is_lost(100.5, seconds_left=0.6)


def test_one_gap_in_ten_may_be_late() -> None:
    slo = make_slo(max_gaps=20)
    now = 100.5
    slo.add_tokens(1, now)
    for _ in range(2):
        now += 0.2
        slo.add_tokens(1, now)
    assert not slo.is_lost(now)
    assert slo.is_lost(now + 0.2)  # the third, as good as there
    slo.add_tokens(1, now + 0.2)
    assert slo.is_lost(now + 0.2)


def test_a_request_may_ask_for_more_than_nine_gaps_in_ten() -> None:
    slo = replace(make_slo(max_gaps=20), tpot_share=0.99)
    slo.add_tokens(1, 100.5)
    assert not slo.is_lost(100.6)
    assert slo.is_lost(100.61)


def test_a_gap_can_be_spared_of_as_many_as_are_expected_and_no_more_than_may_come() -> None:
    slo = make_slo(max_gaps=20)
    slo.add_tokens(1, 100.5)
    assert slo.can_spare_a_gap(10.0)
    assert not slo.can_spare_a_gap(9.0)  # one of nine would be too many
    assert slo.can_spare_a_gap(1000.0)
    slo.add_tokens(1, 100.7)
    assert not slo.can_spare_a_gap(19.0) and slo.can_spare_a_gap(1000.0)
    slo.add_tokens(1, 100.9)
    assert not slo.can_spare_a_gap(1000.0)  # there will be 20


def test_who_has_had_its_gaps_can_spare_of_them_whatever_is_expected() -> None:
    slo = make_slo(max_gaps=1000)
    slo.add_tokens(4, 100.5)
    for _ in range(3):
        slo.add_tokens(2, 100.5)
    assert slo.num_gaps == 9 and slo.can_spare_a_gap(0.0)  # with the next one there are ten
    assert not make_slo().can_spare_a_gap(0.0)


def test_without_an_slo_nothing_is_due() -> None:
    slo = SloState(arrived_at=0.0, ttft_s=None, tpot_s=None, max_gaps=5)
    assert slo.deadline == float("inf")
    slo.add_tokens(1, 1e9)
    assert slo.deadline == float("inf") and not slo.is_lost(1e12) and slo.can_spare_a_gap(0.0)


# -- those of many ----------------------------------------------------------------------------------------------------


class Needs:
    """Seconds that requests take, given by their names; counts how often it was asked."""

    def __init__(self, **seconds: float) -> None:
        self.seconds = seconds
        self.num_asked = 0
        self.deadlines = Deadlines(3, self)

    def __call__(self, request: Request) -> float:
        self.num_asked += 1
        return self.seconds[request.request_id]

    def add(self, name: str, ttft_ms: float | None) -> Request:
        request = make_request(PlannedRequest(name, (1,), (), 10, arrival_time=0.0), Engine())
        self.deadlines.add(request, Slo(ttft_ms=ttft_ms, tpot_ms=None, tpot_share=0.9))
        return request

    def order(self, requests: list[Request], now: float) -> list[str]:
        self.deadlines.begin_step()
        return [request.request_id for request in self.deadlines.in_order(requests, now)]


def test_who_needs_most_of_its_time_is_first_and_stays_it_when_a_part_is_done() -> None:
    needs = Needs(a=1.0, b=2.0)
    requests = [needs.add(name, 5000.0) for name in "ab"]
    assert needs.order(requests, 0.0) == ["b", "a"]
    needs.seconds["b"] = 0.1  # its image is there
    assert needs.order(requests, 0.0) == ["b", "a"]


def test_who_cannot_be_in_time_gives_way_as_often_as_its_patience_says() -> None:
    needs = Needs(a=2.0, b=1.0)
    requests = [needs.add("a", 1500.0), needs.add("b", 9000.0)]
    orders = ["".join(needs.order(requests, 0.0)) for _ in range(5)]
    assert orders == ["ba", "ba", "ba", "ab", "ab"]


def test_who_can_be_in_time_with_what_is_done_by_now_does_not_give_way() -> None:
    needs = Needs(a=2.0, b=1.0)
    requests = [needs.add("a", 2100.0), needs.add("b", 9000.0)]
    assert needs.order(requests, 0.0) == ["a", "b"]
    needs.seconds["a"] = 0.5
    assert needs.order(requests, 1.0) == ["a", "b"]


def test_what_a_request_needs_is_looked_up_once_in_a_step() -> None:
    needs = Needs(a=1.0)
    request = needs.add("a", 5000.0)
    for _ in range(2):
        needs.order([request], 0.0)
        needs.deadlines.seconds_to_token(request)
    assert needs.num_asked == 1 + 1


def test_a_first_token_is_made_late_by_what_it_is_in_time_without() -> None:
    needs = Needs(a=1.0, b=1.0)
    needs.add("a", 1000.0)
    needs.add("b", None)

    def is_made_late(without_s: float, with_s: float) -> bool:
        return needs.deadlines.is_first_token_made_late(["a", "b", "c"], 0.0, without_s, with_s)

    assert is_made_late(0.5, 1.5)
    assert not is_made_late(0.5, 0.9) and not is_made_late(1.1, 1.5)
    needs.deadlines.add_tokens("a", 1, 0.5)
    assert not is_made_late(0.5, 1.5)


def test_answers_are_expected_to_be_as_long_as_those_of_late() -> None:
    needs = Needs()
    for number in range(100):
        needs.add(str(number), 1000.0)
        needs.deadlines.add_tokens(str(number), 8, 0.1)
        needs.deadlines.remove(str(number))
    needs.add("aborted", 1000.0)
    needs.deadlines.remove("aborted")
    assert needs.deadlines.expected_gaps == pytest.approx(7.0, abs=0.1)
    assert not needs.deadlines.states
