"""``roles_on_hosts``: whose controllers run beside their engines on other hosts; frames pass from host to host."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from vllm.config import VllmConfig

from vllm_omni.config import OmniConfig, StageConfig
from vllm_omni.engine.cache_edges import CacheSource
from vllm_omni.engine.graph_checks import published_edges
from vllm_omni.flow import StaticPlan
from vllm_omni.model_executor.pipeline import StageSpec


def roles_on_hosts(
    config: OmniConfig,
    plans: Collection[StaticPlan],
    specs: Mapping[str, StageSpec],
    cache_sources: Mapping[str, CacheSource],
) -> dict[str, str]:
    """Stages whose controllers run beside their engines -> their host.

    The controllers of all others run in the front end: it chooses among several engines, and repeats what a lost one
    had not finished; it fetches pictures and videos by the relay, for which a message is no way; it releases caches
    that travel; and it has the state of sessions (``GlobalParameters``).

    Args:
        config: the front end's.
    """
    with_state = {node.role for plan in plans for node in plan.nodes.values() if node.parameters}
    read_by_several = {
        edge.maker.node.role
        for edge in published_edges(plans, specs)
        if _has_several(config.stage(edge.reader.role))  # they read on another engine what a lost one had read
    }
    elsewhere = with_state | read_by_several | cache_sources.keys()
    places = {stage.name: stage.host_of() for stage in config.stages if not _has_several(stage)}
    return {
        name: host
        for name, host in places.items()
        if host is not None and name not in elsewhere and _travels(config.stage(name), specs[name])
    }


def expect_two_clients(config: VllmConfig) -> None:
    """Let an engine and its clients know that its requests come from two.

    The front end, which reads prompts, then keeps processed media itself, instead of a record of what the engine has.
    """
    config.parallel_config._api_process_count = 2


def _has_several(stage: StageConfig) -> bool:
    return len(stage.part_names) > 1 or stage.deployment.is_split


def _travels(stage: StageConfig, spec: StageSpec) -> bool:
    """Whether all that its outputs carry may be in a message."""
    return not (stage.is_diffusion or spec.publishes_pictures or spec.cache_fields)
