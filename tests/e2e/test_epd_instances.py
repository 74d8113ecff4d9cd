"""A tiny LLaVA-1.5 as six instances, of which each test uses some: every mix answers as one upstream engine does.

The last test kills instances one after the other; those before it need all of them. An instance with two ranks is in
``test_epd_ranks.py``.
"""

import asyncio
import base64
import dataclasses
import io
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, aclosing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
import pytest
from prometheus_client import REGISTRY
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.documents import ROOT, read_blocks
from tests.e2e.engines import MARKS, NUM_TOKENS, PATIENT, UPSTREAM, engine_here, greedy, make_image, tokens_of
from tests.processes import paused
from vllm_omni import OmniLLM
from vllm_omni.config.epd import Tasks
from vllm_omni.engine.instances import InstanceGroup
from vllm_omni.engine.latency import PARTS
from vllm_omni.entrypoints.cli.serve import parse_serve_args
from vllm_omni.entrypoints.openai.app import build_omni_app
from vllm_omni.epd.assignment import RequestSize
from vllm_omni.epd.cost import CostModel
from vllm_omni.epd.router import Assignment, RequestState, Router
from vllm_omni.errors import CallAborted, InvalidRequest, StageFailed, StageUnavailable
from vllm_omni.process.status import StageState, StageStatus

pytestmark = MARKS

MIX = "E:1,P:1,D:1,EP:1,ED:1,PD:1"
LONG = 200
CHOICES = ["w7", "w9"]
MUCH_WORK = RequestSize(num_embeds=0, num_prompt_tokens=10**6, num_reply_tokens=0)


def make_prompts() -> list[dict[str, Any]]:
    prompts: list[dict[str, Any]] = [{"prompt": f"<s> w{n} w{n + 1} w{n + 2}"} for n in range(2)]
    prompts += [
        {"prompt": f"<s> w{n} <image> w{n + 3}", "multi_modal_data": {"image": make_image(n)}} for n in range(4)
    ]
    two = [make_image(3), make_image(4)]
    prompts.append({"prompt": "<s> <image> w1 <image> w2", "multi_modal_data": {"image": two}})
    # The prompt ends with an image, so its last token is the image's.
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


class Upstream(NamedTuple):
    tokens: list[list[int]]
    of_images: list[list[int]]  # greedy replies to ``prompt_of(number)``
    long: list[int]  # a long one to the first


def prompt_of(number: int) -> dict[str, Any]:
    return {"prompt": "<s> w0 <image> w3", "multi_modal_data": {"image": make_image(number)}}


@pytest.fixture(scope="module")
def upstream(llava_checkpoint: Path) -> Upstream:
    """Replies of vLLM without this project."""
    prompts = make_prompts()
    with engine_here(llava_checkpoint) as llm:
        outputs = llm.generate(prompts, [make_params(number) for number in range(len(prompts))], use_tqdm=False)
        of_images = llm.generate([prompt_of(number) for number in range(4)], greedy(), use_tqdm=False)
        (long,) = tokens_of(llm.generate(prompt_of(0), greedy(max_tokens=LONG), use_tqdm=False))
    return Upstream(tokens_of(outputs), tokens_of(of_images), long)


