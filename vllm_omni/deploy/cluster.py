"""``spread``: which nodes of a cluster run which engines, by the rules of ``placement``, and what each gives. ``move``:
which node takes the place of one that is gone.

Pure: nodes in, a deployment and its bundles out. Ray reserves cards by number and does not know their memory, so
engines are placed by the number of cards; the start on each host divides what it measures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from vllm_omni.config import OmniConfig, StageConfig
from vllm_omni.config.model import HOST_NAME
from vllm_omni.config.travel import on_host
from vllm_omni.deploy.needs import EngineNeeds, list_every_engine, on_one_host, stages_of
from vllm_omni.deploy.placement import plan
from vllm_omni.deploy.ray_messages import Bundle, Node
from vllm_omni.deploy.resources import Host, Replica, Stage
from vllm_omni.deploy.shortage import NoPlace
from vllm_omni.errors import ConfigError, OmniError
from vllm_omni.names import suggest
from vllm_omni.process.memory import Device

CARD_BYTES = 1 << 40  # Ray does not tell the memory of a card: more than any engine needs


NOWHERE = "nowhere"  # a host's name, to ask whether a stage may have one


class NotYet(OmniError):
    """The cluster has no place for the deployment as it is now."""


@dataclass(frozen=True)
class Share:
    """The engines on one node, or their parts."""

    bundle: Bundle
    engines: tuple[str, ...]  # as ``StageConfig.part_names``
    is_chosen: bool  # here, rather than by the deployment: another node does as well
    spanning: frozenset[str] = frozenset()  # stages of whose engines other nodes have parts, too


def spread(config: OmniConfig, nodes: Sequence[Node]) -> tuple[OmniConfig, list[Share]]:
    """Give each engine, or each part of one that spans ``nodes``, a node: the one that its ``host`` names, or one with
    room.

    Returns:
        The deployment, with the names of its nodes as hosts; and what runs on each.

    Raises:
        NotYet: no node has room.
        ConfigError: no node has the name of a ``host``, or engines cannot be on other hosts.
    """
    _check_stages(config)
    if not nodes:
        raise NotYet("the cluster has no node")
    engines = list_every_engine(config)
    if left := [one.name for one in engines if one.is_left_to_vllm]:
        raise ConfigError(
            f"worker_backend = 'ray': engine {left[0]!r} has devices of vLLM's choice: leave "
            "distributed_executor_backend, nnodes and UUIDs out"
        )
    named = _nodes_by_name(engines, nodes)
    placed = {node.id: _place_named(config, names, node) for node, names in named.items()}
    if rest := {one.name for one in engines}.difference(*named.values()):
        left_over = [_without(node, _num_cards(placed.get(node.id, []))) for node in nodes]
        names = [one.name for one in engines if one.name in rest]
        for replica in _place(stages_of(on_host(config, names)), left_over):
            for its in _parts_of(config, replica):
                placed.setdefault(its.hosts[0], []).append(its)
    by_id = {node.id: node for node in nodes}
    spanning = frozenset(stage.name for stage in config.stages if stage.nodes > 1)
    shares = [
        _share(by_id[one], replicas, spanning, is_chosen=by_id[one] not in named) for one, replicas in placed.items()
    ]
    hosts = {name: share.bundle.host for share in shares for name in share.engines}
    return _with_hosts(config, hosts), shares


def find_node(name: str, nodes: Sequence[Node], engine: str) -> Node:
    """The node of a name, an address, a host's name or an id.

    Raises:
        ConfigError: there is none, or there are several.
    """
    for names in ([node.name for node in nodes], [node.address for node in nodes], [node.hostname for node in nodes]):
        if (count := names.count(name)) > 1:
            ids = ", ".join(node.id for node, one in zip(nodes, names, strict=True) if one == name)
            raise ConfigError(f"engine {engine!r}: host = {name!r}: {count} nodes have this name; give an id: {ids}")
        if count:
            return nodes[names.index(name)]
    for node in nodes:
        if node.id == name:
            return node
    known = dict.fromkeys(one for node in nodes for one in (node.name, node.address, node.hostname))
    raise ConfigError(f"engine {engine!r}: host = {name!r}: the cluster has no such node: {suggest(name, known)}")


def move(share: Share, shares: Sequence[Share], nodes: Sequence[Node]) -> Share:
    """Give a share whose node is gone another one: a node of the same name, or else one with as much room.

    Parts of an engine stay on different nodes. So a share that has one names its node; for another, Ray may choose.

    Args:
        shares: of the server, this one among them.

    Raises:
        NotYet: there is no such node.
    """
    bundle = share.bundle
    peers = [one for one in shares if one is not share and not share.spanning.isdisjoint(one.spanning)]
    allowed = [node for node in nodes if not any(_belongs_to(node, one) for one in peers)]
    same = [node for node in allowed if _is_named(node, share)]
    if not same and not share.is_chosen:
        raise NotYet(f"node {bundle.host} is gone, and the deployment names it")
    if same or not peers:
        return replace(share, bundle=msgspec.structs.replace(bundle, node=same[0].id if same else ""))
    with_room = [node for node in allowed if _grants(node, bundle)]
    if not with_room:
        raise NotYet(
            f"node {bundle.host} is gone, and no other node has {describe(bundle.resources)} free and no part of "
            f"{', '.join(sorted(share.spanning))}"
        )
    fullest = min(with_room, key=lambda node: (node.num_cards, node.num_cpus))
    return replace(share, bundle=msgspec.structs.replace(bundle, node=fullest.id))


def describe(resources: Mapping[str, float]) -> str:
    """Resources as a user reads them: "2 GPU"."""
    return ", ".join(f"{number:g} {name}" for name, number in resources.items())


def _check_stages(config: OmniConfig) -> None:
    """Check that stages can be on nodes.

    Raises:
        ConfigError: one cannot.
    """
    if config.pipeline is not None:
        raise ConfigError("worker_backend = 'ray': a pipeline of your own is not on the nodes: start its hosts by hand")
    for stage in config.stages:
        if stage.max_replicas is not None:
            raise ConfigError(
                f"worker_backend = 'ray': stage {stage.name!r}: max_replicas: Ray reserves the devices of the engines "
                "that a server starts with: give replicas"
            )
        try:
            replace(stage, host=stage.host or _nowhere(stage))
        except ConfigError as exc:
            raise ConfigError(f"worker_backend = 'ray': each stage has a host: {exc}") from exc


def _nowhere(stage: StageConfig) -> str | list[str | None]:
    return [f"{NOWHERE}-{number}" for number in range(stage.nodes)] if stage.nodes > 1 else NOWHERE


def _nodes_by_name(engines: Sequence[EngineNeeds], nodes: Sequence[Node]) -> dict[Node, list[str]]:
    """The engines, or their parts, whose ``host`` names a node.

    Raises:
        ConfigError: as ``_find_nodes``.
    """
    named: dict[Node, list[str]] = {}
    for one in engines:
        for part, node in _find_nodes(one, nodes).items():
            named.setdefault(node, []).append(part)
    return named


def _find_nodes(engine: EngineNeeds, nodes: Sequence[Node]) -> dict[str, Node]:
    """The nodes that an engine's ``host`` names, by the engine's name, or by those of its parts.

    Raises:
        ConfigError: as ``find_node``; or two parts have one node.
    """
    config = engine.config
    hosts = dict(zip(config.part_names, config.part_hosts, strict=True)) if config.nodes > 1 else {}
    found: dict[str, Node] = {}
    for part, host in (hosts or {engine.name: config.host_of()}).items():
        if host is None:
            continue
        node = find_node(host, nodes, engine.name)
        if node in found.values():
            raise ConfigError(
                f"engine {engine.name!r}: nodes = {config.nodes}: host = {config.host!r}: {host!r} is the node of "
                "another part: give different nodes"
            )
        found[part] = node
    return found


def _place_named(config: OmniConfig, names: Sequence[str], node: Node) -> list[Replica]:
    """The engines of these names on their node."""
    stages = on_one_host(stages_of(on_host(config, names)))
    return _place([_with_part(config, stage, names) for stage in stages], [node])


def _with_part(config: OmniConfig, stage: Stage, names: Sequence[str]) -> Stage:
    """A stage on one host, under the name of its engine's part there."""
    own = [stage.name, *_further_parts(config, stage.name)]
    return replace(stage, names=tuple(one for one in names if one in own)) if len(own) > 1 else stage


