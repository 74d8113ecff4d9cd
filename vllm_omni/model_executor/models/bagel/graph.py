"""The graph of BAGEL: language model -> image decoder; without torch and vLLM."""

from __future__ import annotations

from vllm_omni.flow import Field, Graph, Role, TransferFunction, interface, printable_transfer


class LanguageModel(Role):
    generate = interface(
        inputs_or=[["prompt"]],
        outputs={"text": Field("text", streamed=True), "latents": Field("latents", streamed=True)},
    )


class ImageDecoder(Role):
    decode = interface(inputs_or=[["latents"]], outputs={"image": Field("image", streamed=True)})


def build_graph(latents_to_decoder: TransferFunction, name: str = "bagel") -> Graph:
    graph = Graph(name)
    prompt = graph.placeholder("prompt")
    language_model, decoder = graph.role(LanguageModel, "language_model"), graph.role(ImageDecoder, "image_decoder")
    reply = language_model.generate(prompt=prompt)
    picture = decoder.decode(latents=reply.latents.via(latents_to_decoder))
    graph.output(text=reply.text, image=picture.image)
    return graph


def graph_of(model: str) -> Graph:
    """The graph of a checkpoint with the name of its transfer function, which is that of the pipeline."""
    return build_graph(printable_transfer("latents_to_decoder"))
