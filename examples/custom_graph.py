"""A pipeline of your own: two encoders look at the same picture, one node reads both."""

import asyncio

from vllm_omni.flow import Emission, Field, Graph, GraphParser, GraphRuntime, Role, interface


class Encoder(Role):
    encode = interface([["image"]], {"rows": Field("embedding")})


class Captioner(Role):
    caption = interface([["semantic", "detail"]], {"text": Field("text", streamed=True)})


graph = Graph("caption")
image = graph.placeholder("image")
semantic, detail = (graph.role(Encoder, name).encode(image=image) for name in ("vit", "vae"))
graph.output(text=graph.role(Captioner, "llm").caption(semantic=semantic.rows, detail=detail.rows).text)


class Node:
    def __init__(self, field):
        self.field = field

    async def forward(self, activation):
        read = [f"{name}={chunk.payload}" for name, chunks in activation.inputs.items() async for chunk in chunks]
        yield Emission(self.field, f"{activation.node}({', '.join(read)})")


async def main():
    runtime = GraphRuntime(GraphParser(graph).parse(), {"vit": Node("rows"), "vae": Node("rows"), "llm": Node("text")})
    async for frame in runtime.open("request-1", {"image": "cat.png"}, ["text"]):
        if frame.payload is not None:
            print(frame.payload)


if __name__ == "__main__":
    asyncio.run(main())
