"""One frozen schema for how a model is deployed, and the one way into it.

``load_config`` puts layers on one another; a later one wins, key by key:

1. the bundled YAML of the checkpoint's model type (``vllm_omni/deploy/configs/<model_type>.yaml``);
2. the user's YAML (``deploy_config``), with the same keys;
3. ``overrides``: a mapping of the same shape (a JSON flag, a dictionary);
4. plain engine arguments, from flags or keywords: ``max_num_seqs=8``, and ``epd``;
5. ``stage_overrides``: ``"thinker.max_num_seqs=8"``, the value read as YAML.

An engine argument that names no stage (a keyword, or the top-level ``engine_args`` of a YAML) goes to

* every stage, if it is one of ``EVERY_STAGE_ARGS``: how weights are loaded and in what type;
* every ``ar`` stage, if there are any and it is one of ``AR_STAGE_ARGS``: its batch, the shape of its KV cache, its
  parallelism;
* nowhere, if it is one of ``PER_STAGE_ARGS`` and there are several ``ar`` stages: one number cannot be right for all;
* the entry stage otherwise (the first one: prompt processing, multi-modal limits, prefix caching, quantization, ...).

A stage's own setting, in the same layer or a later one, wins over it.

Nodes and edges themselves are code (each family's ``Graph``); a deployment only sets where and how named ones run.
"""

import dataclasses
import functools
import importlib.util
import json
import math
import os
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import yaml

from vllm_omni import envs
from vllm_omni.config.diffusion import DiffusionConfig, field_problem
from vllm_omni.config.diffusion_params import DiffusionParams
from vllm_omni.config.epd import BUDGET_KEYS, EPDDeployment, Problem, check_section
from vllm_omni.errors import ConfigError, InvalidRequest
from vllm_omni.names import suggest

if TYPE_CHECKING:
    from vllm.config import VllmConfig

EngineType = Literal["ar", "generation", "diffusion"]
Transport = Literal["auto", "inline", "local", "shm", "tcp", "cuda_ipc", "nixl", "mooncake"]
ENGINE_TYPES: tuple[str, ...] = typing.get_args(EngineType)
PIPELINE_GROUP = "vllm_omni.pipelines"  # see added_pipelines
DIFFUSERS = "diffusers"  # the model type, and vLLM's config format, of every directory in diffusers' layout
LANGUAGE = "language"  # the model type of every checkpoint that has no pipeline here and that vLLM knows
TRANSPORTS: tuple[str, ...] = typing.get_args(Transport)
CHUNK_KEYS = ("first", "size", "past", "future")  # see WindowSizes of the family
MODALITIES = ("text", "image", "video", "audio")

EVERY_STAGE_ARGS = frozenset(
    "dtype seed load_format download_dir revision code_revision hf_token trust_remote_code enforce_eager "
    "disable_log_stats use_tqdm_on_load pt_load_map_location safetensors_load_strategy".split()
)
AR_STAGE_ARGS = frozenset(
    "max_model_len max_num_seqs max_num_batched_tokens block_size kv_cache_dtype attention_backend "
    "tensor_parallel_size pipeline_parallel_size distributed_executor_backend compilation_config "
    "optimization_level async_scheduling".split()
)
PER_STAGE_ARGS = frozenset(["gpu_memory_utilization", "kv_cache_memory_bytes", "num_gpu_blocks_override", "device_ids"])

# Set through a field of StageConfig, so that each thing has one place.
_ENGINE_ARGS_WITH_A_FIELD = {"model": "model"}


