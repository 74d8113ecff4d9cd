"""``Profile``: the batches with which an engine is measured before its first request.

From: HydraInfer, section 4.2 (profiling at start).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from vllm.config import VllmConfig
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.request import Request

from vllm_omni.epd.budget import BATCH_GRID, FixedBudgets, SloBudgets
from vllm_omni.epd.cost import CostModel, LanguageLoad, SampleLog, medians

logger = logging.getLogger(__name__)

PREFIX = "\0profile"
"""Of the ids of a profile's requests and images: nobody else's begins so."""

UNLIMITED = 2**31
MAX_CUT = 128
"""Tokens: a batch that is cut below the TPOT is seldom larger on a CPU."""

TYPICAL_DECODES, TYPICAL_CONTEXT = 8, 256  # of which budgets are told


@dataclass(frozen=True)
class Phase:
    """Requests that come together and are run to their end."""

    num_requests: int
    num_prompt_tokens: int
    num_tokens: int  # that each answers
    token_budget: int = UNLIMITED  # of an iteration: a chunk of a prompt beside the decodes
    with_images: int = 0  # of the requests; the others only decode beside them
    num_encode_layers: int | None = None  # beside an iteration with tokens


class DummyImage(NamedTuple):
    """The largest of a model's images, and the shortest prompt that holds it."""

    prompt_token_ids: list[int]
    modality: str
    data: MultiModalKwargsItem
    position: PlaceholderRange

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> DummyImage | None:
        """As vLLM makes it to measure memory; None: the model encodes nothing."""
        if not vllm_config.model_config.supports_multimodal_inputs:
            return None
        processor = MULTIMODAL_REGISTRY.create_processor(vllm_config.model_config)
        allowed = [modality for modality, limit in processor.info.allowed_mm_limits.items() if limit > 0]
        if not allowed:
            return None
        modality = "image" if "image" in allowed else allowed[0]
        inputs = processor.get_dummy_mm_inputs({modality: 1})
        (data,), (position,) = inputs["mm_kwargs"][modality], inputs["mm_placeholders"][modality]
        assert data is not None, "only a cache of the processor takes the data away"
        end = position.offset + position.length
        return cls([*inputs["prompt_token_ids"][:end], 0], modality, data, position)


class MeasuringBudgets(FixedBudgets):
    """What a phase allows; keeps what its iterations took."""

    def __init__(self, phase: Phase, log: SampleLog) -> None:
        super().__init__(phase.token_budget, UNLIMITED, phase.num_encode_layers)
        self._log = log

    def observe_language(self, load: LanguageLoad, seconds: float) -> None:
        self._log.add_language(load, seconds)

    def observe_encode(self, num_embeds: int, num_layers: float, num_layers_of_batch: int, seconds: float) -> None:
        self._log.add_encode(num_embeds, num_layers, num_layers_of_batch, seconds)