@pytest.fixture(scope="module")
def omni(llava_checkpoint: Path, upstream: Upstream) -> Iterator[OmniLLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_OMNI_STAGE_RESTARTS", "0")  # what is killed stays down
        patch.setenv("TORCHDYNAMO_DISABLE", "1")  # vLLM compiles how it ranks the tokens of a prompt
        with OmniLLM(llava_checkpoint, **UPSTREAM, epd={"instances": MIX, **PATIENT}, log_stats=True) as omni:
            yield omni


@pytest.fixture
def group(omni: OmniLLM) -> Iterator[InstanceGroup]:
    """The stage, without work or leases before and after."""
    group = omni.engine.orchestrator.nodes["language"]
    assert isinstance(group, InstanceGroup)
    router, kinds = group.router, group.router.kinds
    yield group
    assert not any(group.statistics().work.values())
    group.router, router.kinds = router, kinds
    if not all(map(group.is_available, group.engines)):  # after the last test
        return
    for reset in (omni.engine.reset_mm_cache, omni.engine.reset_encoder_cache, omni.engine.reset_prefix_cache):
        omni.run(reset())
    leases = omni.run(count_leases(group))
    assert not any(leases.values()), leases


async def count_leases(group: InstanceGroup) -> dict[str, int]:
    counts = {}
    for name, engine in group.engines.items():
        if group.is_available(name):
            ranks = await engine.relay_statistics()
            counts[name] = sum(backend["num_leases"] for rank in ranks for backend in rank.values())
    return counts


@contextmanager
def only(group: InstanceGroup, mix: str) -> Iterator[None]:
    """Route requests to one instance of each of these kinds; "P=PD": as if the first were of the second kind."""
    pairs = [part.partition("=") for part in mix.split("|")]
    kinds = group.router.kinds
    group.router.kinds = {f"language/{kind}0": Tasks[other or kind] for kind, _, other in pairs}
    try:
        yield
    finally:
        group.router.kinds = kinds


def reroute(group: InstanceGroup, cost: CostModel | None = None, **changes: Any) -> None:
    """Route with another cost model, or with changes to the section ``epd``."""
    deployment = dataclasses.replace(group.deployment, **changes)
    group.router = Router(group.router.kinds, deployment, group.is_available, cost)


def occupy(group: InstanceGroup, kind: str) -> Assignment:
    """Give an instance more work than any other, until the assignment is released."""
    with only(group, f"{kind}=PD"):
        assignment = group.router.assign(RequestState(MUCH_WORK))
    assert assignment is not None
    return assignment


async def assigned(group: InstanceGroup, kind: str) -> None:
    """Wait until an instance has work."""
    while not group.statistics().work[f"language/{kind}0"]:  # noqa: ASYNC110  # no event for it
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

    return [answer.tokens for answer in omni.run(all_of_them())]


def num_computed_by(name: str) -> float:
    """Prompt tokens that an instance has computed, by its metrics."""
    samples = (sample for metric in REGISTRY.collect() for sample in metric.samples)
    wanted = {"stage": f"language/{name}", "source": "local_compute"}
    return sum(
        sample.value
        for sample in samples
        if sample.name == "vllm:prompt_tokens_by_source_total" and wanted.items() <= sample.labels.items()
    )


def tasks_since(group: InstanceGroup, before: Any) -> dict[str, int]:
    """Assignments since these statistics, by instance."""
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
    ],
)
def test_every_mix_answers_as_one_engine_does(
    omni: OmniLLM, group: InstanceGroup, upstream: Upstream, mix: str, encoder: str, decoder: str
) -> None:
    before = group.statistics()
    with only(group, mix):
        num_computed = num_computed_by(decoder)
        assert ask_all(omni) == upstream.tokens
        first, tasks = group.statistics(), tasks_since(group, before)
        assert ask_all(omni) == upstream.tokens
        second = group.statistics()
        num_computed = num_computed_by(decoder) - num_computed
    # Where another instance prefills, prompts arrive as pages.
    assert (num_computed == 0) == (first.num_migrations > before.num_migrations) == (mix not in ("E|PD", "PD"))
    # The second time prefixes and images are cached: the replies are the same, and nothing is encoded twice.
    assert len({tuple(tokens) for tokens in upstream.tokens}) == len(upstream.tokens)
    if "E" in mix:
        # Where no instance encodes for others, the decoding one encodes the image with which a prompt ends.
        assert first.num_encoded - before.num_encoded == NUM_IMAGES + (mix == "EP|D")
        assert second.num_encoded == first.num_encoded
    num_prompts, num_with_images = len(upstream.tokens), len(upstream.tokens) - 2
    want = {f"language/{part.partition('=')[0]}0": num_prompts for part in mix.split("|")}
    if encoder in ("E0", "ED0"):
        want[f"language/{encoder}"] = num_with_images + (num_prompts if encoder == "ED0" else 0)
    assert tasks == want
    assert second.num_redone == before.num_redone


