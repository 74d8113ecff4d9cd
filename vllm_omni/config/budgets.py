"""``EPDConfig``: the budgets of a stage's schedulers, which are keys of its ``epd:`` section.

From: HydraInfer, section 4.2 (budgets under the TPOT SLO).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields
from typing import TYPE_CHECKING, Any, Self

from vllm_omni.errors import ConfigError
from vllm_omni.messages.slo import SHARE_OF_GAPS, Slo
from vllm_omni.names import suggest

if TYPE_CHECKING:
    from vllm.config import VllmConfig

EPD_CONFIG = "epd"
"""Key of a stage's ``additional_config`` for its budgets, and the name of the section in error messages."""

ENCODE_IN, SLICES, THREAD = "encode_in", "slices", "thread"
"""Key of an ``epd`` section, and where images are encoded: between the steps, or in a thread beside them."""


@dataclass(frozen=True)
class Costs:
    """Seconds of the parts of an iteration, as an engine logs them. ``epd.cost.CostModel`` computes with them."""

    step_s: float  # of any language batch
    decode_s: float  # per decoding token
    decode_context_s: float  # per token that a decode attends to
    prefill_token_s: float
    prefill_pair_s: float  # per pair of a token and one that it attends to
    encode_s: float  # of any batch of images
    embed_s: float  # per embedding of an image

    @classmethod
    def parse(cls, values: Any, name: str) -> Self:
        """Read the configuration value called ``name``.

        Raises:
            ConfigError: not a mapping of these keys to seconds.
        """
        known = [one.name for one in fields(cls)]
        if not isinstance(values, Mapping) or set(values) != set(known):
            raise ConfigError(f"{name} = {values!r}: must be a mapping with {', '.join(known)}, as the log gives it")
        for key, value in values.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ConfigError(f"{name}.{key} = {value!r}: must be a number of seconds, not negative")
        return cls(**values)

    def __post_init__(self) -> None:
        assert min(astuple(self)) >= 0, "binary search needs a cost that never falls"


@dataclass(frozen=True)
class EPDConfig:
    """Budgets of an engine. With none given, its scheduler decides as vLLM's own does.

    Either both budgets are fixed, or they follow from ``tpot_ms`` and the measured costs of batches.
    """

    token_budget: int | None = None  # tokens of the language model in one iteration
    image_budget: int | None = None  # embeddings in one batch of images
    num_encode_layers: int | None = None  # of the encoder, beside one iteration with tokens; None: to the end
    tpot_ms: float | None = None  # default for requests without their own
    ttft_ms: float | None = None
    tpot_share: float = SHARE_OF_GAPS  # of a request's gaps must keep the TPOT; the others may be spent
    # Share of the TPOT that an iteration is planned to take. On two cores of a shared host, one iteration in a hundred
    # takes 1.4 times the median of the same batch, and the way to the client is part of a gap, too.
    margin: float = 0.7
    min_prefill_tokens: int = 16  # an iteration's prefill is never planned shorter, so that no prompt starves
    patience: int = 64  # steps in a row for which an encode, or a request that is too late, is deferred
    cost: Costs | None = None  # of this machine, if measured before; None: measured at the start
    profile_s: float = 5.0  # limit of that measurement; 0: the first iterations are measured instead
    encode_in: str = SLICES  # between the steps of the language model, or in a THREAD beside them

    def __post_init__(self) -> None:
        for one in fields(self):
            self._check_number(one.name, getattr(self, one.name))
        if self.tpot_share > 1:
            raise ConfigError(f"{EPD_CONFIG}.tpot_share = {self.tpot_share}: a share of the gaps, at most 1")
        if self.encode_in not in (SLICES, THREAD):
            raise ConfigError(f"{EPD_CONFIG}.{ENCODE_IN}: {suggest(str(self.encode_in), (SLICES, THREAD))}")
        if self.encode_in == THREAD and not self.is_on:
            raise ConfigError(f"{EPD_CONFIG}.{ENCODE_IN} = {THREAD!r}: needs budgets: give tpot_ms as well")
        if self.tpot_ms is None and (self.token_budget is None) != (self.image_budget is None):
            raise ConfigError(f"{EPD_CONFIG}: give both token_budget and image_budget, or tpot_ms")

    @staticmethod
    def _check_number(name: str, value: object) -> None:
        if value is None or name in ("cost", ENCODE_IN):
            return
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{EPD_CONFIG}.{name} = {value!r}: must be a number")
        if value <= 0 and not (name == "profile_s" and value == 0):
            raise ConfigError(f"{EPD_CONFIG}.{name} = {value}: must be greater than 0")

    @property
    def is_on(self) -> bool:
        return self.tpot_ms is not None or self.token_budget is not None

    @property
    def slo(self) -> Slo:
        """The default of requests without their own."""
        return Slo(self.ttft_ms, self.tpot_ms, self.tpot_share)

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> EPDConfig:
        if unknown := sorted(set(values) - set(BUDGET_KEYS)):
            raise ConfigError(f"{EPD_CONFIG}: unknown {', '.join(unknown)}; known are {', '.join(sorted(BUDGET_KEYS))}")
        cost = values.get("cost")
        return cls(**{**values, "cost": Costs.parse(cost, f"{EPD_CONFIG}.cost") if cost is not None else None})


BUDGET_KEYS = tuple(one.name for one in fields(EPDConfig))


def encodes_in_thread(config: VllmConfig) -> bool:
    """Whether an engine encodes images beside its steps; never without images, or without a language model.

    Raises:
        ConfigError: it is configured to, and cannot.
    """
    if config.additional_config.get(EPD_CONFIG, {}).get(ENCODE_IN) != THREAD:
        return False
    if config.is_mm_encoder_only or not config.model_config.supports_multimodal_inputs:
        return False
    if config.parallel_config.world_size > 1 or config.device_config.device_type != "cpu":
        raise ConfigError(
            f"{EPD_CONFIG}.{ENCODE_IN} = {THREAD!r}: only on a CPU and with one rank, as ranks would end at different "
            f"times; give {SLICES!r}"
        )
    return True
