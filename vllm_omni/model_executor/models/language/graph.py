"""The graph of a language model; without torch and vLLM."""

from __future__ import annotations

from vllm_omni.config import LANGUAGE
from vllm_omni.flow import Field, Graph, Role, interface


class LanguageModel(Role):
    generate = interface(inputs_or=[["prompt"]], outputs={"text": Field("text", streamed=True)})


def graph_of(model: str) -> Graph:
    """The graph of a checkpoint."""
    graph = Graph(LANGUAGE)
    prompt = graph.placeholder("prompt")
    reply = graph.role(LanguageModel, LANGUAGE).generate(prompt=prompt)
    graph.output(text=reply.text)
    return graph
