"""The graph of Qwen2.5-Omni: thinker -> talker -> token2wav.

A family's ``graph`` imports neither torch nor vLLM, which take seconds: ``vllm-omni graph`` prints what ``graph_of``
returns.
"""

from __future__ import annotations

from vllm_omni.flow import Field, Graph, Role, TransferFunction, interface, printable_transfer


class Thinker(Role):
    generate = interface(
        inputs_or=[["prompt"]],
        outputs={"text": Field("text", streamed=True), "rows": Field("hidden_states", streamed=True)},
    )


class Talker(Role):
    generate = interface(inputs_or=[["rows"]], outputs={"codes": Field("codec", streamed=True)})


class Token2Wav(Role):
    # A piece is up to two seconds of sound.
    decode = interface(inputs_or=[["codes"]], outputs={"audio": Field("audio", streamed=True, window=4)})


def build_graph(thinker_to_talker: TransferFunction, talker_to_token2wav: TransferFunction) -> Graph:
    graph = Graph("qwen2_5_omni")
    prompt = graph.placeholder("prompt")
    thinker, talker = graph.role(Thinker, "thinker"), graph.role(Talker, "talker")
    token2wav = graph.role(Token2Wav, "token2wav")
    reply = thinker.generate(prompt=prompt)
    speech = talker.generate(rows=reply.rows.via(thinker_to_talker))
    sound = token2wav.decode(codes=speech.codes.via(talker_to_token2wav))
    graph.output(text=reply.text, audio=sound.audio, codec_ids=speech.codes)
    return graph


def graph_of(model: str) -> Graph:
    """The graph of a checkpoint with the names of its transfer functions, which are those of the pipeline."""
    return build_graph(printable_transfer("thinker_to_talker"), printable_transfer("talker_to_token2wav"))
