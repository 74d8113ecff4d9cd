"""Graphs that are no chains, on real engines: equal to the same engines called by hand, one after another."""

import asyncio
import base64
import io
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from diffusers import DiffusionPipeline
from PIL import Image

from tests.e2e.graphs.pipelines import NUM_TOOL_CALLS, GraphsPipeline
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.entrypoints.cli.serve import parse_serve_args
from vllm_omni.entrypoints.openai.app import build_omni_app
from vllm_omni.errors import ConfigError
from vllm_omni.messages.outputs import OmniRequestOutput, collect
from vllm_omni.model_executor.pipeline import RequestContext, StageRequest
from vllm_omni.testing import diffusion, llava

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore:max_tokens is deprecated:DeprecationWarning"),  # vLLM's handler reads it
]

PROMPT = [1, 10, 20, 30, 40]
PARAMS: dict[str, Any] = {
    "writer": {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True},
    "critic": {"temperature": 0.0, "max_tokens": 5, "ignore_eos": True},
    "painter": {"num_inference_steps": 2, "height": 64, "width": 64, "seed": 3, "guidance_scale": 0.0},
}


SHAPE = replace(llava.TINY, hidden_size=32, num_heads=1)
"""The writer's hidden states are as wide as the encoded texts that the painter reads."""


def start(directory: Path, *stage_overrides: str) -> AsyncOmni:
    painter = diffusion.build(directory / "painter", "z-image")
    return AsyncOmni(
        llava.build(directory / "writer", SHAPE),
        pipeline=GraphsPipeline,
        stage_overrides=[
            f"critic.model={llava.build(directory / 'critic', seed=1)}",
            f"painter.model={painter}",
            "writer.dtype=float32",
            "writer.default_sampling_params={temperature: 0.0, max_tokens: 6, ignore_eos: true}",
            "critic.dtype=float32",
            "writer.max_model_len=256",
            "critic.max_model_len=256",
            "writer.enforce_eager=true",
            "critic.enforce_eager=true",
            *stage_overrides,
        ],
    )


@pytest.fixture(scope="module")
def omni(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncOmni]:
    omni = start(tmp_path_factory.mktemp("graphs"))
    yield omni
    omni.shutdown()


async def ask(omni: AsyncOmni, graph: str, prompt: Sequence[int] = PROMPT, **more: Any) -> OmniRequestOutput:
    return await collect(omni.generate({"prompt_token_ids": list(prompt)}, PARAMS, graph=graph, **more))


class ByHand:
    """The engines without the graph."""

    def __init__(self, omni: AsyncOmni) -> None:
        self._omni = omni
        self._params = omni.params.resolve(PARAMS)

    async def run(self, stage: str, prompt: Any, params: Mapping[str, Any] | None = None) -> OmniRequestOutput:
        engine = self._omni.orchestrator.front(stage)
        context = RequestContext(
            f"by-hand-{id(prompt)}", self._params if params is None else self._omni.params.resolve(params), {}
        )
        outputs = engine.generate(StageRequest(prompt), context, frozenset({"text"}))
        return await collect(outputs)

    async def write(self, prompt: Sequence[int]) -> list[int]:
        return list((await self.run("writer", {"prompt_token_ids": list(prompt)})).outputs[0].token_ids)


async def test_a_diamond_joins_two_replies(omni: AsyncOmni) -> None:
    hand = ByHand(omni)
    joined = await hand.write([*await hand.write(PROMPT), *await hand.write(PROMPT[::-1])])
    answer = await ask(omni, "diamond")
    assert list(answer.outputs[0].token_ids) == joined
    assert answer.outputs[0].finish_reason == "length"
    assert set(answer.stage_durations) == {"parser", "writer", "total"}


async def test_a_count_gathers_three_producers_in_their_order(omni: AsyncOmni) -> None:
    hand = ByHand(omni)
    drafts = [await hand.write(prompt) for prompt in (PROMPT, PROMPT[::-1], PROMPT * 2)]
    answer = await ask(omni, "gathered")
    assert list(answer.outputs[0].token_ids) == await hand.write([token for draft in drafts for token in draft])


async def test_an_agent_calls_its_tool_until_it_answers(omni: AsyncOmni) -> None:
    hand = ByHand(omni)
    output = await hand.run("writer", {"prompt_token_ids": PROMPT})
    for _ in range(NUM_TOOL_CALLS):
        output = await hand.run("writer", " ".join(reversed(output.outputs[0].text.split())))
    answer = await ask(omni, "agent")
    assert answer.outputs[0].text == output.outputs[0].text
    assert list(answer.outputs[0].token_ids) == list(output.outputs[0].token_ids)


async def test_a_reply_is_painted(omni: AsyncOmni) -> None:
    hand = ByHand(omni)
    reply = await hand.run("writer", {"prompt_token_ids": PROMPT})
    painted = await hand.run("painter", reply.outputs[0].text)
    answer = await ask(omni, "illustrated")
    assert answer.outputs[0].text == reply.outputs[0].text
    assert torch.equal(answer.multimodal_output["images"], painted.multimodal_output["images"])


