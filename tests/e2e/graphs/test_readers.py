"""One stage's rows, streamed to two autoregressive stages at once: each answers as it does alone.

The readers are two talkers of Qwen2.5-Omni's thinker. One reads over shared memory, the other over TCP, with few
credits, which it gives back late.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.errors import CallAborted, StageFailed
from vllm_omni.flow import Graph
from vllm_omni.messages.outputs import OmniRequestOutput, collect
from vllm_omni.model_executor.models.qwen2_5_omni.graph import Talker, Thinker
from vllm_omni.model_executor.models.qwen2_5_omni.pipeline import Qwen2_5OmniPipeline
from vllm_omni.testing import qwen2_5_omni as tiny

pytestmark = [pytest.mark.timeout(300), pytest.mark.long]  # units: tests/model_executor/test_row_publisher.py

NUM_TOKENS, NUM_CODES = 24, 40
STAGES = ("thinker", "talker", "echo")
PARAMS: dict[str, Any] = {
    "thinker": {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True},
    "talker": {"temperature": 0.0, "max_tokens": NUM_CODES, "repetition_penalty": 1.0},
    "echo": {"temperature": 0.0, "max_tokens": NUM_CODES, "repetition_penalty": 1.0},
}
PROMPT = {"prompt": "<|im_start|>user\nTell me a story.<|im_end|>\n<|im_start|>assistant\n"}


class TwoTalkers(Qwen2_5OmniPipeline):
    """The thinker, and two talkers that read its rows."""

    modalities = {"text": "text"}
    extra_outputs = {"codec_ids": "codec_ids", "echoed_ids": "echoed_ids"}
    chunks = {}
    speech_stage = None
    deployment = {
        "stages": {name: {"engine_type": "ar"} for name in STAGES},
        "edges": {
            "thinker->talker": {"transport": "shm", "credits": 256},
            "thinker->echo": {"transport": "tcp", "credits": 4},
        },
    }

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        thinker, talker, _ = self.stages
        self.stages = (thinker, talker, replace(talker, name="echo"))
        self.graph = graph = Graph("duet")
        reply = graph.role(Thinker, "thinker").generate(prompt=graph.placeholder("prompt"))
        codes = [
            graph.role(Talker, name).generate(rows=reply.rows.via(self.thinker_to_talker)).codes for name in STAGES[1:]
        ]
        graph.output(text=reply.text, codec_ids=codes[0], echoed_ids=codes[1])


@pytest.fixture(scope="module")
def omni(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncOmni]:
    omni = AsyncOmni(
        tiny.build(tmp_path_factory.mktemp("checkpoint")),
        pipeline=TwoTalkers,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        skip_mm_profiling=True,
    )
    yield omni
    omni.shutdown()


async def ask(omni: AsyncOmni, outputs: Sequence[str], **more: Any) -> OmniRequestOutput:
    return await collect(omni.generate(PROMPT, PARAMS, modalities=["text", *outputs], **more))


async def relays(omni: AsyncOmni) -> dict[str, dict[str, int]]:
    (statistics,) = await omni.orchestrator.front("thinker").relay_statistics()
    return statistics


async def wait_for_no_lease(omni: AsyncOmni) -> None:
    async with asyncio.timeout(60):
        while any(one["num_leases"] for one in (await relays(omni)).values()):  # noqa: ASYNC110 - of another process
            await asyncio.sleep(0.01)


async def test_each_of_two_readers_answers_as_alone(omni: AsyncOmni) -> None:
    talker = await ask(omni, ["codec_ids"])
    before = await relays(omni)
    echo = await ask(omni, ["echoed_ids"])
    assert before["tcp"]["num_puts"] == 0 and (await relays(omni))["shm"] == before["shm"]  # each over its own edge
    alone = talker.multimodal_output["codec_ids"], echo.multimodal_output["echoed_ids"]
    assert alone[0] == alone[1] and len(alone[0]) >= NUM_CODES - 1
    both = await asyncio.gather(*(ask(omni, ["codec_ids", "echoed_ids"]) for _ in range(3)))
    for answer in both:
        assert (answer.multimodal_output["codec_ids"], answer.multimodal_output["echoed_ids"]) == alone
        assert answer.outputs[0].token_ids == talker.outputs[0].token_ids
    await wait_for_no_lease(omni)


async def test_an_aborted_answer_leaves_no_share_of_either_reader(omni: AsyncOmni) -> None:
    task = asyncio.create_task(ask(omni, ["codec_ids", "echoed_ids"], request_id="aborted"))
    async with asyncio.timeout(60):
        while not omni.orchestrator.front("echo").num_requests:  # noqa: ASYNC110 - of another process
            await asyncio.sleep(0.002)
    await omni.abort("aborted")
    with pytest.raises(CallAborted):
        await task
    await wait_for_no_lease(omni)


async def test_a_reader_that_dies_leaves_nothing_and_the_other_answers(omni: AsyncOmni) -> None:
    task = asyncio.create_task(ask(omni, ["codec_ids", "echoed_ids"]))
    echo = omni.orchestrator.front("echo")
    async with asyncio.timeout(60):
        while not echo.num_requests:  # noqa: ASYNC110 - of another process
            await asyncio.sleep(0.002)
    echo.kill()
    with pytest.raises(StageFailed, match="echo"):
        await task
    await wait_for_no_lease(omni)
    assert len((await ask(omni, ["codec_ids"])).multimodal_output["codec_ids"]) >= NUM_CODES - 1
    await wait_for_no_lease(omni)
