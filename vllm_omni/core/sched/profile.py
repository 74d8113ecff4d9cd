"""``Profile``: the requests with which an engine is measured before its first one, as ``ProfilePlan`` chooses them.

From: HydraInfer, section 4.2 (profiling at start).
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

from vllm.config import VllmConfig
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.request import Request

from vllm_omni.config.budgets import EPDConfig
from vllm_omni.epd.profile_plan import MeasuringBudgets, Phase, ProfileLimits, ProfilePlan

logger = logging.getLogger(__name__)

PREFIX = "\0profile"
"""Start of the ids of a profile's requests and images; no other id starts with it."""


class DummyImage(NamedTuple):
    """The largest of a model's images, and the shortest prompt that holds it."""

    prompt_token_ids: list[int]
    modality: str
    data: MultiModalKwargsItem
    position: PlaceholderRange

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> DummyImage | None:
        """Make the image with which vLLM measures memory; None: the model encodes nothing."""
        if not vllm_config.model_config.supports_multimodal_inputs:
            return None
        processor = MULTIMODAL_REGISTRY.create_processor(vllm_config.model_config)
        allowed = [modality for modality, limit in processor.info.allowed_mm_limits.items() if limit > 0]
        if not allowed:
            return None
        modality = "image" if "image" in allowed else allowed[0]
        inputs = processor.get_dummy_mm_inputs({modality: 1})
        (data,), (position,) = inputs["mm_kwargs"][modality], inputs["mm_placeholders"][modality]
        assert data is not None, "only a cache of the processor removes the data"
        end = position.offset + position.length
        return cls([*inputs["prompt_token_ids"][:end], 0], modality, data, position)


class Profile:
    """The profile of an engine while it runs.

    Its requests are added by the scheduler itself. So an iteration's whole cost is measured, vLLM's part included, on
    every kind of engine and under every front end; a user's request that arrives meanwhile waits until it is over.

    Args:
        max_seconds: see ``ProfilePlan``.
        num_kv_tokens: for which the engine has room.
    """

    def __init__(self, vllm_config: VllmConfig, max_seconds: float, num_kv_tokens: int, hash_block_size: int) -> None:
        self.request_ids: list[str] = []  # of the phase that runs
        self.budgets: MeasuringBudgets | None = None  # of the phase that runs
        self._block_hasher: Any = None
        if vllm_config.cache_config.enable_prefix_caching:
            hash_fn = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
            self._block_hasher = get_request_block_hasher(hash_block_size, hash_fn)
        self._num_requests = 0
        self._image: DummyImage | None = None
        is_complete = True
        try:
            self._image = DummyImage.of(vllm_config)
        except Exception:  # a model's own processor may fail; then the first images are measured
            logger.warning("epd: no image to profile with", exc_info=True)
            is_complete = False
        limits = ProfileLimits(
            vllm_config.scheduler_config.max_num_seqs,
            vllm_config.scheduler_config.max_num_batched_tokens,
            vllm_config.model_config.max_model_len,
            vllm_config.cache_config.block_size or 1,
            num_kv_tokens,
            len(self._image.prompt_token_ids) if self._image is not None else 0,
            self._image.position.get_num_embeds() if self._image is not None else 0,
        )
        self.plan = ProfilePlan(limits, max_seconds, is_complete=is_complete)

    def owns(self, request_id: str) -> bool:
        return request_id.startswith(PREFIX)

    def without_own(self, outputs: dict[int, EngineCoreOutputs]) -> dict[int, EngineCoreOutputs]:
        """Keep the outputs of users' requests, which may have been rejected; drop the step's statistics."""
        for of_client in outputs.values():
            of_client.outputs = [one for one in of_client.outputs if not self.owns(one.request_id)]
            of_client.scheduler_stats = None
        return {client: one for client, one in outputs.items() if one.outputs}

    def next_requests(self, now: float) -> list[Request]:
        """Make the requests of the next phase; none: the profile is over."""
        phase = self.plan.next_phase(now)
        if phase is None:
            return []
        self.budgets = MeasuringBudgets(phase, self.plan.log)
        requests = [self._request(phase, index) for index in range(phase.num_requests)]
        self.request_ids = [request.request_id for request in requests]
        return requests

    def _request(self, phase: Phase, index: int) -> Request:
        number = self._num_requests
        self._num_requests += 1
        features = None
        if index >= phase.num_requests - phase.with_images:
            assert self._image is not None
            prompt = self._image.prompt_token_ids
            name = f"{PREFIX}-image-{number}"  # a new name each time, so that no cache has the image
            features = [MultiModalFeatureSpec(self._image.data, self._image.modality, name, self._image.position)]
        else:
            prompt = [number % 7 + 1] * phase.num_prompt_tokens
        params = SamplingParams(temperature=0.0, max_tokens=phase.num_tokens, ignore_eos=True)
        params.skip_reading_prefix_cache = True
        return Request(
            f"{PREFIX}-{number}", prompt, params, None, mm_features=features, block_hasher=self._block_hasher
        )


def make_profile(
    vllm_config: VllmConfig, config: EPDConfig, num_kv_tokens: int, hash_block_size: int
) -> Profile | None:
    """The profile with which an engine starts; None: its costs are known, or learned while it runs."""
    is_unknown = config.tpot_ms is not None and config.cost is None and bool(config.profile_s)
    # Engines of a data-parallel group step together: none of them may start by itself.
    is_alone = vllm_config.parallel_config.data_parallel_size == 1
    if not is_unknown or not is_alone or vllm_config.is_mm_encoder_only:
        return None
    return Profile(vllm_config, config.profile_s, num_kv_tokens, hash_block_size)
