"""When a request meets its service level objective (SLO): the time to its first token, and those between its tokens.

From: HydraInfer, section 2.3.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm_omni.errors import InvalidRequest
from vllm_omni.names import suggest

SLO_ARGS = "slo"
"""Key of ``SamplingParams.extra_args`` for a request's own ``ttft_ms``, ``tpot_ms`` and ``tpot_share``."""

SHARE_OF_GAPS = 0.9
"""A request meets its TPOT SLO when so many of its gaps between tokens do (HydraInfer, section 2.3)."""

STRICT_SHARE_OF_GAPS = 0.99
"""The same, strictly: the 99th percentile of its gaps does."""

_TIMES = ("ttft_ms", "tpot_ms")
_KEYS = (*_TIMES, "tpot_share")


@dataclass(frozen=True)
class Slo:
    """What a request is promised; None: nothing."""

    ttft_ms: float | None = None  # from its arrival to its first token
    tpot_ms: float | None = None  # between two tokens
    tpot_share: float | None = None  # of the gaps between tokens, which keep it; None: SHARE_OF_GAPS

    def __bool__(self) -> bool:
        return self.ttft_ms is not None or self.tpot_ms is not None

    @property
    def share(self) -> float:
        return SHARE_OF_GAPS if self.tpot_share is None else self.tpot_share

    @classmethod
    def parse(cls, value: object) -> Slo:
        """A request's own, as it stands in ``extra_args``.

        Raises:
            InvalidRequest: not a mapping, an unknown key, or a value that is no time or share.
        """
        if value is None:
            return cls()
        if not isinstance(value, Mapping):
            raise InvalidRequest(
                f'{SLO_ARGS} = {value!r}: must be times by name, e.g. {{"ttft_ms": 1000, "tpot_ms": 50}}',
                param=SLO_ARGS,
            )
        for name, one in value.items():
            if name not in _KEYS:
                raise InvalidRequest(f"{SLO_ARGS}: unknown {name!r}: {suggest(str(name), _KEYS)}", param=SLO_ARGS)
            if one is None:
                continue
            # A bool is an int; a NaN is not greater than 0, and an infinite time promises nothing.
            is_number = isinstance(one, int | float) and not isinstance(one, bool) and 0 < one < math.inf
            if name in _TIMES and not is_number:
                raise InvalidRequest(
                    f"{SLO_ARGS}.{name} = {one!r}: must be milliseconds, a number greater than 0", param=SLO_ARGS
                )
            if name not in _TIMES and not (is_number and one <= 1):
                raise InvalidRequest(
                    f"{SLO_ARGS}.{name} = {one!r}: must be a share of the gaps, greater than 0 and at most 1",
                    param=SLO_ARGS,
                )
        return cls(**{str(name): None if one is None else float(one) for name, one in value.items()})

    def over(self, default: Slo) -> Slo:
        """This one, with the default's values where it has none."""
        return Slo(
            default.ttft_ms if self.ttft_ms is None else self.ttft_ms,
            default.tpot_ms if self.tpot_ms is None else self.tpot_ms,
            default.tpot_share if self.tpot_share is None else self.tpot_share,
        )


class SloReport(NamedTuple):
    """How one request did."""

    is_ttft_met: bool  # also where there is none to meet
    is_tpot_met: bool  # by the SLO's share of the gaps
    is_tpot_met_strictly: bool  # by STRICT_SHARE_OF_GAPS
    ttft_s: float | None  # None: no token came
    num_gaps: int
    num_late_gaps: int

    @property
    def is_met(self) -> bool:
        return self.is_ttft_met and self.is_tpot_met

    @property
    def is_met_strictly(self) -> bool:
        return self.is_ttft_met and self.is_tpot_met_strictly


def enough_in_time(num_late: int, num_gaps: int, share: float) -> bool:
    """Whether at least ``share`` of the gaps are in time; 0.99: whether their 99th percentile (nearest rank) is."""
    return num_late <= num_gaps - math.ceil(share * num_gaps - 1e-9)


def judge(ttft_s: float | None, gaps_s: Iterable[float], slo: Slo) -> SloReport:
    """How a request that has ended stands to its SLO.

    Args:
        ttft_s: seconds from its arrival to its first token; None: it had none, and has missed a TTFT.
        gaps_s: seconds between consecutive tokens. Tokens that came together have gaps of nothing between them.
    """
    watch = SloWatch(slo, arrived_at=0.0)
    if ttft_s is not None:
        now = ttft_s
        watch.add_tokens(1, now)
        for gap in gaps_s:
            watch.add_gap(gap)
    return watch.report()


@dataclass
class SloWatch:
    """Watches one request. Times are seconds of one clock."""

    slo: Slo
    arrived_at: float
    ttft_s: float | None = None
    num_gaps: int = 0
    num_late_gaps: int = 0
    _last_at: dict[int, float] = field(default_factory=dict)  # of each of its answers

    def add_tokens(self, num_tokens: int, now: float, index: int = 0) -> None:
        """Tokens came, ``num_tokens`` at once, of the answer ``index``; the gaps between those are nothing."""
        if num_tokens < 1:
            return
        if self.ttft_s is None:
            self.ttft_s = now - self.arrived_at
        if index in self._last_at:
            self.add_gap(now - self._last_at[index])
        self.num_gaps += num_tokens - 1
        self._last_at[index] = now

    def add_gap(self, seconds: float) -> None:
        self.num_gaps += 1
        if self.slo.tpot_ms is not None and seconds > self.slo.tpot_ms / 1000:
            self.num_late_gaps += 1

    def report(self) -> SloReport:
        ttft_ms = self.slo.ttft_ms
        is_ttft_met = ttft_ms is None or (self.ttft_s is not None and self.ttft_s <= ttft_ms / 1000)
        return SloReport(
            is_ttft_met,
            enough_in_time(self.num_late_gaps, self.num_gaps, self.slo.share),
            enough_in_time(self.num_late_gaps, self.num_gaps, STRICT_SHARE_OF_GAPS),
            self.ttft_s,
            self.num_gaps,
            self.num_late_gaps,
        )


def attainment(reports: Iterable[SloReport], *, is_strict: bool = False) -> float:
    """The share of requests that meet their SLO; of none: 1."""
    met = [one.is_met_strictly if is_strict else one.is_met for one in reports]
    return sum(met) / len(met) if met else 1.0


def goodput(attainments: Mapping[float, float], share: float = 0.9) -> float:
    """The highest request rate at which the attainment reaches ``share``, at it and at every lower rate; 0: at none.

    Args:
        attainments: by request rate, requests per second.

    From: HydraInfer, section 2.3; that lower rates must reach it, too, is ours: one lucky run is no capacity.
    """
    best = 0.0
    for rate in sorted(attainments):
        if attainments[rate] < share:
            break
        best = rate
    return best


def slo_of(extra_args: Mapping[str, Any] | None, default: Slo = Slo()) -> Slo:
    """Of a request with these ``extra_args``.

    Raises:
        InvalidRequest: see ``Slo.parse``.
    """
    return Slo.parse((extra_args or {}).get(SLO_ARGS)).over(default)
