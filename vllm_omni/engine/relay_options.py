"""``make_relay_options``: how a stage publishes tensors for other stages, for its instances and for the user."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence

from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from vllm_omni import envs
from vllm_omni.config import OmniConfig, StageConfig
from vllm_omni.engine.cache_edges import cache_edges
from vllm_omni.engine.edge_checks import WholeEdges, why_not_streamed
from vllm_omni.engine.graph_checks import published_edges, whole_edges
from vllm_omni.engine.memory import devices_of
from vllm_omni.engine.pool_args import check_address
from vllm_omni.engine.stage import StageEngine
from vllm_omni.engine.stage_edges import StageEdge
from vllm_omni.errors import ConfigError
from vllm_omni.flow import ENTRY, StaticPlan
from vllm_omni.hosts.endpoint import Endpoint
from vllm_omni.model_executor.workerless_executor import WorkerlessExecutor
from vllm_omni.relay.hub import EdgeOptions, RelayOptions
from vllm_omni.relay.select import Placement, choose_backend

EnginesOf = Callable[[str], Sequence[StageEngine]]
"""Stage -> its engine, or its several engines."""


def make_relay_options(
    engine: StageEngine, engines_of: EnginesOf, plans: Collection[StaticPlan], config: OmniConfig
) -> RelayOptions:
    """Choose the transports of one engine, one for each edge on which it publishes.

    Raises:
        ConfigError: an edge has a setting that it cannot honour where its stages run, or other hosts are to read its
            pages, and cannot reach it.
    """
    deployment, is_here = engine.config.deployment, engine.config.host_of() is None
    if engine.config.pool is not None and is_here:
        check_address(engine.config.pool, relay_host(config))
    migrates = _migrates(engine)
    num_bytes = (deployment.relay_bytes if migrates else None) or envs.VLLM_OMNI_RELAY_BYTES
    transport = "inline"
    there = Placement(same_host=is_here)
    if migrates:
        device = engine.vllm_config.device_config.device_type
        are_here = _hosts(config.stage(engine.config.name)) == {None}
        placement = Placement(same_host=are_here, devices=(device, device))
        # Wherever they are, the front end must reach the leases, which it ends.
        edge = f"{engine.name}->instances{'' if are_here else ' and front end'}"
        transport = choose_backend(deployment.transport, placement, edge)
    elif (caches := _caches_of(engine, plans)) is not None:
        transport = _cache_transport(*caches, engines_of, config)
    elif not engine.kind.generates_tokens:
        transport = choose_backend("auto", there, f"{engine.name}->user")
    specs = {engine.config.name: engine.spec}
    published = published_edges(plans, specs)
    edges = {
        target: _edge_options(engine, engines_of(target), target, whole_edges(plans, specs), config, published)
        for target in sorted({edge.reader.role for edge in published})
    }
    every = edges | _between_graphs(published, edges, transport, config)
    return RelayOptions(transport, num_bytes, every, relay_host(config), secret_file_of(config))


def relay_host(config: OmniConfig) -> str:
    """Where the relays of this host listen: as the environment says, or where hosts join."""
    if config.listen and "VLLM_OMNI_RELAY_HOST" not in os.environ:
        return Endpoint.parse(config.listen, "--listen").resolve().host
    return envs.VLLM_OMNI_RELAY_HOST


def secret_file_of(config: OmniConfig) -> str:
    """The file with the deployment's secret, as processes in any directory find it; empty: it needs none."""
    return os.path.abspath(config.token_file) if config.token_file else ""


def _between_graphs(
    published: Sequence[StageEdge], edges: Mapping[str, EdgeOptions], to_user: str, config: OmniConfig
) -> dict[str, EdgeOptions]:
    """How tensors travel that enter another graph, by its role, or leave their own, by ENTRY.

    The producer does not know their readers there, nor how often they read.
    """
    sinks: dict[str, set[str]] = {}  # -> stages that read
    for edge in published:
        if not edge.is_within_graph:
            sinks.setdefault(edge.sink, set()).add(edge.reader.role)
    made: dict[str, EdgeOptions] = {}
    for sink, targets in sinks.items():
        ways = {edges[target].transport for target in targets}
        # The front end may read what leaves a graph, too.
        way = ways.pop() if len(ways) == 1 and sink != ENTRY else to_user
        made[sink] = EdgeOptions(way, stays=True)
        for edge in (edge for edge in published if edge.sink == sink):
            if (named := config.edge(*edge.roles).transport) not in ("auto", way):
                source, target = edge.roles
                raise ConfigError(
                    f"edge {source}->{target}: transport = {named!r}: {edge} leads from one graph into another, and "
                    f"its tensors travel by {way!r} here; leave it out"
                )
    return made


