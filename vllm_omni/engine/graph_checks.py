"""Check, before any engine starts, that a server can run a pipeline's graph with its deployment."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from vllm_omni.config import OmniConfig, StageConfig
from vllm_omni.engine.answer import KINDS, kind_of
from vllm_omni.engine.cache_edges import WHY_WHOLE, cache_edges, check_cache_edges
from vllm_omni.engine.edge_checks import Edges, check_edge, listed
from vllm_omni.engine.pipeline_checks import check_generator
from vllm_omni.engine.stage_edges import StageEdge, stage_edges
from vllm_omni.errors import ConfigError, GraphError, PlanError
from vllm_omni.flow import ENTRY, Scheduling, StaticPlan
from vllm_omni.flow.graph.plan import Edge, NodePlan
from vllm_omni.model_executor.models.diffusers.hf_config import ARCHITECTURE
from vllm_omni.model_executor.pipeline import Pipeline, StageSpec
from vllm_omni.model_executor.routes import ByKind
from vllm_omni.model_executor.transfers import pass_tensors
from vllm_omni.names import suggest

PROMPT = "prompt"
"""The placeholder that a request fills, unless the pipeline has ``inputs`` of its own."""

OUTPUT_TYPES: Mapping[str, frozenset[str]] = {
    "ar": frozenset({"text", "latents", "text+image"}),
    "generation": frozenset({"latents", "audio", "image", "video"}),
    "diffusion": frozenset({"audio", "image", "video"}),
}
"""Kind of engine -> output types that its stages may have."""

ANSWERS: Mapping[str, frozenset[str]] = {
    "text": frozenset({"text", "latents"}),
    **{kind: frozenset({kind}) for kind in ("audio", "image", "video")},
}
"""Modality that the routes know -> kinds of outputs (``kind_of``) that have it."""

MADE: Mapping[str, frozenset[str]] = {
    **{output_type: frozenset({"text"}) for output_type in ("text", "latents")},
    "text+image": frozenset({"text", "image"}),
    **{output_type: frozenset({"audio", "image", "video"}) for output_type in ("audio", "image", "video")},
}
"""Output type of a stage -> what the graph may declare of its outputs, where they answer a request: a video has sound,
too."""


def check_graph(config: OmniConfig, pipeline: Pipeline, plans: Sequence[StaticPlan]) -> None:
    """Check the pipeline by itself, then its deployment.

    Args:
        plans: of the pipeline's graphs, the first one first.

    Raises:
        GraphError: the pipeline contradicts itself, or (``PlanError``) its graph needs more than a server does.
        ConfigError: the deployment has other stages or edges, or a setting that an edge cannot honour.
    """
    specs = {spec.name: spec for spec in pipeline.stages}
    named = {graph.name for graph in (pipeline.graph, *pipeline.further_graphs)}
    served = [plan for plan in plans if plan.name in named]  # others are called by these
    _check_roles(plans, pipeline)
    _check_processes(plans, pipeline)
    for plan in plans:
        _check_plan(plan, specs)
    for plan in served:
        _check_placeholders(plan, pipeline)
    for each in stage_edges(plans):
        _check_stage_edge(each, specs)
    _check_first(plans[0], config.stages[0].name, specs)
    edges = edges_between(plans)
    _check_names(pipeline, served, specs, edges)
    publishing, whole = publishing_edges(plans, specs), whole_edges(plans, specs)
    _check_publishing(plans, specs)
    if set(specs) != set(config.stage_names):
        raise ConfigError(
            f"the graph of {config.model_type} has the stages {', '.join(specs)}, the deployment has "
            f"{', '.join(config.stage_names)}"
        )
    for stage in config.stages:
        _check_spec(stage, specs[stage.name])
    check_cache_edges(plans, specs, config)
    with_caches = {edge.roles for edge in cache_edges(plans, specs)}
    whole = {**dict.fromkeys(with_caches - publishing, WHY_WHOLE), **whole}
    _check_outputs(pipeline, served, specs, config)
    _check_sample_rate(pipeline, config)
    _check_served_names([one.name for plan in served for one in (plan, *plan.entries())], config)
    for edge in config.edges:
        carries_frames = edge.source in specs and specs[edge.source].publishes_frames
        check_edge(edge, edges, publishing | with_caches, whole, config, carries_frames=carries_frames)


def edges_between(plans: Collection[StaticPlan], fields: Mapping[str, frozenset[str]] | None = None) -> Edges:
    """The edges between roles.

    Args:
        fields: by role; only the edges that carry one of these fields of their source.
    """
    return {
        (edge.maker.node.role, edge.reader.role)
        for edge in stage_edges(plans)
        if fields is None or edge.maker.field in fields.get(edge.maker.node.role, ())
    }


def publishing_edges(plans: Collection[StaticPlan], specs: Mapping[str, StageSpec]) -> Edges:
    """The edges on which tensors travel, over the relay; on others, requests are made of what the front end has."""
    return edges_between(plans, {name: spec.publishing_fields for name, spec in specs.items()})


def whole_edges(plans: Collection[StaticPlan], specs: Mapping[str, StageSpec]) -> dict[tuple[str, str], str]:
    """Of those, the edges on which nothing can be streamed, and why."""
    found: dict[tuple[str, str], str] = {}
    published = published_edges(plans, specs)
    within = {edge.roles for edge in published if edge.is_within_graph}
    for edge in published:
        if edge.is_constant:
            found[edge.roles] = "it enters a loop, whose every iteration reads the rows again"
        elif edge.roles not in within:
            found.setdefault(edge.roles, "it leads from one graph into another, which reads whole values")
    return found


def published_edges(plans: Collection[StaticPlan], specs: Mapping[str, StageSpec]) -> list[StageEdge]:
    """The single edges that carry tensors."""
    fields = {name: spec.publishing_fields for name, spec in specs.items()}
    return [edge for edge in stage_edges(plans) if edge.maker.field in fields.get(edge.maker.node.role, ())]


def whole_fields(role: str, plans: Iterable[StaticPlan]) -> dict[str, set[str]]:
    """Interface of a role -> its output fields that are not streamed."""
    nodes = (node for plan in plans for node in plan.nodes.values() if node.role == role)
    return {node.interface: {name for name, one in node.outputs.items() if not one.streamed} for node in nodes}


def _of(plans: Sequence[StaticPlan]) -> str:
    return f"the pipeline of graph {plans[0].name!r}"


def _check_roles(plans: Sequence[StaticPlan], pipeline: Pipeline) -> None:
    where = _of(plans)
    names = [*(spec.name for spec in pipeline.stages), *(spec.name for spec in pipeline.functions)]
    roles = frozenset[str]().union(*(plan.roles for plan in plans))
    for role in sorted(roles - set(names)):
        raise GraphError(
            f"{where} has no stage for role {role!r}: add a StageSpec, or a FunctionSpec; {suggest(role, names)}"
        )
    for name in names:
        if name not in roles:
            raise GraphError(f"{where} has no role for {name!r}; {suggest(name, roles)}")
        if names.count(name) > 1:
            raise GraphError(f"{where} has {name!r} twice: a role is a stage or a function")
    for spec in pipeline.stages:
        nodes = [node for plan in plans for node in plan.nodes.values() if node.role == spec.name]
        _check_interfaces(f"{where}: stage {spec.name!r}", spec, nodes)


def _check_processes(plans: Sequence[StaticPlan], pipeline: Pipeline) -> None:
    """What is shared between calls stays in the front end."""
    hosted = {spec.name for spec in pipeline.functions if spec.processes}
    for node in (node for plan in plans for node in plan.nodes.values() if node.role in hosted):
        if node.parameters:
            raise GraphError(
                f"{_of(plans)}: function {node.role!r} shares the GlobalParameters {', '.join(node.parameters)}, which "
                "are in the front end: it cannot have processes of its own"
            )


def _check_interfaces(where: str, spec: StageSpec, nodes: Sequence[NodePlan]) -> None:
    """The names in a stage's settings are those of its nodes."""
    fields = {field: one for node in nodes for field, one in node.outputs.items()}
    outputs = {node.interface: node.outputs for node in nodes}
    _check_keys(where, "output", set(fields), spec, "publishing_fields", "frame_fields", "cache_fields", "frames")
    _check_keys(where, "interface", set(outputs), spec, "combine", "route")
    for field in spec.frames:
        if not fields[field].streamed:
            raise GraphError(f"{where}: frames: output {field!r} is not streamed: it has one frame, the whole output")
    for interface, route in spec.route.items():
        for field in route.fields if isinstance(route, ByKind) else ():
            if field not in outputs[interface]:
                raise GraphError(
                    f"{where}: route of {interface!r}: no output {field!r}; {suggest(field, outputs[interface])}"
                )


