"""Check, before any engine starts, that a server can run a pipeline's graph with its deployment."""

from __future__ import annotations

from collections.abc import Mapping

from vllm_omni.config import EdgeConfig, OmniConfig, StageConfig
from vllm_omni.engine.output_processor import HANDLERS
from vllm_omni.errors import ConfigError, GraphError, PlanError
from vllm_omni.flow import ENTRY, Scheduling, StaticPlan
from vllm_omni.model_executor.pipeline import Pipeline, StageSpec
from vllm_omni.names import suggest

PROMPT = "prompt"
"""The placeholder that a request fills."""

Edges = set[tuple[str, str]]
"""(Source, target), both stages."""


def check_graph(config: OmniConfig, pipeline: Pipeline, plan: StaticPlan) -> None:
    """Check the pipeline by itself, then its deployment.

    Raises:
        GraphError: the pipeline contradicts itself, or (``PlanError``) its graph needs more than a server does.
        ConfigError: the deployment has other stages or edges, or a setting that an edge cannot honour.
    """
    specs = {spec.name: spec for spec in pipeline.stages}
    _check_stages(plan, specs)
    _check_served(plan)
    _check_first(plan, config.stages[0].name)
    edges = {
        (plan.nodes[edge.source].role, plan.nodes[edge.target].role)
        for edge in plan.edges
        if ENTRY not in (edge.source, edge.target)
    }
    _check_names(pipeline, plan, specs, edges)
    if set(specs) != set(config.stage_names):
        raise ConfigError(
            f"the graph of {config.model_type} has the stages {', '.join(specs)}, the deployment has "
            f"{', '.join(config.stage_names)}"
        )
    for stage in config.stages:
        _check_spec(stage, specs[stage.name])
    publishing = publishing_edges(plan, specs)
    for edge in config.edges:
        _check_edge(edge, edges, publishing)


def publishing_edges(plan: StaticPlan, specs: Mapping[str, StageSpec]) -> Edges:
    """The edges on which tensors travel, over the relay; on others, requests are made of what the front end has."""
    return {
        (plan.nodes[edge.source].role, plan.nodes[edge.target].role)
        for edge in plan.edges
        if ENTRY not in (edge.source, edge.target)
        and edge.source_field in specs[plan.nodes[edge.source].role].publishing_fields
    }


def _check_stages(plan: StaticPlan, specs: Mapping[str, StageSpec]) -> None:
    where = f"the pipeline of graph {plan.name!r}"
    for role in sorted(plan.roles - set(specs)):
        raise GraphError(f"{where} has no stage for role {role!r}: add a StageSpec; {suggest(role, specs)}")
    for spec in specs.values():
        if spec.name not in plan.roles:
            raise GraphError(f"{where} has no role for stage {spec.name!r}; {suggest(spec.name, plan.roles)}")
        if spec.output_type not in HANDLERS:
            known = suggest(spec.output_type, HANDLERS)
            raise GraphError(f"{where}: stage {spec.name!r}: output_type {spec.output_type!r}; {known}")
        fields = {field for node in plan.nodes.values() if node.role == spec.name for field in node.outputs}
        for field in sorted(spec.publishing_fields - fields):
            known = suggest(field, fields)
            raise GraphError(f"{where}: stage {spec.name!r}: publishing_fields: no output {field!r}; {known}")


def _check_served(plan: StaticPlan) -> None:
    """What the graph language has and a server does not."""
    for what, names in {"parameters of sessions": plan.parameters, "graph calls": plan.graph_calls}.items():
        if names:
            raise PlanError(f"graph {plan.name!r} has {what} ({', '.join(names)}), which a server does not support")
    if set(plan.placeholders) != {PROMPT}:
        raise PlanError(
            f"graph {plan.name!r} has the placeholders {', '.join(plan.placeholders)}: a server has one, {PROMPT!r}"
        )
    for node in plan.nodes.values():
        for group in node.groups:
            if len(group.slots) > 1:
                raise PlanError(
                    f"node {node.name!r} joins {' and '.join(group.slots)}: a stage of a server reads one field; let "
                    "one stage hand on what the other has made"
                )
        if node.scheduling in (Scheduling.LEAST_OUTSTANDING, Scheduling.BROADCAST):
            raise PlanError(
                f"node {node.name!r}: scheduling {node.scheduling.name}: a server supports SESSION alone; its first "
                "stage may have several instances, balanced by epd.policy"
            )
    for edge in plan.edges:
        if ENTRY not in (edge.source, edge.target) and edge.transfer is None:
            raise GraphError(
                f"edge {edge} has no transfer function: a stage reads StageRequest and {edge.source} yields outputs; "
                "convert them with .via(function)"
            )


def _check_first(plan: StaticPlan, first: str) -> None:
    readers = {plan.nodes[edge.target].role for edge in plan.edges if edge.source == ENTRY}
    if first not in readers:
        raise GraphError(
            f"graph {plan.name!r}: the first stage, {first!r}, does not read the prompt; put one first that does: "
            f"{', '.join(sorted(readers))}"
        )


def _check_names(pipeline: Pipeline, plan: StaticPlan, specs: Mapping[str, StageSpec], edges: Edges) -> None:
    where = f"the pipeline of graph {plan.name!r}"
    for name, output in {**pipeline.modalities, **pipeline.extra_outputs}.items():
        if output not in plan.outputs:
            known = suggest(output, plan.outputs)
            raise GraphError(f"{where}: modality {name!r}: the graph has no output {output!r}; {known}")
    for source, target in pipeline.chunks:
        if (source, target) not in edges:
            raise GraphError(f"{where}: chunks: the graph has no edge {source}->{target}; it has {_listed(edges)}")
    speech_stage = pipeline.speech_stage
    if speech_stage is not None and speech_stage not in specs:
        raise GraphError(f"{where}: speech_stage: no stage {speech_stage!r}; {suggest(speech_stage, specs)}")


def _check_spec(stage: StageConfig, spec: StageSpec) -> None:
    """Properties that would do nothing in a stage of this kind, at this place."""
    if spec.publishing_fields and not stage.is_autoregressive:
        fields = ", ".join(sorted(spec.publishing_fields))
        raise GraphError(
            f"stage {stage.name!r}: publishing_fields {fields}: only a stage with engine_type 'ar' publishes rows, and "
            f"this one is {stage.engine_type!r}"
        )
    if spec.check_prompt is not None and stage.stage_id:
        raise GraphError(f"stage {stage.name!r}: check_prompt: only the first stage reads the user's prompt")


def _check_edge(edge: EdgeConfig, edges: Edges, publishing: Edges) -> None:
    where = f"edge {edge.source}->{edge.target}"
    if (edge.source, edge.target) not in edges:
        raise ConfigError(f"{where}: the graph has no such edge; it has {_listed(edges)}")
    default = EdgeConfig(source=edge.source, target=edge.target)
    for key in ("transport", "stream", "credits"):
        value = getattr(edge, key)
        if value != getattr(default, key) and (edge.source, edge.target) not in publishing:
            raise ConfigError(
                f"{where}: {key} = {value!r} has no effect: its requests are made in the front end, and no tensors "
                f"travel on it; tensors travel on {_listed(publishing) or 'no edge'}"
            )


def _listed(edges: Edges) -> str:
    return ", ".join(f"{source}->{target}" for source, target in sorted(edges))
