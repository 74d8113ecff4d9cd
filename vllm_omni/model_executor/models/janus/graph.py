"""The graph of Janus-Pro: language model -> image decoder; without torch and vLLM."""

from __future__ import annotations

from vllm_omni.flow import Field, Graph, Role, TransferFunction, interface, printable_transfer


class LanguageModel(Role):
    generate = interface(
        inputs_or=[["prompt"]],
        outputs={"text": Field("text", streamed=True), "picture_tokens": Field("picture_tokens")},
    )


class ImageDecoder(Role):
    decode = interface(inputs_or=[["picture_tokens"]], outputs={"image": Field("image", streamed=True)})


def build_graph(tokens_to_decoder: TransferFunction) -> Graph:
    graph = Graph("janus")
    prompt = graph.placeholder("prompt")
    language_model, decoder = graph.role(LanguageModel, "language_model"), graph.role(ImageDecoder, "image_decoder")
    reply = language_model.generate(prompt=prompt)
    picture = decoder.decode(picture_tokens=reply.picture_tokens.via(tokens_to_decoder))
    graph.output(text=reply.text, image=picture.image, picture_tokens=reply.picture_tokens)
    return graph


def graph_of(model: str) -> Graph:
    """The graph of a checkpoint with the name of its transfer function, which is that of the pipeline."""
    return build_graph(printable_transfer("tokens_to_decoder"))