def _edge_options(
    source: StageEngine,
    targets: Sequence[StageEngine],
    target: str,
    whole: WholeEdges,
    config: OmniConfig,
    published: Sequence[StageEdge],
) -> EdgeOptions:
    edge, stage = config.edge(source.config.name, target), config.stage(target)
    why_not = why_not_streamed(edge, whole, config, carries_frames=source.spec.publishes_frames)
    is_streamed = bool(edge.stream) and not why_not
    is_constant = any(one.is_constant for one in published if one.reader.role == target)
    placement = place(source, targets, grows=_grows(stage), hosts=_hosts(stage))
    return EdgeOptions(
        choose_backend(edge.transport, placement, f"{edge.source}->{target}", streams=is_streamed),
        targets[0].vllm_config.parallel_config.tensor_parallel_size,
        is_streamed,
        edge.credits,
        # Each iteration of a loop reads its constants again; a replica may have to repeat what another one was doing.
        stays=is_constant or (not is_streamed and (stage.max_engines > 1 or stage.deployment.is_split)),
    )


def _grows(stage: StageConfig) -> bool:
    """Whether further engines of a stage may start, on any device."""
    return stage.max_engines > stage.replicas


def _hosts(stage: StageConfig) -> set[str | None]:
    """Where the engines of a stage run, also those that may start later."""
    return set(stage.part_hosts)


def place(
    source: StageEngine, targets: Sequence[StageEngine], *, grows: bool = False, hosts: Collection[str | None] = ()
) -> Placement:
    """Where an engine, whose first rank publishes, and the engines of a stage that reads run.

    Args:
        grows: there may be more of those that read, or of those that publish.
        hosts: where these may start, besides.
    """
    # Pictures and sound are on the host when they are published.
    from_type = source.vllm_config.device_config.device_type if source.kind.generates_tokens else "cpu"
    types = (from_type, targets[0].vllm_config.device_config.device_type)
    devices = {device for target in targets for device in devices_of(target.vllm_config)}
    return Placement(
        same_process=not grows and len(targets) == 1 and targets[0] is source and _runs_in_engine_core(source),
        same_host={*hosts, *(target.config.host_of() for target in targets)} == {source.config.host_of()},
        devices=types,
        same_gpu=not grows and "cpu" not in types and devices == {devices_of(source.vllm_config)[0]},
    )


def _runs_in_engine_core(engine: StageEngine) -> bool:
    """Whether its scheduler and its model are one process."""
    return issubclass(Executor.get_class(engine.vllm_config), UniProcExecutor | WorkerlessExecutor)


def _migrates(engine: StageEngine) -> bool:
    """Whether caches travel between it and other instances of its stage."""
    return engine.instance is not None and engine.instance.kind is not None


def _caches_of(engine: StageEngine, plans: Collection[StaticPlan]) -> tuple[str, Sequence[str]] | None:
    """The stage whose KV cache travels to or from an engine, and the stages that read it; None: none does."""
    name = engine.config.name
    if engine.cache_source is not None:
        return engine.cache_source.stage, engine.cache_source.readers
    readers = sorted({edge.reader.role for edge in cache_edges(plans, {name: engine.spec})})
    return (name, readers) if readers else None


def _cache_transport(source: str, readers: Sequence[str], engines_of: EnginesOf, config: OmniConfig) -> str:
    """How the pages of a stage travel; they lie in one relay, whichever stages read them."""
    named: dict[str, str] = {config.edge(source, target).transport: target for target in readers}
    if len(named) > 1:
        listed = " and ".join(f"{transport!r} to {target!r}" for transport, target in named.items())
        raise ConfigError(f"stage {source!r}: its KV cache travels by one transport, not by {listed}: give one to all")
    targets = [engine for target in readers for engine in engines_of(target)]
    stages = [config.stage(name) for name in (source, *readers)]
    hosts = set[str | None]().union(*map(_hosts, stages))
    placement = place(engines_of(source)[0], targets, grows=any(map(_grows, stages)), hosts=hosts)
    transport, edge = next(iter(named)), f"{source}->{' and '.join(readers)}"
    if transport == "inline":
        raise ConfigError(f"edge {edge}: transport = 'inline': a KV cache lies in buffers of a relay, which it has not")
    return choose_backend(transport, placement, edge)
