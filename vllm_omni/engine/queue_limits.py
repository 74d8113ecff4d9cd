"""``QueueLimits``: how many requests a stage may have, waiting and running; further ones are rejected at once."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Self

from vllm.sampling_params import SamplingParams

from vllm_omni.config.diffusion_params import DiffusionParams
from vllm_omni.engine.stage import StageEngine
from vllm_omni.errors import Overloaded

LONGEST_RETRY_S = 60
NUM_MEASURED = 16  # requests that have left a stage last, from which the next one's end is estimated


def num_answers(params: SamplingParams | DiffusionParams) -> int:
    """The answers to a request, by the parameters of its first stage."""
    return 1 if isinstance(params, DiffusionParams) else params.n or 1


class QueueLimits:
    """Counts the open requests of each stage that has a limit.

    A request is counted in all stages that it takes part in from its start, since none of them may reject it later: a
    reply whose text has been sent must get its speech.

    Args:
        limits: stage -> ``max_num_queued_reqs``, of all its engines together.
        clock: seconds.

    Attributes:
        num_rejected: by stage.
        on_change: called after each change of the counts.
    """

    def __init__(self, limits: Mapping[str, int], clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = Counter(limits)
        self.on_change: Callable[[], None] = lambda: None
        self._of_engines: dict[str, int] = {}
        self._clock = clock
        self.num_rejected = Counter(dict.fromkeys(limits, 0))
        self._open: Counter[str] = Counter()
        self._left_at: dict[str, deque[float]] = {stage: deque(maxlen=NUM_MEASURED) for stage in limits}

    @classmethod
    def of(cls, engines: Iterable[StageEngine]) -> Self:
        """Take over the limits of engines, which would reject what a request needs in the middle of its graph."""
        limits = cls({})
        for engine in engines:
            limits.add(engine)
        return limits

    def add(self, engine: StageEngine) -> None:
        """Take over the limit of an engine that is not started yet."""
        scheduler, stage = engine.vllm_config.scheduler_config, engine.config.name
        if (limit := scheduler.max_num_queued_reqs) is None:
            return
        scheduler.max_num_queued_reqs = None
        self._of_engines[engine.name] = limit
        self.limits[stage] += limit
        self.num_rejected[stage] += 0
        self._left_at.setdefault(stage, deque(maxlen=NUM_MEASURED))

    def remove(self, engine: StageEngine) -> None:
        """An engine has ended, or did not start."""
        if (limit := self._of_engines.pop(engine.name, None)) is not None:
            self.limits[engine.config.name] -= limit

    def check(self, stages: Collection[str], n: int = 1, *, is_request: bool = True) -> None:
        """Check that a request could start now.

        Args:
            n: answers to it; each counts.
            is_request: there is one, whose rejection is counted.

        Raises:
            Overloaded: a stage has as many as it may.
        """
        for stage, limit in self.limits.items():
            is_open = self._open[stage]
            if stage in stages and is_open + n > limit:
                asked = "" if n == 1 else f", and this one counts {n}"
                self.num_rejected[stage] += is_request
                raise Overloaded(
                    f"stage {stage!r} has {is_open} of at most {limit} requests (max_num_queued_reqs){asked}: try "
                    "again later",
                    retry_after_s=self.retry_after_s(stage),
                )

    @contextmanager
    def hold(self, stages: Collection[str], n: int = 1) -> Iterator[None]:
        """Check a request, and count it inside the block."""
        self.check(stages, n)
        limited = self.limits.keys() & set(stages)
        self._count(limited, n)
        try:
            yield
        finally:
            for stage in limited:
                self._left_at[stage].append(self._clock())
            self._count(limited, -n)

    def _count(self, stages: Collection[str], n: int) -> None:
        self._open.update(dict.fromkeys(stages, n))
        if stages:
            self.on_change()

    def num_open(self) -> Mapping[str, tuple[int, int]]:
        """Stage -> requests, and how many there may be."""
        return {stage: (self._open[stage], limit) for stage, limit in self.limits.items()}

    def retry_after_s(self, stage: str) -> int:
        """When the next request of the stage is likely to end."""
        left_at = self._left_at[stage]
        if len(left_at) < 2:
            return 1
        gap_s = (left_at[-1] - left_at[0]) / (len(left_at) - 1)
        return min(LONGEST_RETRY_S, max(1, math.ceil(left_at[-1] + gap_s - self._clock())))