class Profile:
    """Decides which requests an engine is measured with, one phase after the other, until its time is up.

    The requests are the scheduler's own. So whatever an iteration costs is measured, vLLM's part of it included, on
    every kind of engine and whoever asks it; and a user's request that comes meanwhile waits until it is over.

    All phases are run twice, and the first round does not count if the second one is done: kernels choose their ways
    with the first batch of a size.

    Args:
        max_seconds: after which no phase is begun, and the one that is running is given up.
        num_kv_tokens: for which the engine has room.
    """

    def __init__(self, vllm_config: VllmConfig, max_seconds: float, num_kv_tokens: int, hash_block_size: int) -> None:
        self.log = SampleLog()
        self.request_ids: list[str] = []  # of the phase that is running
        self.began_at: float | None = None
        self._max_seconds = max_seconds
        self._vllm_config = vllm_config
        self._num_kv_tokens = num_kv_tokens
        self._block_hasher: Any = None
        if vllm_config.cache_config.enable_prefix_caching:
            hash_fn = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
            self._block_hasher = get_request_block_hasher(hash_block_size, hash_fn)
        self._phases: Iterator[Phase] = iter(())
        self.is_complete = True  # as far as it has got: nothing that the engine does was left out
        self._image = self._make_image()
        self._num_requests = 0
        self.budgets: MeasuringBudgets | None = None  # of the phase that is running

    def owns(self, request_id: str) -> bool:
        return request_id.startswith(PREFIX)

    def without_own(self, outputs: dict[int, EngineCoreOutputs]) -> dict[int, EngineCoreOutputs]:
        """Of a step: what others are to be told, who may have been refused; its statistics are nobody's."""
        for of_client in outputs.values():
            of_client.outputs = [one for one in of_client.outputs if not self.owns(one.request_id)]
            of_client.scheduler_stats = None
        return {client: one for client, one in outputs.items() if one.outputs}

    def is_late(self, now: float) -> bool:
        return self.began_at is not None and now - self.began_at > self._max_seconds

    def next_requests(self, now: float) -> list[Request]:
        """Those of the next phase; none: it is over."""
        if self.began_at is None:
            self.began_at = now
            self._phases = self._rounds()
        if self.is_late(now):
            self.is_complete = False
            return []
        phase = next(self._phases, None)
        if phase is None:
            return []
        self.budgets = MeasuringBudgets(phase, self.log)
        requests = [self._request(phase, index) for index in range(phase.num_requests)]
        self.request_ids = [request.request_id for request in requests]
        return requests

    def cost(self) -> CostModel | None:
        """What the batches say; None: they say nothing of the language model."""
        if not any(not sample.num_embeds for sample in self.log.samples):
            return None
        return CostModel.fit(medians(self.log.samples))

    def tell(self, budgets: SloBudgets, tpot_s: float, now: float) -> None:
        """Log what was found: the budgets at this TPOT, and the costs as a configuration takes them."""
        assert self.began_at is not None
        if not budgets.is_fitted:
            logger.warning("epd: nothing was measured in %.1f s; the first iterations will tell", now - self.began_at)
            return
        decodes = LanguageLoad().with_decode(TYPICAL_DECODES, TYPICAL_CONTEXT)
        limit_s = budgets.limit_s(tpot_s)
        num_layers = budgets.num_layers(decodes, self._num_embeds, limit_s)
        logger.info(
            "epd: %d batches measured in %.1f s. At %g ms, beside %d decodes: %d tokens of a prompt; with a layer "
            "of %d of an encode, %d tokens; of an encode alone, %s layers. cost: %s",
            len(self.log.samples),
            now - self.began_at,
            tpot_s * 1000,
            TYPICAL_DECODES,
            budgets.num_tokens(decodes, TYPICAL_CONTEXT, limit_s, 0),
            budgets.num_layers_of_batch,
            budgets.num_tokens(decodes, TYPICAL_CONTEXT, limit_s, self._num_embeds),
            num_layers if num_layers is not None else "all",
            json.dumps({name: float(f"{value:.4g}") for name, value in asdict(budgets.cost).items()}),
        )

    @property
    def _num_embeds(self) -> int:
        return self._image.position.get_num_embeds() if self._image is not None else 0

    def _make_image(self) -> DummyImage | None:
        try:
            return DummyImage.of(self._vllm_config)
        except Exception:  # of a model's own processor: then its first images tell
            logger.warning("epd: no image to profile with", exc_info=True)
            self.is_complete = False
            return None

    def _rounds(self) -> Iterator[Phase]:
        phases = list(self._fitting(self._all_phases()))
        yield from phases
        first = len(self.log.samples)
        yield from phases
        del self.log.samples[:first]
        logger.debug("epd: %d batches measured, %d to get warm", len(self.log.samples), first)

    def _all_phases(self) -> Sequence[Phase]:
        scheduler = self._vllm_config.scheduler_config
        num_seqs = min(32, scheduler.max_num_seqs)
        some = min(8, num_seqs)
        longest = min(1024, self._vllm_config.model_config.max_model_len * 3 // 4)
        whole = min(longest, scheduler.max_num_batched_tokens)
        phases = [
            Phase(1, min(16, longest), 6),
            Phase(some, min(16, longest), 6),
            Phase(1, whole, 4),
            Phase(1, longest, 4, token_budget=max(16, whole // 4)),
            # One by one they begin to decode beside the prompts of the others.
            Phase(some, min(96, longest), 4, token_budget=48),
            Phase(num_seqs, min(16, longest), 4),
            Phase(some // 2 or 1, longest // 2, 4),
            # The sizes to which batches are cut, so that their kernels are there.
            *(Phase(1, size, 1) for size in range(BATCH_GRID, min(MAX_CUT, longest) + 1, BATCH_GRID)),
        ]
        if self._image is not None:
            phases[2:2] = [
                Phase(1, 0, 1, with_images=1),
                Phase(some, min(16, longest), 12, token_budget=64, with_images=1, num_encode_layers=2),
                Phase(2, 0, 1, with_images=2),
            ]
        return phases

    def _fitting(self, phases: Sequence[Phase]) -> Iterator[Phase]:
        """Those that an engine with little room can run without preempting its own requests."""
        num_image = len(self._image.prompt_token_ids) if self._image is not None else 0
        max_model_len = self._vllm_config.model_config.max_model_len
        for phase in phases:
            lengths = [num_image] * phase.with_images + [phase.num_prompt_tokens] * (
                phase.num_requests - phase.with_images
            )
            block_size = self._vllm_config.cache_config.block_size or 1
            room = sum(length + phase.num_tokens + block_size for length in lengths)
            if room <= self._num_kv_tokens and max(lengths) + phase.num_tokens < max_model_len:
                yield phase

    def _request(self, phase: Phase, index: int) -> Request:
        number = self._num_requests
        self._num_requests += 1
        features = None
        if index >= phase.num_requests - phase.with_images:
            assert self._image is not None
            prompt = self._image.prompt_token_ids
            name = f"{PREFIX}-image-{number}"  # of its own: no cache has it
            features = [MultiModalFeatureSpec(self._image.data, self._image.modality, name, self._image.position)]
        else:
            prompt = [number % 7 + 1] * phase.num_prompt_tokens
        params = SamplingParams(temperature=0.0, max_tokens=phase.num_tokens, ignore_eos=True)
        params.skip_reading_prefix_cache = True
        return Request(
            f"{PREFIX}-{number}", prompt, params, None, mm_features=features, block_hasher=self._block_hasher
        )
