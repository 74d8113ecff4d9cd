"""The graph of Qwen3-TTS: talker -> codec; of a checkpoint that clones voices also the encoder of recordings."""

from __future__ import annotations

from vllm_omni.config import read_model_config
from vllm_omni.flow import Field, Graph, Role, TransferFunction, interface, printable_transfer

BASE = "base"  # the kind of checkpoint (tts_model_type) that clones voices


class Talker(Role):
    speak = interface(inputs_or=[["prompt"]], outputs={"codes": Field("codec", streamed=True)})


class Codec(Role):
    # A piece is up to two seconds of sound.
    decode = interface(inputs_or=[["codes"]], outputs={"audio": Field("audio", streamed=True, window=4)})


class VoiceEncoder(Role):
    encode = interface(inputs_or=[["recording"]], outputs={"voice": Field("voice")})


def build_graph(talker_to_codec: TransferFunction, *, clones: bool) -> Graph:
    """Make the graph.

    Args:
        clones: whether the checkpoint speaks in cloned voices: a call for the output ``voice`` encodes a recording.
    """
    graph = Graph("qwen3_tts")
    prompt = graph.placeholder("prompt")
    talker, codec = graph.role(Talker, "talker"), graph.role(Codec, "codec")
    speech = talker.speak(prompt=prompt)
    sound = codec.decode(codes=speech.codes.via(talker_to_codec))
    graph.output(audio=sound.audio, codec_ids=speech.codes)
    if clones:
        recording = graph.placeholder("recording")
        graph.output(voice=graph.role(VoiceEncoder, "voice_encoder").encode(recording=recording).voice)
    return graph


def graph_of(model: str) -> Graph:
    """The graph of a checkpoint with the names of its transfer functions, which are those of the pipeline."""
    return build_graph(
        printable_transfer("talker_to_codec"), clones=read_model_config(model).get("tts_model_type") == BASE
    )
