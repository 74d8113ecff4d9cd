"""Edges on which a KV cache travels: one stage computes a prompt, another continues behind it without computing it.

Both stages get vLLM's KV connector over the relay (``kv/kv_connector.py``). The pages are pulled by the engine of the
reading stage; the front end handles their references, and releases them.

From: Omni-Flow, section 4 (prefill and decode as roles of a graph); HydraInfer, section 4.3 (pull-based migration).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from vllm.config import VllmConfig

from vllm_omni.config import OmniConfig, StageConfig
from vllm_omni.engine.stage_edges import StageEdge, maker_of, stage_edges
from vllm_omni.engine.transfer_params import KV_CONFIG, kv_connector
from vllm_omni.errors import ConfigError, GraphError
from vllm_omni.flow import ENTRY, StaticPlan
from vllm_omni.flow.run.scope import index_plans
from vllm_omni.model_executor.pipeline import StageSpec
from vllm_omni.model_executor.transfers import pass_cache

WHY_WHOLE = "the KV cache of a prompt is pulled when the prompt is computed"
_SET_BY_CONNECTOR = (KV_CONFIG, "ec_transfer_config")
_UNSUPPORTED = ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size")


class CacheSource(NamedTuple):
    """Where a stage's requests come from that bring a KV cache."""

    stage: str  # it has computed the prompt; the sampling parameters are those given for it
    readers: tuple[str, ...]  # the stages that read its caches
    is_read_once: bool  # by one node, once: the pages are released with the first token


def cache_edges(plans: Collection[StaticPlan], specs: Mapping[str, StageSpec]) -> list[StageEdge]:
    """The edges that carry a KV cache."""
    fields = {name: spec.cache_fields for name, spec in specs.items() if spec.cache_fields}
    if not fields:
        return []
    return [edge for edge in stage_edges(plans) if edge.maker.field in fields.get(edge.maker.node.role, ())]


def cache_sources(plans: Collection[StaticPlan], specs: Mapping[str, StageSpec]) -> dict[str, CacheSource]:
    """Each stage that reads a cache -> the stage that has computed it."""
    edges = cache_edges(plans, specs)
    found: dict[str, CacheSource] = {}
    for source, target in sorted({edge.roles for edge in edges}):
        of_source = [edge for edge in edges if edge.maker.node.role == source]
        readers = tuple(sorted({edge.reader.role for edge in of_source}))
        found[target] = CacheSource(source, readers, len(of_source) == 1 and not of_source[0].is_constant)
    return found


def with_connectors(
    plans: Collection[StaticPlan], specs: Mapping[str, StageSpec], sources: Mapping[str, CacheSource]
) -> dict[str, StageSpec]:
    """The stages, of which those that pass or read a cache have a KV connector."""
    roles: dict[str, str] = {}
    for source in {one.stage for one in sources.values()}:
        made = {
            field for plan in plans for node in plan.nodes.values() if node.role == source for field in node.outputs
        }
        # An engine that only prefills yields the cores to others (``worker/cpu_worker.py``).
        roles[source] = "kv_producer" if made <= specs[source].cache_fields else "kv_both"
    roles |= dict.fromkeys(sources, "kv_consumer")
    return {
        name: replace(spec, engine_args={**spec.engine_args, KV_CONFIG: kv_connector(roles[name])})
        if name in roles
        else spec
        for name, spec in specs.items()
    }


# -- checks before any engine starts -----------------------------------------------------------------------------------


def check_cache_edges(plans: Collection[StaticPlan], specs: Mapping[str, StageSpec], config: OmniConfig) -> None:
    """Check the stages that pass or read a cache, and what is between them.

    Raises:
        GraphError: the graph has a cache where it cannot be read, or a stage that would read two.
        ConfigError: the deployment of one of the stages does not allow a connector.
    """
    edges = cache_edges(plans, specs)
    _check_readers(edges, specs)
    _check_outputs(plans, specs)
    for edge in stage_edges(plans):
        transfers = [one.transfer for one in edge.path]
        source = specs.get(edge.maker.node.role)
        if pass_cache in transfers and source is not None and edge.maker.field not in source.cache_fields:
            raise GraphError(
                f"edge {edge}: pass_cache: add {edge.maker.field!r} to cache_fields of the StageSpec of {source.name!r}"
            )
    for name in {role for edge in edges for role in edge.roles}:
        _check_stage(config.stage(name))


