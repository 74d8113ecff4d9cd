"""Check engine arguments and sampling parameters against vLLM's own types and ranges.

Without vLLM nothing is checked here: an engine checks its arguments when it starts.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from vllm_omni.config.checks import Problem, translate, validator
from vllm_omni.names import suggest

EVERY_STAGE_ARGS = frozenset(
    "dtype seed load_format download_dir revision code_revision hf_token trust_remote_code "
    "disable_log_stats use_tqdm_on_load pt_load_map_location safetensors_load_strategy".split()
)
AR_STAGE_ARGS = frozenset(
    "max_model_len max_num_seqs max_num_batched_tokens block_size kv_cache_dtype attention_backend "
    "tensor_parallel_size pipeline_parallel_size distributed_executor_backend compilation_config "
    "optimization_level performance_mode enforce_eager cudagraph_capture_sizes max_cudagraph_capture_size "
    "kernel_config linear_backend moe_backend enable_flashinfer_autotune async_scheduling".split()
)
PER_STAGE_ARGS = frozenset(["gpu_memory_utilization", "kv_cache_memory_bytes", "num_gpu_blocks_override", "device_ids"])

# A value may be valid although pydantic finds no such type: EngineArgs converts names and mappings into these itself.
_LEFT_TO_VLLM = ("callable_type", "dataclass_exact_type", "dataclass_type", "enum", "is_instance_of", "is_subclass_of")


def vllm_attribute(module: str, name: str) -> Any:
    """Import an attribute of vLLM; ``None`` without vLLM."""
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as exc:
        if exc.name is not None and exc.name.partition(".")[0] == "vllm":
            return None
        raise


def known_engine_args() -> Iterable[str]:
    """The names that an engine argument may have; without vLLM, those that this package knows."""
    return _engine_arg_types() or (EVERY_STAGE_ARGS | AR_STAGE_ARGS | PER_STAGE_ARGS)


def check_engine_args(args: dict[str, Any]) -> dict[str, Any]:
    """Check engine arguments by name, and return them; raises ``Problem``."""
    for key, value in args.items():
        check_engine_arg(key, value)
    return args


def check_engine_arg(key: str, value: object) -> None:
    """Check one engine argument.

    Raises:
        Problem: unknown to vLLM, of another type, or out of the range that vLLM's configuration declares.
    """
    if key == "model":
        raise Problem("set it by the stage's own key 'model'", key)
    types = _engine_arg_types()
    if types is None:
        return
    if key not in types:
        raise Problem(f"vLLM has no such engine argument: {suggest(key, types)}", key)
    if value is None:
        return  # "not given" for almost every argument; EngineArgs reports the others
    try:
        _validate(types[key], value)
    except ValidationError as exc:
        if not any(error["type"] in _LEFT_TO_VLLM for error in exc.errors(include_url=False)):
            problem = translate(exc, value)
            raise Problem(str(problem), key, *problem.path) from None


def _validate(engine_arg: TypeAdapter[Any], value: object) -> None:
    """Validate mappings as vLLM's configuration classes do, and other data strictly, with lists for tuples."""
    try:
        text = None if isinstance(value, Mapping) else json.dumps(value)
    except (TypeError, ValueError, RecursionError):  # an object that is no data, for example a class
        text = None
    if text is None:
        engine_arg.validate_python(value)
    else:
        engine_arg.validate_json(text, strict=True)


@functools.cache
def _engine_arg_types() -> Mapping[str, TypeAdapter[Any]] | None:
    """Engine argument -> its type; its range is that of the configuration field with the same name."""
    engine_args = vllm_attribute("vllm.engine.arg_utils", "EngineArgs")
    if engine_args is None:
        return None
    ranges, types = _ranges(), {}
    for arg in dataclasses.fields(engine_args):
        if not arg.name.startswith("_") and arg.name != "model":
            hint = Any if isinstance(arg.type, str) else arg.type  # a string names what arg_utils does not import
            limits = ranges.get(arg.name)
            types[arg.name] = validator(Annotated[hint, *limits] if limits else hint)
    return types


def _ranges() -> dict[str, list[Any]]:
    """Field of vLLM's configurations -> its range, if it has one."""
    config = importlib.import_module("vllm.config")
    ranges: dict[str, list[Any]] = {}
    for class_name in config.__all__:
        fields: Mapping[str, FieldInfo] = getattr(getattr(config, class_name), "__pydantic_fields__", {})
        for name, info in fields.items():
            if info.metadata:
                ranges.setdefault(name, info.metadata)
    return ranges


def make_sampling_params(values: Mapping[str, Any]) -> Any:
    """vLLM's ``SamplingParams`` from its fields by name; ``None`` without vLLM.

    Raises:
        Problem: an unknown field, or a value that vLLM rejects.
    """
    params = vllm_attribute("vllm.sampling_params", "SamplingParams")
    if params is None:
        return None
    known = [name for name in params.__struct_fields__ if not name.startswith("_") and name != "output_kind"]
    for key in values:
        if key not in known:
            raise Problem(f"unknown sampling parameter: {suggest(str(key), known)}", str(key))
    try:
        return _sampling_params_validator().validate_python(dict(values))
    except ValidationError as exc:
        raise translate(exc, values) from exc
    except (vllm_attribute("vllm.exceptions", "VLLMClientError"), TypeError) as exc:
        raise Problem(str(exc)) from exc


@functools.cache
def _sampling_params_validator() -> TypeAdapter[Any]:
    return validator(vllm_attribute("vllm.sampling_params", "SamplingParams"))
