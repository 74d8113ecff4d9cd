"""What the page shows of a server that does not change: its graphs, parameters of its stages, what it can answer."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from vllm.sampling_params import SamplingParams

from vllm_omni.config import StageConfig
from vllm_omni.config.diffusion_params import DiffusionParams
from vllm_omni.engine.orchestrator import Orchestrator
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.flow import ENTRY, StaticPlan
from vllm_omni.flow.graph.plan import Edge
from vllm_omni.flow.graph.render.labels import drawn, edge_label, is_streamed

KINDS = {int: "integer", float: "number", bool: "boolean", str: "string"}
"""Types of parameters that a form has a field for; others are left to requests by program."""
HIDDEN = ("n", "detokenize", "skip_clone", "output_text_buffer_length", "flat_logprobs", "stream_interval")
"""Of ``SamplingParams``: how vLLM hands out tokens, and several answers, of which the page shows one."""
OF_ROUTES = ("output_type", "progress", "notify_start", "preview_every", "num_outputs_per_prompt")
"""Of ``DiffusionParams``: what the routes of images and videos set themselves."""


def describe_model(omni: AsyncOmni, names: Sequence[str]) -> dict[str, Any]:
    """Describe the served model for the page.

    Args:
        names: under which requests ask for it.
    """
    orchestrator, pipeline = omni.orchestrator, omni.orchestrator.pipeline
    first, *others = orchestrator.models
    graphs = [
        describe_graph(orchestrator, first, names[0]),
        *(describe_graph(orchestrator, one, one) for one in others),
    ]
    speaks = pipeline.speech_stage is not None
    return {
        "model": names[0],
        "graphs": graphs,
        "stages": [describe_stage(omni, stage) for stage in omni.config.stages],
        "replies": not omni.is_diffusion and not pipeline.speaks_prompts,
        "speaks": speaks and not omni.is_diffusion,
        "diffuses": omni.is_diffusion,
        "draws": omni.draws,
        # In text to speech it reads the text as its reply, and samples nothing.
        "prefills_speech": None if not speaks or pipeline.speaks_first else pipeline.stages[0].name,
        "reads": read_media(omni),
        "sample_rate": pipeline.sample_rate,
    }


def describe_graph(orchestrator: Orchestrator, name: str, model: str) -> dict[str, Any]:
    """The nodes and edges of a graph, and in which modalities it answers; ``model`` is its name for requests."""
    plan = orchestrator.plan_of(name)
    made = orchestrator.modalities_of(name)
    return {
        "model": model,
        "modalities": made,
        "makers": {one: orchestrator.stage_of(orchestrator.pipeline.modalities[one], name) for one in made},
        **describe_plan(plan),
    }


def describe_plan(plan: StaticPlan) -> dict[str, Any]:
    """What the page draws of a graph."""
    return {
        "inputs": list(plan.placeholders),
        "nodes": [{"name": one.name, "role": one.role} for one in plan.nodes.values()],
        "edges": [_describe_edge(plan, edge) for edge in _edges(plan)],
    }


def _edges(plan: StaticPlan) -> list[Edge]:
    slots = [edge for node in plan.nodes.values() for edge in drawn(node.slots)]
    return [*slots, *plan.outputs.values()]


def _describe_edge(plan: StaticPlan, edge: Edge) -> dict[str, Any]:
    return {
        "source": None if edge.source == ENTRY else edge.source,
        "target": None if edge.target == ENTRY else edge.target,
        "source_field": edge.source_field,
        "target_field": edge.target_field,
        "label": edge_label(plan, edge),
        "streamed": is_streamed(plan, edge),
        "back": edge.is_back,
    }


def describe_stage(omni: AsyncOmni, stage: StageConfig) -> dict[str, Any]:
    """The kind of a stage, and the parameters that requests may give for it, each with its default here."""
    kind, hidden = (DiffusionParams, OF_ROUTES) if stage.is_diffusion else (SamplingParams, HIDDEN)
    defaults = omni.params.resolve(None)[stage.name]
    if (
        stage.stage_id == 0
        and isinstance(defaults, SamplingParams)
        and "max_tokens" not in stage.default_sampling_params
    ):
        defaults.max_tokens = None  # the rest of the context, in chats
    engine = omni.orchestrator.front(stage.name)
    fixed = engine.spec.sampling_params
    return {
        "name": stage.name,
        "kind": stage.engine_type,
        "generates_tokens": engine.kind.generates_tokens,
        "replicas": [one.name for one in omni.orchestrator.engines_of(stage.name)],
        "parameters": [
            one
            for one in describe_parameters(kind, defaults, hidden)
            if one["name"] not in fixed
            and (stage.is_diffusion or engine.kind.generates_tokens or one["name"] == "seed")
        ],
    }


def describe_parameters(kind: type[msgspec.Struct], defaults: Any, hidden: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The parameters of a class that are numbers, texts or switches.

    Args:
        defaults: an object of this class.
    """
    hints = typing.get_type_hints(kind)
    for name in kind.__struct_fields__:
        if name.startswith("_") or name in hidden:
            continue
        union = typing.get_origin(hints[name]) in (types.UnionType, typing.Union)
        options = set(typing.get_args(hints[name])) - {types.NoneType} if union else {hints[name]}
        of_form = [one for one in options if one in KINDS]
        if not of_form or (len(of_form) < len(options) and of_form != [str]):
            continue
        default = getattr(defaults, name)
        if isinstance(default, float) and not math.isfinite(default):
            default = None
        yield {"name": name, "type": KINDS[of_form[0]], "default": default}


def read_media(omni: AsyncOmni) -> list[str]:
    """The kinds of media that prompts may have beside text: those of vLLM's processor, and images for a pipeline of
    diffusers, which says itself whether it reads any."""
    if omni.is_diffusion:
        return ["image"]
    if not omni.model_config.is_multimodal_model:
        return []
    limits = omni.renderer.get_mm_processor().info.supported_mm_limits
    return [kind for kind in ("image", "audio", "video") if limits.get(kind, 0) != 0]
