"""The graph: a thinker that replies, and a stage that keys what it says while it says it."""

from collections.abc import AsyncIterator, Mapping
from typing import Any

from transformers import PreTrainedConfig
from vllm.inputs import tokens_input

from omni_morse.model import SAMPLE_RATE, morse_hf_config
from vllm_omni.errors import InvalidRequest
from vllm_omni.flow import CallInfo, Chunk, Field, Graph, Role, interface
from vllm_omni.model_executor.pipeline import Pipeline, StageRequest, StageSpec


class Thinker(Role):
    generate = interface(inputs_or=[["prompt"]], outputs={"text": Field("text", streamed=True)})


class Key(Role):
    press = interface(inputs_or=[["text"]], outputs={"audio": Field("audio", streamed=True)})


class MorsePipeline(Pipeline):
    """Text out, and its Morse code, on any checkpoint of Qwen2.5-Omni."""

    modalities = {"text": "text", "audio": "audio"}
    sample_rate = SAMPLE_RATE

    def __init__(self, model: str, hf_config: PreTrainedConfig, revision: str | None = None) -> None:
        self.graph = Graph("morse")
        prompt = self.graph.placeholder("prompt")
        thinker, key = self.graph.role(Thinker, "thinker"), self.graph.role(Key, "key")
        reply = thinker.generate(prompt=prompt)
        keyed = key.press(text=reply.text.via(self.text_to_key))
        self.graph.output(text=reply.text, audio=keyed.audio)
        self.stages = (
            StageSpec("thinker", architecture="Qwen2_5OmniThinker", output_type="text"),
            StageSpec(
                "key",
                architecture="Morse",
                output_type="audio",
                hf_overrides=morse_hf_config,
            ),
        )

    def validate(self, options: Mapping[str, Any]) -> dict[str, Any]:
        if options:
            raise InvalidRequest(f"this model has no options, and was given {', '.join(options)}")
        return {}

    async def text_to_key(self, chunks: AsyncIterator[Chunk], call: CallInfo) -> AsyncIterator[Chunk]:
        """Each piece of text becomes a request to the key, whose sound goes out at once."""
        seq = 0
        async for chunk in chunks:
            text = chunk.payload.outputs[0].text if chunk.payload is not None else ""
            yield Chunk(StageRequest(tokens_input([0]), {"text": text}), seq, last=chunk.last)
            seq += 1
