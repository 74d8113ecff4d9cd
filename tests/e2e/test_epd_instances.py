"""A tiny LLaVA-1.5 as six instances, of which each test uses some: every mix answers as one stock engine does.

One of them has two ranks, so that caches go to more ranks than they come from, and to fewer. The last tests kill
instances one after the other; those before them need all.
"""

import asyncio
import base64
import io
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
import psutil
import pytest
from prometheus_client import REGISTRY
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.documents import ROOT, read_blocks
from tests.e2e.engines import MARKS, NUM_TOKENS, STOCK, engine_here, greedy, make_image, tokens_of
from tests.processes import paused
from vllm_omni import OmniLLM
from vllm_omni.engine.instances import WORK_UNITS, InstanceGroup
from vllm_omni.engine.latency import PARTS
from vllm_omni.entrypoints.cli.serve import parse_serve_args
from vllm_omni.entrypoints.openai.app import build_omni_app
from vllm_omni.epd.affinity import InstanceBalance
from vllm_omni.epd.cost import CostModel
from vllm_omni.errors import CallAborted, StageFailed, StageUnavailable
from vllm_omni.process.status import StageState, StageStatus

pytestmark = MARKS

MIX = "E:1,P:1,D:1,EP:1,ED:1,PD:1"
TWO_RANKS = {"PD": {"tensor_parallel_size": 2}}
LONG = 200
CHOICES = ["w7", "w9"]
MUCH_WORK = 10**6 * WORK_UNITS


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
    match number:
        case 2:
            return greedy(temperature=1.0, seed=7)
        case 3:
            return greedy(ignore_eos=False, structured_outputs=StructuredOutputsParams(choice=CHOICES))
        case 4:
            return greedy(presence_penalty=1.5)
    return greedy()


class Stock(NamedTuple):
    tokens: list[list[int]]
    of_images: list[list[int]]  # greedy replies to ``prompt_of(number)``
    long: list[int]  # a long one to the first


def prompt_of(number: int) -> dict[str, Any]:
    return {"prompt": "<s> w0 <image> w3", "multi_modal_data": {"image": make_image(number)}}


@pytest.fixture(scope="module")
def stock(llava_checkpoint: Path) -> Stock:
    """What vLLM alone says."""
    prompts = make_prompts()
    with engine_here(llava_checkpoint) as llm:
        outputs = llm.generate(prompts, [make_params(number) for number in range(len(prompts))], use_tqdm=False)
        of_images = llm.generate([prompt_of(number) for number in range(4)], greedy(), use_tqdm=False)
        (long,) = tokens_of(llm.generate(prompt_of(0), greedy(max_tokens=LONG), use_tqdm=False))
    return Stock(tokens_of(outputs), tokens_of(of_images), long)


