"""Budgets: how many tokens and how much of an encode one iteration may hold.

From: HydraInfer, section 4.2 (budgets by binary search under the TPOT SLO).
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable

from vllm_omni.config.budgets import EPDConfig
from vllm_omni.epd.cost import CostModel, LanguageLoad, SampleLog, medians


class Budgets:
    """The decisions that ``EPDScheduler`` asks for before each iteration, and the costs that it reports after it.

    These budgets are the same in every iteration.
    """

    def __init__(self, token_budget: int, image_budget: int, num_encode_layers: int | None = None) -> None:
        self._token_budget = token_budget
        self._image_budget = image_budget
        self._num_encode_layers = num_encode_layers

    def num_tokens(self, decodes: LanguageLoad, context: int, limit_s: float | None, num_encoding: int) -> int:
        """The most tokens that the iteration may prefill beside its decodes: a chunk behind ``context`` tokens.

        Args:
            num_encoding: embeddings of the batch of images in flight.
        """
        return max(0, self._token_budget - decodes.num_decodes)

    def num_embeds(self, decodes: LanguageLoad, limit_s: float | None) -> int:
        """The most embeddings of one batch of images."""
        return self._image_budget

    def num_layers(self, load: LanguageLoad, num_embeds: int, limit_s: float | None) -> int | None:
        """How many layers of the encoder a batch of images passes beside ``load``, at least one; None: all."""
        return self._num_encode_layers

    def limit_s(self, tpot_s: float | None, is_hurried: bool = False) -> float | None:
        """Plan the duration of an iteration with decodes of which one asks for ``tpot_s``; None: no limit.

        Args:
            is_hurried: plan with a smaller margin, because a first token would be late.
        """
        return None

    def seconds_alone(self, load: LanguageLoad, num_embeds: int) -> float:
        """The time of an encode of ``num_embeds`` and then the language batch, with the machine to themselves."""
        return 0.0

    def observe_language(self, load: LanguageLoad, seconds: float) -> None:
        """Report what an iteration took, without its encode."""

    def observe_encode(self, num_embeds: int, num_layers: float, num_layers_of_batch: int, seconds: float) -> None:
        """Report what ``num_layers`` of a batch of images took."""


HURRIED_MARGIN = 0.8
"""Share of the TPOT that is planned where a first token would be late otherwise: some of the gaps may be late."""

STEP = 0.03
"""Correction of the expected duration by each iteration, in ``ln``."""

FIRST_FIT, LAST_FIT = 8, 2048
"""Numbers of samples for the first and the last fit, where the costs are learned while the engine runs."""

BATCH_GRID = 16
"""A batch that is cut to its time has a multiple of this many tokens.

