"""``create_vllm_config``: vLLM's configuration of one stage, from the deployment, the pipeline and our defaults."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from typing import Any

from pydantic import ValidationError
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMClientError
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_omni.config import StageConfig
from vllm_omni.config.budgets import EPD_CONFIG, EPDConfig
from vllm_omni.config.checkpoint import folder_of
from vllm_omni.config.epd import Instance
from vllm_omni.config.lacking_args import LACKING_ARGS
from vllm_omni.core.sched.canvases import denoises
from vllm_omni.engine.kinds import ENGINE_KINDS
from vllm_omni.engine.pool_args import check_hosts, media_pool, name_pages, unpoolable, with_offloading
from vllm_omni.errors import ConfigError
from vllm_omni.messages.media_counts import MEDIA_POOL
from vllm_omni.model_executor.pipeline import StageSpec
from vllm_omni.model_executor.row_cache import ROW_CACHE
from vllm_omni.process.shared_weights import LOAD_FORMAT, SHARED_WEIGHTS
from vllm_omni.vllm_patches import inspect_models_here

DEFAULTS = {field.name: None if field.default is MISSING else field.default for field in fields(AsyncEngineArgs)}


def create_vllm_config(
    config: StageConfig, spec: StageSpec, instance: Instance | None = None, *, log_stats: bool = False
) -> VllmConfig:
    """Create the configuration with which the stage's engine starts.

    Args:
        config: of an instance, if one is given (``config_of_instance``).

    Raises:
        ConfigError: an engine argument is wrong, or the pipeline sets it itself.
    """
    name = config.name if instance is None else instance.name
    try:
        args = _engine_args(config, spec, is_instance=instance is not None and instance.kind is not None)
    except ConfigError as exc:
        raise ConfigError(f"stage {name!r}: {exc}") from exc.__cause__
    # Our runner extends V1's; the switch is read here and in every process of the stage.
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    # A forked child inherits locks of threads that it does not have, and stages start from threads.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    if current_platform.is_cpu():
        inspect_models_here()
    try:
        args["disable_log_stats"] = not log_stats
        made = AsyncEngineArgs(**args).create_engine_config(UsageContext.ENGINE_CONTEXT)
    except ValidationError as exc:
        said = "; ".join(error["msg"].removeprefix("Value error, ") for error in exc.errors(include_url=False))
        raise ConfigError(f"stage {name!r}: {said}") from exc
    except (ValueError, TypeError, NotImplementedError, VLLMClientError) as exc:
        raise ConfigError(f"stage {name!r}: {exc}") from exc
    if (cache_bytes := config.engine_args.get("kv_cache_memory_bytes")) is not None:
        made.cache_config.kv_cache_memory_bytes = cache_bytes  # on a CPU, VLLM_CPU_KVCACHE_SPACE would win over it
    _leave_out_wrong_kernels(made)
    try:
        choose_attention(made)
    except ConfigError as exc:
        raise ConfigError(f"stage {name!r}: {exc}") from exc
    if made.load_config.load_format == LOAD_FORMAT and (reason := unshareable(made)) is not None:
        raise ConfigError(f"stage {name!r}: load_format = {LOAD_FORMAT!r}: {reason}")
    try:
        _complete_pool(made, config, spec)
    except ConfigError as exc:
        raise ConfigError(f"stage {name!r}: {exc}") from exc
    return made


def _complete_pool(made: VllmConfig, config: StageConfig, spec: StageSpec) -> None:
    if config.pool is None:
        return
    if made.load_config.load_format == "dummy":
        raise ConfigError(
            "kv_pool: what is kept is named by the checkpoint's weights, and with load_format = 'dummy' the model has "
            "others: leave one of them out"
        )
    if config.pool.keeps_pages and made.kv_transfer_config is not None:
        if (reason := unpoolable(made, config.pool, spec)) is not None:
            raise ConfigError(f"kv_pool: {reason}")
        name_pages(made)
    if config.pool.keeps_media:
        made.additional_config[MEDIA_POOL] = media_pool(made, config.pool, config.name)


def _leave_out_wrong_kernels(config: VllmConfig) -> None:
    """vLLM 0.32's rotary kernel for the CPU gives wrong values for the slices that latent attention (MLA) gives it."""
    if current_platform.is_cpu() and config.model_config.use_mla:
        config.compilation_config.custom_ops.append("-rotary_embedding")


