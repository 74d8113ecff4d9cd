"""``vllm-omni config show MODEL``: print the resolved deployment, each value with its origin."""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch
from vllm.config import VllmConfig
from vllm.logger import configure_logging_from_args

from vllm_omni import __version__
from vllm_omni.config import CHUNK_KEYS, DIFFUSERS, MODEL_INDEX, OmniConfig, Origin, StageConfig, dump_value
from vllm_omni.engine.orchestrator import Orchestrator
from vllm_omni.entrypoints.cli.config import DESCRIPTION, USAGE
from vllm_omni.entrypoints.cli.deployment import DeploymentParser, add_engine_flags, parse_deployment
from vllm_omni.entrypoints.cli.quiet import only_the_answer_on_stdout
from vllm_omni.model_executor.pipeline import StageSpec

EDGE_KEYS = ("transport", "stream", "credits")

# Engine arguments that are shown as resolved where the deployment does not set them; the first concern every stage.
RESOLVED = ("dtype", "load_format", "max_num_seqs", "distributed_executor_backend", "worker_cls", "scheduler_cls")
RESOLVED_OF_AR = (
    "max_model_len max_num_batched_tokens tensor_parallel_size enable_prefix_caching block_size cache_dtype "
    "kv_cache_memory_bytes"
).split()


class Value(NamedTuple):
    """One value of the deployment."""

    path: tuple[str, ...]  # its keys in a deployment file
    value: Any
    kind: str  # as ``Origin.kind``; or "model" (pinned by its code), "generation_config" or "default"
    origin: str  # as printed: "--stage talker.max_num_seqs=2"
    is_set: bool = True  # False: a default, or a value that cannot be set; printed as a comment


def show(args: Sequence[str]) -> None:
    """Print the resolved deployment.

    Raises:
        SystemExit: a flag is wrong.
        ConfigError: the deployment is wrong.
    """
    parsed = parse_deployment("config show", args, _add_arguments, description=DESCRIPTION, usage=USAGE)
    with only_the_answer_on_stdout() as stdout:
        configure_logging_from_args(parsed.args)
        deployment = parsed.load_config()
        values = resolve(deployment)
        if parsed.args.json:
            _print_json(deployment, values, stdout)
        else:
            _print_yaml(deployment, values, stdout)


def _add_arguments(parser: DeploymentParser) -> None:
    add_engine_flags(parser)
    group = parser.add_argument_group("Output", "Format of the output.")
    group.add_argument("--json", action="store_true", help="Print one JSON object, each value with its origin.")
    parser.own_groups = ["Omni", "Output"]


# -- values ------------------------------------------------------------------------------------------------------------


def resolve(deployment: OmniConfig) -> list[Value]:
    """List every value of the deployment, including those that the model pins and those that the engines resolve.

    Raises:
        ConfigError: the deployment is wrong, or the model or vLLM rejects it.
    """
    orchestrator = Orchestrator(deployment)
    pipeline = orchestrator.pipeline
    specs = {spec.name: spec for spec in pipeline.stages}
    values = [_of_deployment(deployment, ("model_type",), deployment.model_type)]
    for stage in deployment.stages:
        engines, _ = orchestrator.maker.make_node(stage)
        front = next((one for one in engines if one.instance is not None and one.instance.is_front), engines[0])
        values += _of_stage(deployment, stage, specs[stage.name], front.vllm_config)
    values += _of_edges(deployment, pipeline.chunks)
    values += [_of_deployment(deployment, ("voices", name), voice) for name, voice in deployment.voices.items()]
    return values


def _of_edges(deployment: OmniConfig, sizes_of_edge: Mapping[tuple[str, str], Any]) -> Iterator[Value]:
    for edge in deployment.edges:
        path = ("edges", f"{edge.source}->{edge.target}")
        for key in EDGE_KEYS:
            yield _of_deployment(deployment, (*path, key), getattr(edge, key))
        sizes = sizes_of_edge.get((edge.source, edge.target))
        for key in () if sizes is None else CHUNK_KEYS:
            yield _of_deployment(deployment, (*path, "chunks", key), getattr(sizes, key))


def _of_deployment(deployment: OmniConfig, path: tuple[str, ...], value: Any) -> Value:
    origin = deployment.origins.get(path)
    if origin is None:
        is_model = path[-1] == "model"
        kind, said = ("argument", "the model of the command line") if is_model else ("default", "default")
        return Value(path, _plain(value), kind, said, is_set=False)
    if origin.kind == "checkpoint" and value == DIFFUSERS:
        return Value(path, value, origin.kind, f"{origin.source}/{MODEL_INDEX}")
    if path[-1] == "hf_token" and isinstance(value, str):  # a secret
        return Value(path, "(hidden)", origin.kind, _describe(origin), is_set=False)
    return Value(path, _plain(value), origin.kind, _describe(origin))


def _of_stage(deployment: OmniConfig, stage: StageConfig, spec: StageSpec, vllm_config: VllmConfig) -> Iterator[Value]:
    at = ("stages", stage.name)
    for key in ("engine_type", "model", "executor_class", "replicas", "max_replicas", "balance", "layer", "nodes"):
        yield _of_deployment(deployment, (*at, key), getattr(stage, key))
    yield from _engine_args(deployment, stage, spec, vllm_config)
    sections: dict[str, Mapping[str, Any]] = {}
    if stage.is_diffusion:
        sections["diffusion"] = dataclasses.asdict(stage.diffusion_config)
    if spec.publishes_pictures:
        yield _of_deployment(deployment, (*at, "unified"), stage.unified is not False)
    if stage.epd or stage.unified is False:
        sections["epd"] = {**dataclasses.asdict(stage.deployment), **stage.budgets}
    for name, section in sections.items():
        for key, value in section.items():
            yield _of_deployment(deployment, (*at, name, key), value)
    yield from _sampling_params(deployment, stage, spec, vllm_config)


