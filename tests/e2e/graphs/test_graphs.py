"""Graphs that are no chains, on real engines: equal to the same engines called by hand, one after another."""

import asyncio
import base64
import io
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
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
from tests.e2e.graphs.pondering import DIRECTORY, HOLD
from tests.encoded_link import served_from_bytes
from vllm_omni.engine.request_record import RequestRecord
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.entrypoints.cli.serve import parse_serve_args
from vllm_omni.entrypoints.openai.app import build_omni_app
from vllm_omni.errors import CallAborted, DeadlineExceeded, InvalidRequest
from vllm_omni.messages.outputs import OmniRequestOutput, collect
from vllm_omni.messages.payload import encode
from vllm_omni.model_executor.pipeline import RequestContext, StageRequest
from vllm_omni.process.status import StageState
from vllm_omni.relay.hub import RelayHub, RelayOptions
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
# The latents of a smaller picture would travel inline.
LATENTS = PARAMS | {"painter": PARAMS["painter"] | {"output_type": "latents", "height": 160, "width": 160}}
PARAMS_OF = {"refined": LATENTS}


SHAPE = replace(llava.TINY, hidden_size=32, num_heads=1)
"""The writer's hidden states are as wide as the encoded texts that the painter reads."""


def build(directory: Path) -> tuple[Path, list[str]]:
    """The checkpoint of the pipeline, and settings of its stages."""
    painter = diffusion.build(directory / "painter", "z-image")
    return (
        llava.build(directory / "writer", SHAPE),
        [
            f"critic.model={llava.build(directory / 'critic', seed=1)}",
            f"painter.model={painter}",
            "writer.dtype=float32",
            "writer.default_sampling_params={temperature: 0.0, max_tokens: 6, ignore_eos: true}",
            "critic.dtype=float32",
            "writer.max_model_len=256",
            "critic.max_model_len=256",
            "writer.enforce_eager=true",
            "critic.enforce_eager=true",
        ],
    )


def start(directory: Path, *stage_overrides: str) -> AsyncOmni:
    model, settings = build(directory)
    return AsyncOmni(model, pipeline=GraphsPipeline, stage_overrides=[*settings, *stage_overrides])


@pytest.fixture(scope="module")
def omni(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncOmni]:
    omni = start(tmp_path_factory.mktemp("graphs"))
    yield omni
    omni.shutdown()


async def ask(omni: AsyncOmni, graph: str, prompt: Sequence[int] = PROMPT, **more: Any) -> OmniRequestOutput:
    return await collect(
        omni.generate({"prompt_token_ids": list(prompt)}, PARAMS_OF.get(graph, PARAMS), graph=graph, **more)
    )


class ByHand:
    """The engines without the graph."""

    def __init__(self, omni: AsyncOmni, params: Mapping[str, Any] = PARAMS) -> None:
        self._omni = omni
        self._params = omni.params.resolve(params)

    async def run(
        self, stage: str, prompt: Any, params: Mapping[str, Any] | None = None, args: Mapping[str, Any] | None = None
    ) -> OmniRequestOutput:
        engine = self._omni.orchestrator.front(stage)
        context = RequestContext(
            f"by-hand-{id(prompt)}", self._params if params is None else self._omni.params.resolve(params), {}
        )
        outputs = engine.generate(StageRequest(prompt, dict(args or {})), context, frozenset({"text"}))
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
    record = RequestRecord()
    outputs = orchestrator.front("writer").generate(request, context, frozenset({"rows"}), report=record.add)
    reply = await collect(outputs)
    rows = torch.cat([orchestrator.hub.pull_blocking(payload)["rows"] for payload in reply.payloads])
    assert rows.shape == (len(PROMPT) + PARAMS["writer"]["max_tokens"] - 1, SHAPE.hidden_size)
    pipeline = DiffusionPipeline.from_pretrained(omni.config.stage("painter").model)
    settings = {name: value for name, value in PARAMS["painter"].items() if name != "seed"}
    generator = torch.Generator().manual_seed(PARAMS["painter"]["seed"])
    expected = pipeline(prompt_embeds=[rows], generator=generator, output_type="np", **settings).images
    for payload in record.published:
        orchestrator.hub.release_payload(payload, for_all=True)
    answer = await ask(omni, "embedded")
    assert answer.outputs[0].text == reply.outputs[0].text
    pixels = answer.multimodal_output["images"].float() / 255
    assert (pixels - torch.from_numpy(expected)).abs().max() <= 1.01 / 255  # rounded to eight bits