def test_instances_that_do_not_decode_run_at_a_lower_priority(group: InstanceGroup) -> None:
    for name, engine in group.engines.items():
        processes = [psutil.Process(pid) for pid in engine.pids()]
        workers = [one for one in processes if "::Worker_TP" in " ".join(one.cmdline())]
        computing = workers or processes  # two ranks, or one
        is_nice = {one.nice() > psutil.Process().nice() for one in computing}
        assert is_nice == {Tasks.D not in group.router.kinds[name]}, name


def test_latency_parts_of_a_split_request_sum_to_its_duration(omni: OmniLLM, group: InstanceGroup) -> None:
    with only(group, "E|P|D"):
        prompts = [prompt_of(30), {"prompt": "<s> w30 w31"}]
        image, text = omni.generate(prompts, greedy(), use_tqdm=False)
    for output in (image, text):
        parts = output.latency_parts["language"]
        assert tuple(parts) == PARTS
        assert all(seconds >= 0 for seconds in parts.values())
        # The clocks of three processes and of this one; on busy cores, each waits tens of milliseconds in between.
        assert sum(parts.values()) == pytest.approx(output.stage_durations["total"], rel=0.05, abs=0.1)
        assert parts["prefill_execution"] and parts["pd_migration"] and parts["decode_execution"]
    of_encode = ("encode_queueing", "encode_execution", "ep_migration")
    assert all(image.latency_parts["language"][part] for part in of_encode)
    assert not any(text.latency_parts["language"][part] for part in of_encode)


# -- assignments -------------------------------------------------------------------------------------------------------


def pause(group: InstanceGroup, *kinds: str) -> AbstractContextManager[None]:
    return paused(*(pid for kind in kinds for pid in group.engines[f"language/{kind}0"].pids()))


@pytest.mark.parametrize("cost", [None, CostModel(0.0, 1e-2, 0.0, 1e-4, 0.0, 0.0, 0.0)], ids=["tokens", "seconds"])
def test_the_instance_with_least_work_gets_the_next_request(
    omni: OmniLLM, group: InstanceGroup, cost: CostModel | None
) -> None:
    """A long prompt is many tokens; a long reply takes much time."""
    reroute(group, cost)
    long_prompt = {"prompt": "<s> " + " ".join(f"w{number % 100}" for number in range(150))}
    requests = [(long_prompt, 1), ({"prompt": "<s> w1"}, 100), ({"prompt": "<s> w2"}, 1)]
    tasks = []

    async def give(prompt: Any, num_tokens: int) -> dict[str, int]:
        """Start a request and return its instance."""
        before = group.statistics()
        tasks.append(asyncio.create_task(ask(omni, prompt, greedy(max_tokens=num_tokens))))
        while not (found := tasks_since(group, before)):  # noqa: ASYNC110  # no event for it
            await asyncio.sleep(0)
        return found

    async def end() -> None:
        await asyncio.gather(*tasks)

    with only(group, "P=PD|PD"):
        with pause(group, "P", "PD"):
            prompt, reply, third = (omni.run(give(*request)) for request in requests)
        omni.run(end())
    assert prompt != reply
    assert third == (reply if cost is None else prompt)


def test_with_affinity_requests_go_to_their_caches(omni: OmniLLM, group: InstanceGroup) -> None:
    reroute(group, balance="affinity")

    async def where(prompt: Any, **more: Any) -> tuple[dict[str, int], Answer]:
        before = group.statistics()
        answer = await ask(omni, prompt, greedy(max_tokens=2), **more)
        return tasks_since(group, before), answer

    def text(first: int, length: int) -> dict[str, Any]:
        return {"prompt": "<s> " + " ".join(f"w{(first + 3 * number) % 100}" for number in range(length))}

    def session(name: str) -> dict[str, Any]:
        return {"prompt": text(next(words), 5), "session_id": name}

    words = iter(range(100))
    order = (0, 1, 1, 0, 0, 1, 0)  # the first two go to different instances, the others to the same ones
    with only(group, "P=PD|PD"):
        # The texts of a session have no common prefix.
        found = [omni.run(where(**session("ab"[number]))) for number in order]
        assert [used == found[0][0] for used, _ in found] == [number == 0 for number in order]
        assert not any(answer.num_cached_tokens for _, answer in found)
        # Texts with a common prefix.
        found = [omni.run(where(text(50 + number, 100))) for number in order]
        assert [used == found[0][0] for used, _ in found] == [number == 0 for number in order]
        assert [answer.num_cached_tokens for _, answer in found] == [0, 0, *[96] * 5]
    with only(group, "E|ED=E|PD"):
        # The front end forgets the images; the encoders keep them.
        num_encoded, found = group.statistics().num_encoded, []
        for number in order:
            omni.engine.orchestrator.forget_images()
            found.append(omni.run(where(prompt_of(40 + number))))
        encoders = [used.keys() - {"language/PD0"} for used, _ in found]
        assert [one == encoders[0] for one in encoders] == [number == 0 for number in order]
        assert group.statistics().num_encoded == num_encoded + 2


