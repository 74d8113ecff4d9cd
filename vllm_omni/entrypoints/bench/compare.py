"""Whether two servers differ: the ratio of their figures, beside that of one of them against itself."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, stdev

T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""The 97.5 % quantile of Student's t with 1, 2, ... degrees of freedom."""

MEDIAN_TO_MEAN = 1.2533
"""The standard deviation of a median of many normal values, divided by that of their mean: sqrt(pi / 2)."""

HIGHER_IS_BETTER = ("completed", "c50", "c100", "goodput", "goodput_share", "per_second")
"""Ends of the names of figures; all others are times and failures."""


@dataclass(frozen=True)
class Comparison:
    """One figure of two servers.

    Attributes:
        a, b: medians over the runs.
        ratio: of the medians, B to A.
        low, high: the A/A band (see ``band``).
    """

    name: str
    a: float
    b: float
    ratio: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        if self.low <= self.ratio <= self.high:
            return "within the band"
        is_better = (self.ratio > 1.0) == self.name.endswith(HIGHER_IS_BETTER)
        return f"outside: B is {'better' if is_better else 'worse'}"


def compare(name: str, a: Sequence[float], b: Sequence[float]) -> Comparison:
    """Compare a figure of A's runs, of which there are at least two, with those of B."""
    low, high = band(a, len(b))
    return Comparison(name, median(a), median(b), ratio_of(median(b), median(a)), low, high)


def band(values: Sequence[float], num_others: int) -> tuple[float, float]:
    """The A/A band of a figure: where 95 of 100 ratios are, if A is compared with itself.

    The ratio is that of the median of ``num_others`` further runs to the median of the given ones. How far runs differ
    is estimated from these, as factors: their logarithms are taken to be normally distributed, which gives Student's t.
    The band is wide for few runs, and narrower for more.
    """
    if max(values) == min(values):
        return 1.0, 1.0
    if min(values) <= 0.0:  # a figure that is sometimes 0 may differ by any factor
        return 0.0, math.inf
    freedom = len(values) - 1
    quantile = T_QUANTILES[freedom - 1] if freedom <= len(T_QUANTILES) else 1.96 + 2.65 / freedom
    deviation = stdev(map(math.log, values)) * math.sqrt(1 / len(values) + 1 / num_others)
    high = math.exp(min(quantile * MEDIAN_TO_MEAN * deviation, 700.0))  # more is no number
    return 1.0 / high, high


def ratio_of(value: float, base: float) -> float:
    """Their ratio, where 0 of 0 is 1: nothing differs."""
    if base:
        return value / base
    return 1.0 if value == 0 else math.inf


def shared_figures(runs: Sequence[Mapping[str, float]]) -> list[str]:
    """The figures that every run has, in the order of the first."""
    return [name for name in runs[0] if all(name in run for run in runs)]