async def test_a_stage_reads_its_own_tensors_by_reference(omni: AsyncOmni) -> None:
    painter = omni.orchestrator.front("painter")
    (before,) = await painter.relay_statistics()
    answer = await ask(omni, "refined")
    (after,) = await painter.relay_statistics()
    for count in ("num_puts", "num_gets"):
        assert after["local"][count] == before["local"][count] + 1
    assert after["local"]["num_leases"] == after["local"]["num_expired"] == 0
    hand = ByHand(omni)
    sketch = await hand.run("painter", " ".join(f"w{token}" for token in PROMPT), LATENTS)
    latents = sketch.multimodal_output["latents"]
    inputs = {
        "payloads": [encode(RelayHub(RelayOptions()).publish("", {"latents": latents}))],
        "inputs": {"latents": "latents"},
    }
    refined = await hand.run("painter", "w7 w8", LATENTS, inputs)
    assert torch.equal(answer.multimodal_output["latents"], refined.multimodal_output["latents"])
    assert not torch.equal(latents, refined.multimodal_output["latents"])


async def test_each_iteration_of_a_loop_reads_the_same_tensors_which_are_then_released(omni: AsyncOmni) -> None:
    prompt = PROMPT * 40  # its rows are too many to travel inline
    once = await ask(omni, "embedded", prompt)
    answer = await ask(omni, "retouched", prompt)
    assert torch.equal(answer.multimodal_output["images"], torch.cat([once.multimodal_output["images"]] * 3))
    (statistics,) = await omni.orchestrator.front("writer").relay_statistics()
    assert statistics["shm"]["num_puts"] > 1
    assert not statistics["shm"]["num_leases"]


@pytest.mark.parametrize("graph", ["handed", "assembled"])
async def test_tensors_pass_between_graphs_that_call_one_another(omni: AsyncOmni, graph: str) -> None:
    prompt = PROMPT * 40
    once, answer = await ask(omni, "embedded", prompt), await ask(omni, graph, prompt)
    assert answer.outputs[0].text == once.outputs[0].text
    assert torch.equal(answer.multimodal_output["images"], once.multimodal_output["images"])


async def test_a_picture_is_painted_again_as_the_critic_says(omni: AsyncOmni) -> None:
    hand = ByHand(omni)
    first = await hand.run("painter", " ".join(f"w{token}" for token in PROMPT))
    said = await hand.run("critic", {"prompt": "w5 <image> w6", "multi_modal_data": {"image": first.images[0]}})
    second = await hand.run("painter", said.outputs[0].text)
    answer = await ask(omni, "critique")
    expected = torch.cat([first.multimodal_output["images"], second.multimodal_output["images"]])
    assert torch.equal(answer.multimodal_output["images"], expected)


async def test_a_graph_is_a_node_of_another_one(omni: AsyncOmni) -> None:
    hand = ByHand(omni)
    reply = await hand.run("writer", {"prompt_token_ids": PROMPT})
    first = await hand.run("painter", " ".join(f"w{token}" for token in reply.outputs[0].token_ids))
    said = await hand.run("critic", {"prompt": "w5 <image> w6", "multi_modal_data": {"image": first.images[0]}})
    second = await hand.run("painter", said.outputs[0].text)
    answer = await ask(omni, "reviewed")
    assert answer.outputs[0].text == reply.outputs[0].text
    expected = torch.cat([first.multimodal_output["images"], second.multimodal_output["images"]])
    assert torch.equal(answer.multimodal_output["images"], expected)
    assert answer.multimodal_output["comment"].startswith(said.outputs[0].text)
    assert set(answer.stage_durations) == {"writer", "painter", "critic", "total"}
    alone = await ask(omni, "critique.review", reply.outputs[0].token_ids)
    assert torch.equal(alone.multimodal_output["images"], expected)