def test_prompt_logprobs_come_from_one_instance(omni: OmniLLM, group: InstanceGroup) -> None:
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


@pytest.mark.parametrize("mix", ["E|P|D", "E|PD"])
def test_a_schema_that_allows_no_token_is_the_requests_fault(omni: OmniLLM, group: InstanceGroup, mix: str) -> None:
    endless = greedy(structured_outputs=StructuredOutputsParams(json={"$ref": "#"}))
    with only(group, mix), pytest.raises(InvalidRequest, match="no token is allowed by the schema or grammar"):
        omni.generate(prompt_of(0), endless, use_tqdm=False)


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
                    await anext(outputs, None)  # within the last delay the reply may end
        except TimeoutError:
            pass
        await outputs.aclose()

    with only(group, "E|P|D"):
        for number in range(4):
            omni.run(leave_early(0.005 * 4**number))


def test_a_request_that_does_not_start_in_time_moves_to_another_instance(
    omni: OmniLLM, group: InstanceGroup, upstream: Upstream
) -> None:
    """The other instance pulls the same pages."""
    reroute(group, admission_timeout_s=3.0)

    async def run(other_work: Assignment) -> list[int]:
        reading = asyncio.create_task(collect(omni, "moved", 0, LONG))
        await assigned(group, "D")
        group.router.release(other_work)
        return await reading

    before = group.statistics()
    with only(group, "E|P|D|PD"), pause(group, "D"):
        other_work = occupy(group, "PD")  # until P and D are assigned
        assert omni.run(run(other_work)) == upstream.long
    after = group.statistics()
    assert (after.num_redone, after.num_migrations) == (1, before.num_migrations + 1)
    assert after.num_tasks["language/P0"] == 1


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
        app = await build_omni_app(omni.engine, parsed.args)
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
        answered, as_documented, report = omni.run(ask())
    assert answered.status_code == 200, answered.text
    assert as_documented.status_code == 200, as_documented.text
    (same,) = omni.generate(
        make_prompts()[2], {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}, use_tqdm=False
    )
    assert answered.json()["choices"][0]["message"]["content"] == same.outputs[0].text
    assert set(report.json()["stages"]) == set(group.engines)


def test_a_waiting_request_resumes_when_an_instance_recovers(omni: OmniLLM, group: InstanceGroup) -> None:
    """Without a termination: the test sets the status, as a supervisor does."""
    engine = group.engines["language/PD0"]

    async def run() -> list[int]:
        reading = asyncio.create_task(collect(omni, "waits", 0))
        await assigned(group, "E")
        engine.set_status(StageStatus(StageState.RESTARTING, "a test says so", 0))
        while group.statistics().work["language/E0"]:  # noqa: ASYNC110  # no event for it
            await asyncio.sleep(0)
        assert not any(group.statistics().work.values()) and not reading.done()
        engine.set_status(StageStatus(StageState.RUNNING))
        return await reading

    with only(group, "E|PD"):
        assert len(omni.run(run())) == NUM_TOKENS


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_instances_sleep_and_wake_up(omni: OmniLLM, group: InstanceGroup, upstream: Upstream, mode: Any) -> None:
    """Requests are anywhere between two instances when these go to sleep; one more arrives meanwhile."""

    async def run() -> list[Any]:
        replies = [asyncio.create_task(collect(omni, f"{mode}-{number}", number)) for number in range(4)]
        await assigned(group, "P")
        await omni.engine.sleep(1, mode)
        assert await omni.engine.is_sleeping()
        replies.append(asyncio.create_task(collect(omni, f"{mode}-late", 0, LONG)))
        assert await omni.engine.wake_up()
        assert not await omni.engine.is_sleeping()
        return await asyncio.gather(*replies, return_exceptions=True)

    with only(group, "E|P|D"):
        *replies, late = omni.run(run())
    assert late == upstream.long
    if mode == "abort":
        assert all(isinstance(one, CallAborted) for one in replies)
    else:
        assert replies == upstream.of_images