@dataclass(frozen=True, kw_only=True)
class StageConfig:
    """One stage: an engine, the model it runs and how. Lists become tuples; do not change the mappings afterwards.

    Raises:
        ConfigError: a field does not hold what it may; the message names the stage, the field and the valid values.
    """

    stage_id: int  # its place in the order of the stages, from 0
    name: str  # the node's name in the family's graph
    engine_type: EngineType = "ar"
    model: str = ""  # path or Hub id of the checkpoint; empty only with a ready vllm_config
    input_modalities: tuple[str, ...] = ()  # what of the user's prompt it reads
    output_modalities: tuple[str, ...] = ()  # what of its output the user may ask for
    engine_args: Mapping[str, Any] = field(default_factory=dict)  # field of vLLM's EngineArgs -> value
    vllm_config: "VllmConfig | None" = None  # ready-made, instead of engine_args
    executor_class: str | type | None = None  # "package.module.Class", one of vLLM's own names, or a class
    # field of SamplingParams -> value; of DiffusionParams for a diffusion stage
    default_sampling_params: Mapping[str, Any] = field(default_factory=dict)
    diffusion: Mapping[str, Any] = field(
        default_factory=dict
    )  # of a diffusion stage: field of DiffusionConfig -> value
    # Of the ar stage that reads the user's prompt: field of EPDDeployment, or of core.sched.budget.EPDConfig -> value
    epd: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key in _STAGE_CHECKS:
            value = getattr(self, key)
            try:
                object.__setattr__(self, key, _stage_check(key, self.engine_type)(value))
            except _Invalid as exc:
                raise ConfigError(f"stage {self.name!r}: {key}{exc.at} = {exc.value(value)!r}: {exc}") from None
        if self.diffusion and self.engine_type != "diffusion":
            raise ConfigError(
                f"stage {self.name!r}: diffusion: only a stage with engine_type 'diffusion' has this section, and this "
                f"one is {self.engine_type!r}"
            )
        if self.epd and (self.engine_type != "ar" or self.stage_id != 0):
            raise ConfigError(
                f"stage {self.name!r}: epd: only the first stage has this section, which reads the prompt, and only if "
                "its engine_type is 'ar'"
            )
        if self.epd and self.vllm_config is not None:
            raise ConfigError(f"stage {self.name!r}: epd: not with a ready vllm_config; give engine_args instead")
        if self.vllm_config is not None and self.engine_args:
            raise ConfigError(f"stage {self.name!r}: give engine_args or a ready vllm_config, not both")
        if self.vllm_config is None and not self.model:
            raise ConfigError(
                f"stage {self.name!r}: model: the path of a checkpoint is needed (or a ready vllm_config)"
            )
        if self.executor_class is not None and "distributed_executor_backend" in self.engine_args:
            raise ConfigError(
                f"stage {self.name!r}: executor_class and engine_args.distributed_executor_backend set the same thing: "
                "give one of them"
            )

    @property
    def is_autoregressive(self) -> bool:
        """Whether the stage generates tokens; its parameters are vLLM's ``SamplingParams``."""
        return self.engine_type == "ar"

    @property
    def is_diffusion(self) -> bool:
        """Whether the stage runs a diffusion pipeline; its parameters are ``DiffusionParams``."""
        return self.engine_type == "diffusion"

    @cached_property
    def diffusion_config(self) -> DiffusionConfig:
        """The section ``diffusion`` with its defaults."""
        return DiffusionConfig(**self.diffusion)

    @property
    def deployment(self) -> EPDDeployment:
        """The instances that the stage is made of."""
        return EPDDeployment.of(self.epd)

    @property
    def budgets(self) -> dict[str, Any]:
        """Those that its schedulers keep to: fields of ``core.sched.budget.EPDConfig``."""
        return {key: value for key, value in self.epd.items() if key in BUDGET_KEYS}


@dataclass(frozen=True, kw_only=True)
class EdgeConfig:
    """How tensors travel from one named stage to another."""

    source: str
    target: str
    transport: Transport = "auto"  # a backend of the relay, or the first that works where the stages are
    stream: bool = True  # the target starts while the source runs, if both the model and the transport can
    credits: int = 256  # of a stream: how many rows the source may be ahead of the target
    # How a streamed field is cut, where the target reads chunks: one of CHUNK_KEYS -> number of the field's items. The
    # family's pipeline has a default for each.
    chunks: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.transport not in TRANSPORTS:
            where = f"edge {self.source}->{self.target}: transport = {self.transport!r}"
            raise ConfigError(f"{where}: {suggest(str(self.transport), TRANSPORTS)}")
        for key, check in _EDGE_CHECKS.items():
            value = getattr(self, key)
            try:
                check(value)
            except _Invalid as exc:
                raise ConfigError(f"edge {self.source}->{self.target}: {key} = {value!r}: {exc}") from None


class Origin(NamedTuple):
    """Where one value of a deployment comes from."""

    kind: Literal["checkpoint", "bundled", "file", "overrides", "argument", "stage"]
    source: str  # the checkpoint, the file, "overrides", the argument's name, or the ``NAME.KEY=VALUE`` itself
    line: int | None = None  # of the file, from 1


@dataclass(frozen=True, kw_only=True)
class OmniConfig:
    """A whole deployment: the stages in order (``stage_id`` is the place), and the edges whose transport is set.

    ``origins`` says where each value that was set comes from, by its path in a deployment file:
    ``("stages", "talker", "engine_args", "max_num_seqs")``, ``("edges", "thinker->talker", "transport")``,
    ``("model_type",)``. What is not in it is this schema's default.
    """

    model: str
    model_type: str
    stages: tuple[StageConfig, ...]
    edges: tuple[EdgeConfig, ...] = ()
    origins: Mapping[tuple[str, ...], Origin] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", tuple(self.stages))
        object.__setattr__(self, "edges", tuple(self.edges))
        if not self.stages:
            raise ConfigError("stages: at least one stage is needed")
        for index, stage in enumerate(self.stages):
            if stage.stage_id != index:
                raise ConfigError(
                    f"stage {stage.name!r}: stage_id = {stage.stage_id}: its place in the list is {index}"
                )
        names = self.stage_names
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"stages: the name {name!r} is used {names.count(name)} times")
        pairs = [(edge.source, edge.target) for edge in self.edges]
        for source, target in pairs:
            for end in (source, target):
                if end not in names:
                    raise ConfigError(f"edge {source}->{target}: no stage {end!r}: {suggest(end, names)}")
            if pairs.count((source, target)) > 1:
                raise ConfigError(f"edge {source}->{target} is given {pairs.count((source, target))} times")

    @property
    def stage_names(self) -> tuple[str, ...]:
        return tuple(stage.name for stage in self.stages)

    def stage(self, name_or_id: str | int) -> StageConfig:
        """The stage of that name or id; raises ``ConfigError`` naming the nearest."""
        return self.stages[_stage_index(str(name_or_id), self.stage_names, "stage")]

    def edge(self, source: str, target: str) -> EdgeConfig:
        """How tensors travel on that edge; the defaults where the deployment does not say."""
        for edge in self.edges:
            if (edge.source, edge.target) == (source, target):
                return edge
        return EdgeConfig(source=source, target=target)


