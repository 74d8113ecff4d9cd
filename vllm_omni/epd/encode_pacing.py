"""``EncodePacing``: when a batch of images may start, and how large it may be.

From: HydraInfer, section 4.2, Algorithm 1 (encodes yield to prefills).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Generic, TypeVar

from vllm_omni.config.budgets import EPDConfig
from vllm_omni.epd.budget import Budgets
from vllm_omni.epd.deadlines import Deadlines
from vllm_omni.epd.engine_request import EngineRequest
from vllm_omni.epd.iterations import Iteration

R = TypeVar("R", bound=EngineRequest)


class EncodePacing(Generic[R]):
    """Defers encodes that would delay a first token, for at most ``patience`` steps in a row.

    Args:
        is_threaded: images are encoded in a thread, and take no time of an iteration.
    """

    def __init__(self, config: EPDConfig, deadlines: Deadlines[R], *, is_threaded: bool) -> None:
        self._config = config
        self._deadlines = deadlines
        self._is_threaded = is_threaded
        self.num_deferrals = 0  # in a row

    def num_embeds(
        self, budgets: Budgets, step: Iteration, requests: Collection[R], limit_s: float | None
    ) -> int | None:
        """Embeddings of a batch that starts now; None: it is deferred.

        Args:
            step: the language batch that was scheduled, and when.
            requests: in the step.
            limit_s: planned duration of the iteration.
        """
        max_embeds = budgets.num_embeds(step.load, None if self._is_threaded else limit_s)
        if self.num_deferrals < self._config.patience and self._delays_first_token(budgets, step, requests, max_embeds):
            self.num_deferrals += 1
            return None
        return max_embeds

    def note_start(self) -> None:
        """A batch has started."""
        self.num_deferrals = 0

    def _delays_first_token(self, budgets: Budgets, step: Iteration, requests: Collection[R], max_embeds: int) -> bool:
        """Whether an encode now would delay the step's prefills in a way that matters."""
        if not step.load.num_prefill_tokens or not self._config.is_on:
            return False
        if self._config.tpot_ms is None:
            return True
        # With SLOs, only a first token matters that is in time without the encode and late with it.
        without_s, with_s = (budgets.seconds_alone(step.load, num_embeds) for num_embeds in (0, max_embeds))
        return self._deadlines.is_first_token_made_late(requests, step.scheduled_at, without_s, with_s)