def _parts_of(config: OmniConfig, replica: Replica) -> Iterator[Replica]:
    """The part of a replica on each of its nodes."""
    names = [replica.name, *_further_parts(config, replica.stage)]
    for name, host in zip(names, replica.hosts, strict=True):
        yield replace(replica, name=name, places=tuple(place for place in replica.places if place.host == host))


def _further_parts(config: OmniConfig, stage: str) -> list[str]:
    """Names of the parts of a stage's engine beside the first; none of a kind of instances ("thinker/PD")."""
    return next((one.part_names[1:] for one in config.stages if one.name == stage and one.nodes > 1), [])


def _belongs_to(node: Node, share: Share) -> bool:
    """Whether a share is on a node, or will be: it waits for the one that the deployment names."""
    return node.id == share.bundle.node or (not share.is_chosen and _is_named(node, share))


def _is_named(node: Node, share: Share) -> bool:
    return share.bundle.host in (node.name, node.address)


def _grants(node: Node, bundle: Bundle) -> bool:
    """Whether a node has what a bundle needs free; a host without cards is another kind of host."""
    needs = bundle.resources
    if "GPU" in needs:
        return node.num_cards >= needs["GPU"]
    return not node.has_cards and node.num_cpus >= needs["CPU"]


def _place(stages: Sequence[Stage], nodes: Sequence[Node]) -> list[Replica]:
    try:
        with_room = [node for node in nodes if _has_room(node)]
        if not with_room:
            raise NotYet(f"no card or CPU is free on {', '.join(map(host_name, nodes))}")
        return list(plan(stages, [_host(node) for node in with_room]).replicas)
    except NoPlace as exc:
        raise NotYet(_readable(str(exc), nodes)) from exc