def choose_attention(config: VllmConfig) -> None:
    """On CUDA, choose attention with a flag for each row of a batch where a model's images see each other
    (``worker/attention_pieces.py``).

    Triton's has it; of FlashAttention only version 4, and vLLM chooses 3 or 2 on most cards, which would fail with the
    first picture.

    Raises:
        ConfigError: another one is configured.
    """
    if config.device_config.device_type != "cuda" or not denoises(config.model_config.hf_config):
        return
    attention = config.attention_config
    flagged = [AttentionBackendEnum.TRITON_ATTN]
    if attention.flash_attn_version == 4:
        flagged.insert(0, AttentionBackendEnum.FLASH_ATTN)
    if attention.backend is None:
        attention.backend = flagged[0]
    elif attention.backend not in flagged:
        raise ConfigError(
            f"attention_backend = {attention.backend.name!r}: the images of this model see each other, for which "
            "attention needs a flag for each row: leave it out, give 'TRITON_ATTN', or 'FLASH_ATTN' with "
            "attention_config.flash_attn_version = 4"
        )


def unshareable(config: VllmConfig) -> str | None:
    """Why engines cannot map one copy of their weights, if that is so; models are examined when they load."""
    if config.device_config.device_type not in ("cpu", "cuda"):
        return f"it is for CPUs and for NVIDIA's GPUs, and this is {config.device_config.device_type!r}"
    if config.model_config.quantization is not None:
        return f"weights with quantization = {config.model_config.quantization!r} are packed in each process"
    if config.model_config.enable_sleep_mode:
        return "enable_sleep_mode frees weights, and these belong to no engine"
    return None if config.device_config.device_type == "cpu" else _rewritten_by(config)


def _rewritten_by(config: VllmConfig) -> str | None:
    """What writes into an engine's weights while it runs: on a CPU into its own pages, on a GPU into those of all."""
    written = {
        "enable_eplb moves": config.parallel_config.enable_eplb,
        "weight_transfer_config replaces": config.weight_transfer_config is not None,
        "offloading (cpu_offload_gb, offload_group_size) moves": config.offload_config.uva.cpu_offload_gb > 0
        or config.offload_config.prefetch.offload_group_size > 0,
    }
    reason = next((what for what, is_set in written.items() if is_set), None)
    return (
        None if reason is None else f"{reason} weights while an engine runs, and on a GPU the others compute with them"
    )


def shares_blocks(config: VllmConfig) -> bool:
    """Whether an engine shares blocks of a GPU's memory, which its server holds."""
    return SHARED_WEIGHTS in config.additional_config and config.device_config.device_type == "cuda"


def config_of_instance(config: StageConfig, instance: Instance) -> StageConfig:
    """The stage's configuration with the engine arguments of one of its instances, or of one replica."""
    args = {**config.engine_args, **instance.engine_args}
    additional = {**(config.engine_args.get("additional_config") or {}), **(args.get("additional_config") or {})}
    args |= {"additional_config": additional} if additional else {}
    # Its devices are not divided once more.
    host = config.host_of(config.engine_names.index(instance.name))
    return replace(config, engine_args=args, replicas=1, max_replicas=None, balance=None, host=host)


def _engine_args(config: StageConfig, spec: StageSpec, *, is_instance: bool) -> dict[str, Any]:
    device = current_platform.device_type
    own = ENGINE_KINDS[config.engine_type].engine_args(config, device)
    _check_effects(config, {**own, **spec.engine_args})
    revision = config.engine_args.get("revision")
    args: dict[str, Any] = {
        "model": folder_of(config.model, spec.model_folder, revision=revision) if spec.model_folder else config.model,
        "use_tqdm_on_load": False,  # the bars of several stages would overwrite one another
        "load_format": "safetensors",  # "auto" takes any other file for weights where these are missing
        **own,
        **config.engine_args,
        **_pinned_args(config.engine_args, spec),
    }
    keeps_pages = config.pool is not None and config.pool.keeps_pages
    if keeps_pages and not args.get("mm_encoder_only"):  # an encoder has no KV cache
        args["kv_transfer_config"] = _transfer_of_pool(config, args, is_instance=is_instance)
    if spec.architecture:
        args["hf_overrides"] = spec.hf_overrides or {"architectures": [spec.architecture]}
    if config.executor_class is not None:
        args["distributed_executor_backend"] = config.executor_class
    if config.nodes > 1:
        args |= {"nnodes": config.nodes, "distributed_executor_backend": "mp"}
    if sections := _sections(config, spec, args, is_instance=is_instance):
        args["additional_config"] = {**args.get("additional_config", {}), **sections}
    if device == "cpu":
        _check_adapters(args)
    keeps_media = config.pool is not None and config.pool.keeps_media
    _check_async_scheduling(args, reports_media=is_instance or keeps_media)
    return args


