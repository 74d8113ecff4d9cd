"""A graph of two stages between which a KV cache travels, as users declare it (``examples/prefill_decode.py``).

DeepSeek-V2 over HTTP, whose pages have latents: ids as transformers' own. The language model of a LLaVA-1.5, a Llama,
in this process: ids as one upstream engine's, and nothing is left behind, however a request ends.
"""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm import RequestOutput, SamplingParams
from vllm.lora.request import LoRARequest

from tests.e2e.engines import (
    MARKS,
    NUM_TOKENS,
    UPSTREAM,
    engine_here,
    greedy,
    make_image,
    tokens_of,
    upstream_answers,
)
from tests.e2e.test_deepseek_v2 import NUM_TOKENS as NUM_DEEPSEEK_TOKENS
from tests.e2e.test_deepseek_v2 import PROMPTS, checkpoint, expected
from tests.e2e.test_epd_recovery import RANK, adapter
from tests.processes import paused
from tests.server import Server, serve
from vllm_omni import OmniLLM
from vllm_omni.engine.stage import StageEngine
from vllm_omni.errors import InvalidRequest, StageFailed
from vllm_omni.messages.outputs import OmniRequestOutput, collect
from vllm_omni.process.status import StageState

pytestmark = [*MARKS, pytest.mark.timeout(400), pytest.mark.long]  # units: tests/engine/test_cache_edges.py

__all__ = ["adapter", "checkpoint", "expected"]  # fixtures

STAGES = ("prefill", "decode")
PIPELINE = f"--pipeline={Path(__file__).resolve().parents[2] / 'examples/prefill_decode.py'}:PrefillDecode"
TEXTS = [f"<s> {' '.join(f'w{(count + 7 * n) % 100}' for n in range(count))}" for count in (1, 31, 32, 63, 90, 64)]
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 17},
    {"logprobs": 3},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"prompt_logprobs": 2},
    {"n": 3, "temperature": 1.0, "seed": 5},
]
PARAMS = [greedy(**kind) for kind in KINDS]
LONG = 120
RESTART_TIMEOUT_S = 120.0


# -- DeepSeek-V2, over HTTP --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ["--dtype=float32", "--max-model-len=512", "--block-size=32", "--max-num-batched-tokens=128"]
    flags += ["--enforce-eager", "--attention-backend=CPU_MLA"]
    flags += [f"--stage={name}.kv_cache_memory_bytes={16 << 20}" for name in STAGES]
    with serve(checkpoint, tmp_path_factory.mktemp("server") / "log", PIPELINE, *flags) as server:
        yield server


