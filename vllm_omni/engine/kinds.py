"""``EngineKind``: what differs between autoregressive, generation and diffusion stages in the engine.

A further kind of engine is one more class here, beside its name in ``config.model.EngineType``.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from vllm.sampling_params import RequestOutputKind, SamplingParams

from vllm_omni.config import StageConfig
from vllm_omni.config.budgets import EPD_CONFIG
from vllm_omni.config.diffusion import DIFFUSION
from vllm_omni.config.diffusion_params import DiffusionParams
from vllm_omni.engine.diffusion_request import ENGINE_PROMPT, make_sampling_params
from vllm_omni.engine.stage_params import own_params
from vllm_omni.engine.transfer_params import KV, KV_CONFIG, cache_args, without_reply
from vllm_omni.errors import InvalidRequest
from vllm_omni.flow import ENTRY
from vllm_omni.messages.stage_step import STAGE_ARGS
from vllm_omni.model_executor.pipeline import StageRequest, StageSpec
from vllm_omni.worker.platforms import find_platform

logger = logging.getLogger(__name__)


_WRONG_PARAMS = "AsyncOmni.stage_params makes those that the stage's kind needs"


class EngineKind(ABC):
    """The engine arguments and the requests of one kind of engine."""

    generates_tokens = False  # its tasks are timed, and other stages may read the rows that it publishes
    renders_prompt = True  # a first stage's prompt passes through vLLM's renderer
    sampling_params: Mapping[str, Any] = {}  # which every request has, as with those of a ``StageSpec``

    @abstractmethod
    def engine_args(self, config: StageConfig, device: str) -> dict[str, Any]:
        """Fields of vLLM's ``EngineArgs`` unless the deployment says otherwise.

        Args:
            device: vLLM's name of the platform: "cpu", "cuda".
        """

    def additional_config(self, config: StageConfig) -> dict[str, Any]:
        """Sections for ``VllmConfig.additional_config``, where the stage's processes read them."""
        return {}

    async def engine_request(
        self,
        config: StageConfig,
        spec: StageSpec,
        request: StageRequest,
        given: SamplingParams | DiffusionParams,
        wanted: frozenset[str],
    ) -> tuple[Any, SamplingParams]:
        """The prompt and the parameters that the engine receives for a request.

        Args:
            request: its prompt rendered, where the kind renders prompts.
            given: the user's parameters for this stage.
            wanted: fields of the graph that the call needs from this stage.

        Raises:
            InvalidRequest: a parameter that the stage cannot honour.
        """
        assert isinstance(given, SamplingParams), _WRONG_PARAMS
        if wanted and wanted <= spec.cache_fields:
            own = {STAGE_ARGS: request.args} if request.args else {}
            return request.prompt, without_reply(given, {**own, KV: cache_args(spec, request, given, wanted)})
        publishes = bool(spec.publishing_fields & wanted)
        is_read_on = publishes or bool((spec.frame_fields | spec.cache_fields) & wanted)
        if is_read_on and given.n > 1:
            raise InvalidRequest(f"stage {config.name!r}: n = {given.n}: the next stage reads one answer; give n = 1")
        params = own_params(config.name, given, {**spec.sampling_params, **request.sampling_params})
        if is_read_on or params.output_kind is not RequestOutputKind.FINAL_ONLY:
            # Each output costs the front end a pass through the graph.
            params.output_kind = RequestOutputKind.FINAL_ONLY if request.is_read_whole else RequestOutputKind.DELTA
        args: dict[str, Any] = {**request.args, **_publishing_args(spec, request, wanted)}
        if publishes and spec.publishes_rows and not params.skip_reading_prefix_cache:
            # A cached prefix is not computed, so it has no rows but those that are kept: the scheduler knows of which.
            args["cached_rows"] = params.skip_reading_prefix_cache = True
        ours: dict[str, Any] = {STAGE_ARGS: args}
        if KV_CONFIG in spec.engine_args:
            ours[KV] = cache_args(spec, request, params, wanted)
        params.extra_args = _with_ours(params.extra_args or {}, ours)
        return request.prompt, params


def _with_ours(extra_args: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any] | None:
    """Replace values that the user put under our keys: they must not reach the runner, or our connector."""
    kept = {name: value for name, value in extra_args.items() if name not in ours}
    return {**kept, **{name: value for name, value in ours.items() if value}} or None


