"""When a request meets its SLO, and what is no SLO."""

import math
from dataclasses import replace

import pytest

from vllm_omni.errors import InvalidRequest
from vllm_omni.messages.slo import Slo, SloReport, SloState, enough_in_time, slo_of

SLO = Slo(ttft_ms=1000, tpot_ms=100)


def judge(ttft_s: float | None, gaps_s: list[float], slo: Slo) -> SloReport:
    """A request that has ended, with one token at a time."""
    state, now = SloState(slo, arrived_at=0.0), ttft_s
    for gap in [0.0, *gaps_s] if now is not None else ():
        now += gap
        state.add_tokens(1, now)
    return state.report()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("fast", "must be times by name"),
        ([100, 10], "must be times by name"),
        ({"tpot": 50}, "'tpot_ms'"),
        ({"tpot_ms": -1}, "slo.tpot_ms = -1: must be milliseconds"),
        ({"ttft_ms": 0}, "slo.ttft_ms = 0"),
        ({"ttft_ms": "50"}, "slo.ttft_ms = '50'"),
        ({"ttft_ms": True}, "slo.ttft_ms = True"),
        ({"ttft_ms": math.nan}, "slo.ttft_ms = nan"),
        ({"ttft_ms": math.inf}, "slo.ttft_ms = inf"),
        ({"tpot_share": 0}, "slo.tpot_share = 0: must be a share of the gaps"),
        ({"tpot_share": 1.5}, "slo.tpot_share = 1.5"),
        ({"tpot_share": "0.9"}, "slo.tpot_share = '0.9'"),
        ({"tpot_share": True}, "slo.tpot_share = True"),
    ],
)
def test_a_wrong_slo_is_rejected_by_name(value, said):
    with pytest.raises(InvalidRequest, match=said) as raised:
        Slo.parse(value)
    assert raised.value.param == "slo"


def test_a_missing_time_is_the_deployments():
    assert slo_of({"slo": {"ttft_ms": 500}}, SLO) == Slo(500, 100)
    assert slo_of({"slo": {"ttft_ms": 500}}, Slo(tpot_share=0.8)) == Slo(500, None, 0.8)
    assert not slo_of({"slo": {"tpot_share": 0.8}})  # a share without a time
    assert slo_of(None, SLO) == SLO
    assert not slo_of(None)


def test_nine_gaps_of_ten_and_the_first_token_must_be_in_time():
    assert judge(0.9, [0.05] * 9 + [0.2], SLO).is_met
    assert not judge(0.9, [0.05] * 8 + [0.2] * 2, SLO).is_met
    late_first = judge(1.1, [0.05] * 10, SLO)
    assert not late_first.is_ttft_met and late_first.is_tpot_met and not late_first.is_met


def test_a_request_may_ask_for_another_share_of_its_gaps():
    gaps = [0.05] * 19 + [0.2]
    assert judge(0.9, gaps, replace(SLO, tpot_share=0.95)).is_met
    assert not judge(0.9, gaps, replace(SLO, tpot_share=0.96)).is_met
    assert not judge(0.9, gaps, replace(SLO, tpot_share=1.0)).is_met


def test_the_strict_rule_is_the_99th_percentile():
    assert judge(0.9, [0.05] * 99 + [0.2], SLO).is_met_strictly
    assert not judge(0.9, [0.05] * 98 + [0.2] * 2, SLO).is_met_strictly
    assert not judge(0.9, [0.05] * 9 + [0.2], SLO).is_met_strictly


@pytest.mark.parametrize("share", [0.9, 0.99])
def test_enough_in_time_is_a_percentile_by_nearest_rank(share):
    for num_gaps in range(1, 300):
        rank = math.ceil(round(share * num_gaps, 6))
        for num_late in range(num_gaps + 1):
            gaps = sorted([0.0] * (num_gaps - num_late) + [1.0] * num_late)
            assert enough_in_time(num_late, num_gaps, share) == (gaps[rank - 1] < 0.5), (num_late, num_gaps)


