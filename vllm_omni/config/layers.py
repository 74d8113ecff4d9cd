"""``load_config``: the one way from a checkpoint, files, flags and keywords to an ``OmniConfig``.

Each layer overrides those before it, key by key:

1. the bundled YAML of the checkpoint's model type (``vllm_omni/deploy/configs/<model_type>.yaml``);
2. the user's YAML (``deploy_config``), with the same keys;
3. ``overrides``: a mapping of the same shape (a JSON flag, a dictionary);
4. plain engine arguments, from flags or keywords: ``max_num_seqs=8``, and ``epd``;
5. ``stage_overrides``: ``"thinker.max_num_seqs=8"``, the value read as YAML.

An engine argument that names no stage (a keyword, or the top-level ``engine_args`` of a YAML) goes to

* every stage, for ``EVERY_STAGE_ARGS``: how weights are loaded, and their type;
* every ``ar`` stage, if there is one, for ``AR_STAGE_ARGS``: batch, shape of the KV cache, parallelism;
* no stage, with an error, for ``PER_STAGE_ARGS`` if there are several ``ar`` stages: each needs its own number;
* the first stage otherwise (prompt processing, multi-modal limits, prefix caching, quantization, ...).

A stage's own setting, in the same layer or a later one, wins over it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vllm_omni import envs
from vllm_omni.config.checkpoint import default_deployment, read_model_type, supported, supported_model_types
from vllm_omni.config.checks import Problem, check_field
from vllm_omni.config.documents import TOP_LEVEL_KEYS, Document, KeyPath, parse_yaml, read_yaml_file, with_string_keys
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
from vllm_omni.names import suggest

STAGE_KEYS = tuple(key for key in STAGE_FIELDS if key not in ("stage_id", "name"))  # of a stage in a file


def load_config(
    model: str | os.PathLike[str],
    *,
    deploy_config: str | os.PathLike[str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    stage_overrides: Sequence[str] = (),
    epd: str | Mapping[str, Any] | None = None,
    **engine_args: Any,
) -> OmniConfig:
    """Load the deployment of ``model``: the bundled one with the layers above it, see the head of this module.

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
    envs.reject_unknown()
    model = os.fspath(model)
    layers = []
    if deploy_config is not None:
        layers.append(read_yaml_file(Path(deploy_config)))
    if overrides:
        keys = dict(overrides) if set(overrides) & set(TOP_LEVEL_KEYS) else {"stages": dict(overrides)}
        layers.append(Document("overrides", with_string_keys(keys), {}, "overrides"))
    if engine_args:
        layers.append(Document("", {"engine_args": engine_args}, {}, "argument"))
    for layer in layers:
        layer.reject_unknown_keys((), TOP_LEVEL_KEYS)

    model_type, origin = _choose_model_type(model, layers, engine_args.get("revision"))
    bundled = read_yaml_file(default_deployment(model_type))
    draft = _Draft(bundled._replace(kind="bundled"))
    draft.origins[("model_type",)] = origin
    for layer in layers:
        draft.overlay(layer)
    if epd is not None:
        draft.set_epd({"instances": epd} if isinstance(epd, str) else epd)
    for text in stage_overrides:
        draft.set_by_flag(text)
    return draft.build(model, model_type)


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
    is_changed = any(value not in (None, (), [], {}) for value in changes.values())
    if config is not None:
        if model or stage_configs is not None or is_changed:
            raise ConfigError("`config` cannot be combined with other arguments")
        return config
    if stage_configs is not None:
        if is_changed:
            raise ConfigError("`stage_configs` cannot be combined with arguments that change a deployment")
        if not stage_configs:
            raise ConfigError("stage_configs: at least one stage is needed")
        first = stage_configs[0]
        model = model or first.model or (first.vllm_config.model_config.model if first.vllm_config else "")
        return OmniConfig(model=str(model), model_type=read_model_type(model), stages=tuple(stage_configs))
    if model is None:
        raise ConfigError("give a model: the directory or hub name of a checkpoint")
    return load_config(model, **changes)


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
        self.origins: dict[KeyPath, Origin] = {}
        self.overlay(bundled)

    def overlay(self, layer: Document) -> None:
        """Apply a file, a mapping or keywords."""
        for key, value in layer.mapping("engine_args").items():
            path = ("engine_args", key)
            try:
                check_engine_args({key: value})
            except Problem as exc:
                more = exc.path[1:]  # the first is the key itself
                raise ConfigError(f"{layer.at((*path, *more))} = {exc.value({key: value})!r}: {exc}") from None
            for name in self._stages_of_engine_arg(key, layer.at(path)):
                self.stages[name]["engine_args"][key] = value
                self.origins["stages", name, "engine_args", key] = layer.origin(path)
        for ref in layer.mapping("stages"):
            name = self.names[stage_index(ref, self.names, layer.at(("stages", ref)))]
            place = _Place(("stages", ref), layer.at, layer.origin)
            for key, value in layer.mapping("stages", ref).items():
                self._set(name, key, value, place)
        for edge in layer.mapping("edges"):
            self._overlay_edge(layer, edge)

    def set_by_flag(self, text: str) -> None:
        """Set one ``NAME.KEY=VALUE``; ``KEY`` may have a second part: ``talker.default_sampling_params.top_k=2``."""
        target, equals, scalar = text.partition("=")
        ref, dot, key = target.strip().partition(".")
        if not (equals and dot and ref and key):
            raise ConfigError(f"--stage {text!r}: must be NAME.KEY=VALUE, for example {self.names[0]}.max_num_seqs=8")
        name = self.names[stage_index(ref, self.names, f"--stage {text!r}")]
        value = parse_yaml(scalar, f"--stage {text!r}").values["value"]
        head, dot, rest = key.partition(".")
        if dot and head in SECTIONS:
            value = {rest: value}
        elif dot:
            raise ConfigError(f"--stage {text!r}: only {', '.join(SECTIONS)} have keys below them")
        origin = Origin("stage", text)
        self._set(name, head, value, _Place((ref,), lambda path: f"--stage {'.'.join(path)}", lambda _: origin))

    def set_epd(self, section: Mapping[str, Any]) -> None:
        """Set keys of the first stage's ``epd`` section, from the flag or keyword ``epd``."""
        origin = Origin("argument", "epd")
        if self._engine_type(self.names[0]) != "ar":
            raise ConfigError(
                f"epd: the first stage, {self.names[0]!r}, is not a language model: it has one kind of instance"
            )

        def at(path: KeyPath) -> str:  # text for "epd" itself holds the instances
            return ".".join(path[:1] if path[1:] == ("instances",) else path)

        self._set(self.names[0], "epd", section, _Place((), at, lambda _: origin))

    def build(self, model: str, model_type: str) -> OmniConfig:
        stages = []
        for stage_id, (name, values) in enumerate(self.stages.items()):
            stages.append(StageConfig(stage_id=stage_id, name=name, **{"model": model, **values}))
        edges = [EdgeConfig(source=s, target=t, **values) for (s, t), values in self.edges.items()]
        return OmniConfig(
            model=model, model_type=model_type, stages=tuple(stages), edges=tuple(edges), origins=self.origins
        )

    def _set(self, name: str, key: str, value: object, place: _Place) -> None:
        """Set one key of a stage: a field of ``StageConfig``, or an engine argument directly under the stage."""
        if key not in STAGE_KEYS:
            if key not in known_engine_args():
                valid = (*STAGE_KEYS, *known_engine_args())
                raise ConfigError(f"{place.at(key)}: unknown key {key!r} of stage {name!r}: {suggest(key, valid)}")
            key, value, place = "engine_args", {key: value}, place._replace(omits_section=True)
        try:
            checked = check_stage_field(key, value, self._engine_type(name))
        except Problem as exc:
            raise ConfigError(f"{place.at(key, *exc.path)} = {exc.value(value)!r}: {exc}") from None
        if key in SECTIONS:
            self.stages[name][key].update(checked)
            self.origins.update({("stages", name, key, one): place.origin(key, one) for one in checked})
        else:
            self.stages[name][key] = checked
            self.origins["stages", name, key] = place.origin(key)

    def _engine_type(self, name: str) -> str:
        return str(self.stages[name].get("engine_type", "ar"))

    def _stages_of_engine_arg(self, key: str, where: str) -> Sequence[str]:
        if key in EVERY_STAGE_ARGS:
            return self.names
        ar_stages = [name for name in self.names if self._engine_type(name) == "ar"]
        if key in AR_STAGE_ARGS and ar_stages:
            return ar_stages
        if key in PER_STAGE_ARGS and len(ar_stages) > 1:
            each = ", ".join(f"{name}.{key}" for name in ar_stages)
            raise ConfigError(f"{where}: must be given for each stage, by --stage NAME.KEY=VALUE: {each}")
        return self.names[:1]

    def _overlay_edge(self, layer: Document, edge: str) -> None:
        source, target = self._ends_of(edge, layer.at(("edges", edge)))
        layer.reject_unknown_keys(("edges", edge), EDGE_FIELDS)
        layer.reject_unknown_keys(("edges", edge, "chunks"), CHUNK_KEYS)
        values = self.edges.setdefault((source, target), {"transport": "auto", "chunks": {}})
        self.origins["edges", f"{source}->{target}", "transport"] = layer.origin(("edges", edge, "transport"))
        for path, value in _edge_values(layer, edge):
            key = path[0]
            try:
                checked = check_field(EdgeConfig, key, {path[1]: value} if path[1:] else value)
            except Problem as exc:
                raise ConfigError(f"{layer.at(('edges', edge, *path))} = {value!r}: {exc}") from None
            if path[1:]:
                values[key].update(checked)
            else:
                values[key] = checked
            self.origins["edges", f"{source}->{target}", *path] = layer.origin(("edges", edge, *path))

    def _ends_of(self, edge: str, where: str) -> tuple[str, str]:
        source, arrow, target = (part.strip() for part in edge.partition("->"))
        if not (arrow and source and target):
            raise ConfigError(
                f"{where}: an edge is written SOURCE->TARGET, for example {self.names[0]}->{self.names[-1]}"
            )
        for end in (source, target):
            if end not in self.names:
                raise ConfigError(f"{where}: no stage {end!r}: {suggest(end, self.names)}")
        return source, target


class _Place(NamedTuple):
    """Where the keys of a stage are given, for messages and for origins."""

    stage: KeyPath  # the path of the stage itself
    describe: Callable[[KeyPath], str]
    find_origin: Callable[[KeyPath], Origin]
    omits_section: bool = False  # an engine argument stands directly under the stage

    def at(self, *keys: str) -> str:
        return self.describe(self._path(keys))

    def origin(self, *keys: str) -> Origin:
        return self.find_origin(self._path(keys))

    def _path(self, keys: KeyPath) -> KeyPath:
        return (*self.stage, *(keys[1:] if self.omits_section else keys))


def _edge_values(layer: Document, edge: str) -> Iterator[tuple[KeyPath, object]]:
    """The values that a document sets for an edge; chunks one by one."""
    for key, value in layer.mapping("edges", edge).items():
        if key != "chunks":
            yield (key,), value
    for key, value in layer.mapping("edges", edge, "chunks").items():
        yield ("chunks", key), value