def _transfer_of_pool(config: StageConfig, args: Mapping[str, Any], *, is_instance: bool) -> Any:
    """``kv_transfer_config`` with the pool's connector."""
    assert config.pool is not None
    if config.engine_args.get("kv_transfer_config") and not is_instance:
        raise ConfigError("kv_transfer_config: kv_pool sets it, too: give one of them")
    check_hosts(config.pool)
    return with_offloading(args.get("kv_transfer_config"), config.pool, config.name)


def _sections(config: StageConfig, spec: StageSpec, args: Mapping[str, Any], *, is_instance: bool) -> dict[str, Any]:
    """What the stage's processes read in ``additional_config``."""
    sections = ENGINE_KINDS[config.engine_type].additional_config(config)
    if args["load_format"] == LOAD_FORMAT:
        sections[SHARED_WEIGHTS] = True
    if _keeps_rows(config, spec, args, is_instance=is_instance):
        sections[ROW_CACHE] = True
    if config.budgets:
        EPDConfig.parse(config.budgets)  # reports a wrong value before an engine starts
        sections[EPD_CONFIG] = config.budgets
    return sections


def _keeps_rows(config: StageConfig, spec: StageSpec, args: Mapping[str, Any], *, is_instance: bool) -> bool:
    """Whether the runner is to keep the rows that other stages read, if the model's KV cache allows it.

    Pages that a connector pulls have none; the scheduler notes these of connectors that load between steps, as ours do.
    """
    if config.row_cache and not (spec.publishes_rows and args.get("enable_prefix_caching") is not False):
        raise ConfigError("row_cache = True: no stage reads rows of a prefix of this one; leave it out")
    is_foreign = bool(config.engine_args.get("kv_transfer_config")) and not is_instance
    can_read = args.get("enable_prefix_caching") is not False and not is_foreign and not args.get("mm_encoder_only")
    return spec.publishes_rows and can_read and config.row_cache is not False


def _check_effects(config: StageConfig, own: Mapping[str, Any]) -> None:
    """Reject arguments without an effect on the stage's kind, unless their value holds there anyway."""
    lacking = LACKING_ARGS[config.engine_type]
    for name, value in config.engine_args.items():
        holds = own.get(name, DEFAULTS[name])
        if name in lacking and value is not None and value != holds and (value or holds):
            raise ConfigError(f"{name} = {value!r}: this kind of stage has no {lacking[name]}; leave it out")


def _pinned_args(given: Mapping[str, Any], spec: StageSpec) -> dict[str, Any]:
    """The arguments that the model needs; a deployment cannot change them."""
    for name in ["worker_cls", "scheduler_cls"] + (["hf_overrides"] if spec.architecture else []):
        if given.get(name):
            raise ConfigError(f"{name}: set by the model's pipeline, and cannot be changed")
    for name, value in spec.engine_args.items():
        if given.get(name, value) != value:
            raise ConfigError(f"{name} = {given[name]!r}: this model runs with {value!r} only")
    return dict(spec.engine_args)


def _check_adapters(args: Mapping[str, Any]) -> None:
    if args.get("enable_lora") and args.get("max_num_seqs") != 1:
        raise ConfigError(
            f"max_num_seqs = {args.get('max_num_seqs')!r}: with enable_lora on a CPU it must be 1: "
            "vLLM's CPU kernels use an adapter for requests of the same step that have none, too"
        )


def _check_async_scheduling(args: Mapping[str, Any], *, reports_media: bool) -> None:
    reports_images = reports_media or EPD_CONFIG in args.get("additional_config", {})
    if reports_images and args.get("async_scheduling"):
        raise ConfigError(
            "async_scheduling = True: with budgets, as several instances, or with kv_pool.media_bytes a stage reports "
            "its images with each step, which an asynchronous runner's output cannot; leave it out"
        )
