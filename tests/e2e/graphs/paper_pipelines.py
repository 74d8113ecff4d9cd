"""Graphs of the Omni-Flow paper over engines: HunyuanImage-3, LongCat-Next, prefill and decode, and the cases of its
appendix A. ``examples/graphs`` has the first three with stand-ins.

``writer`` and ``prefill`` are engines of one language model, ``critic`` reads images, ``painter`` is a diffusers
pipeline; ``head`` and ``decoder`` are generation stages without weights.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedConfig
from vllm.config import VllmConfig
from vllm.inputs import tokens_input

from tests.e2e.graphs.pipelines import ids, join, text_of
from vllm_omni.flow import Activation, CallInfo, Chunk, Emission, Field, Graph, Role, interface
from vllm_omni.messages.payload import encode
from vllm_omni.messages.stage_output import StageOutput
from vllm_omni.model_executor.frames import Sentences, Tokens
from vllm_omni.model_executor.generation_model import GenerationConfig, GenerationModel
from vllm_omni.model_executor.models.diffusers.pipeline import diffusers_stage
from vllm_omni.model_executor.pipeline import FunctionSpec, Outputs, Pipeline, StageRequest, StageSpec

TEXT, STREAM = Field("text"), Field("text", streamed=True)
IMAGE, IMAGES = Field("image"), Field("image", streamed=True)
CODES, SOUND = Field("codes", streamed=True), Field("audio", streamed=True)

SAMPLE_RATE = 8000
CODES_PER_TOKEN = {"image": 2, "audio": 3}


class Writer(Role):
    write = interface([["prompt"]], {"text": STREAM})
    think = interface([["prompt"]], {"state": STREAM})
    fork = interface([["prompt"]], {"left": STREAM, "right": STREAM})
    speak = interface([["prompt"]], {"first": STREAM, "second": STREAM})
    continue_left = interface([["token"]], {"reply": TEXT}, inputs={"token": TEXT})
    continue_right = interface([["token"]], {"reply": TEXT}, inputs={"token": TEXT})
    spread_left = interface([["token"]], {"token": STREAM}, inputs={"token": TEXT})
    spread_right = interface([["token"]], {"token": STREAM}, inputs={"token": TEXT})
    merge = interface([["left", "right"]], {"text": STREAM})
    embed = interface([["text"]], {"reply": TEXT})
    decode = interface([["first_token", "kv_handle"]], {"text": STREAM})


class Prefill(Role):
    run = interface([["prompt"]], {"first_token": TEXT, "kv_handle": Field("handle"), "text": STREAM})


class Answer(Role):
    join = interface([["first"], ["rest"]], {"text": STREAM})


class Parser(Role):
    parse = interface([["prompt"]], {"text": TEXT, "image": IMAGES, "num_images": Field("number")})


class Critic(Role):
    vit = interface([["image"]], {"text": TEXT}, inputs={"image": IMAGE})
    vae = interface([["image"]], {"text": TEXT}, inputs={"image": IMAGE})


class Painter(Role):
    generate = interface(
        [["text", "vit", "vae", "num_images"]],
        {"latents": IMAGES},
        activate_by_count={"vit": "num_images", "vae": "num_images"},
    )


class Decoder(Role):
    decode = interface([["latents"]], {"image": IMAGES})


class Head(Role):
    """Two heads of a model, each run once for each of its steps, and a vocoder."""

    image = interface([["state"]], {"pixels": CODES}, inputs={"state": TEXT})
    audio = interface([["state"]], {"codes": CODES}, inputs={"state": TEXT})
    speak = interface([["codes"]], {"sound": SOUND})


class TextHead(Role):
    decode = interface([["state"]], {"token": TEXT}, inputs={"state": TEXT})


# -- generation stages without weights --------------------------------------------------------------------------------


def codes_of(head: str, token: int) -> torch.Tensor:
    return torch.tensor([float(token * 7 + number) for number in range(CODES_PER_TOKEN[head])])


def sound_of(codes: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(codes)) / 1024


class _Weightless(GenerationModel):
    published: str  # what it reads of what earlier stages publish

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return set()

    def read(self, args: Mapping[str, Any]) -> Mapping[str, Any]:
        key = self.published
        return {**args, "payloads": [tree[key].clone() for tree in args.get("payloads", ())]}


class PaperHead(_Weightless):
    published = "audio"

    def generate(self, batch: Sequence[Mapping[str, Any]]) -> list[dict[str, torch.Tensor]]:
        return [
            {"audio": codes_of(args["head"], args["token"])}
            if "head" in args
            else {"audio": sound_of(args["payloads"])}
            for args in batch
        ]


class PaperDecoder(_Weightless):
    """The negative of a picture."""

    published = "images"

    def generate(self, batch: Sequence[Mapping[str, Any]]) -> list[dict[str, torch.Tensor]]:
        return [{"images": 255 - torch.cat(args["payloads"])} for args in batch]


def head_config(config: PreTrainedConfig) -> PreTrainedConfig:
    return GenerationConfig(architectures=["PaperHead"], dtype="float32")


def decoder_config(config: PreTrainedConfig) -> PreTrainedConfig:
    return GenerationConfig(architectures=["PaperDecoder"], dtype="float32")


# -- edges and functions ----------------------------------------------------------------------------------------------


def _tokens(chunk: Chunk) -> list[int]:
    return [token for one in chunk.payload.outputs for token in one.token_ids] if chunk.payload is not None else []


async def to_left(chunks: AsyncIterator[Chunk], call: CallInfo) -> AsyncIterator[Chunk]:
    """A token as a prompt."""
    async for chunk in chunks:
        yield Chunk(StageRequest({"prompt_token_ids": [1, *_tokens(chunk)]}), last=True)


async def to_right(chunks: AsyncIterator[Chunk], call: CallInfo) -> AsyncIterator[Chunk]:
    async for chunk in chunks:
        yield Chunk(StageRequest({"prompt_token_ids": [1, *_tokens(chunk) * 2]}), last=True)


async def to_text(chunks: AsyncIterator[Chunk], call: CallInfo) -> AsyncIterator[Chunk]:
    """A sentence as a prompt."""
    async for chunk in chunks:
        yield Chunk(StageRequest(text_of(chunk)), last=True)


async def to_vit(chunks: AsyncIterator[Chunk], call: CallInfo) -> AsyncIterator[Chunk]:
    async for chunk in chunks:
        yield Chunk(look("w5 <image> w6", chunk.payload), last=True)


async def to_vae(chunks: AsyncIterator[Chunk], call: CallInfo) -> AsyncIterator[Chunk]:
    async for chunk in chunks:
        yield Chunk(look("w7 <image>", chunk.payload), last=True)


def look(prompt: str, image: Any) -> StageRequest:
    return StageRequest({"prompt": prompt, "multi_modal_data": {"image": image}})


def to_head(head: str) -> Any:
    async def convert(chunks: AsyncIterator[Chunk], call: CallInfo) -> AsyncIterator[Chunk]:
        async for chunk in chunks:
            for token in _tokens(chunk):
                yield Chunk(StageRequest(tokens_input([0]), {"head": head, "token": token}), last=True)

    return convert


async def pass_on(chunks: AsyncIterator[Chunk], call: CallInfo) -> AsyncIterator[Chunk]:
    """One request, which pulls everything that the source has published."""
    payloads = [
        encode(payload)
        async for chunk in chunks
        if chunk.payload is not None
        for payload in chunk.payload.payloads
        if payload.tensors
    ]
    yield Chunk(StageRequest(tokens_input([0]), {"payloads": payloads}), last=True)


async def parse(activation: Activation) -> AsyncIterator[Any]:
    """A text, images, and how many there are."""
    async for chunk in activation.inputs["prompt"]:
        given = chunk.payload.prompt
        yield [Emission("text", StageRequest(given["text"])), Emission("num_images", len(given["images"]))]
        for image in given["images"]:
            yield Emission("image", image)


async def describe(activation: Activation) -> AsyncIterator[Chunk]:
    """``combine`` of the painter: the texts of all fields, as one prompt."""
    texts = [text_of(chunk) for name in ("text", "vit", "vae") async for chunk in activation.inputs[name]]
    yield Chunk(StageRequest(" ".join(texts)), last=True)


async def route_prefill(outputs: Outputs, activation: Activation) -> AsyncIterator[Any]:
    async for output in outputs:
        yield [Emission("first_token", output), Emission("kv_handle", output), Emission("text", output)]


async def resume(activation: Activation) -> AsyncIterator[Chunk]:
    """``combine`` of decode: the prompt that prefill has read, and its token."""
    prompt = await ids(activation.inputs["kv_handle"])
    assert [token async for chunk in activation.inputs["first_token"] for token in _tokens(chunk)] == prompt[-1:]
    yield Chunk(StageRequest({"prompt_token_ids": prompt}), last=True)


async def answer(activation: Activation) -> AsyncIterator[Emission]:
    for chunks in activation.inputs.values():
        async for chunk in chunks:
            if chunk.payload is not None:
                yield Emission("text", chunk.payload)


async def decode_text(activation: Activation) -> AsyncIterator[Emission]:
    async for chunk in activation.inputs["state"]:
        yield Emission("token", f"<{_tokens(chunk)[0]}>")


# -- graphs -----------------------------------------------------------------------------------------------------------


def _roles(graph: Graph, *names: str) -> list[Any]:
    return [graph.role(ROLES[name], name) for name in names]


def case_1() -> Graph:
    """Each frame of a fork has a bucket of its own."""
    graph = Graph("case_1")
    (writer,) = _roles(graph, "writer")
    forked = writer.fork(prompt=graph.placeholder("prompt"))
    left = writer.continue_left(token=forked.left.via(to_left))
    right = writer.continue_right(token=forked.right.via(to_right))
    graph.output(text=writer.merge(left=left.reply, right=right.reply).text)
    return graph


def case_2() -> Graph:
    """All frames of one frame gather in one bucket, in order."""
    graph = Graph("case_2")
    (writer,) = _roles(graph, "writer")
    spoken = writer.speak(prompt=graph.placeholder("prompt"))
    left = writer.spread_left(token=spoken.first.via(to_text))
    right = writer.continue_right(token=spoken.second.via(to_text))
    graph.output(text=writer.merge(left=left.token, right=right.reply).text)
    return graph


def case_3() -> Graph:
    """Frames of frames gather in the bucket of theirs."""
    graph = Graph("case_3")
    (writer,) = _roles(graph, "writer")
    forked = writer.fork(prompt=graph.placeholder("prompt"))
    left = writer.spread_left(token=forked.left.via(to_left))
    right = writer.spread_right(token=forked.right.via(to_right))
    graph.output(text=writer.merge(left=left.token, right=right.token).text)
    return graph


def hunyuan_image() -> Graph:
    graph = Graph("hunyuan_image")
    parser, writer, critic, painter, decoder = _roles(graph, "parser", "writer", "critic", "painter", "decoder")
    parts = parser.parse(prompt=graph.placeholder("prompt"))
    made = painter.generate(
        text=writer.embed(text=parts.text).reply,
        vit=critic.vit(image=parts.image.via(to_vit)).text,
        vae=critic.vae(image=parts.image.via(to_vae)).text,
        num_images=parts.num_images,
    )
    graph.output(image=decoder.decode(latents=made.latents.via(pass_on)).image)
    return graph


def longcat_next() -> Graph:
    graph = Graph("longcat_next")
    writer, text_head, head = _roles(graph, "writer", "text_head", "head")
    state = writer.think(prompt=graph.placeholder("prompt")).state
    codes = head.audio(state=state.via(to_head("audio"))).codes
    graph.output(
        text=text_head.decode(state=state).token,
        image_codes=head.image(state=state.via(to_head("image"))).pixels,
        audio=head.speak(codes=codes.via(pass_on)).sound,
    )
    return graph


def prefill_decode() -> Graph:
    graph = Graph("prefill_decode")
    prefill, writer, joined = _roles(graph, "prefill", "writer", "answer")
    begun = prefill.run(prompt=graph.placeholder("prompt"))
    rest = writer.decode(first_token=begun.first_token, kv_handle=begun.kv_handle)
    joined.join(first=begun.text)
    graph.output(text=joined.join(rest=rest.text).text)
    return graph


ROLES: dict[str, type[Role]] = {
    "writer": Writer,
    "prefill": Prefill,
    "answer": Answer,
    "parser": Parser,
    "critic": Critic,
    "painter": Painter,
    "decoder": Decoder,
    "head": Head,
    "text_head": TextHead,
}


class PaperPipeline(Pipeline):
    modalities = {"text": "text", "image": "image", "audio": "audio"}
    extra_outputs = {"image_codes": "image_codes"}
    sample_rate = SAMPLE_RATE
    deployment = {
        "stages": {
            "writer": {"engine_type": "ar"},
            "prefill": {"engine_type": "ar"},
            "critic": {"engine_type": "ar"},
            "painter": {"engine_type": "diffusion"},
            "decoder": {"engine_type": "generation"},
            "head": {"engine_type": "generation"},
        }
    }

    def __init__(self, model: str, hf_config: PreTrainedConfig, revision: str | None = None) -> None:
        self.graph = case_1()
        self.further_graphs = (case_2(), case_3(), hunyuan_image(), longcat_next(), prefill_decode())
        self.stages = (
            StageSpec(
                "writer",
                "",
                "text",
                combine={"merge": join, "decode": resume},
                frames={"left": Tokens, "right": Tokens, "state": Tokens, "first": Sentences, "second": Sentences},
            ),
            StageSpec("prefill", "", "text", route={"run": route_prefill}),
            StageSpec("critic", "", "text"),
            replace(
                diffusers_stage("painter", "image"),
                combine={"generate": describe},
                publishing_fields=frozenset({"latents"}),
            ),
            StageSpec("decoder", "PaperDecoder", "image", hf_overrides=decoder_config),
            StageSpec("head", "PaperHead", "audio", hf_overrides=head_config, publishing_fields=frozenset({"codes"})),
        )
        self.functions = (
            FunctionSpec("parser", parse),
            FunctionSpec("text_head", decode_text),
            FunctionSpec("answer", answer),
        )

    def validate(self, options: Mapping[str, Any]) -> dict[str, Any]:
        return {}

    def extra_output(self, name: str, output: StageOutput) -> list[float]:
        codes: list[float] = output.multimodal_output["audio"].tolist() if output.multimodal_output else []
        return codes