async def test_a_request_ends_the_graphs_that_it_calls(omni: AsyncOmni) -> None:
    slow = PARAMS | {"painter": PARAMS["painter"] | {"num_inference_steps": 500}}
    answer = omni.generate({"prompt_token_ids": PROMPT}, slow, "slow", graph="reviewed", deadline_s=60)
    async for output in answer:
        if output.outputs and output.outputs[0].finish_reason:
            break
    while not omni.orchestrator.front("painter").num_requests:  # noqa: ASYNC110 - the other engine reads it
        await asyncio.sleep(0.001)
    await omni.abort("slow")
    with pytest.raises(CallAborted):
        await anext(answer)
    assert not omni.orchestrator.front("painter").num_requests
    assert omni.orchestrator.runtime.statistics().num_open_calls == 0
    with pytest.raises(DeadlineExceeded, match=r"still running: critique.review, critique.review > painter.paint;"):
        await collect(omni.generate({"prompt_token_ids": PROMPT}, slow, graph="reviewed", deadline_s=1))


async def test_a_graph_call_ends_with_the_outputs_that_complete_it(omni: AsyncOmni) -> None:
    answer = await ask(omni, "illustrated.hasty")
    assert answer.finished
    assert answer.outputs[0].finish_reason == "length"
    assert not answer.images


async def test_a_called_graph_shares_the_session_of_its_request(omni: AsyncOmni) -> None:
    hand = ByHand(omni)
    first = await ask(omni, "history", [1, 10], session_id="called")
    assert list(first.outputs[0].token_ids) == await hand.write([1, 10])
    second = await ask(omni, "retold", [1, 11], session_id="called")
    assert list(second.outputs[0].token_ids) == await hand.write([1, 10, 1, 11])
    assert second.outputs[0].finish_reason == "length"


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


# -- with every message encoded ---------------------------------------------------------------------------------------


@pytest.fixture
def encoded(omni: AsyncOmni) -> Iterator[AsyncOmni]:
    with served_from_bytes(omni.orchestrator):
        yield omni


@pytest.fixture(scope="module")
async def answers(omni: AsyncOmni) -> dict[str, OmniRequestOutput]:
    return await ask_all(omni)


async def ask_all(omni: AsyncOmni) -> dict[str, OmniRequestOutput]:
    """By graph; without graph calls, whose other outputs end when the last one that completes them does."""
    return {graph: await ask(omni, graph) for graph, plan in omni.orchestrator.models.items() if not plan.until}


def assert_equal(answer: OmniRequestOutput, expected: OmniRequestOutput) -> None:
    for one, other in zip(answer.outputs, expected.outputs, strict=True):
        assert (one.text, one.token_ids, one.finish_reason) == (other.text, other.token_ids, other.finish_reason)
    assert answer.multimodal_output.keys() == expected.multimodal_output.keys()
    for name, value in expected.multimodal_output.items():
        made = answer.multimodal_output[name]
        assert torch.equal(made, value) if isinstance(value, torch.Tensor) else made == value
    assert answer.stage_durations.keys() == expected.stage_durations.keys()
    assert answer.latency_parts.keys() == expected.latency_parts.keys()


async def test_answers_are_the_same_where_every_message_is_encoded(
    answers: dict[str, OmniRequestOutput], encoded: AsyncOmni
) -> None:
    for graph, expected in answers.items():
        assert_equal(await ask(encoded, graph), expected)
    for engine in encoded.orchestrator.engines.values():
        assert not any(one["num_leases"] for rank in await engine.relay_statistics() for one in rank.values())


async def test_an_engines_rejection_is_the_clients_where_every_message_is_encoded(encoded: AsyncOmni) -> None:
    with pytest.raises(InvalidRequest, match="prompt") as there:
        await ask(encoded, "plain", range(1, 300))
    assert type(there.value) is InvalidRequest


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


async def test_graphs_are_models_of_their_own(omni: AsyncOmni, client: openai.AsyncOpenAI) -> None:
    names = [model.id async for model in client.models.list()]
    assert names == ["tiny", *list(omni.orchestrator.models)[1:]]
    assert {"diamond", "critique", "critique.review"} <= set(names)
    assert "painting" not in names
    completion = await client.completions.create(
        model="diamond", prompt="<s> w10", max_tokens=6, temperature=0, extra_body={"ignore_eos": True}
    )
    plain = await client.completions.create(
        model="tiny", prompt="<s> w10", max_tokens=6, temperature=0, extra_body={"ignore_eos": True}
    )
    assert completion.choices[0].text != plain.choices[0].text
    called = await client.completions.create(
        model="retold", prompt="<s> w10", max_tokens=6, temperature=0, extra_body={"ignore_eos": True}
    )
    assert (called.choices[0].text, called.usage) == (plain.choices[0].text, plain.usage)
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


