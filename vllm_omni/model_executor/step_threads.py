"""How many of the machine's cores a step on the CPU takes."""

from __future__ import annotations

import os
from typing import Any

# vLLM's CPU worker puts a function in its place that does nothing; this module is imported before.
from torch import get_num_threads, set_num_threads

NUM_STAGES = "num_stages"
"""Key of a stage's ``additional_config``: how many stages share the machine."""

MANY_TOKENS = 8


class StepThreads:
    """A step of many tokens (a prompt, a large batch) computes, and takes every core; one of few is bound by reading
    the weights, for which its share of the cores is enough: they wait less for one another, and leave the rest to the
    other stages (docs/performance.md has the measurements).

    Where ``OMP_NUM_THREADS`` is given, every step takes that many: vLLM's own workers of a tensor-parallel group, which
    are bound to cores, have it, too.

    Args:
        additional_config: of the stage's ``VllmConfig``.
    """

    def __init__(self, additional_config: dict[str, Any]) -> None:
        self._all = self._now = get_num_threads()
        is_fixed = "OMP_NUM_THREADS" in os.environ
        self._share = self._all if is_fixed else max(1, self._all // additional_config.get(NUM_STAGES, 1))

    def take(self, num_tokens: int) -> None:
        """Call it in the thread that computes, before a step of so many tokens; 0 takes the share."""
        wanted = self._all if num_tokens >= MANY_TOKENS else self._share
        if wanted != self._now:
            set_num_threads(wanted)
            self._now = wanted
