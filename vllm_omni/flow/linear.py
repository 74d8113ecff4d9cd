"""The short form of a graph: a list of stages that name their sources, as vLLM-Omni's ``input_sources`` do.

From: vLLM-Omni paper, section 3 (stage graph); it makes the same ``Graph`` that one would write out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_omni.errors import GraphError
from vllm_omni.flow.dsl import Field, Graph, NodeCall, Role, interface, what_exists

PROMPT = "prompt"


@dataclass(frozen=True, slots=True)
class LinearStage:
    """One stage: a role of that name with one interface, ``generate``, and one output field, ``output``."""

    name: str
    output: Field
    input_sources: tuple[
        str, ...
    ] = ()  # names of stages, read in inputs of these names; (): the placeholder ``prompt``
    final_output: bool = False  # its output is one of the graph, under the stage's name


def linear_graph(name: str, stages: Sequence[LinearStage]) -> Graph:
    """The graph of a list of stages; a stage with several sources joins them.

    Raises:
        GraphError: a source is no stage that stands before it, or no stage is a final output.
    """
    graph = Graph(name)
    prompt = graph.placeholder(PROMPT)
    calls: dict[str, NodeCall] = {}
    for stage in stages:
        for source in stage.input_sources:
            if source not in calls:
                known = what_exists(source, calls)
                raise GraphError(f"graph {name!r}, stage {stage.name!r}: no stage {source!r} before it; {known}")
        inputs = {source: calls[source].output for source in stage.input_sources} or {PROMPT: prompt}
        declared = interface(inputs_or=[list(inputs)], outputs={"output": stage.output})
        role: Role = graph.role(type("Stage", (Role,), {"generate": declared}), stage.name)
        calls[stage.name] = declared.__get__(role, type(role))(**inputs)
    graph.output(**{stage.name: calls[stage.name].output for stage in stages if stage.final_output})
    if not any(stage.final_output for stage in stages):
        raise GraphError(f"graph {name!r}: no stage has final_output=True, so that a call could ask for nothing")
    return graph
