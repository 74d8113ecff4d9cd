"""A pipeline with many graphs over three engines and a few functions; each graph has something that a chain has not.

``writer`` is a language model, ``critic`` another checkpoint that reads images, ``painter`` a diffusers pipeline.
"""

from collections.abc import AsyncIterator, Mapping
from typing import Any

from transformers import PreTrainedConfig

from tests.e2e.graphs.pondering import ponder
from vllm_omni.flow import Activation, CallInfo, Chunk, Emission, Field, GlobalParameters, Graph, Role, interface
from vllm_omni.model_executor.models.diffusers.pipeline import diffusers_stage
from vllm_omni.model_executor.pipeline import FunctionSpec, Outputs, Pipeline, StageRequest, StageSpec
from vllm_omni.model_executor.transfers import pass_tensors

TEXT, STREAM, IMAGE = Field("text"), Field("text", streamed=True), Field("image", streamed=True)

NUM_TOOL_CALLS = 2


class Writer(Role):
    """Several operations of one engine."""

    write = interface([["prompt"]], {"text": STREAM})
    again = interface([["prompt"]], {"text": STREAM})
    draft = interface([["prompt"]], {"text": TEXT})
    redraft = interface([["prompt"]], {"text": TEXT})
    third = interface([["prompt"]], {"text": TEXT})
    merge = interface([["left", "right"]], {"text": STREAM})
    gather = interface([["text"]], {"text": STREAM}, activate_by_count={"text": 3})
    embed = interface([["prompt"]], {"text": STREAM, "rows": Field("rows", streamed=True)})
    act = interface([["prompt"], ["result"]], {"answer": STREAM, "call": TEXT})


class Critic(Role):
    look = interface([["image"]], {"text": STREAM})


class Painter(Role):
    paint = interface([["prompt"], ["advice"]], {"image": IMAGE}, max_iterations=1)
    sketch = interface([["prompt"]], {"latents": Field("latents", streamed=True)})
    refine = interface([["latents"]], {"image": IMAGE})
    retouch = interface([["rows"], ["rows", "advice"]], {"image": IMAGE}, max_iterations=2)


class Tool(Role):
    use = interface([["call"]], {"result": TEXT})


class Parser(Role):
    parse = interface([["prompt"]], {"first": TEXT, "second": TEXT, "third": TEXT})


class Ponderer(Role):
    ponder = interface([["text"]], {"comment": STREAM})


class Historian(Role):
    tell = interface([["prompt"]], {"prompt": TEXT})


def text_of(chunk: Chunk) -> str:
    return "".join(one.text for one in chunk.payload.outputs) if chunk.payload is not None else ""


async def read(chunks: AsyncIterator[Chunk]) -> str:
    return "".join([text_of(chunk) async for chunk in chunks])


async def ids(chunks: AsyncIterator[Chunk]) -> list[int]:
    """The prompt's ids and the reply's, of a stage's whole output."""
    found: list[int] = []
    async for chunk in chunks:
        if chunk.payload is not None:
            found = found or list(chunk.payload.prompt_token_ids or ())
            found += [token for one in chunk.payload.outputs for token in one.token_ids]
    return found


async def join(activation: Activation) -> AsyncIterator[Chunk]:
    """One request: the reply ids of all fields, one field after the other, in the order of their names."""
    prompt: list[int] = []
    for _, chunks in sorted(activation.inputs.items()):
        async for chunk in chunks:
            if chunk.payload is not None:
                prompt += [token for one in chunk.payload.outputs for token in one.token_ids]
    yield Chunk(StageRequest({"prompt_token_ids": prompt}), last=True)


async def retouch(activation: Activation) -> AsyncIterator[Chunk]:
    """A picture of the same rows in each iteration, once the advice is there."""
    if "advice" in activation.inputs:
        assert await read(activation.inputs["advice"])
    async for chunk in pass_tensors(prompt_embeds="rows")(activation.inputs["rows"]):
        yield chunk


async def act(outputs: Outputs, activation: Activation) -> AsyncIterator[Emission]:
    """The first iterations call the tool; the last one answers."""
    field = "call" if activation.iteration < NUM_TOOL_CALLS else "answer"
    async for output in outputs:
        yield Emission(field, output)


async def use_tool(activation: Activation) -> AsyncIterator[Emission]:
    """Turn the words around."""
    async for chunk in activation.inputs["call"]:
        yield Emission("result", " ".join(reversed(text_of(chunk).split())))


async def parse(activation: Activation) -> AsyncIterator[Emission]:
    """Three prompts: the one given, backwards, and twice."""
    async for chunk in activation.inputs["prompt"]:
        prompt = prompt_ids(chunk)
        yield Emission("first", StageRequest({"prompt_token_ids": prompt}))
        yield Emission("second", StageRequest({"prompt_token_ids": prompt[::-1]}))
        yield Emission("third", StageRequest({"prompt_token_ids": prompt * 2}))