def _check_keys(where: str, what: str, known: set[str], spec: StageSpec, *attributes: str) -> None:
    for attribute in attributes:
        for name in sorted(getattr(spec, attribute)):
            if name not in known:
                raise GraphError(f"{where}: {attribute}: no {what} {name!r}; {suggest(name, known)}")


def _check_placeholders(plan: StaticPlan, pipeline: Pipeline) -> None:
    own = type(pipeline)
    fills = own.inputs is not Pipeline.inputs or own.request_inputs is not Pipeline.request_inputs
    if set(plan.placeholders) != {PROMPT} and not fills:
        raise PlanError(
            f"graph {plan.name!r} has the placeholders {', '.join(plan.placeholders)}: a request fills {PROMPT!r} "
            "alone; override Pipeline.inputs, which fills them"
        )


def _check_plan(plan: StaticPlan, specs: Mapping[str, StageSpec]) -> None:
    for node in plan.nodes.values():
        _check_node(node, specs.get(node.role))
    for edge in plan.edges:
        if edge.transfer is not None:
            check_generator(f"edge {edge}", edge.transfer, "chunks", "call")


def _check_node(node: NodePlan, spec: StageSpec | None) -> None:
    """What an engine's node does not do by itself; a function (without a spec) may do anything."""
    if node.scheduling is Scheduling.BROADCAST:
        raise PlanError(
            f"node {node.name!r}: scheduling BROADCAST: every replica would answer the same request, and a server "
            "answers it once; choose LEAST_OUTSTANDING, ROUND_ROBIN or SESSION"
        )
    for group in node.groups:
        fields = [node.slots[slot].target_field for slot in group.all_slots if node.slots[slot].is_declared]
        if len(set(fields)) > 1 and spec is not None and node.interface not in spec.combine:
            raise GraphError(
                f"node {node.name!r} joins {' and '.join(fields)}: give `combine` of its StageSpec a function for "
                f"{node.interface!r}, which makes the stage's requests of these fields"
            )


