"""The graph of Qwen3-Omni: thinker -> talker -> code2wav; of a checkpoint without a talker, the thinker alone.

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


class Code2Wav(Role):
    decode = interface(inputs_or=[["codes"]], outputs={"audio": Field("audio", streamed=True, window=4)})


def build_graph(thinker_to_talker: TransferFunction, talker_to_code2wav: TransferFunction) -> Graph:
    graph = Graph("qwen3_omni_moe")
    prompt = graph.placeholder("prompt")
    thinker, talker = graph.role(Thinker, "thinker"), graph.role(Talker, "talker")
    code2wav = graph.role(Code2Wav, "code2wav")
    reply = thinker.generate(prompt=prompt)
    speech = talker.generate(rows=reply.rows.via(thinker_to_talker))
    sound = code2wav.decode(codes=speech.codes.via(talker_to_code2wav))
    graph.output(text=reply.text, audio=sound.audio, codec_ids=speech.codes)
    return graph


def graph_of(model: str) -> Graph:
    """The graph of a checkpoint with the names of its transfer functions, which are those of the pipeline."""
    return build_graph(printable_transfer("thinker_to_talker"), printable_transfer("talker_to_code2wav"))