def _host(node: Node) -> Host:
    if not node.has_cards:
        memory = Device(name="cpu", total=node.memory, free=node.memory, is_host=True)
        return Host(node.id, (memory,), node.address, has_cards=False)
    cards = (Device(name=f"cuda:{one}", total=CARD_BYTES, free=CARD_BYTES) for one in range(node.num_cards))
    return Host(node.id, tuple(cards), node.address)


def _readable(text: str, nodes: Sequence[Node]) -> str:
    for node in nodes:
        text = text.replace(node.id, host_name(node))
    return text


def _without(node: Node, num_cards: int) -> Node:
    return msgspec.structs.replace(node, num_cards=node.num_cards - num_cards)


def _has_room(node: Node) -> bool:
    return node.num_cards > 0 if node.has_cards else node.num_cpus >= 1


def _num_cards(replicas: Sequence[Replica]) -> int:
    return len({place for one in replicas for place in one.places if place.device != "cpu"})


def host_name(node: Node) -> str:
    """The name of a host of the deployment for a node."""
    return node.name if HOST_NAME.fullmatch(node.name) else node.id


def _share(node: Node, replicas: Sequence[Replica], spanning: frozenset[str], *, is_chosen: bool) -> Share:
    num_cards, num_ranks = _num_cards(replicas), sum(len(one.places) for one in replicas)
    resources = {"GPU": float(num_cards)} if num_cards else {"CPU": float(num_ranks)}
    return Share(
        Bundle(host_name(node), node.id, resources),
        tuple(one.name for one in replicas),
        is_chosen,
        spanning.intersection(one.stage for one in replicas),
    )


def _with_hosts(config: OmniConfig, hosts: dict[str, str]) -> OmniConfig:
    stages = []
    for stage in config.stages:
        of_engines: list[str | None] = [hosts[name] for name in stage.part_names]
        stages.append(replace(stage, host=of_engines if len(of_engines) > 1 else of_engines[0]))
    return replace(config, stages=tuple(stages))