# -- terminations, one after the other ---------------------------------------------------------------------------------


async def read(omni: OmniLLM, request_id: str, number: int, **more: Any) -> AsyncIterator[Any]:
    """The reply to one of the images."""
    params = greedy(**{"max_tokens": LONG, **more})
    async with aclosing(omni.engine.generate(prompt_of(number), params, request_id)) as outputs:
        async for output in outputs:
            yield output


async def collect(omni: OmniLLM, request_id: str, number: int, num_tokens: int = NUM_TOKENS) -> list[int]:
    outputs = [output async for output in read(omni, request_id, number, max_tokens=num_tokens)]
    return [token for output in outputs for token in output.outputs[0].token_ids]


async def tokens_through_a_kill(omni: OmniLLM, group: InstanceGroup, kind: str, **more: Any) -> list[int]:
    """A long reply; the instance of this kind is killed after the first tokens."""
    tokens: list[int] = []
    async for output in read(omni, f"killed-{kind}", 0, **more):
        if not tokens:
            group.engines[f"language/{kind}0"].kill()
        tokens += output.outputs[0].token_ids
    return tokens


async def given_up(group: InstanceGroup, names: set[str]) -> None:
    """Wait until the supervisors have noticed that these instances are dead: requests notice it sooner."""
    while any(group.engines[name].current_status().state is not StageState.FAILED for name in names):  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def test_no_request_is_lost_while_an_instance_runs(omni: OmniLLM, group: InstanceGroup, upstream: Upstream) -> None:
    """The last test of these engines."""

    async def with_many(kind: str) -> list[list[int]]:
        requests = [asyncio.create_task(collect(omni, f"many-{n}", n)) for n in range(4)]
        await assigned(group, kind)
        group.engines[f"language/{kind}0"].kill()
        return await asyncio.gather(*requests)

    async def all_of_them() -> list[list[int]]:
        return await asyncio.gather(*(collect(omni, f"many-{number}", number) for number in range(4)))

    want = upstream.of_images
    with only(group, "E|P|D"):
        omni.run(omni.engine.reset_mm_cache())
        assert omni.run(with_many("E")) == want  # P encodes
        assert omni.run(with_many("P")) == want  # D does everything
    before = group.statistics().num_redone
    assert before >= 2
    with only(group, "EP|D|PD"):
        other_work = occupy(group, "PD")  # so that D is chosen
        tokens = omni.run(tokens_through_a_kill(omni, group, "D"))
        group.router.release(other_work)
    assert tokens == upstream.long  # resumed on PD
    assert group.statistics().num_redone == before + 1
    # The random numbers of a seed cannot be drawn again: the request fails.
    with (
        only(group, "PD|ED"),
        pytest.raises(
            StageFailed, match=r"language/PD0': its engine has died: .* cannot be resumed on another instance"
        ),
    ):
        omni.run(tokens_through_a_kill(omni, group, "PD", temperature=1.0, seed=1))
    assert omni.run(all_of_them()) == want
    killed = {f"language/{kind}0" for kind in ("E", "P", "D", "PD")}
    omni.run(given_up(group, killed))
    health = omni.engine.stage_report()
    assert {name for name, status in health.items() if status.state is not StageState.RUNNING} == killed
    omni.run(omni.engine.check_health())
    with only(group, "ED"):
        with pytest.raises(StageUnavailable, match=r"stage 'language': failed: language/ED0: its engine has died"):
            omni.run(tokens_through_a_kill(omni, group, "ED"))
        with pytest.raises(StageUnavailable):
            omni.run(omni.engine.check_health())
    assert not any(child.status() == psutil.STATUS_ZOMBIE for child in psutil.Process().children())
