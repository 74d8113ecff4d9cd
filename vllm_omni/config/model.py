"""``OmniConfig``: the one frozen schema for how a model is deployed, of stages and the edges between them.

Nodes and edges themselves are code (each family's ``Graph``); a deployment sets where and how they run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, get_args

from pydantic import AfterValidator, Field

from vllm_omni.config.budgets import BUDGET_KEYS
from vllm_omni.config.checks import (
    FromMapping,
    Problem,
    Section,
    Transport,
    check_field,
    check_section,
)
from vllm_omni.config.conflicts import find_conflict
from vllm_omni.config.diffusion import DiffusionConfig
from vllm_omni.config.diffusion_params import DiffusionParams
from vllm_omni.config.epd import MAX_INSTANCES, Balance, EPDDeployment, check_epd_section
from vllm_omni.config.kv_pool import KVPoolConfig, check_kv_pool_section
from vllm_omni.config.vllm_args import check_engine_args, make_sampling_params
from vllm_omni.errors import ConfigError, InvalidRequest
from vllm_omni.names import suggest

if TYPE_CHECKING:
    from vllm.config import VllmConfig
else:
    VllmConfig = Any  # works without vLLM

EngineType = Literal["ar", "generation", "diffusion"]
ChunkKey = Literal["first", "size", "past", "future"]  # see WindowSizes of the family
CHUNK_KEYS: tuple[str, ...] = get_args(ChunkKey)
MAX_LAYER = 63
HOST_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
MAX_NODES = 1024
WORKER_BACKENDS = ("local", "ray")
# Fields of a stage that are mappings.
SECTIONS = ("engine_args", "default_sampling_params", "diffusion", "epd", "kv_pool")


def _identifier(name: str) -> str:
    if not name.isidentifier():
        raise Problem("must be letters, digits and underscores, and not start with a digit")
    return name


def _host(value: str | list[str | None] | None) -> str | list[str | None] | None:
    names = value if isinstance(value, list) else [value]
    if any(name is not None and not HOST_NAME.fullmatch(name) for name in names):
        raise Problem("must be letters, digits, '.', '-' and '_'")
    return value


def _executor(value: object) -> object:
    if value is None or isinstance(value, type) or (isinstance(value, str) and value):
        return value
    raise Problem(
        "must be 'package.module.Class', one of vLLM's executors (mp, uni, ray, external_launcher), or a class"
    )


def _diffusion(section: dict[str, Any]) -> dict[str, Any]:
    return check_section(DiffusionConfig, section)


def _sampling_params(section: dict[str, Any]) -> dict[str, Any]:
    make_sampling_params(section)
    return section


def _diffusion_params(section: dict[str, Any]) -> dict[str, Any]:
    for key, value in section.items():
        try:
            DiffusionParams.of({key: value}).validate()
        except InvalidRequest as exc:
            raise Problem(str(exc), key) from None
    return section


@dataclass(frozen=True, kw_only=True)
class StageConfig:
    """One stage: an engine, its model and its settings. Do not change the mappings afterwards.

    Raises:
        ConfigError: a field has a wrong value; the message names the stage, the field and the valid values.
    """

    stage_id: Annotated[int, Field(ge=0)]  # position among the stages, from 0
    name: Annotated[str, AfterValidator(_identifier)]  # the node's name in the family's graph
    engine_type: EngineType = "ar"
    model: str = ""  # path or Hub id of the checkpoint; empty only with a ready vllm_config
    engine_args: Annotated[Section, AfterValidator(check_engine_args)] = field(default_factory=dict)
    """Field of vLLM's ``EngineArgs`` -> value."""
    vllm_config: VllmConfig | None = None  # ready-made, instead of engine_args
    executor_class: Annotated[Any, AfterValidator(_executor)] = None
    """``"package.module.Class"``, one of vLLM's own names, or a class."""
    default_sampling_params: Section = field(default_factory=dict)
    """Field of ``SamplingParams`` -> value; of ``DiffusionParams`` for a diffusion stage."""
    diffusion: Annotated[Section, AfterValidator(_diffusion)] = field(default_factory=dict)
    """Field of ``DiffusionConfig`` -> value, for a diffusion stage."""
    epd: Annotated[Section, AfterValidator(check_epd_section)] = field(default_factory=dict)
    """Field of ``EPDDeployment`` or of ``config.budgets.EPDConfig`` -> value, for an ar stage that reads the prompt."""
    kv_pool: Annotated[Section, AfterValidator(check_kv_pool_section)] = field(default_factory=dict)
    """Field of ``KVPoolConfig`` -> value, for an ar stage; empty: the stage has no pool."""
    row_cache: bool | None = None
    """Of a stage whose hidden states another stage reads: whether they are kept beside its KV cache, so that requests
    with speech read the prefix cache. None, the default: if the engine can."""
    unified: bool | None = None
    """Of a language model that generates pictures. False: pictures are denoised by an engine of their own, which gets
    the KV cache of their context (``epd.instances`` with G). True, the default: by the engine that writes texts."""
    replicas: Annotated[int, Field(ge=1, le=MAX_INSTANCES)] = 1  # equal engines, among which requests are balanced
    max_replicas: Annotated[int, Field(ge=1, le=MAX_INSTANCES)] | None = None
    """As many as ``vllm-omni scale`` may start; they have their devices from the beginning. None: as many as there are
    at the start, and the stage is not scaled."""
    balance: Balance | None = None  # how; None: what the graph says
    layer: Annotated[int, Field(ge=0, le=MAX_LAYER)] | None = None
    """0: each engine has devices of its own. Above: it is on devices that layer 0 has, one of this layer on each. None,
    the default: the first stage has its own where there are enough, and the others share them."""
    nodes: Annotated[int, Field(ge=1, le=MAX_NODES)] = 1  # hosts that an engine spans, with as many ranks on each
    host: Annotated[str | list[str | None] | None, AfterValidator(_host)] = None
    """The host that runs it, by a name for this deployment, or one for each of its instances, of the replicas that may
    run, or of the ``nodes`` that its engine spans. None, the default: the front end's host. Any other one joins the
    front end (``vllm serve --omni --headless``)."""

    def __post_init__(self) -> None:
        for key in STAGE_FIELDS:
            value = getattr(self, key)
            try:
                object.__setattr__(self, key, check_stage_field(key, value, self.engine_type))
            except Problem as exc:
                raise self._error(exc.below(key, value)) from None
        if (conflict := find_conflict(self)) is not None:
            raise self._error(conflict)

    def _error(self, message: str) -> ConfigError:
        return ConfigError(f"stage {self.name!r}: {message}")

    @property
    def is_autoregressive(self) -> bool:
        """Whether the stage generates tokens; its parameters are vLLM's ``SamplingParams``."""
        return self.engine_type == "ar"

    @property
    def max_engines(self) -> int:
        """How many equal engines the stage may have."""
        return max(self.replicas, self.max_replicas or 1)

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
        """The instances of the stage and how requests are balanced between them."""
        apart = {"instances": {"EPD": 1, "G": 1}} if self.unified is False else {}
        return EPDDeployment.of({**apart, **self.epd})

    @property
    def engine_names(self) -> list[str]:
        """Its engines, also those that may start later: ["talker"]; ["talker/0", ...], replicas; ["thinker/E0", ...],
        instances."""
        if self.deployment.is_split:
            return [f"{self.name}/{kind}{number}" for kind, number in self.deployment.numbered]
        several = [f"{self.name}/{number}" for number in range(self.max_engines)]
        return several if len(several) > 1 else [self.name]

    @property
    def num_started(self) -> int:
        """How many of its engines start with the server: the first ones."""
        return len(self.engine_names) if self.deployment.is_split else self.replicas

    @property
    def hosts(self) -> list[str | None]:
        """The host of each engine, in the order of ``engine_names``, the first one if it spans several; None: the front
        end's."""
        hosts = self.host if isinstance(self.host, list) else [self.host] * len(self.engine_names)
        return hosts[:1] if self.nodes > 1 and isinstance(self.host, list) else hosts

    @property
    def part_names(self) -> list[str]:
        """Its engines, as ``engine_names``; of one that spans hosts its part on each: ["thinker", "thinker/node1"]. The
        first part has the engine core, and the others only ranks."""
        return [*self.engine_names, *(f"{self.name}/node{number}" for number in range(1, self.nodes))]

    @property
    def part_hosts(self) -> list[str | None]:
        """The host of each part, in the order of ``part_names``."""
        return self.host if isinstance(self.host, list) else [self.host] * len(self.part_names)

    def host_of(self, number: int = 0) -> str | None:
        """The host of an engine, by its place in ``engine_names``; None: the front end's."""
        return self.hosts[number]

    @property
    def has_other_host(self) -> bool:
        """Whether an engine of the stage runs on another host than the front end, or may be started there."""
        return any(host is not None for host in self.part_hosts)

    @property
    def pool(self) -> KVPoolConfig | None:
        """Where its KV pages and encoded media are kept; None: nowhere."""
        return KVPoolConfig.of(self.kv_pool)

    @property
    def budgets(self) -> dict[str, Any]:
        """Budgets of its schedulers: fields of ``config.budgets.EPDConfig``."""
        return {key: value for key, value in self.epd.items() if key in BUDGET_KEYS}