def bundled_model_types() -> tuple[str, ...]:
    """Those of this package."""
    return tuple(sorted(path.stem for path in _bundled_dir().glob("*.yaml")))


def supported_model_types() -> tuple[str, ...]:
    """Those of this package, and those that other packages add."""
    return tuple(sorted({*bundled_model_types(), *added_pipelines()}))


def added_pipelines() -> dict[str, EntryPoint]:
    """Model type -> the class that another package adds by an entry point in the group ``vllm_omni.pipelines``.

    Beside the module of the class lies ``<model_type>.yaml``, which says how the model is deployed.
    """
    return {entry.name: entry for entry in entry_points(group=PIPELINE_GROUP)}


def read_model_type(model: str | os.PathLike[str], *, revision: str | None = None) -> str:
    """The ``model_type`` of a checkpoint's ``config.json``: of a local directory, or of a repository on the Hub.

    One with a ``model_index.json`` is in diffusers' layout, whatever pipeline it is for: "diffusers". One of a type
    that has no pipeline here, and of an architecture that vLLM has, is a language model: "language".

    Raises:
        ConfigError: there is no such checkpoint, or it is of a type that is not supported.
    """
    model = os.fspath(model)
    try:
        _find_model_file(model, MODEL_INDEX, revision)
    except ConfigError:
        path = _find_model_file(model, "config.json", revision)
    else:
        return DIFFUSERS
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        model_type, architectures = config.get("model_type"), config.get("architectures")
    except (ValueError, AttributeError) as exc:
        raise ConfigError(f"{path}: not a JSON object: {exc}") from None
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read: {exc.strerror}") from exc
    if model_type in supported_model_types():
        return str(model_type)
    if isinstance(architectures, list) and any(one in _vllm_architectures() for one in architectures):
        return LANGUAGE
    nor = f", and vLLM has no architecture {architectures[0]!r}" if isinstance(architectures, list) else ""
    raise ConfigError(f"{path}: model_type = {model_type!r} is not supported{nor}: {_supported(str(model_type))}")


def _vllm_architectures() -> Iterable[str]:
    registry = _vllm_attribute("vllm.model_executor.models.registry", "ModelRegistry")
    return () if registry is None else registry.get_supported_archs()


def read_model_index(model: str, *, revision: str | None = None) -> dict[str, Any]:
    """The ``model_index.json`` of a directory in diffusers' layout, or of a repository on the Hub.

    Raises:
        ConfigError: there is none, or it names no pipeline.
    """
    path = _find_model_file(model, MODEL_INDEX, revision)
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(index["_class_name"], str):
            raise TypeError(f"_class_name = {index['_class_name']!r} is no name")
    except (ValueError, KeyError, TypeError, OSError) as exc:
        raise ConfigError(f"{path}: names no pipeline of diffusers: {exc!r}") from exc
    return dict(index)


