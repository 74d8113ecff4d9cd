"""``make_relay_options``: how a stage publishes tensors for other stages, for its instances and for the user."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from vllm_omni import envs
from vllm_omni.config import EdgeConfig, OmniConfig
from vllm_omni.engine.graph_checks import edges_between
from vllm_omni.engine.stage import StageEngine
from vllm_omni.errors import ConfigError
from vllm_omni.flow import StaticPlan
from vllm_omni.relay.hub import UNTIL_RELEASED_FOR_ALL, RelayOptions
from vllm_omni.relay.select import Placement, choose_backend


def make_relay_options(
    engine: StageEngine, plans: Iterable[StaticPlan], config: OmniConfig, num_ranks: Callable[[str], int]
) -> RelayOptions:
    """Choose the transport of one engine, from the edges of the graphs and the deployment.

    Args:
        num_ranks: by stage: how many processes of it read each tensor.

    Raises:
        ConfigError: settings that one publisher cannot combine.
    """
    deployment = engine.config.deployment
    num_bytes = envs.VLLM_OMNI_RELAY_BYTES
    if _migrates(engine):
        num_bytes = deployment.relay_bytes or num_bytes
    targets = sorted(target for _, target in edges_between(plans, {engine.config.name: engine.spec.publishing_fields}))
    device = engine.vllm_config.device_config.device_type
    placement = Placement(devices=(device, device))
    if not targets and not engine.kind.generates_tokens:
        return RelayOptions(choose_backend("auto", Placement(), f"{engine.name}->user"), num_bytes)
    if targets:
        edges = [config.edge(engine.config.name, target) for target in targets]
        edge = edges[0]
        transport = choose_backend(_common_transport(engine, edges), placement, f"{edge.source}->{edge.target}")
        is_streamed = edge.stream and len(targets) == 1 and config.stage(targets[0]).is_autoregressive
        # Tensors stay until their request ends if the front end opens media, too, and how often is known with each
        # request alone; or for a replica that may have to repeat what another one was doing.
        stays = not is_streamed and any(config.stage(target).replicas > 1 for target in targets)
        is_counted = engine.kind.generates_tokens and not stays
        num_readers = sum(map(num_ranks, targets)) if is_counted else UNTIL_RELEASED_FOR_ALL
        return RelayOptions(transport, num_bytes, num_readers, is_streamed, edge.credits, envs.VLLM_OMNI_RELAY_HOST)
    if not _migrates(engine):
        return RelayOptions()
    transport = choose_backend(deployment.transport, placement, f"{engine.name}->instances")
    return RelayOptions(transport, num_bytes, host=envs.VLLM_OMNI_RELAY_HOST)


def _migrates(engine: StageEngine) -> bool:
    """Whether caches travel between it and other instances of its stage."""
    return engine.instance is not None and engine.instance.kind is not None


def _common_transport(engine: StageEngine, edges: Sequence[EdgeConfig]) -> str:
    """The transport that the deployment gives to all edges, and to the instances, of one publisher."""
    if len({(edge.transport, edge.stream, edge.credits) for edge in edges}) > 1:
        names = ", ".join(f"{edge.source}->{edge.target}" for edge in edges)
        raise ConfigError(f"edges {names}: a stage publishes once: give them one transport, stream and credits")
    edge, between = edges[0], engine.config.deployment.transport
    if not _migrates(engine) or between == "auto":
        return edge.transport
    if edge.transport not in ("auto", between):
        raise ConfigError(
            f"stage {edge.source!r}: epd.transport = {between!r}, but edge {edge.source}->{edge.target} has "
            f"{edge.transport!r}: an instance publishes once: give them one transport"
        )
    return between