def _check_readers(edges: Iterable[StageEdge], specs: Mapping[str, StageSpec]) -> None:
    unread = {(name, field) for name, spec in specs.items() for field in spec.cache_fields}
    sources: dict[str, str] = {}
    for edge in edges:
        source, target = edge.roles
        field = edge.maker.field
        where = f"stage {source!r}: cache_fields: {field!r}"
        unread.discard((source, field))
        if edge.maker.node.outputs[field].streamed:
            raise GraphError(f"{where} is streamed: a prompt has one KV cache; declare Field(...) without streamed")
        if target not in specs:
            raise GraphError(f"{where} is read by the function {target!r}, which reads no KV cache")
        if specs[target].cache_fields:
            raise GraphError(
                f"{where} is read by {target!r}, which has cache_fields itself: a stage that continues behind a prompt "
                "cannot pass its own KV cache on"
            )
        if (other := sources.setdefault(target, source)) != source:
            raise GraphError(
                f"stage {target!r} reads KV caches of {other!r} and {source!r}: its sampling parameters are those of "
                "one stage"
            )
    for name, field in sorted(unread):
        raise GraphError(f"stage {name!r}: cache_fields: {field!r} is read by no stage: leave the field out")


def _check_outputs(plans: Collection[StaticPlan], specs: Mapping[str, StageSpec]) -> None:
    graphs, _ = index_plans([*plans])
    for plan in plans:
        for output, edge in plan.outputs.items():
            if edge.source == ENTRY:
                continue
            maker = maker_of(graphs, plan, edge)
            spec = specs.get(maker.node.role)
            if spec is not None and maker.field in spec.cache_fields:
                raise GraphError(
                    f"graph {plan.name!r}: output {output!r} is a KV cache ({maker.node.name}.{maker.field}), which is "
                    "no answer: let a stage read it"
                )


def _check_stage(stage: StageConfig) -> None:
    where = f"stage {stage.name!r}"
    if not stage.is_autoregressive:
        raise ConfigError(f"{where}: engine_type = {stage.engine_type!r}: only 'ar' has a KV cache to pass or to read")
    if stage.vllm_config is not None:
        raise ConfigError(f"{where}: vllm_config: its KV connector is set by the graph; give engine_args instead")
    if stage.deployment.is_split:
        raise ConfigError(
            f"{where}: epd.instances: its KV cache travels to another stage of the graph, and to no other instance; "
            "leave the section out, or serve the model without this graph"
        )
    for key in _SET_BY_CONNECTOR:
        if stage.engine_args.get(key):
            raise ConfigError(f"{where}: {key}: set by the graph, in which a KV cache travels; leave it out")
    for key in _UNSUPPORTED:
        if (value := stage.engine_args.get(key, 1)) != 1:
            raise ConfigError(f"{where}: {key} = {value!r}: KV caches travel between tensor-parallel ranks; must be 1")


def check_layouts(sources: Mapping[str, CacheSource], config_of: Callable[[str], VllmConfig]) -> None:
    """Check that each stage can use the pages of its source.

    Args:
        config_of: stage -> vLLM's configuration of its engine.

    Raises:
        ConfigError: it cannot; the message has what differs, and how.
    """
    for target, source in sources.items():
        layouts = [_layout(name, config_of(name)) for name in (source.stage, target)]
        theirs, ours = layouts
        for what, value in theirs.items():
            if value != ours[what]:
                raise ConfigError(
                    f"edge {source.stage}->{target}: the KV cache of {source.stage!r} cannot be used by {target!r}: "
                    f"{what} = {value!r} there, {ours[what]!r} here; serve both from one checkpoint with equal settings"
                )


def _layout(stage: str, config: VllmConfig) -> dict[str, Any]:
    """What two engines must have in common for the pages of one to be those of the other."""
    model, cache = config.model_config, config.cache_config
    if model.is_encoder_decoder or model.is_attention_free or model.is_hybrid:
        raise ConfigError(
            f"stage {stage!r}: {model.architecture}: its prompts leave more than the KV cache of attention layers, "
            "which does not travel"
        )
    return {
        "architecture": model.architecture,
        "layers": model.get_total_num_hidden_layers(),
        "KV heads": model.get_total_num_kv_heads(),
        "size of a head": model.get_head_size(),
        "latent attention (MLA)": model.use_mla,
        "vocabulary": model.get_vocab_size(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "kv_cache_dtype": cache.cache_dtype,
        "block_size": cache.block_size,
    }
