import pytest
from vllm.v1.request import Request

from tests.core.sched.drive import make_request
from tests.core.sched.random_requests import Engine, PlannedRequest
from vllm_omni.epd.deadlines import Deadlines
from vllm_omni.messages.slo import Slo


class Needs:
    """Seconds that requests take, by name; counts the look-ups."""

    def __init__(self, **seconds: float) -> None:
        self.seconds = seconds
        self.num_lookups = 0
        self.deadlines = Deadlines(3, self)

    def __call__(self, request: Request) -> float:
        self.num_lookups += 1
        return self.seconds[request.request_id]

    def add(self, name: str, ttft_ms: float | None) -> Request:
        request = make_request(PlannedRequest(name, (1,), (), 10, arrival_time=0.0), Engine())
        self.deadlines.add(request, Slo(ttft_ms=ttft_ms, tpot_ms=None, tpot_share=0.9))
        return request

    def order(self, requests: list[Request], now: float) -> list[str]:
        self.deadlines.start_step()
        return [request.request_id for request in self.deadlines.in_order(requests, now)]


def test_least_slack_is_first_and_stays_first_when_a_part_is_done() -> None:
    needs = Needs(a=1.0, b=2.0)
    requests = [needs.add(name, 5000.0) for name in "ab"]
    assert needs.order(requests, 0.0) == ["b", "a"]
    needs.seconds["b"] = 0.1  # its image is ready
    assert needs.order(requests, 0.0) == ["b", "a"]


def test_a_request_that_is_too_late_is_deferred_for_as_many_steps_as_patience() -> None:
    needs = Needs(a=2.0, b=1.0)
    requests = [needs.add("a", 1500.0), needs.add("b", 9000.0)]
    orders = ["".join(needs.order(requests, 0.0)) for _ in range(5)]
    assert orders == ["ba", "ba", "ba", "ab", "ab"]


def test_a_request_that_is_in_time_thanks_to_completed_work_is_not_deferred() -> None:
    needs = Needs(a=2.0, b=1.0)
    requests = [needs.add("a", 2100.0), needs.add("b", 9000.0)]
    assert needs.order(requests, 0.0) == ["a", "b"]
    needs.seconds["a"] = 0.5
    assert needs.order(requests, 1.0) == ["a", "b"]


def test_needs_are_looked_up_once_in_a_step() -> None:
    needs = Needs(a=1.0)
    request = needs.add("a", 5000.0)
    for _ in range(2):
        needs.order([request], 0.0)
        needs.deadlines.seconds_to_token(request)
    assert needs.num_lookups == 1 + 1


def test_a_first_token_is_made_late_only_if_it_is_in_time_otherwise() -> None:
    needs = Needs(a=1.0, b=1.0)
    requests = [needs.add("a", 1000.0), needs.add("b", None)]

    def is_made_late(without_s: float, with_s: float) -> bool:
        return needs.deadlines.is_first_token_made_late(requests, 0.0, without_s, with_s)

    assert is_made_late(0.5, 1.5)
    assert not is_made_late(0.5, 0.9) and not is_made_late(1.1, 1.5)
    needs.deadlines.add_tokens("a", 1, 0.5)
    assert not is_made_late(0.5, 1.5)


def test_answers_are_expected_to_be_as_long_as_recent_ones() -> None:
    needs = Needs()
    for number in range(100):
        needs.add(str(number), 1000.0)
        needs.deadlines.add_tokens(str(number), 8, 0.1)
        needs.deadlines.remove(str(number))
    needs.add("aborted", 1000.0)
    needs.deadlines.remove("aborted")
    assert needs.deadlines.expected_gaps == pytest.approx(7.0, abs=0.1)
    assert not len(needs.deadlines)