async def test_a_painter_reads_the_hidden_states_of_the_writer(omni: AsyncOmni) -> None:
    orchestrator = omni.orchestrator
    params = omni.params.resolve(PARAMS)
    context = RequestContext("by-hand", params, {})
    request = StageRequest({"prompt_token_ids": PROMPT})
    reply = await collect(orchestrator.front("writer").generate(request, context, frozenset({"rows"})))
    rows = torch.cat([orchestrator.hub.pull_blocking(payload)["rows"] for payload in reply.payloads])
    assert rows.shape == (len(PROMPT) + PARAMS["writer"]["max_tokens"] - 1, SHAPE.hidden_size)
    pipeline = DiffusionPipeline.from_pretrained(omni.config.stage("painter").model)
    settings = {name: value for name, value in PARAMS["painter"].items() if name != "seed"}
    generator = torch.Generator().manual_seed(PARAMS["painter"]["seed"])
    expected = pipeline(prompt_embeds=[rows], generator=generator, output_type="np", **settings).images
    for payload in context.payloads:
        orchestrator.hub.release_payload(payload, for_all=True)
    answer = await ask(omni, "embedded")
    assert answer.outputs[0].text == reply.outputs[0].text
    pixels = answer.multimodal_output["images"].float() / 255
    assert (pixels - torch.from_numpy(expected)).abs().max() <= 1.01 / 255  # rounded to eight bits


async def test_a_picture_is_painted_again_as_the_critic_says(omni: AsyncOmni) -> None:
    hand = ByHand(omni)
    first = await hand.run("painter", " ".join(f"w{token}" for token in PROMPT))
    said = await hand.run("critic", {"prompt": "w5 <image> w6", "multi_modal_data": {"image": first.images[0]}})
    second = await hand.run("painter", said.outputs[0].text)
    answer = await ask(omni, "critique")
    expected = torch.cat([first.multimodal_output["images"], second.multimodal_output["images"]])
    assert torch.equal(answer.multimodal_output["images"], expected)


async def test_calls_of_a_session_share_its_history_in_order(omni: AsyncOmni) -> None:
    hand = ByHand(omni)
    calls = [ask(omni, "history", [1, number], session_id="s") for number in range(10, 15)]
    answers = await asyncio.gather(*calls)
    history: list[int] = []
    for number, answer in zip(range(10, 15), answers, strict=True):
        history += [1, number]
        assert list(answer.outputs[0].token_ids) == await hand.write(history)
    alone = await ask(omni, "history", [1, 10])
    assert list(alone.outputs[0].token_ids) == await hand.write([1, 10])


# -- over HTTP --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
async def client(omni: AsyncOmni) -> AsyncIterator[openai.AsyncOpenAI]:
    parsed = parse_serve_args([omni.config.model, "--served-model-name", "tiny", "--dtype", "float32"])
    transport = httpx.ASGITransport(await build_omni_app(omni, parsed.args), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, timeout=120) as http:
        yield openai.AsyncOpenAI(base_url="http://server/v1", api_key="none", http_client=http, max_retries=0)


def chat(graph: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": [{"type": "text", "text": "w10 w20 w30"}]}]
    return {"model": graph, "messages": messages, "extra_body": {"sampling_params_list": PARAMS} | more}


def pixels_of(url: str) -> torch.Tensor:
    image = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))
    return torch.from_numpy(np.array(image))


async def test_text_and_picture_of_one_answer_come_in_one_response(omni: AsyncOmni, client: openai.AsyncOpenAI) -> None:
    hand = ByHand(omni)
    reply = await hand.run("writer", {"prompt": "<s> w10 w20 w30"})
    painted = await hand.run("painter", reply.outputs[0].text)
    expected = torch.from_numpy(np.array(painted.images[0]))
    modalities = ["text", "image"]
    whole = await client.chat.completions.create(**chat("illustrated", modalities=modalities))
    (choice,) = whole.choices
    assert choice.message.content == reply.outputs[0].text
    (image,) = choice.message.images  # type: ignore[attr-defined]
    assert torch.equal(pixels_of(image["image_url"]["url"]), expected)
    stream = await client.chat.completions.create(**chat("illustrated", modalities=modalities), stream=True)
    chunks = [chunk async for chunk in stream]
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == reply.outputs[0].text
    (images,) = [delta.images for delta in deltas if getattr(delta, "images", None)]
    assert torch.equal(pixels_of(images[0]["image_url"]["url"]), expected)
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["length"]


