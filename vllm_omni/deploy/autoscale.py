"""``Autoscaler``: how many replicas of each stage there should be. Pure, with a clock: a server and a simulator ask it.

A stage gets more replicas when requests queue, when its slots are nearly full, or when SLOs are missed, for long enough
that it is no burst; and fewer when one less would have room for twice the requests, for much longer: what a replica
costs is its start, so the longer that takes, the later one is given up.

From: Omni-Flow, section 6 (the replica as the unit of resources), and HydraInfer, section 4.4 (goodput under SLOs).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

FULL = 0.8  # of the slots: above, more replicas
ROOMY = 0.5  # of the slots that one replica less would have: below, one less
ATTAINMENT = 0.9  # share of the requests that meet their SLO: below, more replicas
GROW_S = 5.0  # for how long there must be a reason
SHRINK_S = 60.0
STARTS = 10.0  # a replica must have been idle for as long as so many starts take


class Load(NamedTuple):
    """What a stage has at this moment."""

    replicas: int  # that run
    target: int  # that were asked for; another number: they start or end
    slots: int  # requests that a replica computes at a time
    requests: int  # on all replicas, those that wait included
    waiting: int = 0
    start_s: float = 0.0  # how long a replica takes to start
    attainment: float | None = None  # share of those requests that met their SLO; None: none has ended


class Bounds(NamedTuple):
    """How many replicas a stage may have."""

    fewest: int
    most: int


class Proposal(NamedTuple):
    replicas: int
    reason: str


@dataclass
class _Stage:
    bounds: Bounds
    replicas: int = 0  # at the last look
    wants_more_since: float | None = None
    wants_less_since: float | None = None


class Autoscaler:
    """Proposes replicas, stage by stage.

    Args:
        bounds: by stage.
        clock: seconds.
    """

    def __init__(self, bounds: Mapping[str, Bounds], clock: Callable[[], float] = time.monotonic) -> None:
        self._stages = {name: _Stage(one) for name, one in bounds.items()}
        self._clock = clock

    def propose(self, name: str, load: Load) -> Proposal | None:
        """Say what a stage should have now; None: what it has. Ask every second or so."""
        stage, now = self._stages[name], self._clock()
        if not stage.replicas == load.replicas == load.target:  # what comes of the last change is not known yet
            stage.wants_more_since = stage.wants_less_since = None
        stage.replicas = load.replicas
        if load.replicas != load.target:
            return None
        more, reason = _wanted(load)
        more = min(more, stage.bounds.most)
        stage.wants_more_since = _since(stage.wants_more_since, now, is_wanted=more > load.replicas)
        has_room = load.replicas > 1 and load.requests <= ROOMY * load.slots * (load.replicas - 1)
        is_idle = has_room and not load.waiting and more <= load.replicas > stage.bounds.fewest
        stage.wants_less_since = _since(stage.wants_less_since, now, is_wanted=is_idle)
        if stage.wants_more_since is not None and now - stage.wants_more_since >= GROW_S:
            return Proposal(more, reason)
        patience_s = max(SHRINK_S, STARTS * load.start_s)
        if stage.wants_less_since is not None and now - stage.wants_less_since >= patience_s:
            said = f"{load.requests} requests have had room on {load.replicas - 1} for {patience_s:.0f} s"
            return Proposal(load.replicas - 1, said)
        return None


def _since(began: float | None, now: float, *, is_wanted: bool) -> float | None:
    if not is_wanted:
        return None
    return now if began is None else began


def _wanted(load: Load) -> tuple[int, str]:
    """The replicas that would have room for the requests, and why more are needed."""
    reasons = {
        math.ceil(load.requests / (FULL * load.slots)): f"{load.requests} requests, {load.slots} slots each",
        load.replicas + math.ceil(load.waiting / load.slots): f"{load.waiting} requests wait",
    }
    is_late = load.attainment is not None and load.attainment < ATTAINMENT
    if is_late and load.requests > ROOMY * load.slots * load.replicas:
        reasons.setdefault(load.replicas + 1, f"{load.attainment:.0%} of the requests met their SLO")
    most = max(reasons)
    return most, reasons[most]
