"""What a deployment asks of devices: its stages for ``placement.plan``, and a plan as ``device_ids`` of its engines."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from msgspec import structs

from vllm_omni.config import OmniConfig, StageConfig
from vllm_omni.deploy.inventory import this_host
from vllm_omni.deploy.placement import PlacementPlan, plan
from vllm_omni.deploy.resources import Host, Stage
from vllm_omni.engine.cache_edges import cache_edges
from vllm_omni.engine.engine_args import config_of_instance
from vllm_omni.engine.engine_maker import list_instances
from vllm_omni.engine.graph_checks import published_edges
from vllm_omni.engine.memory import declared_memory, has_configured_cache, memory_share
from vllm_omni.engine.orchestrator import Orchestrator
from vllm_omni.engine.stage import StageEngine
from vllm_omni.errors import ConfigError
from vllm_omni.model_executor.shared_weights import weights_key
from vllm_omni.process.memory import StageMemory
from vllm_omni.process.shared_weights import SHARED_WEIGHTS

logger = logging.getLogger(__name__)

RANK_ARGS = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "prefill_context_parallel_size",
    "data_parallel_size",
)
PLACING_EXECUTORS = ("ray", "external_launcher")  # of vLLM: what they start has devices of their choice


@dataclass(frozen=True)
class EngineNeeds:
    """What one engine of a deployment asks for."""

    name: str  # as ``StageEngine.name``
    unit: str  # the stage, or the kind of instances, of which it is one
    config: StageConfig  # with the arguments of this engine
    key: str = ""  # of an instance, in the section ``epd.engine_args``

    @property
    def args(self) -> Mapping[str, Any]:
        return self.config.engine_args

    @property
    def ranks(self) -> int:
        if (ready := self.config.vllm_config) is not None:
            return int(ready.parallel_config.world_size * ready.parallel_config.data_parallel_size)
        return prod(self.args.get(name) or 1 for name in RANK_ARGS)

    @property
    def is_left_to_vllm(self) -> bool:
        """Whether vLLM finds the devices: its executor places ranks, or they are named by UUIDs, which it reads."""
        is_elsewhere = self.args.get("distributed_executor_backend") in PLACING_EXECUTORS
        has_uuids = any(isinstance(one, str) and not one.isdecimal() for one in self.device_ids)
        return is_elsewhere or has_uuids or (self.args.get("nnodes") or 1) > 1

    @property
    def pinned(self) -> tuple[int, ...]:
        """Positions of the cards that ``device_ids`` name; vLLM uses as many as there are ranks."""
        return tuple(int(one) for one in self.device_ids[: self.ranks])

    @property
    def device_ids(self) -> Sequence[int | str]:
        return self.args.get("device_ids") or ()


def list_engines(config: OmniConfig) -> list[EngineNeeds]:
    """The engines of a deployment that run on this host, in their order; none is made."""
    return [one for one in list_every_engine(config) if one.config.host is None]


def list_every_engine(config: OmniConfig) -> list[EngineNeeds]:
    """Those on other hosts as well, whose config has a ``host``."""
    found: list[EngineNeeds] = []
    for stage in config.stages:
        instances = list_instances(stage)
        if not instances:
            found.append(EngineNeeds(stage.name, stage.name, stage))
        for one in instances:
            unit = f"{stage.name}/{one.kind}" if one.kind else stage.name
            key = f"{one.kind}{one.number}" if one.kind else ""
            found.append(EngineNeeds(one.name, unit, config_of_instance(stage, one), key))
    return found


def stages_of(config: OmniConfig, orchestrator: Orchestrator | None = None) -> list[Stage]:
    """The stages of a deployment for ``plan``, without what is left to vLLM; instances of a kind are one stage.

    Args:
        orchestrator: of the deployment, not started. With it, the needs of memory are estimated.

    Raises:
        ConfigError: an engine argument is wrong, or the sizes of a stage's weights cannot be read.
    """
    engines: dict[str, StageEngine] = {}
    near: Mapping[str, frozenset[str]] = {}
    if orchestrator is not None:
        engines = {one.name: one for stage in config.stages for one in orchestrator.maker.make_node(stage)[0]}
        near = _near(orchestrator)
    needs = [one for one in list_engines(config) if not one.is_left_to_vllm]
    stages: dict[Stage, list[EngineNeeds]] = {}
    for one in needs:
        # Of its own accord, one stage alone takes further cards: each one costs, and near ones exchange faster.
        is_first = one.config.stage_id == needs[0].config.stage_id
        engine = engines.get(one.name, engines.get(f"{one.unit}/0"))  # of replicas, some may start later
        stages.setdefault(_stage_of(one, engine, is_first=is_first), []).append(one)
    units: defaultdict[str, list[str]] = defaultdict(list)  # stage of the deployment -> stages for ``plan``
    named: list[Stage] = []
    for stage, own in stages.items():
        is_new = own[0].unit not in {one.name for one in named}
        name = own[0].unit if is_new else own[0].name  # an instance that is unlike others of its kind
        pins = tuple(one.pinned for one in own) if stage.pinned else ()
        named.append(replace(stage, name=name, replicas=len(own), pinned=pins, names=tuple(one.name for one in own)))
        units[own[0].config.name].append(name)
    return [replace(one, near=_near_units(one.name, units, near)) for one in named]


def _stage_of(needs: EngineNeeds, engine: StageEngine | None, *, is_first: bool) -> Stage:
    """A replica's needs, without what distinguishes it from equal ones."""
    config, layer = needs.config, needs.config.layer
    is_pinned = bool(needs.pinned)
    default_layer = 0 if is_first or is_pinned else 1
    memory: StageMemory | None = None
    share = key = None
    if engine is not None:
        memory = declared_memory(engine, "", 0)
        share = memory_share(engine) if _has_share(engine, memory) else None
        memory = memory if share is None else structs.replace(memory, cache=None)
        key = weights_key(engine.vllm_config) if SHARED_WEIGHTS in engine.vllm_config.additional_config else None
    return Stage(
        name=needs.unit,
        ranks=needs.ranks,
        nodes=config.nodes,
        layer=default_layer if layer is None else layer,
        may_share=layer is None,
        default_layer=default_layer,
        memory=memory,
        memory_share=share,
        shared_weights=key,
        pinned=((0,),) if is_pinned else (),
    )


