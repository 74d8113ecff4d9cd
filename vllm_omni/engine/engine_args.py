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

from vllm_omni.config import StageConfig
from vllm_omni.config.budgets import EPD_CONFIG, EPDConfig
from vllm_omni.config.checkpoint import folder_of
from vllm_omni.config.epd import Instance
from vllm_omni.config.lacking_args import LACKING_ARGS
from vllm_omni.engine.kinds import ENGINE_KINDS
from vllm_omni.errors import ConfigError
from vllm_omni.model_executor.pipeline import StageSpec

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
    try:
        args["disable_log_stats"] = not log_stats
        made = AsyncEngineArgs(**args).create_engine_config(UsageContext.ENGINE_CONTEXT)
    except ValidationError as exc:
        said = "; ".join(error["msg"].removeprefix("Value error, ") for error in exc.errors(include_url=False))
        raise ConfigError(f"stage {name!r}: {said}") from exc
    except (ValueError, TypeError, NotImplementedError, VLLMClientError) as exc:
        raise ConfigError(f"stage {name!r}: {exc}") from exc
    _leave_out_wrong_kernels(made)
    return made


def _leave_out_wrong_kernels(config: VllmConfig) -> None:
    """vLLM 0.32's rotary kernel for the CPU gives wrong values for the slices that latent attention (MLA) gives it."""
    if current_platform.is_cpu() and config.model_config.use_mla:
        config.compilation_config.custom_ops.append("-rotary_embedding")


def config_of_instance(config: StageConfig, instance: Instance) -> StageConfig:
    """The stage's configuration with the engine arguments of one of its instances."""
    args = {**config.engine_args, **instance.engine_args}
    additional = {**(config.engine_args.get("additional_config") or {}), **(args.get("additional_config") or {})}
    return replace(config, engine_args=args | ({"additional_config": additional} if additional else {}))


def _engine_args(config: StageConfig, spec: StageSpec, *, is_instance: bool) -> dict[str, Any]:
    kind, device = ENGINE_KINDS[config.engine_type], current_platform.device_type
    own = kind.engine_args(config, device)
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
    if spec.architecture:
        args["hf_overrides"] = spec.hf_overrides or {"architectures": [spec.architecture]}
    if config.executor_class is not None:
        args["distributed_executor_backend"] = config.executor_class
    sections = kind.additional_config(config)
    if config.budgets:
        EPDConfig.parse(config.budgets)  # reports a wrong value before an engine starts
        sections[EPD_CONFIG] = config.budgets
    if sections:
        args["additional_config"] = {**args.get("additional_config", {}), **sections}
    if device == "cpu":
        _check_adapters(args)
    _check_async_scheduling(args, is_instance=is_instance)
    return args


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


def _check_async_scheduling(args: Mapping[str, Any], *, is_instance: bool) -> None:
    reports_images = is_instance or EPD_CONFIG in args.get("additional_config", {})
    if reports_images and args.get("async_scheduling"):
        raise ConfigError(
            "async_scheduling = True: with budgets, or as several instances, a stage reports "
            "its images with each step, which an asynchronous runner's output cannot; leave it out"
        )