def _check_stage_edge(edge: StageEdge, specs: Mapping[str, StageSpec]) -> None:
    (made_by, field), node = edge.maker, edge.reader
    source, target = specs.get(made_by.role), specs.get(node.role)
    if source is None:
        return
    transfers = [one.transfer for one in edge.path if one.transfer is not None]
    if any(isinstance(one, pass_tensors) for one in transfers) and field not in source.publishing_fields:
        raise GraphError(
            f"edge {edge}: pass_tensors: add {field!r} to publishing_fields of the StageSpec of {source.name!r}"
        )
    if any(one.per_frame for one in edge.path) and field not in source.frames:
        raise GraphError(
            f"edge {edge}: its reader runs once for each frame, and what an engine puts into one output depends on "
            f"timing: give {field!r} an entry in `frames` of the StageSpec of {source.name!r}, or declare "
            "the input as streamed"
        )
    if target is not None and node.interface not in target.combine and not transfers:
        raise GraphError(
            f"edge {edge} has no transfer function: a stage reads StageRequest and {made_by.name}.{field} yields "
            "outputs; convert them with .via(function)"
        )


def _check_first(plan: StaticPlan, first: str, specs: Mapping[str, StageSpec]) -> None:
    readers = {plan.nodes[edge.target].role for edge in plan.edges if edge.source == ENTRY}
    if first not in readers and readers <= set(specs):
        raise GraphError(
            f"graph {plan.name!r}: the first stage, {first!r}, does not read the prompt; put one first that does: "
            f"{', '.join(sorted(readers))}"
        )


def _check_names(pipeline: Pipeline, plans: Sequence[StaticPlan], specs: Mapping[str, StageSpec], edges: Edges) -> None:
    where = _of(plans)
    outputs = [output for plan in plans for output in plan.outputs]
    named: dict[str, str] = {}  # output -> its modality
    for name, output in {**pipeline.modalities, **pipeline.extra_outputs}.items():
        if output not in outputs:
            known = suggest(output, outputs)
            raise GraphError(f"{where}: modality {name!r}: the graph has no output {output!r}; {known}")
        if (other := named.setdefault(output, name)) != name:
            raise GraphError(
                f"{where}: modalities {other!r} and {name!r} both name the output {output!r}: a request may ask for "
                f"both; declare the field as a second output, graph.output({name}=...)"
            )
    for source, target in pipeline.chunks:
        if (source, target) not in edges:
            raise GraphError(f"{where}: chunks: the graph has no edge {source}->{target}; it has {listed(edges)}")
    speech_stage = pipeline.speech_stage
    if speech_stage is not None and speech_stage not in specs:
        raise GraphError(f"{where}: speech_stage: no stage {speech_stage!r}; {suggest(speech_stage, specs)}")


def _check_outputs(
    pipeline: Pipeline, plans: Sequence[StaticPlan], specs: Mapping[str, StageSpec], config: OmniConfig
) -> None:
    """Each output of a graph answers a name, and has what that name says."""
    named = {output: name for name, output in (*pipeline.modalities.items(), *pipeline.extra_outputs.items())}
    for name in pipeline.modalities.keys() & pipeline.extra_outputs:
        raise GraphError(f"{_of(plans)}: extra_outputs: {name!r} is a modality")
    for plan in plans:
        for output, edge in plan.outputs.items():
            if output not in named:
                raise GraphError(
                    f"graph {plan.name!r}: no modality names output {output!r}, so no request can ask for it; add it "
                    f"to modalities or extra_outputs, which have {', '.join(named)}"
                )
            _check_answer(f"graph {plan.name!r}: modality {named[output]!r}", named[output], edge, plan, specs, config)


