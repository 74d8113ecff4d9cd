"""``Slo``, ``SloState``: whether a request meets its service level objective for its first token and between tokens.

From: HydraInfer, section 2.3.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from vllm_omni.errors import InvalidRequest
from vllm_omni.names import suggest

SLO_ARGS = "slo"
"""Key of ``SamplingParams.extra_args`` for a request's own ``ttft_ms``, ``tpot_ms`` and ``tpot_share``."""

SHARE_OF_GAPS = 0.9
"""Share of the gaps between tokens that must keep the TPOT for a request to meet its SLO (HydraInfer, section 2.3)."""

STRICT_SHARE_OF_GAPS = 0.99
"""The same for the strict rule: the 99th percentile of the gaps must keep it."""

_TIME = (sys.float_info.max, "milliseconds, a number greater than 0")
_TARGETS = {  # their upper bounds, and what they must be
    "ttft_ms": _TIME,
    "tpot_ms": _TIME,
    "tpot_share": (1, "a share of the gaps, greater than 0 and at most 1"),
}


@dataclass(frozen=True)
class Slo:
    """Latency targets of a request; None: no target."""

    ttft_ms: float | None = None  # from its arrival to its first token
    tpot_ms: float | None = None  # between two tokens
    tpot_share: float | None = None  # of the gaps between tokens must keep it; None: SHARE_OF_GAPS

    def __bool__(self) -> bool:
        return self.ttft_ms is not None or self.tpot_ms is not None

    @property
    def share(self) -> float:
        return SHARE_OF_GAPS if self.tpot_share is None else self.tpot_share

    @classmethod
    def parse(cls, value: object) -> Slo:
        """Read a request's own targets, the value of ``SLO_ARGS`` in its ``extra_args``.

        Raises:
            InvalidRequest: not a mapping, an unknown key, or a value that is not a time or a share.
        """
        if value is None:
            return cls()
        if not isinstance(value, Mapping):
            said = f'{SLO_ARGS} = {value!r}: must be times by name, e.g. {{"ttft_ms": 1000, "tpot_ms": 50}}'
            raise InvalidRequest(said, param=SLO_ARGS)
        return cls(**{str(name): _parse_target(name, one) for name, one in value.items()})

    def over(self, default: Slo) -> Slo:
        """Fill in the default's values where this one has none."""
        return replace(default, **{name: one for name, one in vars(self).items() if one is not None})


def _parse_target(name: object, value: object) -> float | None:
    if name not in _TARGETS:
        raise InvalidRequest(f"{SLO_ARGS}: unknown {name!r}: {suggest(str(name), _TARGETS)}", param=SLO_ARGS)
    if value is None:
        return None
    largest, valid = _TARGETS[name]
    # A bool is an int, a NaN is not greater than 0, and an infinite time is no target.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= largest:
        raise InvalidRequest(f"{SLO_ARGS}.{name} = {value!r}: must be {valid}", param=SLO_ARGS)
    return float(value)


def slo_of(extra_args: Mapping[str, Any] | None, default: Slo = Slo()) -> Slo:
    """Read the targets of a request with these ``SamplingParams.extra_args``.

    Raises:
        InvalidRequest: see ``Slo.parse``.
    """
    return Slo.parse((extra_args or {}).get(SLO_ARGS)).over(default)


class SloReport(NamedTuple):
    """Latency of one request against its SLO."""

    is_ttft_met: bool  # also without a target
    is_tpot_met: bool  # by the SLO's share of the gaps
    is_tpot_met_strictly: bool  # by STRICT_SHARE_OF_GAPS
    ttft_s: float | None  # None: there was no token
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


@dataclass
class SloState:
    """Count a request's tokens in time and late, while it runs. Times are seconds of one clock.

    From: HydraInfer, section 2.3.
    """

    slo: Slo
    arrived_at: float
    max_gaps: int = 0  # between tokens, if the request takes all that it may
    ttft_s: float | None = None
    num_gaps: int = 0
    num_late_gaps: int = 0
    _last_at: dict[int, float] = field(default_factory=dict)  # by answer

    def __post_init__(self) -> None:
        # Infinite without a target.
        self.ttft_limit_s = _limit_s(self.slo.ttft_ms)
        self.tpot_limit_s = _limit_s(self.slo.tpot_ms)

    def add_tokens(self, num_tokens: int, now: float, index: int = 0) -> None:
        """Count ``num_tokens`` that came together, of the answer ``index``; the gaps between these are zero."""
        if num_tokens < 1:
            return
        if self.ttft_s is None:
            self.ttft_s = now - self.arrived_at
        if index in self._last_at:
            self.num_gaps += 1
            self.num_late_gaps += now - self._last_at[index] > self.tpot_limit_s
        self.num_gaps += num_tokens - 1
        self._last_at[index] = now

    @property
    def has_token(self) -> bool:
        return self.ttft_s is not None

    @property
    def is_ttft_missed(self) -> bool:
        """Whether the first token came, and was late."""
        return self.ttft_s is not None and self.ttft_s > self.ttft_limit_s

    @property
    def deadline(self) -> float:
        """When the next token of the first answer is due; infinite without a target."""
        if 0 not in self._last_at:
            return self.arrived_at + self.ttft_limit_s
        return self._last_at[0] + self.tpot_limit_s

    def is_lost(self, now: float, seconds_left: float = 0.0) -> bool:
        """Whether no schedule can meet the SLO, if the next token takes at least ``seconds_left``."""
        if self.is_ttft_missed:
            return True
        num_late = self.num_late_gaps
        if now + seconds_left > self.deadline:
            if not self.has_token:
                return True
            num_late += 1
        return not enough_in_time(num_late, self.max_gaps, self.slo.share)

    def can_spare_gap(self, expected_gaps: float) -> bool:
        """Whether the SLO can be met with one more late gap.

        Args:
            expected_gaps: of an answer, whose length is unknown while it runs.
        """
        if self.slo.tpot_ms is None:
            return True
        num_gaps = min(self.max_gaps, max(self.num_gaps + 1, int(expected_gaps)))
        return enough_in_time(self.num_late_gaps + 1, num_gaps, self.slo.share)

    def report(self) -> SloReport:
        """Judge the request at its end; without a token, it missed a TTFT."""
        return SloReport(
            self.slo.ttft_ms is None or (self.has_token and not self.is_ttft_missed),
            enough_in_time(self.num_late_gaps, self.num_gaps, self.slo.share),
            enough_in_time(self.num_late_gaps, self.num_gaps, STRICT_SHARE_OF_GAPS),
            self.ttft_s,
            self.num_gaps,
            self.num_late_gaps,
        )


def _limit_s(milliseconds: float | None) -> float:
    return math.inf if milliseconds is None else milliseconds / 1000
