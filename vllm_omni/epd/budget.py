"""Budgets: how many tokens and how much of an encode one iteration may hold.

From: HydraInfer, section 4.2 (budgets by binary search under the TPOT SLO).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol

from vllm_omni.epd.cost import CostModel, LanguageLoad, SampleLog, medians
from vllm_omni.errors import ConfigError
from vllm_omni.messages.epd_step import ENCODE_IN, EPD_CONFIG, SLICES, THREAD
from vllm_omni.messages.slo import SHARE_OF_GAPS
from vllm_omni.names import suggest


@dataclass(frozen=True)
class EPDConfig:
    """Budgets of an engine. None given: its scheduler decides as vLLM's own does.

    Either both budgets are fixed, or they follow from ``tpot_ms`` and what batches cost.
    """

    token_budget: int | None = None  # tokens of the language model in one iteration
    image_budget: int | None = None  # embeddings in one batch of images
    num_encode_layers: int | None = None  # of the tower, beside one iteration with tokens; None: to the end
    tpot_ms: float | None = None  # default of the requests' own
    ttft_ms: float | None = None
    tpot_share: float = SHARE_OF_GAPS  # of a request's gaps, which keep the TPOT; beyond them one may be spent
    # Of the TPOT: what an iteration is planned to take. On two cores of a shared host one iteration in a hundred takes
    # 1.4 times as long as the median one of the same batch, and the way to the client is part of a gap, too.
    margin: float = 0.7
    min_prefill_tokens: int = 16  # an iteration's prefill is never planned shorter: nothing waits for ever
    patience: int = 64  # steps for which an encode, or a request that is too late, gives way in a row
    cost: CostModel | None = None  # of this machine, if it was fitted before; None: batches are measured at the start
    profile_s: float = 5.0  # at most, for that; 0: the first iterations are measured instead
    encode_in: str = SLICES  # between the steps of the language model, or in a THREAD beside them

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not is_number and one.name not in ("cost", ENCODE_IN):
                raise ConfigError(f"{EPD_CONFIG}.{one.name} = {value!r}: must be a number")
            if one.name == "profile_s" and value == 0:
                continue
            if isinstance(value, int | float) and value <= 0:
                raise ConfigError(f"{EPD_CONFIG}.{one.name} = {value}: must be greater than 0")
        if self.tpot_share > 1:
            raise ConfigError(f"{EPD_CONFIG}.tpot_share = {self.tpot_share}: a share of the gaps, at most 1")
        if self.encode_in not in (SLICES, THREAD):
            raise ConfigError(f"{EPD_CONFIG}.{ENCODE_IN}: {suggest(self.encode_in, (SLICES, THREAD))}")
        if self.encode_in == THREAD and not self.is_on:
            raise ConfigError(f"{EPD_CONFIG}.{ENCODE_IN} = {THREAD!r}: needs budgets: give tpot_ms as well")
        if self.tpot_ms is None and (self.token_budget is None) != (self.image_budget is None):
            raise ConfigError(f"{EPD_CONFIG}: give both token_budget and image_budget, or tpot_ms")

    @property
    def is_on(self) -> bool:
        return self.tpot_ms is not None or self.token_budget is not None

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> EPDConfig:
        known = {one.name for one in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise ConfigError(f"{EPD_CONFIG}: unknown {', '.join(unknown)}; known are {', '.join(sorted(known))}")
        cost = values.get("cost")
        return cls(**{**values, "cost": CostModel.parse(cost, f"{EPD_CONFIG}.cost") if cost is not None else None})


class Budgets(Protocol):
    """What ``EPDScheduler`` asks before and after each iteration."""

    def num_tokens(self, decodes: LanguageLoad, context: int, limit_s: float | None, num_encoding: int) -> int:
        """The most tokens that the iteration may prefill beside its decodes: a chunk behind ``context`` tokens.

        ``num_encoding``: embeddings of the batch of images under way.
        """
        ...

    def num_embeds(self, decodes: LanguageLoad, limit_s: float | None) -> int:
        """The most embeddings of one batch of images."""
        ...

    def num_layers(self, load: LanguageLoad, num_embeds: int, limit_s: float | None) -> int | None:
        """How many layers a batch of so many embeddings goes on by beside ``load``; at least one."""
        ...

    def limit_s(self, tpot_s: float | None, is_hurried: bool = False) -> float | None:
        """What an iteration is planned to take, with decodes of which one asks for ``tpot_s``; None: no limit.

        ``is_hurried``: with less care for them, because somebody's first token would be late.
        """
        ...

    def seconds_alone(self, load: LanguageLoad, num_embeds: int) -> float:
        """What an encode of so many embeddings and then the language batch take with the machine to themselves."""
        ...

    def observe_language(self, load: LanguageLoad, seconds: float) -> None:
        """What an iteration took, without its encode."""
        ...

    def observe_encode(self, num_embeds: int, num_layers: float, num_layers_of_batch: int, seconds: float) -> None:
        """What so many of a batch's layers took."""
        ...


