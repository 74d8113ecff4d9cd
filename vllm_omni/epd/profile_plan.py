"""``ProfilePlan``: the batches with which an engine is measured before its first request.

From: HydraInfer, section 4.2 (profiling at start).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from vllm_omni.epd.budget import BATCH_GRID, Budgets, SloBudgets
from vllm_omni.epd.cost import CostModel, LanguageLoad, SampleLog, medians

logger = logging.getLogger(__name__)

UNLIMITED = 2**31
MAX_CUT = 128  # tokens; on a CPU, a batch that is cut to the TPOT is seldom larger
TYPICAL_DECODES, TYPICAL_CONTEXT = 8, 256  # the batch for which budgets are logged


@dataclass(frozen=True)
class Phase:
    """Requests that arrive together and run to their end."""

    num_requests: int
    num_prompt_tokens: int
    num_tokens: int  # generated per request
    token_budget: int = UNLIMITED  # of an iteration, so that a chunk of a prompt runs beside the decodes
    with_images: int = 0  # requests with an image; the others only decode beside them
    num_encode_layers: int | None = None  # beside an iteration with tokens


@dataclass(frozen=True)
class ProfileLimits:
    """What bounds the batches of an engine."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_kv_tokens: int  # for which there is room
    num_image_tokens: int = 0  # of a prompt with the largest image; 0: the model reads no images
    num_embeds: int = 0  # of that image


class MeasuringBudgets(Budgets):
    """The budgets of a phase, which log what its iterations took."""

    def __init__(self, phase: Phase, log: SampleLog) -> None:
        super().__init__(phase.token_budget, UNLIMITED, phase.num_encode_layers)
        self._log = log

    def observe_language(self, load: LanguageLoad, seconds: float) -> None:
        self._log.add_language(load, seconds)

    def observe_encode(self, num_embeds: int, num_layers: float, num_layers_of_batch: int, seconds: float) -> None:
        self._log.add_encode(num_embeds, num_layers, num_layers_of_batch, seconds)


class ProfilePlan:
    """Chooses the phases, one after the other, until they are complete or their time is up.

    All phases run twice. The first round is dropped if the second completes: kernels are chosen or compiled with the
    first batch of a size.

    Args:
        max_seconds: no phase starts later, and the one that runs is given up.
        is_complete: whether the phases cover all that the engine does, so far as it is known.
    """

    def __init__(self, limits: ProfileLimits, max_seconds: float, *, is_complete: bool = True) -> None:
        self.log = SampleLog()
        self.is_complete = is_complete
        self._limits = limits
        self._max_seconds = max_seconds
        self._started_at: float | None = None
        self._phases: Iterator[Phase] = iter(())

    def is_late(self, now: float) -> bool:
        return self._started_at is not None and now - self._started_at > self._max_seconds

    def next_phase(self, now: float) -> Phase | None:
        """The next phase; None: the profile is over."""
        if self._started_at is None:
            self._started_at = now
            self._phases = self._rounds()
        if self.is_late(now):
            self.is_complete = False
            return None
        return next(self._phases, None)

    def finish(self, budgets: SloBudgets, tpot_s: float, now: float) -> SloBudgets:
        """Give the measured costs to new budgets, and log what follows at this TPOT; the rest is learned later."""
        try:
            if any(not sample.num_embeds for sample in self.log.samples):  # else the language model is unknown
                budgets.set_cost(CostModel.fit(medians(self.log.samples)))
        except Exception:  # whatever was measured, the engine must serve
            logger.warning("epd: no cost model fits the measurements", exc_info=True)
        budgets.num_layers_of_batch = self.log.num_layers_of_batch
        if not self.is_complete:
            budgets.continue_learning(self.log)
        self._report(budgets, tpot_s, now)
        return budgets

    def _report(self, budgets: SloBudgets, tpot_s: float, now: float) -> None:
        """Log the budgets, and the costs in the form that a configuration takes."""
        assert self._started_at is not None
        seconds = now - self._started_at
        if not budgets.is_fitted:
            logger.warning("epd: nothing was measured in %.1f s; the first iterations are measured instead", seconds)
            return
        decodes = LanguageLoad().with_decode(TYPICAL_DECODES, TYPICAL_CONTEXT)
        limit_s = budgets.limit_s(tpot_s)
        num_embeds = self._limits.num_embeds
        num_layers = budgets.num_layers(decodes, num_embeds, limit_s)
        logger.info(
            "epd: %d batches measured in %.1f s. At %g ms, beside %d decodes: %d tokens of a prompt; with a layer "
            "of %d of an encode, %d tokens; of an encode alone, %s layers. cost: %s",
            len(self.log.samples),
            seconds,
            tpot_s * 1000,
            TYPICAL_DECODES,
            budgets.num_tokens(decodes, TYPICAL_CONTEXT, limit_s, 0),
            budgets.num_layers_of_batch,
            budgets.num_tokens(decodes, TYPICAL_CONTEXT, limit_s, num_embeds),
            num_layers if num_layers is not None else "all",
            json.dumps({name: float(f"{value:.4g}") for name, value in asdict(budgets.cost).items()}),
        )

    def _rounds(self) -> Iterator[Phase]:
        phases = [phase for phase in self._all_phases() if self._fits(phase)]
        yield from phases
        first = len(self.log.samples)
        yield from phases
        del self.log.samples[:first]
        logger.debug("epd: %d batches measured, %d of the first round dropped", len(self.log.samples), first)

    def _all_phases(self) -> Sequence[Phase]:
        limits = self._limits
        num_seqs = min(32, limits.max_num_seqs)
        some = min(8, num_seqs)
        longest = min(1024, limits.max_model_len * 3 // 4)
        whole = min(longest, limits.max_num_batched_tokens)
        phases = [
            Phase(1, min(16, longest), 6),
            Phase(some, min(16, longest), 6),
            Phase(1, whole, 4),
            Phase(1, longest, 4, token_budget=max(16, whole // 4)),
            # One by one, these start to decode beside the prompts of the others.
            Phase(some, min(96, longest), 4, token_budget=48),
            Phase(num_seqs, min(16, longest), 4),
            Phase(some // 2 or 1, longest // 2, 4),
            # The sizes to which batches are cut, so that their kernels exist.
            *(Phase(1, size, 1) for size in range(BATCH_GRID, min(MAX_CUT, longest) + 1, BATCH_GRID)),
        ]
        if limits.num_image_tokens:
            phases[2:2] = [
                Phase(1, 0, 1, with_images=1),
                Phase(some, min(16, longest), 12, token_budget=64, with_images=1, num_encode_layers=2),
                Phase(2, 0, 1, with_images=2),
            ]
        return phases

    def _fits(self, phase: Phase) -> bool:
        """Whether the engine has room to run the phase without preempting its requests."""
        limits = self._limits
        lengths = [limits.num_image_tokens] * phase.with_images
        lengths += [phase.num_prompt_tokens] * (phase.num_requests - phase.with_images)
        room = sum(length + phase.num_tokens + limits.block_size for length in lengths)
        return room <= limits.num_kv_tokens and max(lengths) + phase.num_tokens < limits.max_model_len