async def wait_until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not is_true():  # noqa: ASYNC110 - of another process
            await asyncio.sleep(0.01)


@pytest.fixture
def hold() -> Iterator[Path]:
    """The function computes until this file is removed."""
    file = Path(os.environ[DIRECTORY]) / HOLD
    file.parent.mkdir(exist_ok=True)
    file.touch()
    yield file
    file.unlink(missing_ok=True)


def release(hold: Path) -> None:
    hold.unlink()


async def it_computes(hold: Path) -> None:
    """Wait until the function computes for one more request."""
    calls: list[Path] = []

    def has_started() -> bool:
        calls[:] = [one for one in hold.parent.iterdir() if one != hold]
        return bool(calls)

    await wait_until(has_started)
    calls[0].unlink()


PONDERED = chat("pondered", modalities=["text", "comment"])


async def test_a_function_that_computes_holds_no_stream_up(
    omni: AsyncOmni, client: openai.AsyncOpenAI, hold: Path
) -> None:
    text = (await ask(omni, "plain")).outputs[0].text
    prompt = {"prompt_token_ids": PROMPT}
    streamed = ""
    async with aclosing(omni.generate(prompt, PARAMS, graph="pondered", modalities=["text", "comment"])) as outputs:
        while streamed != text:  # all that comes before the comment
            streamed += "".join(one.text for one in (await anext(outputs)).outputs)
        await it_computes(hold)
        other = await client.chat.completions.create(**chat("tiny"), stream=True)
        assert [chunk async for chunk in other][-1].choices[0].finish_reason == "length"
        release(hold)  # until here the function has computed
        comments = [output.multimodal_output.get("comment", "") async for output in outputs]
    assert "".join(comments) == text[::-1]


@pytest.mark.long  # units: tests/engine/test_function_process.py
async def test_a_functions_process_that_is_killed_fails_its_request_alone_and_is_restarted(
    omni: AsyncOmni, client: openai.AsyncOpenAI, hold: Path
) -> None:
    async def health() -> httpx.Response:
        return await client._client.get("http://server/health")

    text = (await client.chat.completions.create(**chat("tiny"))).choices[0].message.content or ""
    killed = asyncio.ensure_future(client.chat.completions.create(**PONDERED))
    await it_computes(hold)
    (process,) = omni.orchestrator.function_processes
    os.kill(process.pids()[0], signal.SIGKILL)
    with pytest.raises(openai.InternalServerError, match=r"stage 'ponderer': its process has died: killed by SIGKILL"):
        await killed
    release(hold)
    response = await health()
    assert response.status_code == 503
    assert response.json()["stages"]["ponderer"]["state"] == "restarting"
    with pytest.raises(openai.APIStatusError, match="stage 'ponderer': restarting"):
        await client.chat.completions.create(**PONDERED)
    assert (await client.chat.completions.create(**chat("tiny"))).choices[0].message.content == text
    await wait_until(lambda: process.current_status().state is StageState.RUNNING)
    assert (await health()).status_code == 200
    again = await client.chat.completions.create(**PONDERED)
    assert again.choices[0].message.texts["comment"] == text[::-1]  # type: ignore[attr-defined]


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
    called = await client.images.generate(**body | {"model": "reviewed"}, extra_body=settings)
    assert len(called.data or ()) == 2
    with pytest.raises(openai.BadRequestError) as rejected:
        await client.images.generate(**body | {"size": "0x64"}, extra_body=settings)  # type: ignore[arg-type]
    assert rejected.value.param == "size"
    with pytest.raises(openai.BadRequestError, match=r"'diamond' has no image output: valid: illustrated, "):
        await client.images.generate(model="diamond", prompt="w1")
    with pytest.raises(openai.BadRequestError, match=r"no video output; it has text, image, comment"):
        await client.post("/videos/sync", body={"prompt": "w1"}, cast_to=object)