async def tell(activation: Activation) -> AsyncIterator[Emission]:
    """All prompts of the session so far."""
    history: list[int] = activation.parameters["history"]
    async for chunk in activation.inputs["prompt"]:
        history += prompt_ids(chunk)
        yield Emission("prompt", StageRequest({"prompt_token_ids": list(history)}))


def prompt_ids(chunk: Chunk) -> list[int]:
    return list(chunk.payload.prompt["prompt_token_ids"])


async def to_prompt(chunks: AsyncIterator[Chunk], call: CallInfo) -> AsyncIterator[Chunk]:
    """A tool's text as a prompt, which the stage tokenizes."""
    async for chunk in chunks:
        yield Chunk(StageRequest(chunk.payload), last=True)


async def to_picture(chunks: AsyncIterator[Chunk], call: CallInfo) -> AsyncIterator[Chunk]:
    yield Chunk(StageRequest(await read(chunks)), last=True)


async def to_ids(chunks: AsyncIterator[Chunk], call: CallInfo) -> AsyncIterator[Chunk]:
    """A reply's ids as the prompt of another graph."""
    replied = [chunk.payload.outputs async for chunk in chunks if chunk.payload is not None]
    yield Chunk(StageRequest({"prompt_token_ids": [one for (out,) in replied for one in out.token_ids]}), last=True)


async def user_to_picture(chunks: AsyncIterator[Chunk], call: CallInfo) -> AsyncIterator[Chunk]:
    async for chunk in chunks:
        yield Chunk(StageRequest(" ".join(f"w{token}" for token in prompt_ids(chunk))), last=True)


async def to_critic(chunks: AsyncIterator[Chunk], call: CallInfo) -> AsyncIterator[Chunk]:
    async for chunk in chunks:
        if chunk.payload is not None and chunk.payload.images:
            media = {"image": chunk.payload.images[0]}
            yield Chunk(StageRequest({"prompt": "w5 <image> w6", "multi_modal_data": media}), last=True)


def roles(graph: Graph, *names: str) -> list[Any]:
    return [graph.role(ROLES[name], name, parameters=PARAMETERS.get(name, ())) for name in names]


def plain() -> Graph:
    graph = Graph("plain")
    (writer,) = roles(graph, "writer")
    graph.output(text=writer.write(prompt=graph.placeholder("prompt")).text)
    return graph


def diamond() -> Graph:
    graph = Graph("diamond")
    prompt = graph.placeholder("prompt")
    parser, writer = roles(graph, "parser", "writer")
    parts = parser.parse(prompt=prompt)
    left, right = writer.write(prompt=parts.first), writer.again(prompt=parts.second)
    graph.output(text=writer.merge(left=left.text, right=right.text).text, comment=left.text)
    return graph


def gathered() -> Graph:
    """Three producers, and a count."""
    graph = Graph("gathered")
    parser, writer = roles(graph, "parser", "writer")
    parts = parser.parse(prompt=graph.placeholder("prompt"))
    drafts = writer.draft(prompt=parts.first), writer.redraft(prompt=parts.second), writer.third(prompt=parts.third)
    for one in drafts:
        merged = writer.gather(text=one.text)
    graph.output(text=merged.text)
    return graph


def agent() -> Graph:
    graph = Graph("agent")
    writer, tool = roles(graph, "writer", "tool")
    acted = writer.act(prompt=graph.placeholder("prompt"))
    writer.act(result=tool.use(call=acted.call).result.via(to_prompt))
    graph.output(text=acted.answer)
    return graph


def illustrated() -> Graph:
    graph = Graph("illustrated")
    writer, painter = roles(graph, "writer", "painter")
    reply = writer.write(prompt=graph.placeholder("prompt"))
    graph.output(text=reply.text, image=painter.paint(prompt=reply.text.via(to_picture)).image)
    graph.graph_call("hasty", ["text", "image"], until=["text"])
    return graph


def embedded() -> Graph:
    """The painter reads the writer's hidden states instead of a text."""
    graph = Graph("embedded")
    writer, painter = roles(graph, "writer", "painter")
    reply = writer.embed(prompt=graph.placeholder("prompt"))
    painted = painter.paint(prompt=reply.rows.via(pass_tensors(prompt_embeds="rows")))
    graph.output(text=reply.text, image=painted.image)
    return graph


def painting() -> Graph:
    """Only called: a picture of rows."""
    graph = Graph("painting")
    (painter,) = roles(graph, "painter")
    graph.output(image=painter.paint(prompt=graph.placeholder("rows")).image)
    graph.graph_call("paint", ["image"])
    return graph


def handed(painting: Graph) -> Graph:
    """The painter reads the writer's hidden states in a graph of its own."""
    graph = Graph("handed")
    (writer,) = roles(graph, "writer")
    reply = writer.embed(prompt=graph.placeholder("prompt"))
    painted = graph.graph_ref(painting).paint(rows=reply.rows.via(pass_tensors(prompt_embeds="rows")))
    graph.output(text=reply.text, image=painted.image)
    return graph


