"""When a request meets its SLO, and what is no SLO."""

import math
from dataclasses import replace

import pytest

from vllm_omni.errors import InvalidRequest
from vllm_omni.messages.slo import Slo, SloWatch, attainment, enough_in_time, goodput, judge, slo_of

SLO = Slo(ttft_ms=1000, tpot_ms=100)


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
def test_what_is_no_slo_is_refused_by_name(value, said):
    with pytest.raises(InvalidRequest, match=said) as raised:
        Slo.parse(value)
    assert raised.value.param == "slo"


def test_a_request_without_a_time_has_that_of_its_deployment():
    assert slo_of({"slo": {"ttft_ms": 500}}, SLO) == Slo(500, 100)
    assert slo_of({"slo": {"ttft_ms": 500}}, Slo(tpot_share=0.8)) == Slo(500, None, 0.8)
    assert not slo_of({"slo": {"tpot_share": 0.8}})  # of nothing
    assert slo_of(None, SLO) == SLO
    assert not slo_of(None)


def test_nine_gaps_of_ten_suffice_and_the_first_token_must_be_in_time():
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


def test_tokens_that_come_together_have_gaps_of_nothing():
    watch = SloWatch(SLO, arrived_at=10.0)
    watch.add_tokens(1, 10.5)
    watch.add_tokens(4, 10.9)  # one gap of 0.4 s, three of 0
    watch.add_tokens(0, 12.0)
    report = watch.report()
    assert (report.ttft_s, report.num_gaps, report.num_late_gaps) == (pytest.approx(0.5), 4, 1)


def test_answers_of_one_request_have_gaps_of_their_own():
    watch = SloWatch(SLO, arrived_at=0.0)
    for index in (0, 1):
        watch.add_tokens(1, 0.5 + 0.3 * index, index)
        watch.add_tokens(1, 0.55 + 0.3 * index, index)
    assert watch.report().num_late_gaps == 0 and watch.report().ttft_s == 0.5


def test_attainment_and_goodput():
    good, bad = judge(0.5, [0.01], SLO), judge(2.0, [0.01], SLO)
    assert attainment([good] * 9 + [bad]) == 0.9
    assert attainment([]) == 1.0
    assert goodput({1: 1.0, 2: 0.95, 4: 0.89, 8: 0.99}) == 2  # what follows a failure counts for nothing
    assert goodput({1: 0.5}) == 0