class FixedBudgets:
    """The same budgets in every iteration."""

    def __init__(self, token_budget: int, image_budget: int, num_encode_layers: int | None = None) -> None:
        self._token_budget = token_budget
        self._image_budget = image_budget
        self._num_encode_layers = num_encode_layers

    def num_tokens(self, decodes: LanguageLoad, context: int, limit_s: float | None, num_encoding: int) -> int:
        return max(0, self._token_budget - decodes.num_decodes)

    def num_embeds(self, decodes: LanguageLoad, limit_s: float | None) -> int:
        return self._image_budget

    def num_layers(self, load: LanguageLoad, num_embeds: int, limit_s: float | None) -> int | None:
        return self._num_encode_layers

    def limit_s(self, tpot_s: float | None, is_hurried: bool = False) -> float | None:
        return None

    def seconds_alone(self, load: LanguageLoad, num_embeds: int) -> float:
        return 0.0

    def observe_language(self, load: LanguageLoad, seconds: float) -> None:
        pass

    def observe_encode(self, num_embeds: int, num_layers: float, num_layers_of_batch: int, seconds: float) -> None:
        pass


HURRIED_MARGIN = 0.8
"""Of the TPOT, where a first token would be late otherwise: of the gaps, some may be."""

STEP = 0.03
"""By how much an iteration corrects what is expected of the next ones, in ``ln``."""

FIRST_FIT, LAST_FIT = 8, 2048
"""Samples, where a cost model is found out while the engine runs."""

BATCH_GRID = 16
"""A batch that is cut to its time has a multiple of so many tokens.

Kernels are made for sizes: oneDNN compiles one for each number of rows that it meets, which takes as long as computing
some hundred of them; CUDA graphs are captured for some sizes and padded up to the next.
"""


def largest(fits: Callable[[int], bool], limit: int) -> int:
    """The largest number up to ``limit`` that fits, where whatever is below one that fits does, too; 0 if none."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


class SloBudgets:
    """The largest budgets with which an iteration stays under the TPOT, by binary search over a cost model.

    Joint: a prefill is planned with a layer of the batch of images under way, the layers with the language batch that
    was scheduled. What iterations really took corrects both parts of the model: the machine may be shared, and the
    model was fitted on one day.

    Without a model one is fitted to the first iterations, and again each time that there are twice as many: the
    requests with which an engine is warmed up are the batches that it is profiled with. Of what was not seen yet it
    knows no cost, and so sets it no limit.

    Args:
        cost: fitted before; None: to be found out.
        margin: of the TPOT that is planned.
        max_tokens: of one iteration, from the engine's configuration.
        max_embeds: of one batch of images.
    """

    def __init__(self, cost: CostModel | None, margin: float, max_tokens: int, max_embeds: int) -> None:
        self.cost = cost or CostModel.free()
        self.language_factor = 1.0  # the median of measured over modelled
        self.encode_factor = 1.0
        self.num_layers_of_batch = 1  # not known before the first encode: then a batch is indivisible
        self._margin = margin
        self._max_tokens = max_tokens
        self._max_embeds = max_embeds
        self._log: SampleLog | None = SampleLog() if cost is None else None
        self._num_samples_to_fit = FIRST_FIT

    def go_on_learning(self, log: SampleLog) -> None:
        """From what was measured before on: of some batches it says nothing."""
        self._log = log
        self._num_samples_to_fit = len(log.samples) + FIRST_FIT

    @property
    def is_fitted(self) -> bool:
        return self.cost != CostModel.free()

    def language_s(self, load: LanguageLoad) -> float:
        return self.cost.language_s(load) * self.language_factor

    def layer_s(self, num_embeds: int) -> float:
        """One layer of a batch of images: what an iteration with an encode takes at least."""
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
            self._log = None  # from here on the correction does

    def _corrected(self, factor: float, modelled_s: float, measured_s: float) -> float:
        """A step towards the median of measured over modelled; the margin is for what takes longer than that.

        Of the same length however far it is, so that an iteration from which the machine was taken away counts no more
        than any other; and long enough that a machine twice as slow is noticed within ``ln 2 / STEP`` iterations.
        """
        if modelled_s <= 0:
            return factor
        return factor * math.exp(STEP if measured_s > modelled_s * factor else -STEP)
