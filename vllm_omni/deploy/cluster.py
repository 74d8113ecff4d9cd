"""``spread``: which nodes of a cluster run which engines, by the rules of ``placement``, and what each gives.

Pure: nodes in, a deployment and its bundles out. Ray reserves cards by number and does not know their memory, so
engines are placed by the number of cards; the start on each host divides what it measures.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import msgspec

from vllm_omni.config import OmniConfig
from vllm_omni.config.model import HOST_NAME
from vllm_omni.config.travel import on_host
from vllm_omni.deploy.needs import list_every_engine, stages_of
from vllm_omni.deploy.placement import plan
from vllm_omni.deploy.ray_messages import Bundle, Node
from vllm_omni.deploy.resources import Host, Replica
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
    """The engines on one node."""

    bundle: Bundle
    engines: tuple[str, ...]
    is_chosen: bool  # here, rather than by the deployment: another node does as well


def spread(config: OmniConfig, nodes: Sequence[Node]) -> tuple[OmniConfig, list[Share]]:
    """Give each engine a node: the one that its ``host`` names, or one with room.

    Returns:
        The deployment, with the names of its nodes as hosts; and what runs on each.

    Raises:
        NotYet: no node has room.
        ConfigError: no node has the name of a ``host``, or engines cannot be on other hosts.
    """
    if config.pipeline is not None:
        raise ConfigError("worker_backend = 'ray': a pipeline of your own is not on the nodes: start its hosts by hand")
    if not nodes:
        raise NotYet("the cluster has no node")
    for stage in config.stages:
        if stage.max_replicas is not None:
            raise ConfigError(
                f"worker_backend = 'ray': stage {stage.name!r}: max_replicas: Ray reserves the devices of the engines "
                "that a server starts with: give replicas"
            )
        if stage.nodes > 1:
            raise ConfigError(
                f"worker_backend = 'ray': stage {stage.name!r}: nodes = {stage.nodes}: Ray places an engine on one "
                "node: start the hosts of one that spans several by hand"
            )
        try:
            replace(stage, host=stage.host or NOWHERE)
        except ConfigError as exc:
            raise ConfigError(f"worker_backend = 'ray': each stage has a host: {exc}") from exc
    engines = list_every_engine(config)
    if left := [one.name for one in engines if one.is_left_to_vllm]:
        raise ConfigError(
            f"worker_backend = 'ray': engine {left[0]!r} has devices of vLLM's choice: leave "
            "distributed_executor_backend, nnodes and UUIDs out"
        )
    named: dict[Node, list[str]] = {}
    for one in engines:
        if one.config.host_of() is not None:
            named.setdefault(find_node(str(one.config.host_of()), nodes, one.name), []).append(one.name)
    rest = [one.name for one in engines if all(one.name not in names for names in named.values())]
    placed: dict[str, list[Replica]] = {}  # by the node's id
    for node, names in named.items():
        placed[node.id] = _place(config, names, [node])
    if rest:
        left_over = [_without(node, _num_cards(placed.get(node.id, []))) for node in nodes]
        for replica in _place(config, rest, left_over):
            placed.setdefault(replica.hosts[0], []).append(replica)
    by_id = {node.id: node for node in nodes}
    shares = [_share(by_id[one], replicas, is_chosen=by_id[one] not in named) for one, replicas in placed.items()]
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


def _place(config: OmniConfig, engines: Collection[str], nodes: Sequence[Node]) -> list[Replica]:
    stages = stages_of(on_host(config, engines))
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


def _share(node: Node, replicas: Sequence[Replica], *, is_chosen: bool) -> Share:
    num_cards, num_ranks = _num_cards(replicas), sum(len(one.places) for one in replicas)
    resources = {"GPU": float(num_cards)} if num_cards else {"CPU": float(num_ranks)}
    return Share(Bundle(host_name(node), node.id, resources), tuple(one.name for one in replicas), is_chosen)


def _with_hosts(config: OmniConfig, hosts: dict[str, str]) -> OmniConfig:
    stages = []
    for stage in config.stages:
        of_engines: list[str | None] = [hosts[name] for name in stage.engine_names]
        stages.append(replace(stage, host=of_engines if len(of_engines) > 1 else of_engines[0]))
    return replace(config, stages=tuple(stages))
