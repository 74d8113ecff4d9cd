"""A tiny LLaVA-1.5 as six instances, of which each test uses some: every mix answers as one stock engine does.

The last tests kill instances one after the other; those before them need all.
"""

import asyncio
import base64
import io
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
import numpy as np
import psutil
import pytest
from PIL import Image
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.reference import llava
from vllm_omni import OmniLLM
from vllm_omni.engine.instances import InstanceGroup
from vllm_omni.engine.stage import StageState, StageStatus
from vllm_omni.entrypoints.cli.serve import parse_serve_args
from vllm_omni.entrypoints.openai.app import build_omni_app
from vllm_omni.errors import StageFailed, StageUnavailable

pytestmark = [
    pytest.mark.slow,
    # vLLM's own, of a worker in this process.
    pytest.mark.filterwarnings("ignore:`torch.distributed.reduce_op` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:max_rollback_tokens is deprecated:DeprecationWarning"),
]

ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_seqs": 8,
    "block_size": 32,
    "limit_mm_per_prompt": {"image": 2},
}
MIX = "E:1,P:1,D:1,EP:1,ED:1,PD:1"
NUM_TOKENS = 8
LONG = 200
CHOICES = ["w7", "w9"]


def make_image(number: int) -> Image.Image:
    pixels = np.random.default_rng(number).integers(0, 255, (llava.IMAGE_SIZE, llava.IMAGE_SIZE, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def make_prompts() -> list[dict[str, Any]]:
    prompts: list[dict[str, Any]] = [{"prompt": f"<s> w{n} w{n + 1} w{n + 2}"} for n in range(2)]
    prompts += [
        {"prompt": f"<s> w{n} <image> w{n + 3}", "multi_modal_data": {"image": make_image(n)}} for n in range(4)
    ]
    two = [make_image(3), make_image(4)]
    prompts.append({"prompt": "<s> <image> w1 <image> w2", "multi_modal_data": {"image": two}})
    # Nothing behind the image: the last token of the prompt is its own.
    prompts.append({"prompt": "<s> w1 <image>", "multi_modal_data": {"image": make_image(5)}})
    return prompts


NUM_IMAGES = 6  # of the prompts, each counted once


def make_params(number: int) -> SamplingParams:
    common: dict[str, Any] = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
    match number:
        case 2:
            return SamplingParams(temperature=1.0, seed=7, **common)
        case 3:
            return SamplingParams(
                temperature=0, max_tokens=NUM_TOKENS, structured_outputs=StructuredOutputsParams(choice=CHOICES)
            )
        case 4:
            return SamplingParams(temperature=0, presence_penalty=1.5, **common)
    return SamplingParams(temperature=0, **common)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llava.build(tmp_path_factory.mktemp("llava"))


class Stock(NamedTuple):
    tokens: list[list[int]]
    long: list[int]  # a reply to the first image


@pytest.fixture(scope="module")
def stock(checkpoint: Path) -> Stock:
    """What vLLM alone says."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        llm = LLM(str(checkpoint), **ENGINE)
        prompts = make_prompts()
        outputs = llm.generate(prompts, [make_params(number) for number in range(len(prompts))], use_tqdm=False)
        (long,) = llm.generate(
            prompts[2], SamplingParams(temperature=0, max_tokens=LONG, ignore_eos=True), use_tqdm=False
        )
        llm.llm_engine.engine_core.shutdown()
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    return Stock(tokens, list(long.outputs[0].token_ids))


@pytest.fixture(scope="module")
def omni(checkpoint: Path, stock: Stock) -> Iterator[OmniLLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_OMNI_STAGE_RESTARTS", "0")  # who is killed stays dead
        patch.setenv("TORCHDYNAMO_DISABLE", "1")  # vLLM compiles how it ranks the tokens of a prompt
        with OmniLLM(checkpoint, **ENGINE, epd=MIX) as omni:
            yield omni


@pytest.fixture
def group(omni: OmniLLM) -> Iterator[InstanceGroup]:
    """The stage, which holds nothing before and after."""
    group = omni.engine.orchestrator.nodes["language"]
    assert isinstance(group, InstanceGroup)
    kinds = group.kinds
    yield group
    group.kinds = kinds
    assert not any(group._work.values())
    if not all(group._is_alive(name) for name in group.engines):  # after the last test
        return
    for reset in (omni.engine.reset_mm_cache, omni.engine.reset_encoder_cache, omni.engine.reset_prefix_cache):
        omni._run(reset())
    leases = omni._run(count_leases(group))
    assert not any(leases.values()), leases


async def count_leases(group: InstanceGroup) -> dict[str, int]:
    counts = {}
    for name, engine in group.engines.items():
        if group._is_alive(name):
            ranks = await engine.relay_statistics()
            counts[name] = sum(backend["num_leases"] for rank in ranks for backend in rank.values())
    return counts


@contextmanager
def only(group: InstanceGroup, mix: str) -> Iterator[None]:
    """Use one instance of each of these kinds."""
    kinds, group.kinds = group.kinds, {f"language/{kind}0": kind for kind in mix.split("|")}
    try:
        yield
    finally:
        group.kinds = kinds


async def begun(group: InstanceGroup, name: str) -> None:
    """An instance has been given something to do."""
    while not group._work[name]:  # noqa: ASYNC110  # nothing tells of it
        await asyncio.sleep(0)


def answer(omni: OmniLLM) -> list[list[int]]:
    async def one(number: int, prompt: Any) -> list[int]:
        tokens: list[int] = []
        async for output in omni.engine.generate(prompt, make_params(number)):
            tokens += output.outputs[0].token_ids
        return tokens

    async def all_of_them() -> list[list[int]]:
        return await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(make_prompts())))

    answers: list[list[int]] = omni._run(all_of_them())
    return answers


@pytest.mark.parametrize(
    ("mix", "encoder"), [("E|P|D", "E0"), ("EP|D", "EP0"), ("ED|P", "ED0"), ("E|PD", "E0"), ("PD", "PD0")]
)
def test_every_mix_answers_as_one_engine_does(
    omni: OmniLLM, group: InstanceGroup, stock: Stock, mix: str, encoder: str
) -> None:
    before = group.statistics()
    with only(group, mix):
        assert answer(omni) == stock.tokens
        first = group.statistics()
        assert answer(omni) == stock.tokens
        second = group.statistics()
    # With its prefixes and images cached, it is the same, and nothing is encoded twice.
    assert len({tuple(tokens) for tokens in stock.tokens}) == len(stock.tokens)
    if "E" in mix:
        # Where nobody encodes for others, the one that decodes sees to the image with which a prompt ends.
        assert first.num_encoded - before.num_encoded == NUM_IMAGES + (mix == "EP|D")
        assert second.num_encoded == first.num_encoded
    tasks = {
        name: number - before.num_tasks.get(name, 0)
        for name, number in first.num_tasks.items()
        if number != before.num_tasks.get(name, 0)
    }
    num_prompts, num_with_images = len(stock.tokens), len(stock.tokens) - 2
    want = {f"language/{kind}0": num_prompts for kind in mix.split("|")}
    if encoder in ("E0", "ED0"):
        want[f"language/{encoder}"] = num_with_images + (num_prompts if encoder == "ED0" else 0)
    assert tasks == want
    assert second.num_redone == before.num_redone


def test_what_scores_the_prompt_stays_on_one_instance(omni: OmniLLM, group: InstanceGroup) -> None:
    def score() -> Any:
        (output,) = omni.generate(make_prompts()[2], {"max_tokens": 1, "prompt_logprobs": 1}, use_tqdm=False)
        return [one and {token: logprob.rank for token, logprob in one.items()} for one in output.prompt_logprobs]

    with only(group, "PD"):
        want = score()
    with only(group, "E|P|D"):
        before = group.statistics().num_migrations
        assert score() == want
        assert group.statistics().num_migrations == before
    assert len([one for one in want if one]) > 1


def test_several_answers_to_one_prompt(omni: OmniLLM, group: InstanceGroup) -> None:
    with only(group, "E|P|D"):
        params = {"n": 3, "temperature": 1.0, "seed": 3, "max_tokens": NUM_TOKENS, "ignore_eos": True}
        (output,) = omni.generate(make_prompts()[3], params, use_tqdm=False)
    assert [len(one.token_ids) for one in output.outputs] == [NUM_TOKENS] * 3


@pytest.mark.parametrize("num_outputs", [0, 1, 5])
def test_an_abort_at_any_task_leaves_nothing(omni: OmniLLM, group: InstanceGroup, num_outputs: int) -> None:
    async def leave_early(delay_s: float) -> None:
        outputs = read(omni, f"left-{num_outputs}-{delay_s}", make_image(20 + num_outputs))
        try:
            async with asyncio.timeout(delay_s if num_outputs == 0 else None):
                for _ in range(num_outputs or 1000):
                    await anext(outputs)
        except TimeoutError:
            pass
        await outputs.aclose()

    with only(group, "E|P|D"):
        for number in range(4):
            omni._run(leave_early(0.005 * 4**number))


def test_who_does_not_begin_in_time_is_passed_over(omni: OmniLLM, group: InstanceGroup, stock: Stock) -> None:
    """The same pages go to another instance."""
    stopped = group.engines["language/D0"]._lease._started
    deployment = group.deployment
    group.deployment = msgspec.structs.replace(deployment, admission_timeout_s=0.2)

    async def run() -> list[int]:
        reading = asyncio.create_task(collect(omni, "moved", 0, LONG))
        await begun(group, "language/D0")
        group._work["language/PD0"] -= 1e6
        return await reading

    before = group.statistics()
    for process in stopped:
        os.kill(process.pid, signal.SIGSTOP)
    try:
        with only(group, "E|P|D|PD"):
            # Until it has chosen who prefills, and who decodes.
            group._work["language/PD0"] += 1e6
            assert omni._run(run()) == stock.long
    finally:
        group.deployment = deployment
        for process in stopped:
            os.kill(process.pid, signal.SIGCONT)
    after = group.statistics()
    assert (after.num_redone, after.num_migrations) == (before.num_redone + 1, before.num_migrations + 1)
    assert after.num_tasks["language/P0"] == before.num_tasks["language/P0"] + 1


def test_a_server_answers_with_images(omni: OmniLLM, group: InstanceGroup, checkpoint: Path) -> None:
    file = io.BytesIO()
    make_image(0).save(file, "png")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    parsed = parse_serve_args([str(checkpoint), "--epd", MIX, "--served-model-name", "tiny"])
    assert ",".join(f"{kind}:{n}" for kind, n in parsed.load_config().stages[0].deployment.instances.items()) == MIX

    async def ask() -> tuple[httpx.Response, httpx.Response]:
        app = await build_omni_app(omni.engine.with_defaults(modalities=("text",)), parsed.args)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://tiny") as client:
            content = [
                {"type": "text", "text": "w0"},
                {"type": "image_url", "image_url": {"url": url}},
                {"type": "text", "text": "w3"},
            ]
            body = {"model": "tiny", "messages": [{"role": "user", "content": content}], "temperature": 0}
            answered = await client.post(
                "/v1/chat/completions",
                json={**body, "max_completion_tokens": NUM_TOKENS, "ignore_eos": True},
                timeout=60,
            )
            return answered, await client.get("/health")

    with only(group, "E|P|D"):
        answered, health = omni._run(ask())
    assert answered.status_code == 200, answered.text
    (same,) = omni.generate(
        make_prompts()[2], {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}, use_tqdm=False
    )
    assert answered.json()["choices"][0]["message"]["content"] == same.outputs[0].text
    assert set(health.json()["stages"]) == set(group.engines)


def test_whoever_waits_goes_on_when_an_instance_is_back(omni: OmniLLM, group: InstanceGroup) -> None:
    """Without a death: what a supervisor tells is told here."""
    engine = group.engines["language/PD0"]

    async def run() -> list[int]:
        reading = asyncio.create_task(collect(omni, "waits", 0))
        await begun(group, "language/E0")
        engine.status = StageStatus(StageState.RESTARTING, "it is said to have died", 0)
        while group._work["language/E0"]:  # noqa: ASYNC110  # nothing tells of it
            await asyncio.sleep(0)
        assert not any(group._work.values()) and not reading.done()
        engine.status = StageStatus(StageState.RUNNING)
        return await reading

    with only(group, "E|PD"):
        assert len(omni._run(run())) == NUM_TOKENS


# -- deaths, one after the other ---------------------------------------------------------------------------------------


def kill(group: InstanceGroup, kind: str) -> None:
    name = f"language/{kind}0"
    for process in group.engines[name]._lease._started:
        os.kill(process.pid, signal.SIGKILL)


async def read(omni: OmniLLM, request_id: str, image: Image.Image, **more: Any) -> AsyncIterator[Any]:
    prompt = {"prompt": "<s> w0 <image> w3", "multi_modal_data": {"image": image}}
    params = SamplingParams(**{"temperature": 0, "max_tokens": LONG, "ignore_eos": True, **more})
    async with aclosing(omni.engine.generate(prompt, params, request_id)) as outputs:
        async for output in outputs:
            yield output


async def collect(omni: OmniLLM, request_id: str, number: int, num_tokens: int = NUM_TOKENS) -> list[int]:
    """The reply to one of the images."""
    outputs = [output async for output in read(omni, request_id, make_image(number), max_tokens=num_tokens)]
    return [token for output in outputs for token in output.outputs[0].token_ids]


async def tokens_through_a_death(omni: OmniLLM, group: InstanceGroup, kind: str, **more: Any) -> list[int]:
    """A long reply of which an instance dies that has a task of it, or is writing it."""
    tokens: list[int] = []
    async for output in read(omni, f"killed-{kind}", make_image(0), **more):
        if not tokens:
            kill(group, kind)
        tokens += output.outputs[0].token_ids
    return tokens


def test_deaths_lose_no_request_while_anybody_lives(omni: OmniLLM, group: InstanceGroup, stock: Stock) -> None:
    """The last test of these engines."""

    async def with_many(kind: str) -> list[list[int]]:
        requests = [asyncio.create_task(collect(omni, f"many-{n}", n)) for n in range(4)]
        await begun(group, f"language/{kind}0")
        kill(group, kind)
        return await asyncio.gather(*requests)

    async def all_of_them() -> list[list[int]]:
        return await asyncio.gather(*(collect(omni, f"many-{number}", number) for number in range(4)))

    with only(group, "PD"):
        want = omni._run(all_of_them())
    with only(group, "E|P|D"):
        omni._run(omni.engine.reset_mm_cache())
        assert omni._run(with_many("E")) == want  # P encodes
        assert omni._run(with_many("P")) == want  # D does everything
    before = group.statistics().num_redone
    assert before >= 2
    with only(group, "EP|D|PD"):
        group._work["language/PD0"] += 1e6  # so that D is chosen
        tokens = omni._run(tokens_through_a_death(omni, group, "D"))
        group._work["language/PD0"] -= 1e6
    assert tokens == stock.long  # gone on with by PD
    assert group.statistics().num_redone == before + 1
    # What a seed has drawn cannot be drawn again: the user hears of it.
    with (
        only(group, "PD|ED"),
        pytest.raises(StageFailed, match=r"language/PD0': its engine has died: .* cannot be gone on with elsewhere"),
    ):
        omni._run(tokens_through_a_death(omni, group, "PD", temperature=1.0, seed=1))
    assert omni._run(all_of_them()) == want
    health = omni.engine.stage_report()
    assert {name for name, status in health.items() if status.state is StageState.FAILED} == {
        f"language/{kind}0" for kind in ("E", "P", "D", "PD")
    }
    omni._run(omni.engine.check_health())
    with only(group, "ED"):
        with pytest.raises(StageUnavailable, match=r"stage 'language': failed: language/ED0: its engine has died"):
            omni._run(tokens_through_a_death(omni, group, "ED"))
        with pytest.raises(StageUnavailable):
            omni._run(omni.engine.check_health())
    assert not any(child.status() == psutil.STATUS_ZOMBIE for child in psutil.Process().children())