def _check_answer(
    where: str, modality: str, edge: Edge, plan: StaticPlan, specs: Mapping[str, StageSpec], config: OmniConfig
) -> None:
    node = plan.nodes[edge.source]
    spec = specs.get(node.role)
    made = kind_of(node.outputs[edge.source_field], spec)
    if spec is not None and made in KINDS and made not in MADE[spec.output_type]:
        has = " or ".join(sorted(MADE[spec.output_type]))
        raise GraphError(
            f"{where}: field {edge.source_field!r} is declared {made!r}, and the output_type of stage {spec.name!r} is "
            f"{spec.output_type!r}, which has {has}"
        )
    if made == "text+image":
        raise GraphError(
            f"{where}: stage {node.role!r} has text and images: declare which of them field {edge.source_field!r} is, "
            "Field('text') or Field('image')"
        )
    if made not in ANSWERS.get(modality, {made}) and (spec is not None or made in KINDS):
        needed = " or ".join(sorted(ANSWERS[modality]))
        raise GraphError(f"{where}: output {edge.target_field!r} is {made!r} of {node.role!r}; must be {needed}")
    if modality == "text" and spec is not None and not config.stage(spec.name).is_autoregressive:
        kind = config.stage(spec.name).engine_type
        raise ConfigError(f"{where}: is that of stage {spec.name!r}, whose engine_type is {kind!r}: only 'ar' has text")


def _check_sample_rate(pipeline: Pipeline, config: OmniConfig) -> None:
    if "audio" in pipeline.modalities and not pipeline.sample_rate and not config.stages[0].is_diffusion:
        raise GraphError(
            f"{type(pipeline).__name__}.sample_rate = 0: modality 'audio' needs the samples per second: a stream of "
            "sound starts with them"
        )


def _check_served_names(models: Sequence[str], config: OmniConfig) -> None:
    """Further graphs and graph calls are models of their own, beside the served names of the first graph."""
    given = config.stages[0].engine_args.get("served_model_name") or config.model
    served = [given] if isinstance(given, str) else given
    for name in models[1:]:
        if name in served:
            raise ConfigError(
                f"served_model_name = {name!r}: one of the pipeline's graphs has this name, by which requests "
                "choose it; serve the first graph by another name"
            )


def _check_publishing(plans: Sequence[StaticPlan], specs: Mapping[str, StageSpec]) -> None:
    """Each field that a stage publishes is read by a stage that can read tensors, and by no function."""
    for name, spec in specs.items():
        for field in sorted(spec.publishing_fields):
            where = f"stage {name!r}: publishing_fields: {field!r}"
            readers = {target for _, target in edges_between(plans, {name: frozenset({field})})}
            for reader in sorted(readers - set(specs)):
                raise GraphError(f"{where} is read by the function {reader!r}, which reads no tensors")
            if not any(specs[reader].architecture for reader in readers):
                listed = " and ".join(sorted(readers)) or "no stage"
                raise GraphError(
                    f"{where} is read by {listed}: tensors are read by a stage with a class of its own (architecture); "
                    "leave the field out"
                )


def _check_spec(stage: StageConfig, spec: StageSpec) -> None:
    """Properties that a stage of this kind, at this place, cannot honour."""
    where, kind = f"stage {stage.name!r}", stage.engine_type
    if stage.is_diffusion != (spec.architecture == ARCHITECTURE):
        needed = "diffusion" if spec.architecture == ARCHITECTURE else "ar, or generation"
        raise ConfigError(f"{where}: engine_type = {kind!r}: its class {spec.architecture!r} needs {needed}")
    if spec.output_type not in OUTPUT_TYPES[kind]:
        kinds = [one for one, types in OUTPUT_TYPES.items() if spec.output_type in types]
        raise ConfigError(
            f"{where}: engine_type = {kind!r}: its output_type is {spec.output_type!r}, which is that of "
            f"{' or '.join(kinds)}; this kind has {', '.join(sorted(OUTPUT_TYPES[kind]))}"
        )
    if kind == "generation" and not spec.architecture:
        raise ConfigError(f"{where}: engine_type = 'generation': name its class in architecture of the StageSpec")
    if stage.is_diffusion and spec.sampling_params:
        raise GraphError(f"{where}: sampling_params: a diffusion stage has none; set DiffusionParams in the deployment")
    if spec.check_prompt is not None and stage.stage_id:
        raise GraphError(f"stage {stage.name!r}: check_prompt: only the first stage reads the user's prompt")
