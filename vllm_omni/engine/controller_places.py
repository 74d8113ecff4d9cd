"""``controllers_on_hosts``: whose controllers run beside their engines; frames then pass from host to host."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from vllm.config import VllmConfig

from vllm_omni.config import OmniConfig, StageConfig
from vllm_omni.engine.cache_edges import CacheSource
from vllm_omni.engine.graph_checks import published_edges
from vllm_omni.flow import StaticPlan
from vllm_omni.model_executor.pipeline import StageSpec


def controllers_on_hosts(
    config: OmniConfig,
    plans: Collection[StaticPlan],
    specs: Mapping[str, StageSpec],
    cache_sources: Mapping[str, CacheSource],
) -> dict[str, str]:
    """Engines beside which their controllers run -> their host, the first one of an engine that spans several; replicas
    that may start later are among them.

    All engines of a stage, or none. The controllers of the others run in the front end: it fetches pictures and videos
    by the relay, for which a message is no way; it releases caches that travel; it has the state of sessions
    (``GlobalParameters``); it leads a request from instance to instance, and chooses a replica by what it holds of a
    prompt. Where some replicas of a stage are beside it, it gives each request to one of them when it is known.

    Args:
        config: the front end's.
    """
    with_state = {node.role for plan in plans for node in plan.nodes.values() if node.parameters}
    placed = {
        stage.name: stage
        for stage in config.stages
        if _is_elsewhere(stage) and stage.name not in with_state | cache_sources.keys()
        if _travels(stage, specs[stage.name])
    }
    edges = [(edge.maker.node.role, edge.reader.role) for edge in published_edges(plans, specs)]
    while readers := {  # a front end that repeats on one engine what a lost one had read of a stage must know its reply
        maker
        for maker, reader in edges
        if maker in placed and reader not in placed and _has_several(config.stage(reader))
    }:
        placed = {name: stage for name, stage in placed.items() if name not in readers}
    return {
        name: host
        for stage in placed.values()
        for name, host in zip(stage.engine_names, stage.hosts, strict=True)
        if host is not None
    }


def expect_two_clients(config: VllmConfig) -> None:
    """Let an engine and its clients know that its requests come from two.

    The front end, which reads prompts, then keeps processed media itself, instead of a record of what the engine has.
    """
    config.parallel_config._api_process_count = 2


def _is_elsewhere(stage: StageConfig) -> bool:
    is_chosen_by_prompt = len(stage.engine_names) > 1 and stage.balance == "affinity"
    return not stage.deployment.is_split and not is_chosen_by_prompt and None not in stage.hosts


def _has_several(stage: StageConfig) -> bool:
    return len(stage.part_names) > 1 or stage.deployment.is_split


def _travels(stage: StageConfig, spec: StageSpec) -> bool:
    """Whether all that its outputs carry may be in a message."""
    return not (stage.is_diffusion or spec.publishes_pictures or spec.cache_fields)
