"""``EPDConfig``: the budgets of a stage's schedulers, which are keys of its ``epd:`` section.

From: HydraInfer, section 4.2 (budgets under the TPOT SLO).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field

from vllm_omni.config.checks import Count, Problem, check_section
from vllm_omni.errors import ConfigError
from vllm_omni.messages.slo import SHARE_OF_GAPS, Slo

if TYPE_CHECKING:
    from vllm.config import VllmConfig

EPD_CONFIG = "epd"
"""Key of a stage's ``additional_config`` for its budgets, and the name of the section in error messages."""

ENCODE_IN: Final = "encode_in"
SLICES: Final = "slices"
THREAD: Final = "thread"
"""Key of an ``epd`` section, and where images are encoded: between the steps, or in a thread beside them."""


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class Costs:
    """Seconds of the parts of an iteration, as an engine logs them. ``epd.cost.CostModel`` computes with them."""

    step_s: Seconds  # of any language batch
    decode_s: Seconds  # per decoding token
    decode_context_s: Seconds  # per token that a decode attends to
    prefill_token_s: Seconds
    prefill_pair_s: Seconds  # per pair of a token and one that it attends to
    encode_s: Seconds  # of any batch of images
    embed_s: Seconds  # per embedding of an image

    def __post_init__(self) -> None:
        assert min(astuple(self)) >= 0, "binary search needs a cost that never falls"


def _check_costs(values: dict[str, Any] | None) -> dict[str, Any] | None:
    names = [one.name for one in fields(Costs)]
    if values is not None and set(values) != set(names):
        raise Problem(f"must be a mapping with {', '.join(names)}, as the log gives it")
    return values and check_section(Costs, values)


@dataclass(frozen=True)
class EPDConfig:
    """Budgets of an engine. With none given, its scheduler decides as vLLM's own does.

    Either both budgets are fixed, or they follow from ``tpot_ms`` and the measured costs of batches.
    """

    token_budget: Count | None = None  # tokens of the language model in one iteration
    image_budget: Count | None = None  # embeddings in one batch of images
    num_encode_layers: Count | None = None  # of the encoder, beside one iteration with tokens; None: to the end
    tpot_ms: Positive | None = None  # default for requests without their own
    ttft_ms: Positive | None = None
    # Share of a request's gaps that must keep the TPOT; the others may be spent.
    tpot_share: Annotated[float, Field(gt=0, le=1)] = SHARE_OF_GAPS
    # Share of the TPOT that an iteration is planned to take. On two cores of a shared host, one iteration in a hundred
    # takes 1.4 times the median of the same batch, and the way to the client is part of a gap, too.
    margin: Positive = 0.7
    min_prefill_tokens: Count = 16  # an iteration's prefill is never planned shorter, so that no prompt starves
    patience: Count = 64  # steps in a row for which an encode, or a request that is too late, is deferred
    # ``Costs`` of this machine, if measured before; None: measured at the start
    cost: Annotated[dict[str, float] | None, AfterValidator(_check_costs)] = None
    profile_s: Seconds = 5.0  # limit of that measurement; 0: the first iterations are measured instead
    encode_in: Literal["slices", "thread"] = SLICES  # between the steps of the language model, or beside them

    def __post_init__(self) -> None:
        if self.encode_in == THREAD and not self.is_on:
            raise ConfigError(f"{EPD_CONFIG}.{ENCODE_IN} = {THREAD!r}: needs budgets: give tpot_ms as well")
        if self.tpot_ms is None and (self.token_budget is None) != (self.image_budget is None):
            raise ConfigError(f"{EPD_CONFIG}: give both token_budget and image_budget, or tpot_ms")

    @property
    def is_on(self) -> bool:
        return self.tpot_ms is not None or self.token_budget is not None

    @property
    def slo(self) -> Slo:
        """The default of requests without their own."""
        return Slo(self.ttft_ms, self.tpot_ms, self.tpot_share)

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> EPDConfig:
        """Read the budgets of an ``epd`` section; raises ``ConfigError`` for a wrong one."""
        try:
            return cls(**check_section(cls, values))
        except Problem as exc:
            raise ConfigError(exc.below(EPD_CONFIG, values)) from None


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