async def test_an_answer_without_a_text_of_its_own_has_pictures_and_named_texts(client: openai.AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(**chat("critique"), logprobs=True, top_logprobs=1)
    message = whole.choices[0].message
    assert len(message.images) == 2  # type: ignore[attr-defined]
    assert message.texts["comment"]  # type: ignore[attr-defined]
    assert not message.content
    stream = await client.chat.completions.create(**chat("critique"), stream=True)
    deltas = [chunk.choices[0].delta async for chunk in stream]
    assert [one for delta in deltas for one in getattr(delta, "images", ())] == message.images  # type: ignore[attr-defined]
    comment = "".join(delta.texts["comment"] for delta in deltas if getattr(delta, "texts", None))
    assert comment == message.texts["comment"]  # type: ignore[attr-defined]
    async with client.chat.completions.stream(**chat("critique")) as joined:
        (final,) = (await joined.get_final_completion()).choices
    assert final.message.images == message.images  # type: ignore[attr-defined]
    assert final.finish_reason == "stop"


async def test_an_agents_stream_ends_once_with_its_usage(omni: AsyncOmni, client: openai.AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(**chat("agent"))
    stream = await client.chat.completions.create(**chat("agent"), stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == whole.choices[0].message.content
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["length"]
    (usage,) = [chunk.usage for chunk in chunks if chunk.usage]
    assert usage == whole.usage


async def test_graphs_are_models_of_their_own(client: openai.AsyncOpenAI) -> None:
    names = [model.id async for model in client.models.list()]
    assert names == ["tiny", "diamond", "gathered", "agent", "illustrated", "embedded", "critique", "history"]
    completion = await client.completions.create(
        model="diamond", prompt="<s> w10", max_tokens=6, temperature=0, extra_body={"ignore_eos": True}
    )
    plain = await client.completions.create(
        model="tiny", prompt="<s> w10", max_tokens=6, temperature=0, extra_body={"ignore_eos": True}
    )
    assert completion.choices[0].text != plain.choices[0].text
    with pytest.raises(openai.NotFoundError, match="dimond"):
        await client.completions.create(model="dimond", prompt="w1")
    with pytest.raises(openai.BadRequestError, match=r"unknown modality 'image'.*valid: text"):
        await client.chat.completions.create(**chat("plain", modalities=["image"]))


@pytest.mark.parametrize(
    ("route", "field"),
    [
        ("responses", {"input": "w10", "max_output_tokens": 2}),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "text", "text": "w10"}]}], "max_tokens": 2}),
        ("chat/completions/batch", {"messages": [chat("critique")["messages"]], "max_completion_tokens": 2}),
    ],
)
async def test_other_routes_of_texts_run_the_graph_that_is_named(
    client: openai.AsyncOpenAI, route: str, field: dict[str, Any]
) -> None:
    await client.post(f"/{route}", body={"model": "diamond", **field}, cast_to=object)
    with pytest.raises(openai.BadRequestError, match=r"unknown modality 'text': valid: image, comment"):
        await client.post(f"/{route}", body={"model": "critique", **field}, cast_to=object)


async def test_a_served_name_cannot_be_that_of_a_graph(omni: AsyncOmni) -> None:
    parsed = parse_serve_args([omni.config.model, "--served-model-name", "tiny", "diamond", "--dtype", "float32"])
    with pytest.raises(ConfigError, match="--served-model-name diamond: one of the pipeline's graphs has this name"):
        await build_omni_app(omni, parsed.args)


async def test_sessions_over_http_share_their_history(client: openai.AsyncOpenAI) -> None:
    async def ask_in(session: str | None) -> str:
        headers = {} if session is None else {"X-Session-ID": session}
        answer = await client.chat.completions.create(**chat("history"), extra_headers=headers)
        assert answer.choices[0].message.content is not None
        return answer.choices[0].message.content

    alone = await ask_in(None)
    assert await ask_in("http") == alone
    assert await ask_in("http") != alone
    assert await ask_in("other") == alone


async def test_an_images_route_paints_what_the_language_model_says(omni: AsyncOmni, client: openai.AsyncOpenAI) -> None:
    settings = {name: value for name, value in PARAMS["painter"].items() if name not in ("height", "width")}
    body: dict[str, Any] = {"model": "illustrated", "prompt": "w10 w20 w30", "size": "64x64"}
    made = await client.images.generate(**body, extra_body=settings)
    assert made.data is not None
    image = pixels_of("," + (made.data[0].b64_json or ""))
    hand = ByHand(omni)
    reply = await hand.run("writer", {"prompt": "<s> w10 w20 w30"}, {})
    painted = await hand.run("painter", reply.outputs[0].text)
    assert torch.equal(image, torch.from_numpy(np.array(painted.images[0])))
    stream = await client.images.generate(**body, stream=True, extra_body=settings | {"progress": True})
    events = [event async for event in stream]
    assert [event.type for event in events] == ["image_generation.progress"] * 2 + ["image_generation.completed"]
    assert torch.equal(pixels_of("," + events[-1].b64_json), image)  # type: ignore[union-attr]
    with pytest.raises(openai.BadRequestError) as rejected:
        await client.images.generate(**body | {"size": "0x64"}, extra_body=settings)  # type: ignore[arg-type]
    assert rejected.value.param == "size"
    with pytest.raises(openai.BadRequestError, match=r"'diamond' has no image output: valid: illustrated, embed"):
        await client.images.generate(model="diamond", prompt="w1")
    with pytest.raises(openai.BadRequestError, match=r"no video output; it has text, image, comment"):
        await client.post("/videos/sync", body={"prompt": "w1"}, cast_to=object)
