"""Qwen3-Omni in other shapes and under faults: aborts, a stage that dies, tensor parallelism, clients of its server.

Tolerances: those of ``tests/e2e/test_qwen3_omni_parity.py``, which shares the helpers.
"""

import asyncio
import base64
import io
import signal
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
import soundfile

from tests import machine
from tests.e2e.engines import MARKS
from tests.e2e.test_qwen3_omni_parity import (
    ENGINES,
    FEW,
    GREEDY,
    MAX_TOKENS,
    NUM_FRAMES,
    PENALTY,
    answer,
    check_speech,
    prompt_of,
)
from tests.engine_threads import BATCHES, engine_threads, num_preemptions, thread_of
from tests.reference.media import Case
from tests.reference.qwen3_omni import Reference
from tests.server import END_TIMEOUT_S, QUESTION, Server, serve
from vllm_omni import OmniLLM
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.errors import StageFailed
from vllm_omni.messages.outputs import OmniRequestOutput
from vllm_omni.process.status import StageState
from vllm_omni.testing.qwen3_omni import build

# The talker has no ids for its prompt, so its penalty counts only what it generates, as the library says.
PENALTY_WARNING = pytest.mark.filterwarnings("ignore:Passing `repetition_penalty` with `inputs_embeds`:UserWarning")
pytestmark = [*MARKS, PENALTY_WARNING, pytest.mark.long, pytest.mark.timeout(600)]

SAMPLE_RATE = 24000
LONG = 220  # frames

# Of each shape, settings of its stages: prompts in chunks, and compiled models, as in the default deployment; room for
# a few requests only.
DEPLOYMENTS = {
    "apart": (
        "thinker.kv_cache_memory_bytes=67108864",
        "talker.kv_cache_memory_bytes=67108864",
        "thinker.max_num_batched_tokens=96",
        "talker.max_num_batched_tokens=64",
        "thinker.enforce_eager=false",
        "talker.enforce_eager=false",
    ),
    "eight": (
        "thinker.max_model_len=1024",
        "talker.max_model_len=1024",
        "thinker.num_gpu_blocks_override=34",
        "talker.num_gpu_blocks_override=34",
        "thinker.enable_prefix_caching=false",
    ),
}


class Served(NamedTuple):
    shape: str
    omni: AsyncOmni
    reference: Reference


