"""``StepThreads``: the number of threads that a step on the CPU uses."""

from __future__ import annotations

import os
from typing import Any

# vLLM's CPU worker replaces it by a function without effect; this module is imported before.
from torch import get_num_threads, set_num_threads

NUM_STAGES = "num_stages"
"""Key of a stage's ``additional_config``: how many stages share the machine."""

MANY_TOKENS = 8


class StepThreads:
    """Sets torch's number of threads before each step.

    A step of many tokens (a prompt, a large batch) is bound by computing and uses every core. A step of few tokens is
    bound by reading the weights, for which the stage's share of the cores is enough: its threads wait less for one
    another, and the other cores are free for other stages (docs/performance.md has the measurements).

    With ``OMP_NUM_THREADS``, every step uses that many. vLLM sets it for workers of a tensor-parallel group, which are
    bound to cores.

    Args:
        additional_config: of the stage's ``VllmConfig``.
    """

    def __init__(self, additional_config: dict[str, Any]) -> None:
        self._all = self._now = get_num_threads()
        is_fixed = "OMP_NUM_THREADS" in os.environ
        self._share = self._all if is_fixed else max(1, self._all // additional_config.get(NUM_STAGES, 1))

    def set_for(self, num_tokens: int) -> None:
        """Set the threads for a step of ``num_tokens``, in the thread that computes it; 0 uses the share."""
        wanted = self._all if num_tokens >= MANY_TOKENS else self._share
        if wanted != self._now:
            set_num_threads(wanted)
            self._now = wanted
