"""The graph of GLM-Image: language model -> diffusion; without torch, vLLM and diffusers."""

from __future__ import annotations

from vllm_omni.flow import Field, Graph, Role, interface


class LanguageModel(Role):
    write = interface(inputs_or=[["caption"]], outputs={"codes": Field("codes")})


class Diffusion(Role):
    generate = interface(inputs_or=[["prompt", "codes"]], outputs={"media": Field("media", streamed=True)})


def build_graph() -> Graph:
    graph = Graph("glm_image")
    prompt, caption = graph.placeholder("prompt"), graph.placeholder("caption")
    written = graph.role(LanguageModel, "language_model").write(caption=caption)
    made = graph.role(Diffusion, "diffusion").generate(prompt=prompt, codes=written.codes)
    graph.output(image=made.media)
    return graph


def graph_of(model: str) -> Graph:
    """The graph of a checkpoint."""
    return build_graph()
