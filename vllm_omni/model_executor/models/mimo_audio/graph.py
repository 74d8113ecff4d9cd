"""The graph of MiMo-Audio: language model -> decoder; without torch and vLLM."""

from __future__ import annotations

from vllm_omni.flow import Field, Graph, Role, TransferFunction, interface, printable_transfer


class LanguageModel(Role):
    generate = interface(
        inputs_or=[["prompt"]],
        outputs={"text": Field("text", streamed=True), "codes": Field("codec", streamed=True)},
    )


class Decoder(Role):
    # A piece is up to a minute of sound.
    decode = interface(inputs_or=[["codes"]], outputs={"audio": Field("audio", streamed=True, window=2)})


def build_graph(speech_to_decoder: TransferFunction) -> Graph:
    graph = Graph("mimo_audio")
    prompt = graph.placeholder("prompt")
    language_model, decoder = graph.role(LanguageModel, "language_model"), graph.role(Decoder, "decoder")
    reply = language_model.generate(prompt=prompt)
    sound = decoder.decode(codes=reply.codes.via(speech_to_decoder))
    graph.output(text=reply.text, audio=sound.audio, codec_ids=reply.codes)
    return graph


def graph_of(model: str) -> Graph:
    """The graph of a checkpoint with the name of its transfer function, which is that of the pipeline."""
    return build_graph(printable_transfer("speech_to_decoder"))
