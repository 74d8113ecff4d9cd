"""HunyuanImage-3: one image from text and any number of images; diffusion starts when all are encoded.

The number of images is known at run time only, so `diffusion` counts them: the parser emits the number to wait for,
0 for a request without an image.
"""

from standins import FunctionNode, show

from vllm_omni.flow import Emission, Field, Graph, Role, interface

IMAGE, ROWS = Field("image"), Field("embedding")


class Parser(Role):
    parse = interface(
        [["message"]],
        {"text": Field("text"), "image": Field("image", streamed=True), "num_images": Field("number")},
    )


class Embedding(Role):
    embed = interface([["text"]], {"rows": ROWS})


class Encoder(Role):
    encode = interface([["image"]], {"rows": ROWS}, inputs={"image": IMAGE})


class Diffusion(Role):
    generate = interface(
        [["text", "vit", "vae", "num_images"]],
        {"latents": Field("latents")},
        activate_by_count={"vit": "num_images", "vae": "num_images"},
    )


class Decoder(Role):
    decode = interface([["latents"]], {"image": IMAGE})


graph = Graph("hunyuan_image")
parts = graph.role(Parser, "parser").parse(message=graph.placeholder("message"))
latents = graph.role(Diffusion, "diffusion").generate(
    text=graph.role(Embedding, "embedding").embed(text=parts.text).rows,
    vit=graph.role(Encoder, "vit").encode(image=parts.image).rows,
    vae=graph.role(Encoder, "vae").encode(image=parts.image).rows,
    num_images=parts.num_images,
)
graph.output(image=graph.role(Decoder, "decoder").decode(latents=latents.latents).image)


class ParserNode:
    async def forward(self, activation):
        async for message in activation.inputs["message"]:
            text, *images = message.payload
            yield [Emission("text", text), Emission("num_images", len(images))]
            for image in images:
                yield Emission("image", image)


def make_nodes():
    return {
        "parser": ParserNode(),
        "embedding": FunctionNode("rows", lambda text: f"e({text})", delay=9),
        "vit": FunctionNode("rows", lambda image: f"vit({image})", delay=3),
        "vae": FunctionNode("rows", lambda image: f"vae({image})"),
        "diffusion": FunctionNode("latents", lambda *rows: "+".join(map(str, rows))),
        "decoder": FunctionNode("image", lambda latents: f"image[{latents}]"),
    }


if __name__ == "__main__":
    for message in (["a fox"], ["these together", "a.png", "b.png", "c.png"]):
        show(graph, make_nodes(), {"message": message}, ["image"])