@pytest.fixture(scope="module", params=["apart", "eight"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    if request.param == "apart":
        machine.require("g++")  # torch.compile
    path = build(tmp_path_factory.mktemp(request.param), variant=request.param)
    with engine_threads():
        omni = AsyncOmni(path, stage_overrides=DEPLOYMENTS[request.param], skip_mm_profiling=True, **ENGINES)
        yield Served(request.param, omni, Reference(path))
        omni.shutdown()


def check(
    reference: Reference, case: Case, output: OmniRequestOutput, num_frames: int = NUM_FRAMES, min_frames: int = 0
) -> None:
    expected = reference.answer(
        case, max_tokens=MAX_TOKENS, max_codes=num_frames, repetition_penalty=PENALTY, min_codes=min_frames
    )
    assert output.outputs[0].token_ids == expected.reply.token_ids, case.name
    assert expected.speech is not None
    check_speech(reference, output, expected.speech, case.name)


async def until_idle(omni: AsyncOmni) -> None:
    """Stages learn of ends with their next step."""
    for _ in range(2000):
        statistics = omni.orchestrator.runtime.statistics()
        if not any((statistics.num_open_calls, statistics.num_running_activations, statistics.num_buffered_frames)):
            return
        await asyncio.sleep(0.01)
    raise TimeoutError(f"{statistics} after all requests")


async def test_a_batch_of_eight_equals_transformers(served: Served) -> None:
    cases = [*FEW, *FEW]
    for _ in range(BATCHES):
        outputs = await asyncio.gather(*(answer(served.omni, case, NUM_FRAMES) for case in cases))
        for case, output in zip(cases, outputs, strict=True):
            check(served.reference, case, output)
        preempted = [num_preemptions(served.omni.orchestrator.front(stage)) for stage in ("thinker", "talker")]
        if served.shape != "eight" or all(preempted):
            return
    raise AssertionError(f"no request was preempted in one of the stages: {preempted}")


async def test_more_than_two_hundred_frames_equal_transformers(served: Served) -> None:
    output = await answer(served.omni, FEW[0], LONG, min_frames=LONG)
    check(served.reference, FEW[0], output, LONG, min_frames=LONG)
    assert len(output.multimodal_output["codec_ids"]) == LONG


async def test_an_abort_of_a_half_leaves_nothing_and_the_others_end(served: Served) -> None:
    async def leave(case: Case) -> None:
        async with aclosing(served.omni.generate(prompt_of(case), [GREEDY, GREEDY, {}])) as outputs:
            async for one in outputs:
                if "audio" in one.multimodal_output:
                    return
        raise AssertionError("no sound before the end")

    tasks = [leave(case) if index % 2 else answer(served.omni, case, NUM_FRAMES) for index, case in enumerate(FEW)]
    for case, output in zip(FEW, await asyncio.gather(*tasks), strict=True):
        if output is not None:
            check(served.reference, case, output)
    await until_idle(served.omni)


@pytest.mark.parametrize("served", ["eight"], indirect=True)
@pytest.mark.parametrize("stage", ["thinker", "talker", "code2wav"])
async def test_a_request_fails_with_a_stage_and_later_ones_are_answered(served: Served, stage: str) -> None:
    engine = served.omni.orchestrator.front(stage)
    async with aclosing(served.omni.generate(prompt_of(FEW[0]), [GREEDY, GREEDY, {}])) as outputs:
        await anext(outputs)
        thread_of(engine).kill()
        with pytest.raises(StageFailed, match=stage):
            async for _ in outputs:
                pass
    for _ in range(2000):
        if engine.current_status().state is StageState.RUNNING:
            break
        await asyncio.sleep(0.01)
    check(served.reference, FEW[0], await answer(served.omni, FEW[0], NUM_FRAMES))
    await until_idle(served.omni)


def test_two_ranks_of_each_language_model_answer_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_OMNI_FORK_SERVER", "1")  # engines of other tests may still be threads
    path = build(tmp_path / "checkpoint")
    overrides = [f"{stage}.tensor_parallel_size=2" for stage in ("thinker", "talker")]
    with OmniLLM(path, stage_overrides=overrides, skip_mm_profiling=True, **ENGINES) as llm:

        async def answer_all() -> list[OmniRequestOutput]:
            return await asyncio.gather(*(answer(llm.engine, case, NUM_FRAMES) for case in FEW))

        outputs = llm.run(answer_all())
    reference = Reference(path)
    for case, output in zip(FEW, outputs, strict=True):
        check(reference, case, output)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("server")
    flags = ("--dtype=float32", "--enforce-eager", "--max-model-len=1024", "--skip-mm-profiling")
    with serve(build(directory / "tiny"), directory / "log", *flags) as server:
        yield server


def test_the_openai_client_gets_text_and_speech_until_ctrl_c(server: Server) -> None:
    model = server.client.models.list().data[0].id
    request = {
        "model": model,
        "messages": QUESTION,
        "modalities": ["text", "audio"],
        "audio": {"voice": "ethan", "format": "wav"},
        "max_completion_tokens": 8,
        "temperature": 0,
        "extra_body": {"sampling_params_list": [{}, {**GREEDY, "max_tokens": 10}, {}]},
    }
    message = server.client.chat.completions.create(**request).choices[0].message
    assert message.content and message.audio is not None
    sound, rate = soundfile.read(io.BytesIO(base64.b64decode(message.audio.data)))
    assert rate == SAMPLE_RATE and len(sound) > 0
    streamed = {**request, "audio": {"voice": "ethan", "format": "pcm16"}, "stream": True}
    words, num_bytes = [], 0
    for chunk in server.client.chat.completions.create(**streamed):
        for choice in chunk.choices:
            words.append(choice.delta.content or "")
            if choice.delta.audio is not None and choice.delta.audio.data:
                num_bytes += len(base64.b64decode(choice.delta.audio.data))
    assert "".join(words) == message.content
    assert num_bytes == 2 * len(sound)
    with pytest.raises(httpx.HTTPStatusError, match="400"):
        body = {"model": model, "messages": QUESTION, "modalities": ["text", "audio"], "audio": {"voice": "nobody"}}
        server.post("/v1/chat/completions", body).raise_for_status()
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(END_TIMEOUT_S) == 0
    assert "Traceback" not in server.log.read_text()