STAGE_FIELDS = tuple(one.name for one in fields(StageConfig) if one.name != "vllm_config")


def check_stage_field(key: str, value: object, engine_type: str) -> Any:
    """One field of a stage as ``StageConfig`` takes it; raises ``Problem``."""
    checked = check_field(StageConfig, key, value)
    if key == "default_sampling_params":
        return _diffusion_params(checked) if engine_type == "diffusion" else _sampling_params(checked)
    return checked


@dataclass(frozen=True, kw_only=True)
class EdgeConfig:
    """How tensors travel from one named stage to another."""

    source: str
    target: str
    transport: Transport = "auto"  # a backend of the relay, or the first that works between the two stages
    # Whether the target starts while the source runs; "auto": if both are autoregressive and the transport has streams.
    stream: bool | Literal["auto"] = "auto"
    credits: Annotated[int, Field(ge=1, le=1 << 20)] = 256  # of a stream: rows that the source may be ahead
    # How a streamed field is cut, where the target reads chunks: number of the field's items. The family's pipeline has
    # a default for each.
    chunks: Annotated[dict[ChunkKey, Annotated[int, Field(ge=0)]], FromMapping] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key in EDGE_FIELDS:
            value = getattr(self, key)
            try:
                check_field(EdgeConfig, key, value)
            except Problem as exc:
                raise ConfigError(f"edge {self.source}->{self.target}: {exc.below(key, value)}") from None


