"""The graphs of the Omni-Flow paper on engines: equal to the same engines called by hand, one after another."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm.model_executor.models.registry import ModelRegistry

from tests.e2e.engines import MARKS, make_image
from tests.e2e.graphs.paper_pipelines import (
    CODES_PER_TOKEN,
    SAMPLE_RATE,
    PaperDecoder,
    PaperHead,
    PaperPipeline,
    codes_of,
    look,
    sound_of,
)
from tests.e2e.graphs.test_graphs import PARAMS as GRAPH_PARAMS
from tests.e2e.graphs.test_graphs import PROMPT, ByHand
from tests.engine_threads import engine_threads
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.messages.outputs import OmniRequestOutput, collect
from vllm_omni.testing import diffusion, llava

pytestmark = [*MARKS, pytest.mark.timeout(300), pytest.mark.long]  # quick: test_graphs.py, tests/flow/test_examples.py

PARAMS: dict[str, Any] = {**GRAPH_PARAMS, "prefill": {**GRAPH_PARAMS["writer"], "max_tokens": 1}}
ENGINE = {"dtype": "float32", "max_model_len": 256, "enforce_eager": True, "kv_cache_memory_bytes": 16 << 20}


@pytest.fixture(scope="module")
def omni(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncOmni]:
    directory = tmp_path_factory.mktemp("paper")
    ModelRegistry.register_model("PaperHead", PaperHead)
    ModelRegistry.register_model("PaperDecoder", PaperDecoder)
    models = {
        "critic": llava.build(directory / "critic", seed=1),
        "painter": diffusion.build(directory / "painter", "z-image"),
    }
    engines = [f"{stage}.{name}={value}" for stage in ("writer", "prefill", "critic") for name, value in ENGINE.items()]
    with engine_threads():
        omni = AsyncOmni(
            llava.build(directory / "writer"),
            pipeline=PaperPipeline,
            stage_overrides=[*(f"{stage}.model={path}" for stage, path in models.items()), *engines],
        )
        yield omni
        omni.shutdown()


class Hand(ByHand):
    async def ids(self, prompt: Any) -> list[int]:
        output = await self.run("writer", prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt})
        return list(output.outputs[0].token_ids)


async def ask(omni: AsyncOmni, graph: str, prompt: Any = None, **more: Any) -> OmniRequestOutput:
    prompt = {"prompt_token_ids": PROMPT} if prompt is None else prompt
    return await collect(omni.generate(prompt, PARAMS, graph=graph, **more))


def ids_of(answer: OmniRequestOutput) -> list[int]:
    return list(answer.outputs[0].token_ids)


@pytest.mark.parametrize("graph", ["case_1", "case_3"])
async def test_each_frame_of_an_engine_meets_what_was_made_of_it(omni: AsyncOmni, graph: str) -> None:
    hand, expected = Hand(omni, PARAMS), []
    for token in await hand.ids(PROMPT):
        expected += await hand.ids([*await hand.ids([1, token]), *await hand.ids([1, token, token])])
    assert ids_of(await ask(omni, graph)) == expected


async def test_frames_of_one_frame_gather_in_one_bucket_in_order(omni: AsyncOmni) -> None:
    hand = Hand(omni, PARAMS)
    spoken = (await hand.run("writer", {"prompt_token_ids": PROMPT})).outputs[0].text
    expected = await hand.ids(await hand.ids(spoken) * 2)
    assert ids_of(await ask(omni, "case_2")) == expected


@pytest.mark.parametrize("num_images", [0, 1, 3])
async def test_an_image_of_a_text_and_any_number_of_images(omni: AsyncOmni, num_images: int) -> None:
    hand = Hand(omni, PARAMS)
    images = [make_image(seed) for seed in range(num_images)]
    texts = [(await hand.run("writer", "w10 w20")).outputs[0].text]
    for prompt in ("w5 <image> w6", "w7 <image>"):
        for image in images:
            texts.append((await hand.run("critic", look(prompt, image).prompt)).outputs[0].text)
    painted = await hand.run("painter", " ".join(texts))
    answer = await ask(omni, "hunyuan_image", {"text": "w10 w20", "images": images})
    assert torch.equal(answer.multimodal_output["images"], 255 - painted.multimodal_output["images"])


async def test_each_step_of_a_model_is_read_by_three_heads(omni: AsyncOmni) -> None:
    tokens = await Hand(omni, PARAMS).ids(PROMPT)
    answer = await ask(omni, "longcat_next", modalities=["text", "audio", "image_codes"])
    assert answer.outputs[0].text == "".join(f"<{token}>" for token in tokens)
    assert torch.equal(answer.multimodal_output["audio"], sound_of(codes_of("audio", token) for token in tokens))
    assert len(answer.multimodal_output["audio"]) == CODES_PER_TOKEN["audio"] * len(tokens)
    codes = [code for token in tokens for code in codes_of("image", token).tolist()]
    assert answer.multimodal_output["image_codes"] == codes
    assert answer.multimodal_output["sample_rate"] == SAMPLE_RATE


async def test_one_engine_continues_what_another_has_prefilled(omni: AsyncOmni) -> None:
    num_tokens = PARAMS["writer"]["max_tokens"]
    hand = ByHand(omni, {**PARAMS, "writer": {**PARAMS["writer"], "max_tokens": num_tokens + 1}})
    answers = await asyncio.gather(*(ask(omni, "prefill_decode", {"prompt_token_ids": PROMPT[:n]}) for n in (3, 4, 5)))
    for n, answer in zip((3, 4, 5), answers, strict=True):
        assert ids_of(answer) == await hand.write(PROMPT[:n])
        assert answer.outputs[0].finish_reason == "length"