def _engine_args(
    deployment: OmniConfig, stage: StageConfig, spec: StageSpec, vllm_config: VllmConfig
) -> Iterator[Value]:
    """Engine arguments: those of the deployment, those that the model pins, and those that vLLM resolves."""
    at = ("stages", stage.name, "engine_args")
    architecture = spec.architecture or vllm_config.model_config.architecture
    yield Value((*at, "architecture"), architecture, "model", "set by the model", is_set=False)
    yield from _with_pinned(deployment, at, stage.engine_args, spec.engine_args)
    for key in (*RESOLVED, *(RESOLVED_OF_AR if stage.is_autoregressive else ())):
        if key not in stage.engine_args and key not in spec.engine_args:
            path = (*at, key.replace("cache_dtype", "kv_cache_dtype"))
            yield Value(path, _plain(_resolved(vllm_config, key)), "default", "default", is_set=False)


def _sampling_params(
    deployment: OmniConfig, stage: StageConfig, spec: StageSpec, vllm_config: VllmConfig
) -> Iterator[Value]:
    at = ("stages", stage.name, "default_sampling_params")
    yield from _with_pinned(deployment, at, stage.default_sampling_params, spec.sampling_params)
    if stage.stage_id == 0:
        origin = "the checkpoint's generation_config.json"
        for key, value in vllm_config.model_config.get_diff_sampling_param().items():
            if key not in stage.default_sampling_params and key not in spec.sampling_params:
                yield Value((*at, key), value, "generation_config", origin, is_set=False)


def _with_pinned(
    deployment: OmniConfig, at: tuple[str, ...], values: Mapping[str, Any], pinned: Mapping[str, Any]
) -> Iterator[Value]:
    """Values of the deployment, then those that the model pins."""
    for key, value in values.items():
        if key not in pinned:
            yield _of_deployment(deployment, (*at, key), value)
    for key, value in pinned.items():
        over = deployment.origins.get((*at, key))
        origin = "set by the model" + (f", overriding {_describe(over)}" if over else "")
        yield Value((*at, key), _plain(value), "model", origin)


def _resolved(vllm_config: VllmConfig, key: str) -> Any:
    """Find an engine argument as vLLM has resolved it: one of its configurations has a field of the same name."""
    for part in ("model_config", "load_config", "scheduler_config", "parallel_config", "cache_config"):
        if hasattr(getattr(vllm_config, part), key):
            return getattr(getattr(vllm_config, part), key)
    raise AttributeError(f"no configuration of vLLM has a field {key!r}")


def _describe(origin: Origin) -> str:
    source = origin.source
    return {
        "bundled": f"bundled {Path(source).name}:{origin.line}",
        "file": f"{source}:{origin.line}",
        "overrides": "--stage-overrides",
        "argument": f"--{source.replace('_', '-')}",
        "stage": f"--stage {source}",
        "checkpoint": f"{source}/config.json",
    }[origin.kind]


def _plain(value: Any) -> Any:
    """Convert to the types of YAML and JSON; an object becomes the fields that differ from their defaults."""
    match value:
        case Enum():
            return _plain(value.value)
        case str() | int() | float() | bool() | None:
            return value
        case torch.dtype():
            return str(value).removeprefix("torch.")
        case Mapping():
            return {str(_plain(key)): _plain(item) for key, item in value.items()}
        case list() | tuple() | set() | frozenset():
            return [_plain(item) for item in value]
        case type():
            return f"{value.__module__}.{value.__qualname__}"
    if dataclasses.is_dataclass(value):
        return _plain(_changed_fields(value))
    return str(value)


def _changed_fields(value: Any) -> dict[str, Any]:
    default = type(value)()
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
    return {name: item for name, item in fields.items() if item != getattr(default, name)}


# -- print -------------------------------------------------------------------------------------------------------------


def _print_json(deployment: OmniConfig, values: Sequence[Value], stdout: TextIO) -> None:
    tree: dict[str, Any] = {"model": deployment.model}
    for one in values:
        place = tree
        for key in one.path[:-1]:
            place = place.setdefault(key, {})
        origin = deployment.origins.get(one.path)
        where = {"source": origin.source, "line": origin.line} if origin and origin.kind == one.kind else {}
        place[one.path[-1]] = {"value": one.value, "origin": one.kind, **where, "set": one.is_set}
    print(json.dumps(tree, indent=2, ensure_ascii=False), file=stdout)


def _print_yaml(deployment: OmniConfig, values: Sequence[Value], stdout: TextIO) -> None:
    print(f"# Deployment of {deployment.model} by vllm-omni {__version__}; a file for --deploy-config.", file=stdout)
    print("# Values behind a # are defaults, or cannot be set.", file=stdout)
    printed = set()
    for one in values:
        for depth, key in enumerate(one.path[:-1]):
            parent = one.path[: depth + 1]
            if parent not in printed:
                printed.add(parent)
                print(f"{'  ' * depth}{key}:", file=stdout)
        indent = "  " * (len(one.path) - 1) + ("" if one.is_set else "# ")
        print(f"{indent}{one.path[-1]}: {dump_value(one.value)}  # {one.origin}", file=stdout)
