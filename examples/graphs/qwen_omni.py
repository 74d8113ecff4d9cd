"""Qwen-Omni: text and speech at once; every stage reads the stream of the previous one while it is produced."""

from standins import StreamNode, show

from vllm_omni.flow import Emission, Field, Graph, Role, interface


class Thinker(Role):
    generate = interface(
        [["prompt"]], {"text": Field("text", streamed=True), "rows": Field("hidden_states", streamed=True)}
    )


class Talker(Role):
    generate = interface([["rows"]], {"codes": Field("codec", streamed=True)})


class Token2Wav(Role):
    decode = interface([["codes"]], {"audio": Field("audio", streamed=True)})


graph = Graph("qwen_omni")
reply = graph.role(Thinker, "thinker").generate(prompt=graph.placeholder("prompt"))
codes = graph.role(Talker, "talker").generate(rows=reply.rows).codes
graph.output(text=reply.text, audio=graph.role(Token2Wav, "token2wav").decode(codes=codes).audio)


class ThinkerNode:
    async def forward(self, activation):
        async for prompt in activation.inputs["prompt"]:
            for word in prompt.payload.split():
                yield [Emission("text", word), Emission("rows", len(word))]


class TalkerNode:
    async def forward(self, activation):
        async for row in activation.inputs["rows"]:
            for code in range(row.payload):
                yield Emission("codes", code)


def make_nodes():
    return {
        "thinker": ThinkerNode(),
        "talker": TalkerNode(),
        "token2wav": StreamNode("audio", lambda *codes: [sum(codes[i : i + 4]) for i in range(0, len(codes), 4)]),
    }


INPUTS = {"prompt": "hello there"}

if __name__ == "__main__":
    show(graph, make_nodes(), INPUTS, ["text", "audio"])
