"""Text and images in, text and an image out: the graph of the Omni-Flow paper's Fig. 3.

`parser` yields one part of the message at a time. Text passes the embedding, an image both encoders, whose results are
joined. The LLM reads the parts in the order in which they were written, whichever is encoded first, keeps them in
the cache that the session shares, and replies after the last one.
"""

from standins import FunctionNode, show

from vllm_omni.flow import Emission, Field, GlobalParameters, Graph, Role, Scheduling, interface

TEXT, IMAGE, ROWS = Field("text"), Field("image"), Field("embedding")


class Parser(Role):
    parse = interface([["message"]], {"text": Field("text", streamed=True), "image": Field("image", streamed=True)})


class Embedding(Role):
    embed = interface([["text"]], {"rows": ROWS}, inputs={"text": TEXT})


class Encoder(Role):
    encode = interface([["image"]], {"rows": ROWS}, inputs={"image": IMAGE})


class LLM(Role):
    generate = interface(
        [["text"], ["vit", "vae"]], {"tokens": Field("text", streamed=True)}, scheduling=Scheduling.SESSION
    )


class Diffusion(Role):
    generate = interface([["tokens"]], {"latents": Field("latents")})


class Decoder(Role):
    decode = interface([["latents"]], {"image": IMAGE})


graph = Graph("interleaved")
parts = graph.role(Parser, "parser").parse(message=graph.placeholder("message"))
llm = graph.role(LLM, "llm", parameters=[GlobalParameters("cache", list)])
reply = llm.generate(text=graph.role(Embedding, "embedding").embed(text=parts.text).rows)
vit = graph.role(Encoder, "vit").encode(image=parts.image)
vae = graph.role(Encoder, "vae").encode(image=parts.image)
llm.generate(vit=vit.rows, vae=vae.rows)
latents = graph.role(Diffusion, "diffusion").generate(tokens=reply.tokens).latents
graph.output(tokens=reply.tokens, image=graph.role(Decoder, "decoder").decode(latents=latents).image)


class ParserNode:
    async def forward(self, activation):
        async for message in activation.inputs["message"]:
            for part in message.payload:
                yield Emission("image" if part.endswith(".png") else "text", part)


class LLMNode:
    """Replies to a part that ends with a question mark, with the parts it has read."""

    async def forward(self, activation):
        cache = activation.parameters["cache"]
        cache += [chunk.payload for name in activation.inputs async for chunk in activation.inputs[name]]
        if "?" in cache[-1]:
            for row in cache:
                yield Emission("tokens", row)


def make_nodes():
    return {
        "parser": ParserNode(),
        "embedding": FunctionNode("rows", lambda text: f"e({text})", delay=5),
        "vit": FunctionNode("rows", lambda image: f"vit({image})", delay=2),
        "vae": FunctionNode("rows", lambda image: f"vae({image})"),
        "llm": LLMNode(),
        "diffusion": FunctionNode("latents", lambda *tokens: f"latents[{len(tokens)}]"),
        "decoder": FunctionNode("image", lambda latents: f"image-of-{latents}"),
    }


INPUTS = {"message": ["Draw", "cat.png", "with a hat, will you?"]}

if __name__ == "__main__":
    show(graph, make_nodes(), INPUTS, ["tokens", "image"])