def assembled(painting: Graph) -> Graph:
    """Writer and painter are each in a graph of its own."""
    embedding, graph = Graph("embedding"), Graph("assembled")
    (writer,) = roles(embedding, "writer")
    reply = writer.embed(prompt=embedding.placeholder("prompt"))
    embedding.output(text=reply.text, rows=reply.rows)
    embedding.graph_call("embed", ["text", "rows"])
    made = graph.graph_ref(embedding).embed(prompt=graph.placeholder("prompt"))
    painted = graph.graph_ref(painting).paint(rows=made.rows.via(pass_tensors(prompt_embeds="rows")))
    graph.output(text=made.text, image=painted.image)
    return graph


def retouched() -> Graph:
    """Each iteration of a loop over the painter reads the writer's hidden states again."""
    graph = Graph("retouched")
    writer, painter, critic = roles(graph, "writer", "painter", "critic")
    painted = painter.retouch(rows=writer.embed(prompt=graph.placeholder("prompt")).rows)
    comment = critic.look(image=painted.image.via(to_critic))
    painter.retouch(advice=comment.text)
    graph.output(image=painted.image, comment=comment.text)
    return graph


def refined() -> Graph:
    """The painter starts a second time, from its own latents."""
    graph = Graph("refined")
    (painter,) = roles(graph, "painter")
    sketch = painter.sketch(prompt=graph.placeholder("prompt").via(user_to_picture))
    graph.output(image=painter.refine(latents=sketch.latents.via(pass_tensors("w7 w8", latents="latents"))).image)
    return graph


def critique() -> Graph:
    """A picture, what the critic says about it, and a second picture of that."""
    graph = Graph("critique")
    painter, critic = roles(graph, "painter", "critic")
    painted = painter.paint(prompt=graph.placeholder("prompt").via(user_to_picture))
    comment = critic.look(image=painted.image.via(to_critic))
    painter.paint(advice=comment.text.via(to_picture))
    graph.output(image=painted.image, comment=comment.text)
    graph.graph_call("review", ["image", "comment"])
    return graph


def reviewed(critique: Graph) -> Graph:
    """The critique of what the writer says, as a node."""
    graph = Graph("reviewed")
    (writer,) = roles(graph, "writer")
    reply = writer.write(prompt=graph.placeholder("prompt"))
    made = graph.graph_ref(critique).review(prompt=reply.text.via(to_ids))
    graph.output(text=reply.text, image=made.image, comment=made.comment)
    return graph


def retold(history: Graph) -> Graph:
    graph = Graph("retold")
    graph.output(text=graph.graph_ref(history).tell(prompt=graph.placeholder("prompt")).text)
    return graph


def pondered() -> Graph:
    """A function computes for long about what the writer says."""
    graph = Graph("pondered")
    writer, ponderer = roles(graph, "writer", "ponderer")
    reply = writer.write(prompt=graph.placeholder("prompt"))
    graph.output(text=reply.text, comment=ponderer.ponder(text=reply.text).comment)
    return graph


def history() -> Graph:
    graph = Graph("history")
    historian, writer = roles(graph, "historian", "writer")
    told = historian.tell(prompt=graph.placeholder("prompt"))
    graph.output(text=writer.write(prompt=told.prompt).text)
    graph.graph_call("tell", ["text"])
    return graph


ROLES: dict[str, type[Role]] = {
    "writer": Writer,
    "critic": Critic,
    "painter": Painter,
    "tool": Tool,
    "parser": Parser,
    "historian": Historian,
    "ponderer": Ponderer,
}
PARAMETERS = {"historian": (GlobalParameters("history", list),)}


class GraphsPipeline(Pipeline):
    modalities = {"text": "text", "image": "image", "comment": "comment"}
    deployment = {
        "stages": {
            "writer": {"engine_type": "ar"},
            "critic": {"engine_type": "ar"},
            "painter": {"engine_type": "diffusion"},
        }
    }
    session_ttl_s = 60.0

    def __init__(self, model: str, hf_config: PreTrainedConfig, revision: str | None = None) -> None:
        self.graph = plain()
        criticized, told, painted = critique(), history(), painting()
        self.further_graphs = (
            *(diamond(), gathered(), agent(), illustrated(), embedded(), retouched(), refined()),
            *(criticized, told, reviewed(criticized), retold(told), handed(painted), assembled(painted), pondered()),
        )
        self.stages = (
            StageSpec(
                "writer",
                "",
                "text",
                combine={"merge": join, "gather": join},
                route={"act": act},
                publishing_fields=frozenset({"rows"}),
            ),
            StageSpec("critic", "", "text"),
            diffusers_stage("painter", "image", combine={"retouch": retouch}, publishing_fields=frozenset({"latents"})),
        )
        self.functions = (
            FunctionSpec("tool", use_tool),
            FunctionSpec("parser", parse),
            FunctionSpec("historian", tell),
            FunctionSpec("ponderer", ponder, processes=1),
        )

    def validate(self, options: Mapping[str, Any]) -> dict[str, Any]:
        return {}