def stream(server: Server, prompt: str) -> tuple[list[int], int]:
    """The ids of a streamed completion, and the number of its pieces."""
    asked: dict[str, Any] = {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": NUM_DEEPSEEK_TOKENS}
    ids: list[int] = []
    pieces = 0
    extra = {"ignore_eos": True, "return_token_ids": True}
    for chunk in server.client.completions.create(**asked, stream=True, extra_body=extra):
        new = getattr(chunk.choices[0], "token_ids", None) or []
        ids += new
        pieces += bool(new)
    return ids, pieces


def test_streamed_tokens_of_latent_pages_are_those_of_transformers(server: Server, expected: list[list[int]]) -> None:
    for prompt, answer in zip(PROMPTS, expected, strict=True):
        ids, pieces = stream(server, prompt)
        assert ids == answer
        assert pieces > 1
    assert server.holds_nothing()
    assert server.num_tokens("prefill") == len(PROMPTS)  # one for each prompt, which is discarded
    assert server.num_tokens("decode") == len(PROMPTS) * NUM_DEEPSEEK_TOKENS


# -- a Llama, in this process ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def upstream(llava_checkpoint: Path) -> list[RequestOutput]:
    return upstream_answers(llava_checkpoint, TEXTS, PARAMS)


@pytest.fixture(scope="module")
def omni(llava_checkpoint: Path, upstream: list[RequestOutput]) -> Iterator[OmniLLM]:
    with start(llava_checkpoint) as omni:
        yield omni


def start(checkpoint: Path, *stage_overrides: str, **each_stage: Any) -> OmniLLM:
    """The two stages.

    Args:
        each_stage: engine arguments of both.
    """
    sys.modules.pop("prefill_decode", None)  # another example has that name
    each_stage = {"num_gpu_blocks_override": 64, **each_stage}
    of_stages = [f"{name}.{key}={value}" for name in STAGES for key, value in each_stage.items()]
    arguments = {key: value for key, value in UPSTREAM.items() if key not in each_stage}
    pipeline = PIPELINE.removeprefix("--pipeline=")
    return OmniLLM(checkpoint, pipeline=pipeline, stage_overrides=[*of_stages, *stage_overrides], **arguments)


@pytest.fixture(autouse=True)
def holds_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test, no stage of the Llama has a request, and no page is leased."""
    yield
    if "omni" in request.fixturenames:
        omni: OmniLLM = request.getfixturevalue("omni")
        assert omni.run(num_leases(omni)) == 0
        assert not any(engine.num_requests for engine in omni.engine.orchestrator.engines.values())
        assert omni.engine.orchestrator.runtime.statistics().num_open_calls == 0


async def num_leases(omni: OmniLLM) -> int:
    return sum([await count(omni, name, "num_leases") for name in STAGES])


async def count(omni: OmniLLM, engine: str, what: str) -> int:
    """One of the figures of an engine's relay."""
    statistics = await engine_of(omni, engine).relay_statistics()
    return sum(one[what] for rank in statistics for one in rank.values())


async def num_moved(omni: OmniLLM) -> tuple[int, int]:
    """How many buffers of pages the first stage has published, and the second one has pulled."""
    return await count(omni, "prefill", "num_puts"), await count(omni, "decode", "num_gets")


def engine_of(omni: OmniLLM, name: str) -> StageEngine:
    return omni.engine.orchestrator.engines[name]


async def ask(omni: OmniLLM, text: str, params: SamplingParams, request_id: str | None = None) -> list[int]:
    ids: list[int] = []
    async for output in omni.engine.generate(text, params, request_id):
        ids += output.outputs[0].token_ids
    return ids


def logprobs_of(positions: Any) -> list[dict[int, float]]:
    return [{token: one.logprob for token, one in position.items()} for position in positions or () if position]


def test_every_kind_of_request_is_answered_as_by_one_engine(omni: OmniLLM, upstream: list[RequestOutput]) -> None:
    async def run() -> list[OmniRequestOutput]:
        streams = [omni.engine.generate(text, params) for text, params in zip(TEXTS, PARAMS, strict=True)]
        return await asyncio.gather(*map(collect, streams))

    before = omni.run(num_moved(omni))
    answers = omni.run(run())
    assert tokens_of(answers) == tokens_of(upstream)
    assert logprobs_of(answers[2].outputs[0].logprobs) == [
        pytest.approx(one, abs=1e-4) for one in logprobs_of(upstream[2].outputs[0].logprobs)
    ]
    assert logprobs_of(answers[4].prompt_logprobs) == [
        pytest.approx(one, abs=1e-4) for one in logprobs_of(upstream[4].prompt_logprobs)
    ]
    assert [answer.prompt_token_ids for answer in answers] == [answer.prompt_token_ids for answer in upstream]
    assert all(answer.kv_transfer_params is None for answer in answers)
    assert set(answers[0].stage_durations) == {*STAGES, "total"}
    assert answers[0].latency_parts["decode"]["prefill_execution"] == 0  # the prompt was computed elsewhere
    num_published, num_pulled = np.subtract(omni.run(num_moved(omni)), before).tolist()
    assert num_published == len(TEXTS)
    # A prompt whose log probabilities are asked for is computed where they are. The last one has three answers, which
    # pull one after the other, or find the pages in the prefix cache.
    assert len(TEXTS) - 1 <= num_pulled <= len(TEXTS) + 1


def test_several_answers_continue_behind_one_prompt(omni: OmniLLM, upstream: list[RequestOutput]) -> None:
    answer = omni.run(collect(omni.engine.generate(TEXTS[-1], PARAMS[-1])))
    assert [one.token_ids for one in answer.outputs] == [one.token_ids for one in upstream[-1].outputs]


def test_a_prompt_with_an_image_is_rejected_with_the_way_to_split_its_model(omni: OmniLLM) -> None:
    prompt = {"prompt": "<s> w1 <image> w5", "multi_modal_data": {"image": make_image(0)}}
    with pytest.raises(InvalidRequest, match=r"'multimodal': the KV cache travels to another stage, .* by --epd"):
        omni.generate([prompt], greedy(), use_tqdm=False)


def test_parameters_are_those_of_the_stage_that_reads_the_prompt(omni: OmniLLM) -> None:
    with pytest.raises(InvalidRequest, match=r"'decode': max_tokens: it continues what 'prefill' has read, .*give"):
        omni.generate([TEXTS[0]], {"decode": {"max_tokens": 4}}, use_tqdm=False)


def test_an_abort_while_it_decodes_releases_everything(omni: OmniLLM) -> None:
    async def run() -> int:
        async for _ in omni.engine.generate(TEXTS[4], greedy(max_tokens=LONG), "left"):
            leases = await num_leases(omni)
            await omni.engine.abort("left")
            return leases
        raise AssertionError("no output")

    assert omni.run(run()) == 0  # the pages were released with the first token


def test_an_abort_before_the_pages_are_pulled_releases_them(omni: OmniLLM) -> None:
    async def run() -> int:
        decode = engine_of(omni, "decode")
        with paused(*decode.pids()):
            task = asyncio.create_task(ask(omni, TEXTS[4], greedy(), "left"))
            async with asyncio.timeout(60):
                while not decode.num_requests:  # noqa: ASYNC110  # another task changes it
                    await asyncio.sleep(0.01)
            leases = await count(omni, "prefill", "num_leases")
            await omni.engine.abort("left")
        await asyncio.gather(task, return_exceptions=True)
        return leases

    assert omni.run(run()) == 1


def test_a_request_fails_with_the_stage_that_decodes_it_and_leaves_no_pages(
    omni: OmniLLM, upstream: list[RequestOutput]
) -> None:
    async def run() -> None:
        with pytest.raises(StageFailed, match="'decode': its engine has died"):
            async for _ in omni.engine.generate(TEXTS[4], greedy(max_tokens=LONG)):
                engine_of(omni, "decode").kill()

    async def back() -> None:
        async with asyncio.timeout(RESTART_TIMEOUT_S):
            while omni.engine.stage_report()["decode"].state is not StageState.RUNNING:  # noqa: ASYNC110  # a thread
                await asyncio.sleep(0.05)

    omni.run(run())
    omni.run(back())
    assert omni.run(ask(omni, TEXTS[0], greedy())) == upstream[0].outputs[0].token_ids
    assert len(upstream[0].outputs[0].token_ids) == NUM_TOKENS


def test_replicas_with_an_adapter_answer_as_one_engine(llava_checkpoint: Path, adapter: LoRARequest) -> None:
    lora = {"enable_lora": True, "max_lora_rank": RANK, "max_num_seqs": 1}
    with engine_here(llava_checkpoint, **lora) as llm:
        plain, adapted = (
            tokens_of(llm.generate(TEXTS, greedy(), lora_request=one, use_tqdm=False)) for one in (None, adapter)
        )
    assert plain != adapted
    with start(llava_checkpoint, "decode.replicas=2", **lora) as omni:
        for one, expected in ((None, plain), (adapter, adapted)):
            assert tokens_of(omni.generate(TEXTS, greedy(), lora_request=one, use_tqdm=False)) == expected
        assert omni.run(omni.engine.list_loras()) == {adapter.lora_int_id}
        pulled = [await_count(omni, f"decode/{number}", "num_gets") for number in range(2)]
        assert sum(pulled) == 2 * len(TEXTS) and all(pulled)
        assert await_count(omni, "prefill", "num_leases") == 0


def await_count(omni: OmniLLM, engine: str, what: str) -> int:
    return omni.run(count(omni, engine, what))