def load_config(
    model: str | os.PathLike[str],
    *,
    deploy_config: str | os.PathLike[str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    stage_overrides: Sequence[str] = (),
    epd: str | Mapping[str, Any] | None = None,
    **engine_args: Any,
) -> OmniConfig:
    """The deployment of ``model``: bundled, overlaid as the head of this module says.

    Args:
        model: directory or Hub id of the checkpoint; a stage may have another (its ``model`` key).
        deploy_config: a YAML file with the keys ``model_type``, ``stages``, ``edges``, ``engine_args``.
        overrides: the same keys as a mapping; stages by name or id. The keys may be only stages, too:
            ``{"0": {"max_num_seqs": 8}}``.
        stage_overrides: ``"NAME.KEY=VALUE"``; ``NAME`` a stage's name or id.
        epd: instances of the first stage: ``"E:1,PD:1"``, or keys of its ``epd`` section.
        **engine_args: fields of vLLM's ``EngineArgs``. Pass only what the user gave, not every default.

    Raises:
        ConfigError: the message names the file and line (or flag), the key, the nearest valid name and the valid range.
    """
    envs.refuse_unknown()
    model = os.fspath(model)
    layers = []
    if deploy_config is not None:
        layers.append(_read_yaml_file(Path(deploy_config)))
    if overrides:
        keys = dict(overrides) if set(overrides) & set(_TOP_LEVEL_KEYS) else {"stages": dict(overrides)}
        layers.append(_Document("overrides", _with_string_keys(keys), {}, "overrides"))
    if engine_args:
        layers.append(_Document("", {"engine_args": engine_args}, {}, "argument"))
    for layer in layers:
        layer.refuse_unknown_keys((), _TOP_LEVEL_KEYS)

    model_type, origin = _choose_model_type(model, layers, engine_args.get("revision"))
    default = _read_yaml_file(_default_deployment(model_type))
    draft = _Draft(default._replace(kind="bundled"))
    draft.origins[("model_type",)] = origin
    for layer in layers:
        draft.overlay(layer)
    if epd is not None:
        draft.set_epd({"instances": epd} if isinstance(epd, str) else epd)
    for text in stage_overrides:
        draft.set_by_flag(text)
    return draft.build(model, model_type)


# --- Layers ---------------------------------------------------------------------------------------------------------

MODEL_INDEX = "model_index.json"
_TOP_LEVEL_KEYS = ("model_type", "stages", "edges", "engine_args")

_Path = tuple[str, ...]  # keys from the top of a document


class _Document(NamedTuple):
    source: str  # a file's name, or "overrides"; empty for keywords and flags
    values: dict[str, Any]
    lines: dict[_Path, int]  # of each key, from 1; empty unless it came from a file
    kind: Literal["bundled", "file", "overrides", "argument"] = "file"

    def origin(self, path: _Path) -> Origin:
        return Origin(self.kind, self.source or path[-1], self.lines.get(path))

    def at(self, path: _Path) -> str:
        """Where a key stands, for a message: ``deploy.yaml:12: stages.thinker.dtype``."""
        if not self.source:
            return f"engine argument {path[-1]!r}"
        line = f":{self.lines[path]}" if path in self.lines else ""
        return f"{self.source}{line}: {'.'.join(path)}"

    def mapping(self, *path: str) -> dict[str, Any]:
        value: Any = self.values
        for key in path:
            value = value.get(key)
            if value is None:  # absent, or a key with nothing under it
                return {}
        if not isinstance(value, dict):
            raise ConfigError(f"{self.at(path)} = {value!r}: must be a mapping")
        return value

    def refuse_unknown_keys(self, path: _Path, valid: Iterable[str]) -> None:
        valid = tuple(valid)
        for key in self.mapping(*path):
            if key not in valid:
                raise ConfigError(f"{self.at((*path, key))}: unknown key {key!r}: {suggest(key, valid)}")


class _Draft:
    """The stages while layers are put on: per stage a dictionary of StageConfig's fields."""

    def __init__(self, bundled: _Document):
        self.names = tuple(bundled.mapping("stages"))
        self.stages: dict[str, dict[str, Any]] = {name: {key: {} for key in _MAPPING_FIELDS} for name in self.names}
        self.edges: dict[tuple[str, str], dict[str, Any]] = {}
        self.origins: dict[_Path, Origin] = {}
        self.overlay(bundled)

    def overlay(self, layer: _Document) -> None:
        for key, value in layer.mapping("engine_args").items():
            where = layer.at(("engine_args", key))
            _check_engine_arg(key, value, where)
            for name in self._stages_of_engine_arg(key, where):
                self.stages[name]["engine_args"][key] = value
                self.origins["stages", name, "engine_args", key] = layer.origin(("engine_args", key))
        for ref in layer.mapping("stages"):
            name = self.names[_stage_index(ref, self.names, layer.at(("stages", ref)))]
            for key, value in layer.mapping("stages", ref).items():
                self._set(
                    name,
                    key,
                    value,
                    lambda *more, at=("stages", ref): layer.at((*at, *more)),
                    lambda *more, at=("stages", ref): layer.origin((*at, *more)),
                )
        for edge in layer.mapping("edges"):
            self._set_edge(layer, edge)

    def set_by_flag(self, text: str) -> None:
        """One ``NAME.KEY=VALUE``; ``KEY`` may have a second part: ``talker.default_sampling_params.top_k=2``."""
        target, equals, scalar = text.partition("=")
        ref, dot, key = target.strip().partition(".")
        if not (equals and dot and ref and key):
            raise ConfigError(f"--stage {text!r}: must be NAME.KEY=VALUE, for example {self.names[0]}.max_num_seqs=8")
        name = self.names[_stage_index(ref, self.names, f"--stage {text!r}")]
        value = _parse_yaml(scalar, f"--stage {text!r}").values["value"]
        head, dot, rest = key.partition(".")
        if dot and head in _MAPPING_FIELDS:
            value = {rest: value}
        elif dot:
            raise ConfigError(f"--stage {text!r}: only {', '.join(_MAPPING_FIELDS)} have keys below them")
        origin = Origin("stage", text)
        self._set(name, head, value, lambda *more: f"--stage {'.'.join((ref, *more))}", lambda *more: origin)

    def set_epd(self, section: Mapping[str, Any]) -> None:
        """The flag or keyword ``epd``: of the first stage."""
        origin = Origin("argument", "epd")

        def at(key: str, *more: str) -> str:
            return ".".join([key, *(one for one in more if more != ("instances",))])

        if self.stages[self.names[0]].get("engine_type", "ar") != "ar":
            raise ConfigError(
                f"epd: the first stage, {self.names[0]!r}, is no language model: it has one kind of instance"
            )
        self._set(self.names[0], "epd", section, at, lambda *more: origin)

    def build(self, model: str, model_type: str) -> OmniConfig:
        stages = []
        for stage_id, (name, values) in enumerate(self.stages.items()):
            stages.append(StageConfig(stage_id=stage_id, name=name, **{"model": model, **values}))
        edges = [EdgeConfig(source=s, target=t, **values) for (s, t), values in self.edges.items()]
        return OmniConfig(
            model=model, model_type=model_type, stages=tuple(stages), edges=tuple(edges), origins=self.origins
        )

    def _set(self, name: str, key: str, value: object, at: Callable[..., str], origin: Callable[..., Origin]) -> None:
        """Set one key of a stage: a field of StageConfig, or an engine argument without saying ``engine_args``.

        ``at`` and ``origin`` tell where keys below the stage stand, for a message and as data.
        """
        if key not in _YAML_STAGE_KEYS:
            valid = (*_YAML_STAGE_KEYS, *_known_engine_args())
            if key not in _known_engine_args():
                raise ConfigError(f"{at(key)}: unknown key {key!r} of stage {name!r}: {suggest(key, valid)}")
            key, value, at = "engine_args", {key: value}, lambda _, *more, plain=at: plain(*more)
            origin = lambda _, *more, plain=origin: plain(*more)  # noqa: E731  # as ``at``
        try:
            checked = _stage_check(key, str(self.stages[name].get("engine_type", "ar")))(value)
        except _Invalid as exc:
            raise ConfigError(f"{at(key, *exc.path)} = {exc.value(value)!r}: {exc}") from None
        if isinstance(checked, dict):
            self.stages[name][key].update(checked)
            self.origins.update({("stages", name, key, one): origin(key, one) for one in checked})
        else:
            self.stages[name][key] = checked
            self.origins["stages", name, key] = origin(key)

    def _stages_of_engine_arg(self, key: str, where: str) -> Sequence[str]:
        if key in EVERY_STAGE_ARGS:
            return self.names
        ar_stages = [name for name in self.names if self.stages[name].get("engine_type", "ar") == "ar"]
        if key in AR_STAGE_ARGS and ar_stages:
            return ar_stages
        if key in PER_STAGE_ARGS and len(ar_stages) > 1:
            each = ", ".join(f"{name}.{key}" for name in ar_stages)
            raise ConfigError(f"{where}: must be said for each stage, by --stage NAME.KEY=VALUE: {each}")
        return self.names[:1]

    def _set_edge(self, layer: _Document, edge: str) -> None:
        where = layer.at(("edges", edge))
        source, arrow, target = (part.strip() for part in edge.partition("->"))
        if not (arrow and source and target):
            raise ConfigError(
                f"{where}: an edge is written SOURCE->TARGET, for example {self.names[0]}->{self.names[-1]}"
            )
        for end in (source, target):
            if end not in self.names:
                raise ConfigError(f"{where}: no stage {end!r}: {suggest(end, self.names)}")
        layer.refuse_unknown_keys(("edges", edge), ["transport", *_EDGE_CHECKS, "chunks"])
        layer.refuse_unknown_keys(("edges", edge, "chunks"), CHUNK_KEYS)
        values = self.edges.setdefault((source, target), {"transport": "auto", "chunks": {}})
        how = layer.mapping("edges", edge).get("transport", values["transport"])
        if how not in TRANSPORTS:
            raise ConfigError(f"{layer.at(('edges', edge, 'transport'))} = {how!r}: {suggest(str(how), TRANSPORTS)}")
        values["transport"] = how
        self.origins["edges", f"{source}->{target}", "transport"] = layer.origin(("edges", edge, "transport"))
        for key, check in _EDGE_CHECKS.items():
            if key in (given := layer.mapping("edges", edge)):
                try:
                    values[key] = check(given[key])
                except _Invalid as exc:
                    raise ConfigError(f"{layer.at(('edges', edge, key))} = {given[key]!r}: {exc}") from None
                self.origins["edges", f"{source}->{target}", key] = layer.origin(("edges", edge, key))
        for key, number in layer.mapping("edges", edge, "chunks").items():
            path = ("edges", edge, "chunks", key)
            if type(number) is not int or number < 0:
                raise ConfigError(f"{layer.at(path)} = {number!r}: must be a number of items, 0 or more")
            values["chunks"][key] = number
            self.origins["edges", f"{source}->{target}", "chunks", key] = layer.origin(path)


def _stage_index(ref: str, names: Sequence[str], where: str) -> int:
    if ref in names:
        return names.index(ref)
    if ref.isdecimal() and int(ref) < len(names):
        return int(ref)
    raise ConfigError(f"{where}: no stage {ref!r}: {suggest(ref, names)} (or an id from 0 to {len(names) - 1})")


def _choose_model_type(model: str, layers: Sequence[_Document], revision: object) -> tuple[str, Origin]:
    for layer in reversed(layers):
        chosen = layer.values.get("model_type")
        if chosen is not None:
            if chosen not in supported_model_types():
                raise ConfigError(f"{layer.at(('model_type',))} = {chosen!r}: {_supported(str(chosen))}")
            return str(chosen), layer.origin(("model_type",))
    chosen = read_model_type(model, revision=None if revision is None else str(revision))
    return chosen, Origin("checkpoint", model)


def _find_model_file(model: str, name: str, revision: str | None) -> Path:
    directory = Path(model).expanduser()
    if directory.is_dir():
        if (directory / name).is_file():
            return directory / name
        raise ConfigError(
            f"model {model!r}: the directory has neither {name} nor {MODEL_INDEX}; a checkpoint is needed, "
            f"{_supported()}"
        )
    if directory.exists():
        raise ConfigError(f"model {model!r}: it is a file; give the directory of a checkpoint, {_supported()}")
    nowhere = f"model {model!r}: no such directory, and no {name} of that name on the Hugging Face Hub"
    parts = model.split("/")
    if len(parts) != 2 or not all(parts) or parts[0] in (".", "..", "~"):
        raise ConfigError(f"{nowhere}; {_supported()}")
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError:
        raise ConfigError(f"{nowhere} (huggingface_hub is not installed); {_supported()}") from None
    try:
        return Path(hf_hub_download(model, name, revision=revision))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as exc:
        reason = (str(exc).strip().splitlines() or [type(exc).__name__])[0]
        raise ConfigError(f"{nowhere} ({reason}); {_supported()}") from exc


def _supported(name: str = "") -> str:
    return (
        f"supported model types: {', '.join(supported_model_types())}"
        if not name
        else suggest(name, supported_model_types())
    )


def _default_deployment(model_type: str) -> Path:
    entry = added_pipelines().get(model_type)
    if entry is None:
        return _bundled_dir() / f"{model_type}.yaml"
    try:
        spec = importlib.util.find_spec(entry.module)
    except ImportError as exc:
        raise ConfigError(f"model type {model_type!r}: its package cannot be imported: {exc}") from exc
    if spec is None or spec.origin is None:
        raise ConfigError(f"model type {model_type!r}: there is no module {entry.module}, which is to bring it")
    return Path(spec.origin).with_name(f"{model_type}.yaml")


def _bundled_dir() -> Path:
    return Path(__file__).parents[1] / "deploy" / "configs"


# --- YAML with line numbers -----------------------------------------------------------------------------------------


def _read_yaml_file(path: Path) -> _Document:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        reason = (isinstance(exc, OSError) and exc.strerror) or exc
        raise ConfigError(f"deployment file {str(path)!r} cannot be read: {reason}") from exc
    document = _parse_yaml(text, str(path))
    value = document.values["value"]
    if value is not None and not isinstance(value, dict):
        raise ConfigError(f"{path}: must be a mapping with the keys {', '.join(_TOP_LEVEL_KEYS)}")
    return _Document(str(path), value or {}, document.lines)


def _parse_yaml(text: str, source: str) -> _Document:
    """The text as ``{"value": ...}`` with the line of each key; raises ``ConfigError`` for what is not plain YAML."""
    loader = yaml.SafeLoader(text)
    lines: dict[_Path, int] = {}
    try:
        node = loader.get_single_node()
        value = None if node is None else _construct(loader, node, (), lines, source)
    except yaml.MarkedYAMLError as exc:
        line = "" if exc.problem_mark is None else f":{exc.problem_mark.line + 1}"
        raise ConfigError(f"{source}{line}: not valid YAML: {exc.problem or exc}") from None
    except yaml.YAMLError as exc:
        raise ConfigError(f"{source}: not valid YAML: {exc}") from None
    except (ValueError, RecursionError) as exc:  # a date such as 2001-13-45; a mapping that contains itself
        raise ConfigError(f"{source}: not valid YAML: {exc}") from None
    finally:
        loader.dispose()
    return _Document(source, {"value": value}, lines)


def _construct(loader: yaml.SafeLoader, node: yaml.Node, path: _Path, lines: dict[_Path, int], source: str) -> Any:
    if not isinstance(node, yaml.ScalarNode) and node.tag not in _YAML_COLLECTIONS:
        raise ConfigError(
            f"{source}:{node.start_mark.line + 1}: {'.'.join(path) or 'top level'}: no tag {node.tag!r} here"
        )
    if isinstance(node, yaml.SequenceNode):
        return [_construct(loader, item, (*path, str(i)), lines, source) for i, item in enumerate(node.value)]
    if isinstance(node, yaml.ScalarNode):
        if node.tag == "tag:yaml.org,2002:str" and node.style is None:
            return _yaml_1_2_float(node.value)
        return loader.construct_object(node, deep=True)
    assert isinstance(node, yaml.MappingNode), "YAML has three kinds of node"
    written: dict[str, int] = {}
    for key_node, _ in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(f"{source}:{line}: {'.'.join(path) or 'top level'}: a key must be a plain word")
        if key_node.value in written and key_node.tag != "tag:yaml.org,2002:merge":
            where = ".".join((*path, key_node.value))
            raise ConfigError(f"{source}:{line}: {where}: given twice, first on line {written[key_node.value]}")
        written[key_node.value] = line
    loader.flatten_mapping(node)  # `<<: *anchor`
    values = {}
    for key_node, value_node in node.value:
        key = str(key_node.value)
        lines[(*path, key)] = key_node.start_mark.line + 1
        values[key] = _construct(loader, value_node, (*path, key), lines, source)
    return values


_YAML_COLLECTIONS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")


def _yaml_1_2_float(text: str) -> str | float:
    """``1e-3`` is a number in YAML 1.2 and in every reader's eyes; PyYAML follows 1.1, which wants ``1.0e-3``."""
    if "e" in text.lower() and text[:1] in "+-.0123456789":
        try:
            return float(text)
        except ValueError:
            return text
    return text


def dump_value(value: Any) -> str:
    """One value on one line, as ``load_config`` reads it back."""
    text = yaml.safe_dump(value, default_flow_style=True, width=math.inf, allow_unicode=True, sort_keys=False)
    text = text.removesuffix("...\n").strip()
    # PyYAML leaves the text "1e3" without quotes, which is a number here; and a line break makes several lines.
    is_read = "\n" not in text and _parse_yaml(text, "").values["value"] == value
    return text if is_read else json.dumps(value, ensure_ascii=False)


def _with_string_keys(value: Any) -> Any:
    """``{0: {...}}`` as YAML would have it: keys are words."""
    if isinstance(value, Mapping):
        return {str(key): _with_string_keys(item) for key, item in value.items()}
    return value


# --- Checks of values -----------------------------------------------------------------------------------------------


class _Invalid(Exception):
    """A value that a key may not hold; the text says what is valid. ``path`` leads to it inside the key's value."""

    def __init__(self, valid: str, *path: str):
        super().__init__(valid)
        self.path = path

    @property
    def at(self) -> str:
        return "".join(f".{key}" for key in self.path)

    def value(self, whole: Any) -> Any:
        for key in self.path:
            whole = whole.get(key) if isinstance(whole, Mapping) else whole
        return whole


def _one_of(*names: str) -> Callable[[object], object]:
    def check(value: object) -> object:
        if value not in names:
            raise _Invalid(suggest(str(value), names))
        return value

    return check


def _modalities(value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise _Invalid(f"must be a list of {', '.join(MODALITIES)}")
    for name in value:
        if name not in MODALITIES:
            raise _Invalid(f"no modality {name!r}: {suggest(str(name), MODALITIES)}")
    return tuple(value)


def _instance(*kinds: type, valid: str) -> Callable[[object], object]:
    def check(value: object) -> object:
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise _Invalid(f"must be {valid}")
        return value

    return check


def _flag(value: object) -> object:
    if type(value) is not bool:
        raise _Invalid("must be true or false")
    return value


def _credits(value: object) -> object:
    if type(value) is not int or not 1 <= value <= 1 << 20:
        raise _Invalid("must be a number of rows, from 1 to 1048576")
    return value


def _stage_id(value: object) -> object:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise _Invalid("must be a whole number, at least 0")
    return value


def _stage_name(value: object) -> object:
    if not isinstance(value, str) or not value.isidentifier():
        raise _Invalid("must be letters, digits and underscores, and not begin with a digit")
    return value


def _mapping(value: object) -> dict[str, Any]:
    if value is None:  # a key of a YAML file with nothing under it
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise _Invalid("must be a mapping of names to values")
    return dict(value)


def _engine_args(value: object) -> dict[str, Any]:
    args = _mapping(value)
    for key, item in args.items():
        problem = _engine_arg_problem(key, item)
        if problem is not None:
            raise _Invalid(problem, key)
    return args


def _sampling_params(value: object) -> dict[str, Any]:
    args = _mapping(value)
    sampling_params = _vllm_attribute("vllm.sampling_params", "SamplingParams") if args else None
    if sampling_params is None:
        return args
    valid = [name for name in sampling_params.__struct_fields__ if not name.startswith("_")]
    for key in args:
        if key not in valid:
            raise _Invalid(f"unknown sampling parameter: {suggest(key, valid)}", key)
    try:
        sampling_params(**args)
    except Exception as exc:  # vLLM's validation error is no ValueError; a wrong type may raise anything
        raise _Invalid(str(exc)) from None
    return args


def _diffusion_params(value: object) -> dict[str, Any]:
    args = _mapping(value)
    for key, item in args.items():
        try:
            DiffusionParams.of({key: item}).validate()
        except InvalidRequest as exc:
            raise _Invalid(str(exc), key) from None
    return args


def _diffusion(value: object) -> dict[str, Any]:
    section = _mapping(value)
    for key, item in section.items():
        if key not in DiffusionConfig.__struct_fields__:
            raise _Invalid(f"unknown key: {suggest(key, DiffusionConfig.__struct_fields__)}", key)
        if (problem := field_problem(key, item)) is not None:
            raise _Invalid(problem, key)
    return section


def _epd(value: object) -> dict[str, Any]:
    try:
        section = check_section(_mapping(value), TRANSPORTS)
    except Problem as exc:
        raise _Invalid(str(exc), *exc.path) from None
    for kind, args in section.get("engine_args", {}).items():
        for key, item in args.items():
            if (problem := _engine_arg_problem(key, item)) is not None:
                raise _Invalid(problem, "engine_args", kind, key)
    return section


def _executor_class(value: object) -> object:
    if value is None or isinstance(value, type) or (isinstance(value, str) and value):
        return value
    raise _Invalid(
        "must be 'package.module.Class', one of vLLM's executors (mp, uni, ray, external_launcher), or a class"
    )


_STAGE_CHECKS: dict[str, Callable[[object], object]] = {
    "stage_id": _stage_id,
    "name": _stage_name,
    "engine_type": _one_of(*ENGINE_TYPES),
    "model": _instance(str, valid="the path or Hub id of a checkpoint"),
    "input_modalities": _modalities,
    "output_modalities": _modalities,
    "engine_args": _engine_args,
    "executor_class": _executor_class,
    "default_sampling_params": _sampling_params,
    "diffusion": _diffusion,
    "epd": _epd,
}


def _stage_check(key: str, engine_type: str) -> Callable[[object], object]:
    if key == "default_sampling_params" and engine_type == "diffusion":
        return _diffusion_params
    return _STAGE_CHECKS[key]


_EDGE_CHECKS: dict[str, Callable[[object], object]] = {"stream": _flag, "credits": _credits}
_YAML_STAGE_KEYS = tuple(key for key in _STAGE_CHECKS if key not in ("stage_id", "name"))
_MAPPING_FIELDS = ("engine_args", "default_sampling_params", "diffusion", "epd")


# --- vLLM's engine arguments: names, types and ranges, read from vLLM itself ------------------------------------------


def _vllm_attribute(module: str, name: str) -> Any:
    """An attribute of vLLM, or ``None`` without vLLM: names are then checked by the engine, later."""
    import importlib

    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as exc:
        if exc.name is not None and exc.name.partition(".")[0] == "vllm":
            return None
        raise


class _ArgSpec(NamedTuple):
    hint: Any  # the type annotation; Any where it cannot be resolved
    bounds: tuple[tuple[str, float], ...]  # ("ge", 1), ...


@functools.cache
def _engine_arg_specs() -> Mapping[str, _ArgSpec] | None:
    engine_args = _vllm_attribute("vllm.engine.arg_utils", "EngineArgs")
    if engine_args is None:
        return None
    bounds = dict(_config_bounds())
    specs = {}
    for arg in dataclasses.fields(engine_args):
        if not arg.name.startswith("_") and arg.name not in _ENGINE_ARGS_WITH_A_FIELD:
            hint = Any if isinstance(arg.type, str) else arg.type
            specs[arg.name] = _ArgSpec(hint, bounds.get(arg.name, ()))
    return specs


def _config_bounds() -> Iterator[tuple[str, tuple[tuple[str, float], ...]]]:
    """Ranges as vLLM's configuration classes declare them: most engine arguments carry the name of such a field."""
    import vllm.config

    for class_name in reversed(vllm.config.__all__):  # reversed: of two classes the one named first wins in a dict
        fields = getattr(getattr(vllm.config, class_name), "__pydantic_fields__", {})
        for name, info in fields.items():
            limits = tuple((op, getattr(m, op)) for m in info.metadata for op in _BOUNDS if hasattr(m, op))
            if limits:
                yield name, limits


_BOUNDS: dict[str, tuple[str, Callable[[float, float], bool]]] = {
    "ge": ("at least", lambda value, limit: value >= limit),
    "gt": ("above", lambda value, limit: value > limit),
    "le": ("at most", lambda value, limit: value <= limit),
    "lt": ("below", lambda value, limit: value < limit),
}


def _known_engine_args() -> Iterable[str]:
    return _engine_arg_specs() or (EVERY_STAGE_ARGS | AR_STAGE_ARGS | PER_STAGE_ARGS)


def _check_engine_arg(key: str, value: object, where: str) -> None:
    problem = _engine_arg_problem(key, value)
    if problem is not None:
        raise ConfigError(f"{where} = {value!r}: {problem}")


def _engine_arg_problem(key: str, value: object) -> str | None:
    """What is wrong with an engine argument; ``None`` if nothing is, or if there is no vLLM to ask."""
    if key in _ENGINE_ARGS_WITH_A_FIELD:
        return f"set it by the stage's own key {_ENGINE_ARGS_WITH_A_FIELD[key]!r}"
    specs = _engine_arg_specs()
    if specs is None:
        return None
    if key not in specs:
        return f"vLLM has no such engine argument: {suggest(key, specs)}"
    hint, bounds = specs[key]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not _fits(value, hint):
        return f"must be {_describe(hint, bounds)}"
    if number and not all(_BOUNDS[op][1](value, limit) for op, limit in bounds):  # type: ignore[arg-type]
        return f"must be {_describe(hint, bounds)}"
    return None


def _fits(value: object, hint: Any) -> bool:
    """Whether a value may stand for an annotation. What is not plain (classes, type variables) is left to vLLM."""
    if value is None:
        return True  # EngineArgs takes None for "not given" almost everywhere, and says so where it does not
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, member) for member in typing.get_args(hint) if member is not types.NoneType)
    if origin is Literal:
        return value in typing.get_args(hint)
    if hint is bool:
        return isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is str:
        return isinstance(value, str)
    if origin in (list, tuple, set):
        return isinstance(value, Sequence | set) and not isinstance(value, str)
    if origin is dict:
        return isinstance(value, Mapping)
    return True


def _describe(hint: Any, bounds: Iterable[tuple[str, float]]) -> str:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        members = [member for member in typing.get_args(hint) if member is not types.NoneType]
        return " or ".join(_describe(member, bounds) for member in members)
    if origin is Literal:
        return "one of " + ", ".join(repr(choice) for choice in typing.get_args(hint))
    plain = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    if hint not in plain and origin is not None:
        return f"a {origin.__name__}"
    text = plain.get(hint, getattr(hint, "__name__", str(hint)))
    if hint in (int, float):
        text += "".join(f", {_BOUNDS[op][0]} {limit}" for op, limit in bounds)
    return text
