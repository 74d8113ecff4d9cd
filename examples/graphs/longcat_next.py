"""LongCat-Next: one LLM with three heads for text, image tokens and audio tokens, each at its own speed.

Every step of the LLM is an activation of each head. The heads do not wait for one another, and each output is in the
order of the steps.
"""

import asyncio

from standins import FunctionNode, StreamNode, show

from vllm_omni.flow import Field, Graph, Role, interface

STATE = Field("hidden_states")


class LLM(Role):
    generate = interface([["prompt"]], {"states": Field("hidden_states", streamed=True)})


class TextHead(Role):
    decode = interface([["state"]], {"token": Field("text")}, inputs={"state": STATE})


class ImageHead(Role):
    decode = interface([["state"]], {"codes": Field("image_codes", streamed=True)}, inputs={"state": STATE})


class AudioHead(Role):
    decode = interface([["state"]], {"codes": Field("audio_codes", streamed=True)}, inputs={"state": STATE})


class Vocoder(Role):
    decode = interface([["codes"]], {"audio": Field("audio", streamed=True)})


graph = Graph("longcat_next")
states = graph.role(LLM, "llm").generate(prompt=graph.placeholder("prompt")).states
codes = graph.role(AudioHead, "audio_head").decode(state=states).codes
graph.output(
    text=graph.role(TextHead, "text_head").decode(state=states).token,
    image_codes=graph.role(ImageHead, "image_head").decode(state=states).codes,
    audio=graph.role(Vocoder, "vocoder").decode(codes=codes).audio,
)


class JitteryNode(FunctionNode):
    """The first activations take the longest."""

    async def forward(self, activation):
        for _ in range(20 - 4 * activation.path[-1]):
            await asyncio.sleep(0)
        async for emission in super().forward(activation):
            yield emission


def make_nodes():
    return {
        "llm": StreamNode("states", lambda prompt: [f"{prompt}{step}" for step in range(4)], delay=1),
        "text_head": JitteryNode("token", lambda state: f"t({state})"),
        "image_head": StreamNode("codes", lambda state: [f"i({state})-{k}" for k in range(2)], delay=3),
        "audio_head": StreamNode("codes", lambda state: [f"a({state})-{k}" for k in range(3)], delay=1),
        "vocoder": StreamNode("audio", lambda *codes: [f"wave[{len(codes)}]"]),
    }


INPUTS = {"prompt": "h"}

if __name__ == "__main__":
    show(graph, make_nodes(), INPUTS, ["text", "image_codes", "audio"])