Kernels are made for sizes: oneDNN compiles one for each new number of rows, which takes as long as computing some
hundred rows; CUDA graphs are captured for some sizes, and batches are padded to the next.
"""


def largest(fits: Callable[[int], bool], limit: int) -> int:
    """Find the largest number up to ``limit`` that fits, by bisection; 0 if none does."""
    return bisect.bisect_left(range(1, limit + 1), True, key=lambda number: not fits(number))


class SloBudgets(Budgets):
    """The largest budgets with which an iteration stays under the TPOT, by binary search over a cost model.

    Both budgets share the iteration: a prefill is planned with one layer of the batch of images in flight, the layers
    with the language batch that was scheduled. Measured durations correct both parts of the model, as the machine may
    be shared with other work than when the model was fitted.

    Without a model, one is fitted to the first iterations, and again each time that their number has doubled, so the
    requests that warm up an engine also profile it. Work that was not seen yet has no known cost, and no limit.

    Args:
        cost: fitted before; None: to be learned.
        margin: share of the TPOT that is planned.
        max_tokens: of one iteration, from the engine's configuration.
        max_embeds: of one batch of images.
    """

    def __init__(self, cost: CostModel | None, margin: float, max_tokens: int, max_embeds: int) -> None:
        self.cost = cost or CostModel.free()
        self.language_factor = 1.0  # the median of measured over modelled
        self.encode_factor = 1.0
        self.num_layers_of_batch = 1  # unknown before the first encode, when a batch counts as indivisible
        self._margin = margin
        self._max_tokens = max_tokens
        self._max_embeds = max_embeds
        self._log: SampleLog | None = SampleLog() if cost is None else None
        self._num_samples_to_fit = FIRST_FIT

    def set_cost(self, cost: CostModel) -> None:
        """Use a fitted model, and stop learning one."""
        self.cost = cost
        self._log = None

    def continue_learning(self, log: SampleLog) -> None:
        """Add the next iterations to a log of measurements that does not cover all kinds of batches."""
        self._log = log
        self._num_samples_to_fit = len(log.samples) + FIRST_FIT

    @property
    def is_fitted(self) -> bool:
        return self.cost != CostModel.free()

    def language_s(self, load: LanguageLoad) -> float:
        return self.cost.language_s(load) * self.language_factor

    def layer_s(self, num_embeds: int) -> float:
        """The time of one layer of a batch of images, the least that an iteration with an encode takes."""
        return self.cost.images_s(num_embeds) * self.encode_factor / self.num_layers_of_batch

    def num_tokens(self, decodes: LanguageLoad, context: int, limit_s: float | None, num_encoding: int) -> int:
        if limit_s is None:
            return self._max_tokens
        left_s = limit_s - self.layer_s(num_encoding)
        num_tokens = largest(lambda n: self.language_s(decodes.with_prefill(n, context)) <= left_s, self._max_tokens)
        beyond = (decodes.num_decodes + num_tokens) % BATCH_GRID
        return num_tokens - beyond if num_tokens > beyond else num_tokens

    def num_embeds(self, decodes: LanguageLoad, limit_s: float | None) -> int:
        if limit_s is None:
            return self._max_embeds
        left_s = limit_s - self.language_s(decodes)
        return max(1, largest(lambda n: self.layer_s(n) <= left_s, self._max_embeds))

    def num_layers(self, load: LanguageLoad, num_embeds: int, limit_s: float | None) -> int | None:
        if limit_s is None or not self.layer_s(num_embeds):
            return None
        left_s = limit_s - self.language_s(load)
        return max(1, int(left_s / self.layer_s(num_embeds)))

    def limit_s(self, tpot_s: float | None, is_hurried: bool = False) -> float | None:
        if tpot_s is None:
            return None
        return tpot_s * (max(HURRIED_MARGIN, self._margin) if is_hurried else self._margin)

    def seconds_alone(self, load: LanguageLoad, num_embeds: int) -> float:
        return self.language_s(load) + self.cost.images_s(num_embeds) * self.encode_factor

    def observe_language(self, load: LanguageLoad, seconds: float) -> None:
        self.language_factor = self._corrected(self.language_factor, self.cost.language_s(load), seconds)
        if self._log is not None:
            self._log.add_language(load, seconds)
            self._learn()

    def observe_encode(self, num_embeds: int, num_layers: float, num_layers_of_batch: int, seconds: float) -> None:
        self.num_layers_of_batch = num_layers_of_batch
        modelled_s = self.cost.images_s(num_embeds) * num_layers / num_layers_of_batch
        self.encode_factor = self._corrected(self.encode_factor, modelled_s, seconds)
        if self._log is not None:
            self._log.add_encode(num_embeds, num_layers, num_layers_of_batch, seconds)
            self._learn()

    def _learn(self) -> None:
        assert self._log is not None
        if len(self._log.samples) < self._num_samples_to_fit:
            return
        self.cost = CostModel.fit(medians(self._log.samples))
        self.language_factor = self.encode_factor = 1.0
        self._num_samples_to_fit *= 2
        if self._num_samples_to_fit > LAST_FIT:
            self._log = None  # later changes are left to the correction

    def _corrected(self, factor: float, modelled_s: float, measured_s: float) -> float:
        """Move the factor a step towards the median of measured over modelled; the margin covers what takes longer.

        The step has a fixed length, so that an interrupted iteration counts no more than any other. It is long enough
        to notice a machine twice as slow within ``ln 2 / STEP`` iterations.
        """
        if modelled_s <= 0:
            return factor
        return factor * math.exp(STEP if measured_s > modelled_s * factor else -STEP)


def make_budgets(config: EPDConfig, max_tokens: int, max_embeds: int) -> Budgets:
    """Make the budgets of a configuration that has some.

    Args:
        max_tokens: of one iteration, without a ``token_budget``.
        max_embeds: of one batch of images, without an ``image_budget``.
    """
    if config.tpot_ms is None:
        assert config.token_budget is not None and config.image_budget is not None
        return Budgets(config.token_budget, config.image_budget, config.num_encode_layers)
    return SloBudgets(
        CostModel.of(config.cost),
        config.margin,
        max_tokens=config.token_budget or max_tokens,
        max_embeds=config.image_budget or max_embeds,
    )