EDGE_FIELDS = tuple(one.name for one in fields(EdgeConfig) if one.name not in ("source", "target"))


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
    ``("model_type",)``. A value without an origin is the default of this schema.
    """

    model: str
    model_type: str
    pipeline: type | None = None  # the caller's own, instead of the one for the model type
    stages: tuple[StageConfig, ...]
    edges: tuple[EdgeConfig, ...] = ()
    voices: Mapping[str, str] = field(default_factory=dict)  # a further name of a voice -> the checkpoint's
    listen: str = ""  # HOST:PORT where other hosts join
    token_file: str = ""  # with the secret that they have as well
    worker_backend: Literal["local", "ray"] = "local"  # "ray": a cluster's nodes run all engines
    ray_address: str = ""  # of the cluster, HOST:PORT; empty: that of RAY_ADDRESS, or of this machine
    origins: Mapping[tuple[str, ...], Origin] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", tuple(self.stages))
        object.__setattr__(self, "edges", tuple(self.edges))
        if not self.stages:
            raise ConfigError("stages: at least one stage is needed")
        self._check_workers()
        self._check_stages()
        self._check_edges()

    def _check_workers(self) -> None:
        if self.worker_backend not in WORKER_BACKENDS:
            backends = suggest(str(self.worker_backend), WORKER_BACKENDS)
            raise ConfigError(f"worker_backend = {self.worker_backend!r}: {backends}")
        if self.ray_address and self.worker_backend != "ray":
            raise ConfigError("ray_address: has no effect without worker_backend = 'ray'")
        if self.ray_address.startswith("ray://"):
            raise ConfigError(
                f"ray_address = {self.ray_address!r}: is one of Ray Client's: give HOST:PORT of the cluster's head, "
                "and start the server on a node"
            )

    def _check_stages(self) -> None:
        for index, stage in enumerate(self.stages):
            if stage.stage_id != index:
                raise ConfigError(
                    f"stage {stage.name!r}: stage_id = {stage.stage_id}: its place in the list is {index}"
                )
        names = self.stage_names
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"stages: the name {name!r} is used {names.count(name)} times")

    def _check_edges(self) -> None:
        names = self.stage_names
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
        return self.stages[stage_index(str(name_or_id), self.stage_names, "stage")]

    def edge(self, source: str, target: str) -> EdgeConfig:
        """How tensors travel on that edge; the defaults if the deployment does not set it."""
        for edge in self.edges:
            if (edge.source, edge.target) == (source, target):
                return edge
        return EdgeConfig(source=source, target=target)


def stage_index(ref: str, names: Sequence[str], where: str) -> int:
    """The position of the stage with that name or id; ``where`` starts the message of a ``ConfigError``."""
    if ref in names:
        return names.index(ref)
    if ref.isdecimal() and int(ref) < len(names):
        return int(ref)
    raise ConfigError(f"{where}: no stage {ref!r}: {suggest(ref, names)} (or an id from 0 to {len(names) - 1})")