def test_a_request_without_a_token_has_missed_its_ttft_and_no_gap():
    report = judge(None, [], SLO)
    assert not report.is_met and report.is_tpot_met and report.ttft_s is None
    assert judge(None, [], Slo(tpot_ms=100)).is_met


def test_a_request_with_one_token_has_no_gap_to_miss():
    assert judge(0.5, [], SLO).is_met_strictly


def test_tokens_that_come_together_have_zero_gaps():
    state = SloState(SLO, arrived_at=10.0)
    state.add_tokens(1, 10.5)
    state.add_tokens(4, 10.9)  # one gap of 0.4 s, three of 0
    state.add_tokens(0, 12.0)
    report = state.report()
    assert (report.ttft_s, report.num_gaps, report.num_late_gaps) == (pytest.approx(0.5), 4, 1)


def test_each_answer_of_a_request_has_its_own_gaps():
    state = SloState(SLO, arrived_at=0.0)
    for index in (0, 1):
        state.add_tokens(1, 0.5 + 0.3 * index, index)
        state.add_tokens(1, 0.55 + 0.3 * index, index)
    assert state.report().num_late_gaps == 0 and state.report().ttft_s == 0.5


# -- while the request runs -------------------------------------------------------------------------------------------


def make_state(max_gaps: int = 20, tpot_share: float = 0.9) -> SloState:
    return SloState(replace(SLO, tpot_share=tpot_share), arrived_at=100.0, max_gaps=max_gaps)


def test_the_first_token_is_due_a_ttft_after_the_arrival_and_each_other_a_tpot_after_the_last() -> None:
    state = make_state()
    assert state.deadline == 101.0
    state.add_tokens(1, 100.5)
    assert state.deadline == 100.6


def test_a_late_first_token_loses_the_slo() -> None:
    state = make_state()
    assert not state.is_lost(101.0)
    assert state.is_lost(101.01)
    state.add_tokens(1, 101.01)
    assert state.is_lost(101.02)


def test_a_first_token_that_cannot_come_in_time_loses_the_slo_before_it_is_due() -> None:
    assert make_state().is_lost(100.5, seconds_left=0.6)


def test_one_gap_in_ten_may_be_late() -> None:
    state = make_state(max_gaps=20)
    now = 100.5
    state.add_tokens(1, now)
    for _ in range(2):
        now += 0.2
        state.add_tokens(1, now)
    assert not state.is_lost(now)
    assert state.is_lost(now + 0.2)  # the third late gap is certain
    state.add_tokens(1, now + 0.2)
    assert state.is_lost(now + 0.2)


def test_a_larger_share_of_gaps_is_lost_with_the_first_late_one() -> None:
    state = make_state(tpot_share=0.99)
    state.add_tokens(1, 100.5)
    assert not state.is_lost(100.6)
    assert state.is_lost(100.61)


def test_a_gap_can_be_spared_by_the_expected_length_up_to_the_maximum() -> None:
    state = make_state(max_gaps=20)
    state.add_tokens(1, 100.5)
    assert state.can_spare_gap(10.0)
    assert not state.can_spare_gap(9.0)  # one of nine would be too many
    assert state.can_spare_gap(1000.0)
    state.add_tokens(1, 100.7)
    assert not state.can_spare_gap(19.0) and state.can_spare_gap(1000.0)
    state.add_tokens(1, 100.9)
    assert not state.can_spare_gap(1000.0)  # of at most 20


def test_gaps_so_far_count_beyond_the_expected_length() -> None:
    state = make_state(max_gaps=1000)
    state.add_tokens(4, 100.5)
    for _ in range(3):
        state.add_tokens(2, 100.5)
    assert state.num_gaps == 9 and state.can_spare_gap(0.0)  # with the next one there are ten
    assert not make_state().can_spare_gap(0.0)


def test_without_targets_nothing_is_due() -> None:
    state = SloState(Slo(), arrived_at=0.0, max_gaps=5)
    assert state.deadline == float("inf")
    state.add_tokens(1, 1e9)
    assert state.deadline == float("inf") and not state.is_lost(1e12) and state.can_spare_gap(0.0)