@pytest.fixture(scope="module")
def omni(llava_checkpoint: Path, stock: Stock) -> Iterator[OmniLLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_OMNI_STAGE_RESTARTS", "0")  # who is killed stays dead
        patch.setenv("TORCHDYNAMO_DISABLE", "1")  # vLLM compiles how it ranks the tokens of a prompt
        epd = {"instances": MIX, "engine_args": TWO_RANKS}
        with OmniLLM(llava_checkpoint, **STOCK, epd=epd, log_stats=True) as omni:
            yield omni


@pytest.fixture
def group(omni: OmniLLM) -> Iterator[InstanceGroup]:
    """The stage, which holds nothing before and after."""
    group = omni.engine.orchestrator.nodes["language"]
    assert isinstance(group, InstanceGroup)
    kept = group.kinds, group.deployment, group._balance, group._cost
    yield group
    group.kinds, group.deployment, group._balance, group._cost = kept
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
    """Use one instance of each of these kinds; "P=PD": as if it were of another."""
    pairs = [part.partition("=") for part in mix.split("|")]
    kinds, group.kinds = group.kinds, {f"language/{kind}0": other or kind for kind, _, other in pairs}
    try:
        yield
    finally:
        group.kinds = kinds


async def begun(group: InstanceGroup, name: str) -> None:
    """An instance has been given something to do."""
    while not group._work[name]:  # noqa: ASYNC110  # nothing tells of it
        await asyncio.sleep(0)


class Answer(NamedTuple):
    tokens: list[int]
    num_cached_tokens: int  # of the prompt


async def ask(omni: OmniLLM, prompt: Any, params: SamplingParams | None = None, **more: Any) -> Answer:
    tokens: list[int] = []
    async for output in omni.engine.generate(prompt, params or greedy(), **more):
        tokens += output.outputs[0].token_ids
    return Answer(tokens, output.num_cached_tokens or 0)


def ask_all(omni: OmniLLM) -> list[list[int]]:
    async def all_of_them() -> list[Answer]:
        return await asyncio.gather(
            *(ask(omni, prompt, make_params(number)) for number, prompt in enumerate(make_prompts()))
        )

    return [answer.tokens for answer in omni._run(all_of_them())]


def num_computed_by(name: str) -> float:
    """Tokens of prompts that an instance has computed, as its metrics have it."""
    samples = (sample for metric in REGISTRY.collect() for sample in metric.samples)
    wanted = {"stage": f"language/{name}", "source": "local_compute"}
    return sum(
        sample.value
        for sample in samples
        if sample.name == "vllm:prompt_tokens_by_source_total" and wanted.items() <= sample.labels.items()
    )


def tasks_since(group: InstanceGroup, before: Any) -> dict[str, int]:
    """Tasks of each instance that had any, since these statistics."""
    counts = {name: number - before.num_tasks.get(name, 0) for name, number in group.statistics().num_tasks.items()}
    return {name: number for name, number in counts.items() if number}


@pytest.mark.parametrize(
    ("mix", "encoder", "decoder"),
    [
        ("E|P|D", "E0", "D0"),
        ("EP|D", "EP0", "D0"),
        ("ED|P", "ED0", "ED0"),
        ("E|PD", "E0", "PD0"),
        ("PD", "PD0", "PD0"),
        ("E|PD=P|D", "E0", "D0"),  # from two ranks to one
        ("E|P|PD=D", "E0", "PD0"),  # from one rank to two
    ],
)
def test_every_mix_answers_as_one_engine_does(
    omni: OmniLLM, group: InstanceGroup, stock: Stock, mix: str, encoder: str, decoder: str
) -> None:
    before = group.statistics()
    with only(group, mix):
        num_computed = num_computed_by(decoder)
        assert ask_all(omni) == stock.tokens
        first, tasks = group.statistics(), tasks_since(group, before)
        assert ask_all(omni) == stock.tokens
        second = group.statistics()
        num_computed = num_computed_by(decoder) - num_computed
    # Prompts whose pages have been computed elsewhere came as pages.
    assert (num_computed == 0) == (first.num_migrations > before.num_migrations) == (mix not in ("E|PD", "PD"))
    # With its prefixes and images cached, it is the same, and nothing is encoded twice.
    assert len({tuple(tokens) for tokens in stock.tokens}) == len(stock.tokens)
    if "E" in mix:
        # Where nobody encodes for others, the one that decodes sees to the image with which a prompt ends.
        assert first.num_encoded - before.num_encoded == NUM_IMAGES + (mix == "EP|D")
        assert second.num_encoded == first.num_encoded
    num_prompts, num_with_images = len(stock.tokens), len(stock.tokens) - 2
    want = {f"language/{part.partition('=')[0]}0": num_prompts for part in mix.split("|")}
    if encoder in ("E0", "ED0"):
        want[f"language/{encoder}"] = num_with_images + (num_prompts if encoder == "ED0" else 0)
    assert tasks == want
    assert second.num_redone == before.num_redone


def test_who_writes_nothing_leaves_busy_cores_to_those_who_write(group: InstanceGroup) -> None:
    for name, engine in group.engines.items():
        processes = [psutil.Process(process.pid) for process in engine._lease._started]
        workers = [child for process in processes for child in process.children(recursive=True)]
        computing = [one for one in workers if one.name().startswith("VLLM::")] or processes  # two ranks, or one
        is_nice = {one.nice() > psutil.Process().nice() for one in computing}
        assert is_nice == {"D" not in group.kinds[name]}, name


def test_parts_of_a_request_that_was_split_sum_to_what_it_took(omni: OmniLLM, group: InstanceGroup) -> None:
    with only(group, "E|P|D"):
        prompts = [prompt_of(30), {"prompt": "<s> w30 w31"}]
        image, text = omni.generate(prompts, greedy(), use_tqdm=False)
    for output in (image, text):
        parts = output.latency_parts["language"]
        assert tuple(parts) == PARTS
        assert all(seconds >= 0 for seconds in parts.values())
        # The clocks of three processes and of this one.
        assert sum(parts.values()) == pytest.approx(output.stage_durations["total"], rel=0.05, abs=0.02)
        assert parts["prefill_execution"] and parts["pd_migration"] and parts["decode_execution"]
    of_encode = ("encode_queueing", "encode_execution", "ep_migration")
    assert all(image.latency_parts["language"][part] for part in of_encode)
    assert not any(text.latency_parts["language"][part] for part in of_encode)


# -- who is given a request --------------------------------------------------------------------------------------------


def pids(group: InstanceGroup, *kinds: str) -> list[int]:
    """Of these instances' engine cores."""
    return [process.pid for kind in kinds for process in group.engines[f"language/{kind}0"]._lease._started]


async def chosen(group: InstanceGroup, num_tasks: int) -> None:
    """So many tasks have been given to instances since the start."""
    while sum(group._num_tasks.values()) < num_tasks:  # noqa: ASYNC110  # nothing tells of it
        await asyncio.sleep(0)


@pytest.mark.parametrize("cost", [None, CostModel(0.0, 1e-2, 0.0, 1e-4, 0.0, 0.0, 0.0)], ids=["tokens", "seconds"])
def test_who_has_least_to_do_is_given_the_next_request(
    omni: OmniLLM, group: InstanceGroup, cost: CostModel | None
) -> None:
    """A long prompt is many tokens, and a long reply is much time."""
    group._cost = cost
    long_prompt = {"prompt": "<s> " + " ".join(f"w{number % 100}" for number in range(150))}
    requests = [(long_prompt, 1), ({"prompt": "<s> w1"}, 100), ({"prompt": "<s> w2"}, 1)]
    tasks = []

    async def give(prompt: Any, num_tokens: int) -> dict[str, int]:
        """Who has it."""
        before = group.statistics()
        tasks.append(asyncio.create_task(ask(omni, prompt, greedy(max_tokens=num_tokens))))
        await chosen(group, sum(before.num_tasks.values()) + 1)
        return tasks_since(group, before)

    async def end() -> None:
        await asyncio.gather(*tasks)

    with only(group, "P=PD|PD"):
        with paused(*pids(group, "P", "PD")):
            prompt, reply, third = (omni._run(give(*request)) for request in requests)
        omni._run(end())
    assert prompt != reply
    assert third == (reply if cost is None else prompt)


def test_with_affinity_requests_go_where_their_caches_are(omni: OmniLLM, group: InstanceGroup) -> None:
    group._balance = InstanceBalance("language", "affinity")

    async def where(prompt: Any, **more: Any) -> tuple[dict[str, int], Answer]:
        before = group.statistics()
        answer = await ask(omni, prompt, greedy(max_tokens=2), **more)
        return tasks_since(group, before), answer

    def text(first: int, length: int) -> dict[str, Any]:
        return {"prompt": "<s> " + " ".join(f"w{(first + 3 * number) % 100}" for number in range(length))}

    def session(name: str) -> dict[str, Any]:
        return {"prompt": text(next(words), 5), "session_id": name}

    words = iter(range(100))
    order = (0, 1, 1, 0, 0, 1, 0)  # the first two go to different instances, the others to those
    with only(group, "P=PD|PD"):
        # Texts of a session have nothing in common.
        found = [omni._run(where(**session("ab"[number]))) for number in order]
        assert [who == found[0][0] for who, _ in found] == [number == 0 for number in order]
        assert not any(answer.num_cached_tokens for _, answer in found)
        # Prefixes are found again.
        found = [omni._run(where(text(50 + number, 100))) for number in order]
        assert [who == found[0][0] for who, _ in found] == [number == 0 for number in order]
        assert [answer.num_cached_tokens for _, answer in found] == [0, 0, *[96] * 5]
    with only(group, "E|ED=E|PD"):
        # The front end forgets the images, those who have encoded them do not.
        num_encoded, found = group.statistics().num_encoded, []
        for number in order:
            omni.engine.orchestrator.forget_images()
            found.append(omni._run(where(prompt_of(40 + number))))
        encoders = [who.keys() - {"language/PD0"} for who, _ in found]
        assert [one == encoders[0] for one in encoders] == [number == 0 for number in order]
        assert group.statistics().num_encoded == num_encoded + 2


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
        outputs = read(omni, f"left-{num_outputs}-{delay_s}", 20 + num_outputs)
        try:
            async with asyncio.timeout(delay_s if num_outputs == 0 else None):
                for _ in range(num_outputs or LONG):
                    await anext(outputs, None)  # the last delay may be long enough for all of it
        except TimeoutError:
            pass
        await outputs.aclose()

    with only(group, "E|P|D"):
        for number in range(4):
            omni._run(leave_early(0.005 * 4**number))


def test_who_does_not_begin_in_time_is_passed_over(omni: OmniLLM, group: InstanceGroup, stock: Stock) -> None:
    """The same pages go to another instance."""
    group.deployment = msgspec.structs.replace(group.deployment, admission_timeout_s=0.2)

    async def run() -> list[int]:
        reading = asyncio.create_task(collect(omni, "moved", 0, LONG))
        await begun(group, "language/D0")
        group._work["language/PD0"] -= MUCH_WORK
        return await reading

    before = group.statistics()
    with only(group, "E|P|D|PD"), paused(*pids(group, "D")):
        # Until it has chosen who prefills, and who decodes.
        group._work["language/PD0"] += MUCH_WORK
        assert omni._run(run()) == stock.long
    after = group.statistics()
    assert (after.num_redone, after.num_migrations) == (before.num_redone + 1, before.num_migrations + 1)
    assert after.num_tasks["language/P0"] == before.num_tasks["language/P0"] + 1


def test_a_server_answers_with_images(omni: OmniLLM, group: InstanceGroup, llava_checkpoint: Path) -> None:
    file = io.BytesIO()
    make_image(0).save(file, "png")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    parsed = parse_serve_args([str(llava_checkpoint), "--epd", MIX, "--served-model-name", "tiny"])
    assert ",".join(f"{kind}:{n}" for kind, n in parsed.load_config().stages[0].deployment.instances.items()) == MIX
    guide = [command for block in read_blocks(ROOT / "docs" / "epd.md") for command in block.commands]
    documented, health = [command for command in guide if command[0] == "curl"]
    assert documented[-2] == "-d" and health[-1].endswith("/health")

    async def ask() -> tuple[httpx.Response, httpx.Response, httpx.Response]:
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
            as_documented = await client.post("/v1/chat/completions", json=json.loads(documented[-1]), timeout=60)
            return answered, as_documented, await client.get("/health")

    with only(group, "E|P|D"):
        answered, as_documented, report = omni._run(ask())
    assert answered.status_code == 200, answered.text
    assert as_documented.status_code == 200, as_documented.text
    (same,) = omni.generate(
        make_prompts()[2], {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}, use_tqdm=False
    )
    assert answered.json()["choices"][0]["message"]["content"] == same.outputs[0].text
    assert set(report.json()["stages"]) == set(group.engines)


def test_whoever_waits_goes_on_when_an_instance_is_back(omni: OmniLLM, group: InstanceGroup) -> None:
    """Without a death: what a supervisor tells is told here."""
    engine = group.engines["language/PD0"]

    async def run() -> list[int]:
        reading = asyncio.create_task(collect(omni, "waits", 0))
        await begun(group, "language/E0")
        engine.set_status(StageStatus(StageState.RESTARTING, "it is said to have died", 0))
        while group._work["language/E0"]:  # noqa: ASYNC110  # nothing tells of it
            await asyncio.sleep(0)
        assert not any(group._work.values()) and not reading.done()
        engine.set_status(StageStatus(StageState.RUNNING))
        return await reading

    with only(group, "E|PD"):
        assert len(omni._run(run())) == NUM_TOKENS


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_instances_sleep_and_wake_up(omni: OmniLLM, group: InstanceGroup, stock: Stock, mode: Any) -> None:
    """Requests are anywhere between two instances when they are told to sleep; one comes while they do."""

    async def run() -> list[Any]:
        replies = [asyncio.create_task(collect(omni, f"{mode}-{number}", number)) for number in range(4)]
        await begun(group, "language/P0")
        await omni.engine.sleep(1, mode)
        assert await omni.engine.is_sleeping()
        replies.append(asyncio.create_task(collect(omni, f"{mode}-late", 0, LONG)))
        assert await omni.engine.wake_up()
        assert not await omni.engine.is_sleeping()
        return await asyncio.gather(*replies, return_exceptions=True)

    with only(group, "E|P|D"):
        *replies, late = omni._run(run())
    assert late == stock.long
    if mode == "abort":
        assert all(isinstance(one, CallAborted) for one in replies)
    else:
        assert replies == stock.of_images


# -- deaths, one after the other ---------------------------------------------------------------------------------------


def kill(group: InstanceGroup, kind: str) -> None:
    name = f"language/{kind}0"
    for process in group.engines[name]._lease._started:
        os.kill(process.pid, signal.SIGKILL)


async def read(omni: OmniLLM, request_id: str, number: int, **more: Any) -> AsyncIterator[Any]:
    """The reply to one of the images."""
    params = greedy(**{"max_tokens": LONG, **more})
    async with aclosing(omni.engine.generate(prompt_of(number), params, request_id)) as outputs:
        async for output in outputs:
            yield output


async def collect(omni: OmniLLM, request_id: str, number: int, num_tokens: int = NUM_TOKENS) -> list[int]:
    outputs = [output async for output in read(omni, request_id, number, max_tokens=num_tokens)]
    return [token for output in outputs for token in output.outputs[0].token_ids]


async def tokens_through_a_death(omni: OmniLLM, group: InstanceGroup, kind: str, **more: Any) -> list[int]:
    """A long reply of which an instance dies that has a task of it, or is writing it."""
    tokens: list[int] = []
    async for output in read(omni, f"killed-{kind}", 0, **more):
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

    want = stock.of_images
    with only(group, "E|P|D"):
        omni._run(omni.engine.reset_mm_cache())
        assert omni._run(with_many("E")) == want  # P encodes
        assert omni._run(with_many("P")) == want  # D does everything
    before = group.statistics().num_redone
    assert before >= 2
    with only(group, "EP|D|PD"):
        group._work["language/PD0"] += MUCH_WORK  # so that D is chosen
        tokens = omni._run(tokens_through_a_death(omni, group, "D"))
        group._work["language/PD0"] -= MUCH_WORK
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
