"""The graph of Qwen3-Omni checkpoints without a talker; without torch and vLLM."""

from __future__ import annotations

from vllm_omni.flow import Field, Graph, Role, interface


class Thinker(Role):
    generate = interface(inputs_or=[["prompt"]], outputs={"text": Field("text", streamed=True)})


def graph_of(model: str) -> Graph:
    """The graph of a checkpoint."""
    graph = Graph("qwen3_omni_moe_thinker")
    prompt = graph.placeholder("prompt")
    reply = graph.role(Thinker, "thinker").generate(prompt=prompt)
    graph.output(text=reply.text)
    return graph
