"""``load_config``: the one way from a checkpoint, files, flags and keywords to an ``OmniConfig``.

Each layer overrides those before it, key by key:

1. the bundled YAML of the checkpoint's model type (``vllm_omni/deploy/configs/<model_type>.yaml``);
2. the user's YAML (``deploy_config``), with the same keys;
3. ``overrides``: a mapping of the same shape (a JSON flag, a dictionary);
4. plain engine arguments, from flags or keywords: ``max_num_seqs=8``, ``epd`` and ``kv_pool``;
5. ``stage_overrides``: ``"thinker.max_num_seqs=8"``, the value read as YAML.

An engine argument that names no stage (a keyword, or the top-level ``engine_args`` of a YAML) goes to

* every stage on which it has an effect, for ``EVERY_STAGE_ARGS``: how weights are loaded, and their type;
* every ``ar`` stage, if there is one, for ``AR_STAGE_ARGS``: batch, KV cache, parallelism, compilation, kernels;
* no stage, with an error, for ``PER_STAGE_ARGS`` if there are several ``ar`` stages: each needs its own number;
* the first stage otherwise (prompt processing, multi-modal limits, prefix caching, quantization, ...).

A stage's own setting, in the same layer or a later one, wins over it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from vllm_omni import envs
from vllm_omni.config.checkpoint import default_deployment, read_model_type, supported, supported_model_types
from vllm_omni.config.checks import Problem, check_field
from vllm_omni.config.documents import TOP_LEVEL_KEYS, Document, KeyPath, parse_yaml, read_yaml_file, with_string_keys
from vllm_omni.config.given_pipeline import deployment_of, find_pipeline
from vllm_omni.config.lacking_args import LACKING_ARGS
from vllm_omni.config.model import (
    CHUNK_KEYS,
    EDGE_FIELDS,
    SECTIONS,
    STAGE_FIELDS,
    EdgeConfig,
    OmniConfig,
    Origin,
    StageConfig,
    check_stage_field,
    stage_index,
)
from vllm_omni.config.vllm_args import (
    AR_STAGE_ARGS,
    EVERY_STAGE_ARGS,
    PER_STAGE_ARGS,
    check_engine_args,
    known_engine_args,
)
from vllm_omni.errors import ConfigError
from vllm_omni.names import hide_password, suggest

# Arguments of ``load_config``.
LAYERS = (
    *("pipeline", "deploy_config", "overrides", "stage_overrides", "epd", "kv_pool", "listen", "token_file"),
    *("worker_backend", "ray_address"),
)
STAGE_KEYS = tuple(key for key in STAGE_FIELDS if key not in ("stage_id", "name"))  # of a stage in a file


def load_config(
    model: str | os.PathLike[str],
    *,
    pipeline: type | str | None = None,
    deploy_config: str | os.PathLike[str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    stage_overrides: Sequence[str] = (),
    epd: str | Mapping[str, Any] | None = None,
    kv_pool: int | Mapping[str, Any] | None = None,
    listen: str | None = None,
    token_file: str | os.PathLike[str] | None = None,
    worker_backend: Literal["local", "ray"] | None = None,
    ray_address: str | None = None,
    **engine_args: Any,
) -> OmniConfig:
    """Load the deployment of ``model``: the bundled one with the layers above it, see the head of this module.

    Args:
        model: directory or Hub id of the checkpoint; a stage may have another (its ``model`` key).
        pipeline: instead of the one for the checkpoint's model type: a class, ``"file.py:MyPipeline"`` or
            ``"package.module:MyPipeline"``. Its attribute ``deployment`` is the first layer.
        deploy_config: a YAML file with the keys ``model_type``, ``stages``, ``edges``, ``engine_args``, ``voices``.
        overrides: the same keys as a mapping; stages by name or id. The keys may be only stages, too:
            ``{"0": {"max_num_seqs": 8}}``.
        stage_overrides: ``"NAME.KEY=VALUE"``; ``NAME`` a stage's name or id.
        epd: instances of the first stage: ``"E:1,PD:1"``, or keys of its ``epd`` section.
        kv_pool: keep KV pages of the first stage: its ``memory_bytes``, or keys of its ``kv_pool`` section.
        listen: HOST:PORT where other hosts join, for stages with the key ``host``.
        token_file: the secret that they must have.
        worker_backend: "ray": the nodes of a Ray cluster run all engines; then listen and token_file are optional.
        ray_address: of the cluster, HOST:PORT; by default that of RAY_ADDRESS, or of this machine.
        **engine_args: fields of vLLM's ``EngineArgs``. Pass only what the user gave, not every default.

    Raises:
        ConfigError: the message names the file and line (or flag), the key, the nearest valid name and the valid range.
    """
    envs.reject_unknown()
    model = os.fspath(model)
    layers = [*_read_layers(deploy_config, overrides, engine_args, epd, kv_pool), *map(_read_flag, stage_overrides)]
    for layer in layers:
        layer.reject_unknown_keys((), TOP_LEVEL_KEYS)

    if pipeline is not None:
        pipeline = find_pipeline(pipeline)
        bundled = deployment_of(pipeline)
        model_type, origin = pipeline.__name__, Origin("argument", "pipeline")
        if any("model_type" in layer.values for layer in (bundled, *layers)):
            raise ConfigError(f"model_type: cannot be combined with a pipeline ({model_type}), which stands for it")
    else:
        model_type, origin = _choose_model_type(model, layers, engine_args.get("revision"))
        bundled = read_yaml_file(default_deployment(model_type))._replace(kind="bundled")
    draft = _Draft(bundled)
    draft.origins[("model_type",)] = origin
    for layer in layers:
        draft.overlay(layer)
    return replace(
        draft.build(model, model_type, pipeline),
        listen=listen or "",
        token_file=os.fspath(token_file or ""),
        worker_backend=worker_backend or "local",
        ray_address=ray_address or "",
    )


def _read_layers(
    deploy_config: str | os.PathLike[str] | None,
    overrides: Mapping[str, Any] | None,
    engine_args: Mapping[str, Any],
    epd: str | Mapping[str, Any] | None,
    kv_pool: int | Mapping[str, Any] | None,
) -> Iterator[Document]:
    if deploy_config is not None:
        yield read_yaml_file(Path(deploy_config))
    if overrides:
        keys = dict(overrides) if set(overrides) & set(TOP_LEVEL_KEYS) else {"stages": dict(overrides)}
        yield Document("overrides", with_string_keys(keys), {}, "overrides")
    if engine_args:
        reject_unknown_arguments(engine_args)
        yield Document("", {"engine_args": dict(engine_args)}, {}, "argument")
    if epd is not None:
        section = {"instances": epd} if isinstance(epd, str) else epd
        yield Document("epd", {"stages": {"0": {"epd": section}}}, {}, "argument")
    if kv_pool is not None:
        of_pool = kv_pool if isinstance(kv_pool, Mapping) else {"memory_bytes": kv_pool}
        yield Document("kv_pool", {"stages": {"0": {"kv_pool": of_pool}}}, {}, "argument")


def _read_flag(text: str) -> Document:
    """Read ``NAME.KEY=VALUE``; ``KEY`` may have a second part: ``talker.default_sampling_params.top_k=2``."""
    target, equals, scalar = text.partition("=")
    ref, dot, key = target.strip().partition(".")
    if not all((equals, dot, ref, key)):
        raise ConfigError(f"--stage {text!r}: must be NAME.KEY=VALUE, for example thinker.max_num_seqs=8")
    value = parse_yaml(scalar, f"--stage {text!r}").values["value"]
    head, dot, rest = key.partition(".")
    if dot and head not in SECTIONS:
        raise ConfigError(f"--stage {text!r}: only {', '.join(SECTIONS)} have keys below them")
    return Document(hide_password(text), {"stages": {ref: {head: {rest: value} if dot else value}}}, {}, "stage")


def reject_unknown_arguments(names: Iterable[str], others: Iterable[str] = ()) -> None:
    """Raise ``ConfigError`` for a name that is no argument of ``load_config``, and none of ``others``."""
    valid = (*LAYERS, *others, *known_engine_args())
    for name in names:
        if name not in valid:
            raise ConfigError(f"unknown argument {name!r}: {suggest(name, valid)}")


def find_config(
    model: str | os.PathLike[str] | None,
    config: OmniConfig | None,
    stage_configs: Sequence[StageConfig] | None,
    changes: Mapping[str, Any],
) -> OmniConfig:
    """The deployment of a model, or of stages, or a ready one.

    Args:
        changes: arguments of ``load_config``, which go with a model alone.

    Raises:
        ConfigError: nothing is given, or arguments that exclude each other; and as ``load_config``.
    """
    reject_unknown_arguments(changes, ("config", "stage_configs", "log_stats"))
    is_changed = any(value not in (None, (), [], {}) for value in changes.values())
    if config is not None:
        if any((model, stage_configs is not None, is_changed)):
            raise ConfigError("`config` cannot be combined with other arguments")
        return config
    if stage_configs is not None:
        if is_changed:
            raise ConfigError("`stage_configs` cannot be combined with arguments that change a deployment")
        return _config_of_stages(model, stage_configs)
    if model is None:
        raise ConfigError("give a model: the directory or hub name of a checkpoint")
    return load_config(model, **changes)


def _config_of_stages(model: str | os.PathLike[str] | None, stages: Sequence[StageConfig]) -> OmniConfig:
    if not stages:
        raise ConfigError("stage_configs: at least one stage is needed")
    first = stages[0]
    model = model or first.model or (first.vllm_config.model_config.model if first.vllm_config else "")
    return OmniConfig(model=str(model), model_type=read_model_type(model), stages=tuple(stages))


def _choose_model_type(model: str, layers: Sequence[Document], revision: object) -> tuple[str, Origin]:
    for layer in reversed(layers):
        chosen = layer.values.get("model_type")
        if chosen is not None:
            if chosen not in supported_model_types():
                raise ConfigError(f"{layer.at(('model_type',))} = {chosen!r}: {supported(str(chosen))}")
            return str(chosen), layer.origin(("model_type",))
    chosen = read_model_type(model, revision=None if revision is None else str(revision))
    return chosen, Origin("checkpoint", model)


class _Draft:
    """Collects the layers of a deployment: a dictionary of fields for each stage and edge."""

    def __init__(self, bundled: Document):
        self.names = tuple(bundled.mapping("stages"))
        self.stages: dict[str, dict[str, Any]] = {name: {key: {} for key in SECTIONS} for name in self.names}
        self.edges: dict[tuple[str, str], dict[str, Any]] = {}
        self.voices: dict[str, str] = {}
        self.origins: dict[KeyPath, Origin] = {}
        self.overlay(bundled)

    def overlay(self, layer: Document) -> None:
        """Apply a file, a mapping, keywords or a flag."""
        for key, value in layer.mapping("engine_args").items():
            _check(layer, ("engine_args",), {key: value}, check_engine_args)
            for name in self._stages_of_engine_arg(key, layer.at(("engine_args", key))):
                self.stages[name]["engine_args"][key] = value
                self.origins["stages", name, "engine_args", key] = layer.origin(("engine_args", key))
        for ref in layer.mapping("stages"):
            at = ("stages", ref)
            name = self.names[stage_index(ref, self.names, layer.at(at))]
            for key, value in layer.mapping(*at).items():
                self._set(layer, at, name, key, value)
        for edge in layer.mapping("edges"):
            self._overlay_edge(layer, edge)
        for name, speaker in layer.mapping("voices").items():
            self.voices[name] = speaker
            self.origins["voices", name] = layer.origin(("voices", name))

    def build(self, model: str, model_type: str, pipeline: type | None) -> OmniConfig:
        stages = [
            StageConfig(stage_id=stage_id, name=name, **{"model": model, **values})
            for stage_id, (name, values) in enumerate(self.stages.items())
        ]
        edges = [EdgeConfig(source=s, target=t, **values) for (s, t), values in self.edges.items()]
        return OmniConfig(
            model=model,
            model_type=model_type,
            pipeline=pipeline,
            stages=tuple(stages),
            edges=tuple(edges),
            voices=self.voices,
            origins=self.origins,
        )

    def _set(self, layer: Document, at: KeyPath, name: str, key: str, value: object) -> None:
        """Set one key of a stage: a field of ``StageConfig``, or an engine argument directly under the stage."""
        if key in STAGE_KEYS:
            at = (*at, key)
        elif key in known_engine_args():
            key, value = "engine_args", {key: value}
        else:
            valid = (*STAGE_KEYS, *known_engine_args())
            raise ConfigError(f"{layer.at((*at, key))}: unknown key {key!r} of stage {name!r}: {suggest(key, valid)}")
        engine_type = self._engine_type(name)
        checked = _check(layer, at, value, lambda value: check_stage_field(key, value, engine_type))
        if key in SECTIONS:
            self.stages[name][key].update(checked)
            self.origins.update({("stages", name, key, one): layer.origin((*at, one)) for one in checked})
        else:
            self.stages[name][key] = checked
            self.origins["stages", name, key] = layer.origin(at)

    def _engine_type(self, name: str) -> str:
        return str(self.stages[name].get("engine_type", "ar"))

    def _stages_of_engine_arg(self, key: str, where: str) -> Sequence[str]:
        if key in EVERY_STAGE_ARGS:
            concerned = [name for name in self.names if key not in LACKING_ARGS[self._engine_type(name)]]
            return concerned or self.names[:1]  # where no stage has it, the first reports that
        ar_stages = [name for name in self.names if self._engine_type(name) == "ar"]
        if key in AR_STAGE_ARGS and ar_stages:
            return ar_stages
        if key in PER_STAGE_ARGS and len(ar_stages) > 1:
            each = ", ".join(f"{name}.{key}" for name in ar_stages)
            raise ConfigError(f"{where}: must be given for each stage, by --stage NAME.KEY=VALUE: {each}")
        return self.names[:1]

    def _overlay_edge(self, layer: Document, edge: str) -> None:
        at = ("edges", edge)
        source, target = self._ends_of(edge, layer.at(at))
        layer.reject_unknown_keys(at, EDGE_FIELDS)
        layer.reject_unknown_keys((*at, "chunks"), CHUNK_KEYS)
        path = ("edges", f"{source}->{target}")
        values = self.edges.setdefault((source, target), {"transport": "auto", "chunks": {}})
        self.origins[*path, "transport"] = layer.origin((*at, "transport"))
        for key, value in layer.mapping(*at).items():
            checked = _check(layer, (*at, key), value, partial(check_field, EdgeConfig, key))
            if key == "chunks":
                values[key].update(checked)
                self.origins.update({(*path, key, one): layer.origin((*at, key, one)) for one in checked})
            else:
                values[key] = checked
                self.origins[*path, key] = layer.origin((*at, key))

    def _ends_of(self, edge: str, where: str) -> tuple[str, str]:
        source, arrow, target = (part.strip() for part in edge.partition("->"))
        if not all((arrow, source, target)):
            raise ConfigError(
                f"{where}: an edge is written SOURCE->TARGET, for example {self.names[0]}->{self.names[-1]}"
            )
        for end in (source, target):
            if end not in self.names:
                raise ConfigError(f"{where}: no stage {end!r}: {suggest(end, self.names)}")
        return source, target


def _check(layer: Document, at: KeyPath, value: object, check: Callable[[Any], Any]) -> Any:
    """Check the value at a place of a layer; raises ``ConfigError`` with the place."""
    try:
        return check(value)
    except Problem as exc:
        raise ConfigError(exc.at(layer.at((*at, *exc.path)), value)) from None