def _has_share(engine: StageEngine, memory: StageMemory) -> bool:
    """Whether the size of its cache depends on that of its device."""
    return bool(memory.cache_max) and memory_share(engine) is not None and not has_configured_cache(engine)


def _near(orchestrator: Orchestrator) -> dict[str, frozenset[str]]:
    """Stage -> the stages with which it exchanges tensors or caches."""
    plans, specs = orchestrator.plans.values(), {spec.name: spec for spec in orchestrator.pipeline.stages}
    found: defaultdict[str, set[str]] = defaultdict(set)
    for edge in [*published_edges(plans, specs), *cache_edges(plans, specs)]:
        source, target = edge.roles
        found[source].add(target)
        found[target].add(source)
    return {name: frozenset(names) for name, names in found.items()}


def _near_units(name: str, units: Mapping[str, Sequence[str]], near: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """The stages for ``plan`` near one of them: the other kinds of its stage, and those of near stages."""
    (stage,) = [stage for stage, own in units.items() if name in own]
    stages = {stage, *near.get(stage, ())}
    return frozenset(unit for one in stages for unit in units.get(one, ())) - {name}


# -- on this host ------------------------------------------------------------------------------------------------------


def place_here(config: OmniConfig, host: Host | None = None, *, has_parts: bool = False) -> OmniConfig:
    """Choose the devices of a server that runs on one host: returns the deployment with its ``device_ids``.

    Where there is one device, or the deployment names all of them, it stays as it is, and memory is what the start
    measures. Otherwise estimates help to choose; they reject nothing that the start might find to fit.

    Args:
        host: default: this one.
        has_parts: of an engine that spans hosts, the ranks of one run here.

    Raises:
        NoPlace: the host has too few devices.
        ConfigError: an engine argument is wrong, or an engine spans hosts that have no names.
    """
    host = this_host(opens_devices=False) if host is None else host
    stages = on_one_host(stages_of(config)) if has_parts else stages_of(config)
    if not stages:
        return config
    for one in stages:
        if one.nodes > 1:
            raise ConfigError(
                f"stage {one.name!r}: nodes = {one.nodes}: its engine spans hosts that join this one: give --stage "
                f"'{one.name}.host=[NAME, ...]' with {one.nodes} names, --listen HOST:PORT and --token-file "
                "FILE, or --worker-backend ray"
            )
    made = plan(stages, [host])
    if len(host.devices) == 1 or all(one.pinned for one in stages):
        return config
    orchestrator = Orchestrator(config)  # for its engines' configurations; they are made anew with their devices
    try:
        stages = stages_of(config, orchestrator)
        made = plan(on_one_host(stages) if has_parts else stages, [host])
    except ConfigError as exc:  # of the estimates, or one that the start finds as well
        logger.warning("devices are chosen without regard to their memory: %s", exc)
    finally:
        orchestrator.shutdown()
    return with_devices(config, made, host)


def on_one_host(stages: Sequence[Stage]) -> list[Stage]:
    """The stages with the ranks that one of their engine's hosts has."""
    return [replace(one, ranks=one.ranks // one.nodes, nodes=1) for one in stages]


def with_devices(config: OmniConfig, made: PlacementPlan, host: Host) -> OmniConfig:
    """The deployment with the devices that a plan gives its engines, except where it names them itself."""
    order = [device.name for device in host.devices]
    ids = {one.name: [order.index(place.device) for place in one.places] for one in made.replicas}
    by_stage: defaultdict[str, list[EngineNeeds]] = defaultdict(list)
    for one in list_engines(config):
        if one.name in ids and not one.device_ids and one.config.vllm_config is None:
            by_stage[one.config.name].append(one)
    return replace(config, stages=tuple(_with_ids(stage, by_stage[stage.name], ids) for stage in config.stages))


def _with_ids(stage: StageConfig, engines: Sequence[EngineNeeds], ids: Mapping[str, Sequence[int]]) -> StageConfig:
    if not engines:
        return stage
    if not engines[0].key:  # replicas divide those of the stage; one on another host takes that host's instead
        every = [number for name in stage.engine_names for number in ids.get(name, ids[engines[0].name])]
        return replace(stage, engine_args={**stage.engine_args, "device_ids": every})
    given = stage.deployment.engine_args
    own = {one.key: {**given.get(one.key, {}), "device_ids": list(ids[one.name])} for one in engines}
    return replace(stage, epd={**stage.epd, "engine_args": {**given, **own}})