def _publishing_args(spec: StageSpec, request: StageRequest, wanted: frozenset[str]) -> dict[str, Any]:
    """Stage arguments of a request whose output another stage pulls."""
    if not spec.publishing_fields & wanted:
        return {}
    is_opened = wanted - spec.publishing_fields or ENTRY in request.args.get("readers", ())
    if spec.publishes_pictures:
        return {} if ENTRY in request.args.get("readers", ()) else {"unopened": True}
    return {"publish": True} if is_opened else {"publish": True, "unopened": True}


class AutoregressiveKind(EngineKind):
    """vLLM's own engine: tokens, and rows that later stages read."""

    generates_tokens = True

    def engine_args(self, config: StageConfig, device: str) -> dict[str, Any]:
        args: dict[str, Any] = {
            "async_scheduling": False,
            "worker_cls": find_platform(device).ar_worker,
            "scheduler_cls": _ar_scheduler_cls(config),
        }
        return args | self._cpu_args(config.engine_args) if device == "cpu" else args

    def _cpu_args(self, given: Mapping[str, Any]) -> dict[str, Any]:
        args: dict[str, Any] = {}
        if given.get("tensor_parallel_size", 1) == 1:
            # vLLM would add a worker process on the CPU, and two hops to every step.
            args["distributed_executor_backend"] = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
        if given.get("enable_lora"):
            args["max_num_seqs"] = 1  # see engine_args._check_adapters
        compiler = os.environ.get("CXX", "g++")
        if shutil.which(compiler) is None and "enforce_eager" not in given:
            logger.warning("no C++ compiler (%r, the environment's CXX): models run without torch.compile", compiler)
            args["enforce_eager"] = True
        return args


def _ar_scheduler_cls(config: StageConfig) -> str:
    args = config.engine_args
    has_budgets = config.budgets or EPD_CONFIG in (args.get("additional_config") or {})
    if has_budgets or config.deployment.is_split or args.get("ec_transfer_config"):
        return "vllm_omni.core.sched.epd.EPDScheduler"
    return "vllm_omni.core.sched.stream.StreamScheduler"


class GenerationKind(EngineKind):
    """A model that answers a request in one step: a vocoder."""

    # A request that does not end with its only step would be scheduled again, which ends the engine.
    sampling_params: Mapping[str, Any] = {"max_tokens": 1, "detokenize": False}

    def engine_args(self, config: StageConfig, device: str) -> dict[str, Any]:
        return {
            "dtype": "float32",
            "distributed_executor_backend": find_platform(device).generation_executor,
            "scheduler_cls": "vllm_omni.core.sched.generation.GenerationScheduler",
            "skip_tokenizer_init": True,
            "enable_prefix_caching": False,
            "enforce_eager": True,
            "max_num_seqs": 8,
            "max_model_len": 16,  # one prompt token and one output token
        }


class DiffusionKind(GenerationKind):
    """A diffusers pipeline: the text travels with the parameters, and the pipeline reads it."""

    renders_prompt = False
    sampling_params: Mapping[str, Any] = {}

    def engine_args(self, config: StageConfig, device: str) -> dict[str, Any]:
        platform = find_platform(device)
        return super().engine_args(config, device) | {
            "dtype": platform.diffusion_dtype,
            "distributed_executor_backend": platform.diffusion_executor,
            "scheduler_cls": "vllm_omni.core.sched.diffusion.DiffusionScheduler",
            "worker_cls": platform.diffusion_worker,
        }

    def additional_config(self, config: StageConfig) -> dict[str, Any]:
        return {DIFFUSION: dict(config.diffusion)}

    async def engine_request(
        self,
        config: StageConfig,
        spec: StageSpec,
        request: StageRequest,
        given: SamplingParams | DiffusionParams,
        wanted: frozenset[str],
    ) -> tuple[Any, SamplingParams]:
        assert isinstance(given, DiffusionParams), _WRONG_PARAMS
        # In a thread, since it may decode images.
        args = {**request.args, **_publishing_args(spec, request, wanted)}
        params = await asyncio.to_thread(make_sampling_params, request.prompt, given, config.diffusion_config, args)
        return ENGINE_PROMPT, params


ENGINE_KINDS: Mapping[str, EngineKind] = {
    "ar": AutoregressiveKind(),
    "generation": GenerationKind(),
    "diffusion": DiffusionKind(),
}
"""By ``StageConfig.engine_type``."""
