"""What of a difference is noise."""

import math

import numpy as np
import pytest

from vllm_omni.entrypoints.bench.compare import band, compare, ratio_of, shared_figures

STEADY = [100.0, 101.0, 99.0, 100.5, 99.5, 100.0]


def test_the_band_is_a_factor_that_follows_from_how_far_as_runs_differ() -> None:
    low, high = band([100.0, 110.0, 100.0, 110.0], 2)
    assert low * high == pytest.approx(1.0)
    # Student's t of 3 degrees of freedom; the deviation of the logarithms; a quarter and a half of a run's variance.
    assert math.log(high) == pytest.approx(3.182 * 1.2533 * math.log(1.1) / math.sqrt(3) * math.sqrt(1 / 4 + 1 / 2))


def test_runs_that_are_equal_have_no_noise_and_those_with_zeros_any() -> None:
    assert band([5.0] * 6, 3) == (1.0, 1.0)
    assert band([0, 0], 1) == (1.0, 1.0)
    assert band([0.0, 1.0, 2.0], 1) == (0.0, math.inf)
    assert band([1e-300, 1e300], 1)[1] < math.inf


def test_more_runs_narrow_the_band() -> None:
    values = [90.0, 110.0] * 12
    highs = [band(values[: 2 * number], number)[1] for number in (1, 2, 3, 5, 6, 12)]
    assert highs == sorted(highs, reverse=True) and highs[-1] < 1.11


@pytest.mark.parametrize("num_repeats", [1, 3, 5, 8])
def test_two_servers_of_equal_speed_differ_by_more_than_the_band_once_in_twenty_times(num_repeats: int) -> None:
    rng = np.random.default_rng(0)

    def is_outside() -> bool:
        a, b = (rng.lognormal(sigma=0.1, size=number).tolist() for number in (2 * num_repeats, num_repeats))
        return compare("p50_ttfa_ms", a, b).verdict != "within the band"

    assert 0.02 < np.mean([is_outside() for _ in range(2000)]) < 0.07


def test_a_difference_of_three_times_the_noise_is_found() -> None:
    rng = np.random.default_rng(0)
    found = [
        compare("p50_rtf", rng.lognormal(sigma=0.1, size=10).tolist(), rng.lognormal(0.3, 0.1, size=5).tolist())
        for _ in range(200)
    ]
    assert np.mean([one.verdict == "outside: B is worse" for one in found]) > 0.95


@pytest.mark.parametrize(
    ("name", "factor", "verdict"),
    [
        ("p50_ttfa_ms", 0.5, "outside: B is better"),
        ("p50_ttfa_ms", 1.5, "outside: B is worse"),
        ("p95_rtf", 1.5, "outside: B is worse"),
        ("media_goodput", 1.5, "outside: B is better"),
        ("media_goodput_share", 0.5, "outside: B is worse"),
        ("audio_seconds_per_second", 1.5, "outside: B is better"),
        ("c50", 0.5, "outside: B is worse"),
        ("media_failed", 2.0, "outside: B is worse"),
        ("media_completed", 0.5, "outside: B is worse"),
        ("p50_ttfa_ms", 1.005, "within the band"),
    ],
)
def test_a_difference_is_judged_by_what_the_figure_means(name: str, factor: float, verdict: str) -> None:
    one = compare(name, STEADY, [factor * value for value in STEADY[:3]])
    assert one.verdict == verdict
    assert one.ratio == pytest.approx(factor)


def test_zero_of_both_is_no_difference_and_of_a_alone_an_infinite_one() -> None:
    assert compare("media_failed", [0, 0], [0]).verdict == "within the band"
    assert compare("media_failed", [0, 0], [3]).verdict == "outside: B is worse"
    assert compare("p99_gap_ms", [3, 4], [0]).verdict == "outside: B is better"
    assert (ratio_of(0, 0), ratio_of(1, 0), ratio_of(0, 2)) == (1.0, math.inf, 0.0)


def test_figures_that_a_run_lacks_are_not_compared() -> None:
    assert shared_figures([{"a": 1, "b": 2, "c": 3}, {"c": 1, "a": 2}]) == ["a", "c"]
