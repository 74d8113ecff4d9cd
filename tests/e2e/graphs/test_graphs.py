"""Graphs that are no chains, on real engines: equal to the same engines called by hand, one after another."""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from tests.e2e.graphs.pipelines import NUM_TOOL_CALLS, GraphsPipeline
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.messages.outputs import OmniRequestOutput, collect
from vllm_omni.model_executor.pipeline import RequestContext, StageRequest
from vllm_omni.testing import diffusion, llava

pytestmark = pytest.mark.timeout(400)

PROMPT = [1, 10, 20, 30, 40]
PARAMS: dict[str, Any] = {
    "writer": {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True},
    "critic": {"temperature": 0.0, "max_tokens": 5, "ignore_eos": True},
    "painter": {"num_inference_steps": 2, "height": 64, "width": 64, "seed": 3},
}


@pytest.fixture(scope="module")
def omni(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncOmni]:
    directory = tmp_path_factory.mktemp("graphs")
    painter = diffusion.build(directory / "painter", "sd3")
    omni = AsyncOmni(
        llava.build(directory / "writer"),
        pipeline=GraphsPipeline,
        stage_overrides=[
            f"critic.model={llava.build(directory / 'critic', seed=1)}",
            f"painter.model={painter}",
            "writer.dtype=float32",
            "critic.dtype=float32",
            "writer.max_model_len=256",
            "critic.max_model_len=256",
            "writer.enforce_eager=true",
            "critic.enforce_eager=true",
        ],
    )
    yield omni
    omni.shutdown()


async def ask(omni: AsyncOmni, graph: str, prompt: Sequence[int] = PROMPT, **more: Any) -> OmniRequestOutput:
    return await collect(omni.generate({"prompt_token_ids": list(prompt)}, PARAMS, graph=graph, **more))


class ByHand:
    """The engines without the graph."""

    def __init__(self, omni: AsyncOmni) -> None:
        self._omni = omni
        self._params = omni.params.resolve(PARAMS)

    async def run(self, stage: str, prompt: Any) -> OmniRequestOutput:
        engine = self._omni.orchestrator.front(stage)
        context = RequestContext(f"by-hand-{id(prompt)}", self._params, {})
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
